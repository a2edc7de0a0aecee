/* SPDX-License-Identifier: Apache-2.0 */
#include "common/profile.h"

#include "common/cleanup.h"
#include "common/input.h"
#include "common/log.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LINE_MAX_BYTES 256
#define WORDS_MAX      10 /* one more than any line has */

static const char *const ops[] = { "broadcast",  "reduce",     "all-gather", "reduce-scatter",
                                   "all-reduce", "all-to-all", "send" };
static const char *const algorithms[] = {
    "tree", "ring", "collnet-direct", "collnet-chain", "nvls", "nvls-tree", "pat"
};
static const char *const protocols[] = { "ll", "ll128", "simple" };
static const char *const kernels[] = { "one-shot", "two-shot", "exchange" };
static const char *const wires[] = { "exact", "bf16" };

_Static_assert(sizeof(ops) / sizeof(*ops) == LC_PROFILE_OPS, "every operation has a name");
_Static_assert(sizeof(algorithms) / sizeof(*algorithms) == LC_PROFILE_ALGORITHMS, "likewise");
_Static_assert(sizeof(protocols) / sizeof(*protocols) == LC_PROFILE_PROTOCOLS, "likewise");
_Static_assert(sizeof(kernels) / sizeof(*kernels) == LC_PROFILE_KERNELS, "likewise");
_Static_assert(sizeof(wires) / sizeof(*wires) == LC_PROFILE_WIRES, "likewise");

struct parser {
    const char *name;
    unsigned line;
    bool begun; /* the first line has been seen */
    struct lc_profile *out;
    size_t room;
    const char *accepted; /* of a line that is refused */
};

static int pick(const char *word, const char *const *names, size_t n, uint8_t *out)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(word, names[i]) == 0) {
            *out = (uint8_t)i;
            return 0;
        }
    }
    return -EINVAL;
}
#define PICK(word, names, out) pick(word, names, sizeof(names) / sizeof(*(names)), out)

/* Digits alone, at most `max`. */
static int number(const char *word, uint64_t max, uint64_t *out)
{
    uint64_t value = 0;

    if (!*word || strlen(word) > 19)
        return -EINVAL;
    for (; *word; word++) {
        if (*word < '0' || *word > '9')
            return -EINVAL;
        value = value * 10 + (uint64_t)(*word - '0');
    }
    if (value > max)
        return -EINVAL;
    *out = value;
    return 0;
}

/* 2.28.9 as 22809. */
static int version(const char *word, int *out)
{
    unsigned part[3] = { 0 };
    int end = 0;

    if (strlen(word) > 12 ||
        sscanf(word, "%2u.%2u.%2u%n", &part[0], &part[1], &part[2], &end) != 3 || word[end] ||
        part[0] != 2)
        return -EINVAL;
    *out = (int)(part[0] * 10000 + part[1] * 100 + part[2]);
    return 0;
}

static int parse_range(char **word, struct lc_profile_rule *rule)
{
    if (number(word[0], (uint64_t)1 << 60, &rule->from) ||
        number(word[1], (uint64_t)1 << 60, &rule->to))
        return -EINVAL;
    if (rule->to == 0)
        rule->to = UINT64_MAX;
    return rule->from < rule->to ? 0 : -EINVAL;
}

static int parse_count(const char *word, uint64_t least, uint64_t most, uint32_t *out)
{
    uint64_t value;

    if (number(word, most, &value) || value < least)
        return -EINVAL;
    *out = (uint32_t)value;
    return 0;
}

static int parse_nccl_rule(char **word, struct lc_profile_rule *rule)
{
    uint32_t channels;

    rule->who = LC_PROFILE_NCCL;
    if (PICK(word[1], ops, &rule->op) || rule->op > LC_PROFILE_ALL_REDUCE ||
        parse_count(word[2], 2, 1u << 24, &rule->ranks) ||
        parse_count(word[3], 1, rule->ranks, &rule->nodes) || parse_range(word + 4, rule) ||
        PICK(word[6], algorithms, &rule->algorithm) || PICK(word[7], protocols, &rule->protocol) ||
        parse_count(word[8], 0, 64, &channels))
        return -EINVAL;
    rule->width = (uint16_t)channels;
    return 0;
}

