/* SPDX-License-Identifier: Apache-2.0
 *
 * usage: test_nccl FOLDER, or test_nccl --print FILE
 * Machines made up at random and what NCCL 2.28.9's own code makes of them (nccl/compare.py): every way, every GPU's own
 * ports, and ports and relays towards GPUs of other nodes must be the same. */
#include "tests/check.h"
#include "topology/loongtopo.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>

static char *variables[32]; /* "NAME=value" of the machine at hand; NULL behind the last */

static char *get(const char *name)
{
    for (int i = 0; variables[i]; i++) {
        if (strncmp(variables[i], name, strlen(name)) == 0 && variables[i][strlen(name)] == '=')
            return variables[i] + strlen(name) + 1;
    }
    return NULL;
}

/* As NCCL's log has it, without the host. */
static void print_name(const struct lc_topo *topo, int index, FILE *out)
{
    const struct lc_topo_node *node = lc_topo_at(topo, index);
    unsigned long id = 0;

    if (node->type == LC_TOPO_GPU) {
        for (const char *c = lc_topo_at(topo, node->parent)->id; *c; c++) {
            char digit[] = { *c, '\0' };

            if (*c != ':' && *c != '.')
                id = 16 * id + strtoul(digit, NULL, 16);
        }
        fprintf(out, "GPU/%lx", id);
    } else if (node->type == LC_TOPO_CPU) {
        fprintf(out, "CPU/%x", (unsigned)node->cpu.numa);
    } else {
        fprintf(out, "NET/%x", (unsigned)node->net.dev);
    }
}

static void print_way(const struct lc_topo *topo, const struct lc_topo_routes *routes, int from,
                      int to, FILE *out)
{
    struct lc_topo_path path = lc_topo_routes_path(routes, from, to);

    if (path.type == LC_TOPO_PATH_DIS)
        return;
    print_name(topo, from, out);
    fputc(' ', out);
    print_name(topo, to, out);
    fprintf(out, " (%d/%.1f/%s)\n", path.hops, (double)(float)path.gbps,
            lc_topo_path_name(path.type));
}

static void print_ways(const struct lc_topo *topo, const struct lc_topo_routes *routes, FILE *out)
{
    int gpus = lc_topo_routes_gpus(routes);
    int count = gpus + lc_topo_routes_nets(routes);

    for (int i = 0; i < count; i++) {
        int from = i < gpus ? lc_topo_routes_gpu(routes, i) : lc_topo_routes_net(routes, i - gpus);

        for (int k = 0; k < count; k++)
            print_way(topo, routes, from,
                      k < gpus ? lc_topo_routes_gpu(routes, k)
                               : lc_topo_routes_net(routes, k - gpus),
                      out);
        for (int k = lc_topo_next(topo, LC_TOPO_CPU, -1); k >= 0;
             k = lc_topo_next(topo, LC_TOPO_CPU, k))
            print_way(topo, routes, from, k, out);
    }
}

static int number(const struct lc_topo *topo, const struct lc_topo_routes *routes, int net)
{
    return net < 0 ? -1 : lc_topo_at(topo, lc_topo_routes_net(routes, net))->net.dev;
}

static void print_choices(const struct lc_topo *topo, const struct lc_topo_routes *routes,
                          FILE *out)
{
    int gpus = lc_topo_routes_nets(routes) ? lc_topo_routes_gpus(routes) : 0;

    for (int gpu = 0; gpu < gpus; gpu++) {
        fprintf(out, "own %d:", gpu);
        for (int channel = 0; channel < 8; channel++)
            fprintf(out, " %d", number(topo, routes, lc_topo_own_net(routes, gpu, channel)));
        fputc('\n', out);
        for (int dev = 0; dev <= gpus && lc_topo_own_net(routes, gpu, 0) >= 0; dev++) {
            for (int channel = 0; channel < 4; channel++) {
                struct lc_topo_choice found = lc_topo_choose(routes, gpu, dev, channel);

                fprintf(out, "send %d %d %d: %d %d\n", gpu, dev, channel,
                        number(topo, routes, found.net), found.relay);
            }
        }
    }
}