static int parse_rings_rule(char **word, struct lc_profile_rule *rule)
{
    uint32_t ctas;

    rule->who = LC_PROFILE_RINGS;
    rule->nodes = 1;
    if (PICK(word[1], ops, &rule->op) || rule->op < LC_PROFILE_REDUCE_SCATTER ||
        parse_count(word[2], 2, 64, &rule->ranks) || PICK(word[3], wires, &rule->protocol) ||
        parse_range(word + 4, rule) || PICK(word[6], kernels, &rule->algorithm) ||
        parse_count(word[7], 1, 1024, &ctas))
        return -EINVAL;
    if ((rule->op > LC_PROFILE_ALL_REDUCE) != (rule->algorithm == LC_PROFILE_EXCHANGE) ||
        (rule->op > LC_PROFILE_ALL_REDUCE && rule->protocol != 0)) /* they travel as they are */
        return -EINVAL;
    rule->width = (uint16_t)ctas;
    return 0;
}

static bool same_place(const struct lc_profile_rule *a, const struct lc_profile_rule *b)
{
    return a->who == b->who && a->op == b->op && a->ranks == b->ranks && a->nodes == b->nodes &&
           (a->who == LC_PROFILE_NCCL || a->protocol == b->protocol);
}

static int add_rule(struct parser *p, const struct lc_profile_rule *rule)
{
    struct lc_profile *out = p->out;

    for (size_t i = 0; i < out->n; i++) {
        if (same_place(rule, &out->rules[i]) && rule->from < out->rules[i].to &&
            out->rules[i].from < rule->to) {
            p->accepted = "ranges that do not overlap";
            return -EINVAL;
        }
    }
    if (out->n == LC_PROFILE_RULES_MAX) {
        p->accepted = "at most 8192 rules";
        return -EINVAL;
    }
    if (out->n == p->room) {
        size_t room = p->room * 2;

        out = realloc(out, sizeof(*out) + room * sizeof(out->rules[0]));
        if (!out)
            return -ENOMEM;
        p->out = out;
        p->room = room;
    }
    out->rules[out->n++] = *rule;
    out->n_rings += rule->who == LC_PROFILE_RINGS;
    return 0;
}

static int parse_rule(struct parser *p, char **word, int n)
{
    struct lc_profile_rule rule = { 0 };
    bool rings = strcmp(word[0], "rings") == 0;

    p->accepted =
        rings
            ? "rings all-reduce|reduce-scatter RANKS exact|bf16 FROM TO one-shot|two-shot CTAS, or rings all-to-all|send RANKS exact FROM TO exchange CTAS"
            : "nccl VERSION, or nccl OPERATION RANKS NODES FROM TO ALGORITHM PROTOCOL CHANNELS";
    if (rings ? n != 8 || parse_rings_rule(word, &rule) : n != 9 || parse_nccl_rule(word, &rule))
        return -EINVAL;
    return add_rule(p, &rule);
}

/* The rest of the line behind the first word, blanks at its ends cut. */
static int parse_gpu(struct parser *p, const char *text)
{
    size_t length = strlen(text);

    p->accepted = "one line `gpu NAME`";
    if (!length || length >= sizeof(p->out->gpu) || p->out->gpu[0])
        return -EINVAL;
    memcpy(p->out->gpu, text, length);
    return 0;
}

static int split(char *line, char **word)
{
    int n = 0;

    for (char *at = strtok_r(line, " \t", &line); at && n < WORDS_MAX;
         at = strtok_r(NULL, " \t", &line))
        word[n++] = at;
    return n;
}

static int parse_words(struct parser *p, char *line)
{
    char *word[WORDS_MAX];
    int n;

    if (strncmp(line, "gpu ", 4) == 0)
        return parse_gpu(p, line + 4 + strspn(line + 4, " \t"));
    n = split(line, word);
    p->accepted = "gpu, nccl or rings";
    if (n < 1 || (strcmp(word[0], "nccl") != 0 && strcmp(word[0], "rings") != 0))
        return -EINVAL;
    if (word[0][0] == 'n' && n == 2) {
        p->accepted = "one line `nccl VERSION`, as 2.28.9";
        return p->out->nccl ? -EINVAL : version(word[1], &p->out->nccl);
    }
    return parse_rule(p, word, n);
}

static int parse_line(struct parser *p, const char *text, size_t size)
{
    char line[LINE_MAX_BYTES];
    size_t end = 0, begin = 0;

    p->accepted = "lines of printable text of up to 255 bytes";
    if (size >= sizeof(line))
        return -EINVAL;
    for (; end < size && text[end] != '#'; end++) {
        if (((unsigned char)text[end] < ' ' && text[end] != '\t') ||
            (unsigned char)text[end] == 0x7f)
            return -EINVAL;
    }
    while (end > 0 && (text[end - 1] == ' ' || text[end - 1] == '\t'))
        end--;
    while (begin < end && (text[begin] == ' ' || text[begin] == '\t'))
        begin++;
    if (begin == end)
        return 0;
    memcpy(line, text + begin, end - begin);
    line[end - begin] = '\0';
    if (p->begun)
        return parse_words(p, line);
    p->accepted = "`loongcomm.profile/1` as the first line";
    p->begun = true;
    return strcmp(line, "loongcomm.profile/1") == 0 ? 0 : -EINVAL;
}

static int compare_rules(const void *a, const void *b)
{
    const struct lc_profile_rule *x = a, *y = b;

#define ORDER(field)          \
    if (x->field != y->field) \
    return x->field < y->field ? -1 : 1
    ORDER(who);
    ORDER(op);
    ORDER(ranks);
    ORDER(nodes);
    ORDER(from);
    ORDER(protocol);
#undef ORDER
    return 0;
}

/* FNV-1a over values, not over bytes of structs: padding and order in the file say nothing. */
static uint64_t mix(uint64_t hash, uint64_t value)
{
    for (int i = 0; i < 8; i++, value >>= 8)
        hash = (hash ^ (value & 0xff)) * 0x100000001b3u;
    return hash;
}

static uint64_t hash_of(const struct lc_profile *profile)
{
    uint64_t hash = mix(0xcbf29ce484222325u, (uint64_t)profile->nccl);

    for (const char *at = profile->gpu; *at; at++)
        hash = mix(hash, (unsigned char)*at);
    for (size_t i = 0; i < profile->n; i++) {
        const struct lc_profile_rule *rule = &profile->rules[i];

        hash = mix(hash, rule->who | rule->op << 8 | rule->algorithm << 16 |
                             (uint64_t)rule->protocol << 24 | (uint64_t)rule->width << 32);
        hash = mix(mix(hash, rule->ranks), rule->nodes);
        hash = mix(mix(hash, rule->from), rule->to);
    }
    return hash;
}

static int parse_text(struct parser *p, const char *text, size_t size)
{
    while (size > 0) {
        const char *newline = memchr(text, '\n', size);
        size_t length = newline ? (size_t)(newline - text) : size;
        int err;

        p->line++;
        err = parse_line(p, text, length);
        if (err)
            return err;
        text += length + (newline != NULL);
        size -= length + (newline != NULL);
    }
    p->accepted = "`loongcomm.profile/1` as the first line, and a line each of `gpu` and `nccl`";
    return p->begun && p->out->gpu[0] && p->out->nccl ? 0 : -EINVAL;
}

struct lc_profile *lc_profile_parse(const char *name, const char *text, size_t size)
{
    struct parser p = { .name = name, .room = 64 };
    int err;

    p.out = calloc(1, sizeof(*p.out) + p.room * sizeof(p.out->rules[0]));
    err = p.out ? parse_text(&p, text, size) : -ENOMEM;
    if (err) {
        if (err == -ENOMEM)
            lc_warn("profile %s: out of memory; it is not used", name);
        else
            lc_warn("profile %s, line %u: accepted is %s; the profile is not used", name, p.line,
                    p.accepted);
        free(p.out);
        return NULL;
    }
    qsort(p.out->rules, p.out->n, sizeof(p.out->rules[0]), compare_rules);
    p.out->hash = hash_of(p.out);
    return p.out;
}

struct lc_profile *lc_profile_load(const char *path)
{
    lc_autofree char *text = NULL;
    size_t size = 0;
    int err = lc_input_read(AT_FDCWD, path, 0, LC_PROFILE_FILE_MAX, &text, &size);