static int print_file(const char *file, lc_topo_getter *getter, FILE *out)
{
    struct lc_topo *topo = NULL;
    struct lc_topo_routes *routes = NULL;
    struct lc_topo_nccl nccl;
    char error[256] = "";

    if (lc_topo_load(file, &topo, error, sizeof(error)) != 0) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    lc_topo_nccl_read(getter, &nccl);
    CHECK(lc_topo_routes_find(topo, &nccl, &routes) == 0);
    print_ways(topo, routes, out);
    print_choices(topo, routes, out);
    lc_topo_routes_free(routes);
    lc_topo_free(topo);
    return 0;
}

static int compare(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The lines of a text, which it cuts, sorted. */
static size_t lines_of(char *text, char ***out)
{
    size_t count = 0;
    size_t at = 0;

    for (const char *c = text; *c; c++)
        count += *c == '\n';
    *out = calloc(count + 1, sizeof(**out));
    CHECK(*out);
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
        (*out)[at++] = line;
    qsort(*out, at, sizeof(**out), compare);
    return at;
}

/* The answer that is stored, without the variables that it begins with. */
static char *read_answer(const char *path, char **out)
{
    size_t size = 0;
    char *text = NULL;
    FILE *in = fopen(path, "re");
    int count = 0;

    CHECK(in && getdelim(&text, &size, '\0', in) > 0);
    (void)fclose(in);
    for (*out = text; strncmp(*out, "NCCL_", 5) == 0; count++) {
        CHECK(count < 31);
        variables[count] = *out;
        *out = strchr(*out, '\n');
        CHECK(*out);
        *(*out)++ = '\0';
    }
    variables[count] = NULL;
    return text;
}

static int compare_machine(const char *machine, const char *answer)
{
    char **want;
    char **have;
    char *ours = NULL;
    char *body = NULL;
    char *text = read_answer(answer, &body);
    size_t size = 0;
    FILE *out = open_memstream(&ours, &size);
    size_t wanted;
    size_t had;
    int bad = 0;

    CHECK(out && print_file(machine, get, out) == 0 && fclose(out) == 0);
    wanted = lines_of(body, &want);
    had = lines_of(ours, &have);
    for (size_t w = 0, h = 0; w < wanted || h < had;) {
        int order = w == wanted ? 1 : h == had ? -1 : strcmp(want[w], have[h]);

        if (order != 0)
            fprintf(stderr, "%s: %s %s\n", machine, order < 0 ? "NCCL has" : "we have",
                    order < 0 ? want[w] : have[h]);
        bad += order != 0;
        w += order <= 0;
        h += order >= 0;
    }
    CHECK(wanted > 0);
    free(want);
    free(have);
    free(ours);
    free(text);
    return bad;
}

int main(int argc, char **argv)
{
    struct dirent **names;
    int machines = 0;
    int bad = 0;
    int count;

    if (argc == 3 && strcmp(argv[1], "--print") == 0)
        return print_file(argv[2], getenv, stdout);
    CHECK(argc == 2);
    count = scandir(argv[1], &names, NULL, alphasort);
    for (int i = 0; i < count; i++) {
        char machine[4096];
        char answer[4096];
        size_t length = strlen(names[i]->d_name);

        if (length > 4 && strcmp(names[i]->d_name + length - 4, ".xml") == 0) {
            (void)snprintf(machine, sizeof(machine), "%s/%s", argv[1], names[i]->d_name);
            (void)snprintf(answer, sizeof(answer), "%.*s.txt", (int)(strlen(machine) - 4), machine);
            bad += compare_machine(machine, answer);
            machines++;
        }
        free(names[i]);
    }
    free(names);
    printf("%d machines, %d lines differ\n", machines, bad);
    return bad || machines < 10;
}