    if (!err)
        return lc_profile_parse(path, text, size);
    lc_warn("profile %s: %s; accepted are files of up to 1 MiB; it is not used", path,
            lc_input_why(err));
    return NULL;
}

/* Rules are few for one place and sorted; the last that begins at or below `bytes` may hold it. */
static const struct lc_profile_rule *look(const struct lc_profile *profile,
                                          const struct lc_profile_rule *like)
{
    size_t low = 0, high = profile->n;

    while (low < high) { /* the first rule behind `like` */
        size_t middle = low + (high - low) / 2;

        if (compare_rules(&profile->rules[middle], like) <= 0)
            low = middle + 1;
        else
            high = middle;
    }
    for (size_t i = low; i-- > 0;) {
        const struct lc_profile_rule *rule = &profile->rules[i];

        if (rule->who != like->who || rule->op != like->op || rule->ranks != like->ranks ||
            rule->nodes != like->nodes)
            break;
        if (same_place(rule, like))
            return like->from < rule->to ? rule : NULL;
    }
    return NULL;
}

const struct lc_profile_rule *lc_profile_nccl(const struct lc_profile *profile, unsigned op,
                                              uint64_t ranks, uint64_t nodes, uint64_t bytes)
{
    struct lc_profile_rule like = { .who = LC_PROFILE_NCCL,
                                    .op = (uint8_t)op,
                                    .ranks = (uint32_t)ranks,
                                    .nodes = (uint32_t)nodes,
                                    .from = bytes,
                                    .protocol = UINT8_MAX };

    if (op >= LC_PROFILE_OPS || ranks > UINT32_MAX || nodes > UINT32_MAX)
        return NULL;
    return look(profile, &like);
}

const struct lc_profile_rule *lc_profile_rings(const struct lc_profile *profile, unsigned op,
                                               uint64_t ranks, unsigned wire, uint64_t bytes)
{
    struct lc_profile_rule like = { .who = LC_PROFILE_RINGS,
                                    .op = (uint8_t)op,
                                    .ranks = (uint32_t)ranks,
                                    .nodes = 1,
                                    .from = bytes,
                                    .protocol = (uint8_t)wire };

    if (op >= LC_PROFILE_OPS || ranks > UINT32_MAX || wire >= LC_PROFILE_WIRES)
        return NULL;
    return look(profile, &like);
}

int lc_profile_print_rule(const struct lc_profile_rule *rule, char *out, size_t size)
{
    uint64_t to = rule->to == UINT64_MAX ? 0 : rule->to;

    if (rule->who == LC_PROFILE_RINGS)
        return snprintf(out, size, "rings %s %u %s %" PRIu64 " %" PRIu64 " %s %u", ops[rule->op],
                        rule->ranks, wires[rule->protocol], rule->from, to,
                        kernels[rule->algorithm], rule->width);
    return snprintf(out, size, "nccl %s %u %u %" PRIu64 " %" PRIu64 " %s %s %u", ops[rule->op],
                    rule->ranks, rule->nodes, rule->from, to, algorithms[rule->algorithm],
                    protocols[rule->protocol], rule->width);
}

#define GPUS "/proc/driver/nvidia/gpus"

void lc_profile_gpu_here(char *out, size_t size)
{
    DIR *dir = opendir(GPUS);
    struct dirent *entry = NULL;
    char line[256];
    FILE *file = NULL;

    (void)snprintf(out, size, "none");
    while (dir && (entry = readdir(dir)) && entry->d_name[0] == '.')
        ;
    if (entry && snprintf(line, sizeof(line), GPUS "/%s/information", entry->d_name) > 0)
        file = fopen(line, "re");
    while (file && fgets(line, sizeof(line), file)) {
        if (strncmp(line, "Model:", 6) != 0)
            continue;
        line[strcspn(line, "\n")] = '\0';
        (void)snprintf(out, size, "%s", line + 6 + strspn(line + 6, " \t"));
        break;
    }
    if (file)
        (void)fclose(file);
    if (dir)
        closedir(dir);
}

const char *lc_profile_op_name(unsigned op)
{
    return ops[op];
}

const char *lc_profile_algorithm_name(unsigned algorithm)
{
    return algorithms[algorithm];
}

const char *lc_profile_protocol_name(unsigned protocol)
{
    return protocols[protocol];
}
