/* SPDX-License-Identifier: Apache-2.0
 *
 * The launcher: starts the ends, has both sides take turns, and counts. */
#include "perf/net/net.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST_MESSAGES ((uint64_t)1 << 22)
#define TRIAL         8

enum {
    EXIT_USAGE = 2,
};

struct side {
    bool used;
    struct lc_bnet_end ends[2];
    pid_t relay;
    struct lc_bnet_answer answers[2];
};

struct bench {
    const struct lc_bnet_options *options;
    struct side sides[LC_BNET_SIDES];
};

/* ---- asking ---- */

static int receive(const struct bench *bench, struct side *side, int i, const char *what)
{
    struct lc_bnet_answer *answer = &side->answers[i];
    struct pollfd ready = { side->ends[i].fd, POLLIN, 0 };
    /* An end gives up by itself; this is for one that cannot. */
    int n = poll(&ready, 1, (bench->options->timeout_s + 10) * 1000);

    if (n <= 0 || recv(ready.fd, answer, sizeof(*answer), MSG_DONTWAIT) != sizeof(*answer)) {
        fprintf(stderr, "loongcomm-bench net: %s: end %d %s\n", what, i,
                n > 0 ? "died" : "does not answer");
        return -EPIPE;
    }
    answer->text[sizeof(answer->text) - 1] = '\0';
    if (answer->error)
        fprintf(stderr, "loongcomm-bench net: %s: end %d: %s\n", what, i, answer->text);
    return answer->error;
}

/* Each end its own order. */
static int ask(struct bench *bench, struct side *side, const struct lc_bnet_order orders[2],
               const char *what)
{
    int err = 0;

    for (int i = 0; i < 2 && !err; i++) {
        if (send(side->ends[i].fd, &orders[i], sizeof(orders[i]), MSG_NOSIGNAL) < 0)
            err = -errno;
    }
    for (int i = 0; i < 2 && !err; i++)
        err = receive(bench, side, i, what);
    return err;
}

static int ask_both(struct bench *bench, struct side *side, const struct lc_bnet_order *order,
                    const char *what)
{
    struct lc_bnet_order orders[2] = { *order, *order };

    return ask(bench, side, orders, what);
}

/* ---- starting ---- */

static int start_end(struct bench *bench, enum lc_bnet_side s, int i)
{
    struct side *side = &bench->sides[s];
    int pair[2];
    pid_t pid;

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        return -errno;
    pid = fork();
    if (pid == 0) {
        close(pair[0]);
        lc_bnet_end_main(pair[1], s, i, bench->options);
    }
    close(pair[1]);
    if (pid < 0) {
        close(pair[0]);
        return -EAGAIN;
    }
    side->ends[i] = (struct lc_bnet_end){ pid, pair[0] };
    return 0;
}

/* In front of every listen of both ends. */
static int add_relay(struct bench *bench, struct side *side, const struct lc_bnet_way *way)
{
    uint16_t ports[2 * LC_BNET_FLOWS];
    uint16_t fronts[2 * LC_BNET_FLOWS];
    int flows = bench->options->flows;
    int err = way->get_port ? 0 : -ENOTSUP;

    for (int i = 0; i < 2 * flows && !err; i++)
        err = way->get_port(&side->answers[i / flows].handles[i % flows], &ports[i]);
    if (!err)
        err = lc_bnet_relay_start(&bench->options->link, ports, 2 * flows, &side->relay, fronts);
    for (int i = 0; i < 2 * flows && !err; i++)
        way->set_port(&side->answers[i / flows].handles[i % flows], fronts[i]);
    if (err)
        fprintf(stderr, "loongcomm-bench net: no relay for %s: %s\n", way->name, strerror(-err));
    return err;
}

static int start_side(struct bench *bench, enum lc_bnet_side s)
{
    const struct lc_bnet_way *way = lc_bnet_ways[s];
    struct side *side = &bench->sides[s];
    const struct lc_bnet_order up = { .kind = LC_BNET_ASK_UP };
    struct lc_bnet_order orders[2] = { { .kind = LC_BNET_ASK_LISTEN } };
    int err = 0;

    side->used = true;
    for (int i = 0; i < 2 && !err; i++) {
        err = start_end(bench, s, i);
        if (!err)
            err = receive(bench, side, i, way->name);
    }
    if (!err && bench->options->link.veth) {
        pid_t pids[2] = { side->ends[0].pid, side->ends[1].pid };

        err = lc_bnet_veth_make(&bench->options->link, pids);
        if (!err)
            err = ask_both(bench, side, &up, way->name);
    }
    orders[1] = orders[0];
    if (!err)
        err = ask(bench, side, orders, way->name);
    if (!err && bench->options->link.relay)
        err = add_relay(bench, side, way);
    for (int i = 0; i < 2; i++) {
        orders[i].kind = LC_BNET_ASK_CONNECT;
        memcpy(orders[i].handles, side->answers[1 - i].handles, sizeof(orders[i].handles));
    }
    return err ? err : ask(bench, side, orders, way->name);
}

static void stop_side(struct side *side)
{
    for (int i = 0; i < 2; i++) {
        if (side->ends[i].pid == 0)
            continue;
        close(side->ends[i].fd);
        kill(side->ends[i].pid, SIGKILL);
        waitpid(side->ends[i].pid, NULL, 0);
    }
    if (side->relay) {
        kill(side->relay, SIGKILL);
        waitpid(side->relay, NULL, 0);
    }
}

/* ---- measuring ---- */

/* One turn; seconds per message and of CPU per GB. */
static int turn(struct bench *bench, enum lc_bnet_side s, const struct lc_bnet_case *kase,
                uint64_t messages, bool verify, double *us, double *cpu)
{
    const struct lc_bnet_order order = { .kind = LC_BNET_ASK_RUN,
                                         .messages = messages,
                                         .verify = verify };
    struct side *side = &bench->sides[s];
    const struct lc_bnet_answer *a = side->answers;
    int err = ask_both(bench, side, &order, lc_bnet_ways[s]->name);
    double ways = kase->op == LC_BNET_STREAM ? 1 : 2;
    double count = (double)messages *
                   (kase->op == LC_BNET_PINGPONG ? 2 : (double)bench->options->flows);
    int64_t begin;
    int64_t end;

    if (err)
        return err;
    begin = a[0].begin_ns < a[1].begin_ns ? a[0].begin_ns : a[1].begin_ns;
    end = a[0].end_ns > a[1].end_ns ? a[0].end_ns : a[1].end_ns;
    *us = (double)(end - begin) / 1e3 / count;
    if (kase->op != LC_BNET_PINGPONG)
        count *= ways;
    *cpu = (double)(a[0].cpu_ns + a[1].cpu_ns) / ((double)kase->bytes * count);
    return 0;
}

/* So many messages that all turns together last about `budget_s`: the same for all sides. */
static int plan(struct bench *bench, const struct lc_bnet_case *kase, double budget_s,
                uint64_t *messages)
{
    double sum = 0;
    double most;
    uint64_t trial = TRIAL;

    /* The first turn warms up, the second is long enough to tell. */
    for (int again = 0; again < 2; again++) {
        sum = 0;
        for (int s = 0; s < LC_BNET_SIDES; s++) {
            double us;
            double cpu;
            int err = bench->sides[s].used ? turn(bench, s, kase, trial, again == 0, &us, &cpu) : 0;

            if (err)
                return err;
            sum += bench->sides[s].used ? us : 0;
        }
        if (kase->op == LC_BNET_PINGPONG)
            sum *= 2;
        else
            sum *= bench->options->flows;
        most = 0.02 * 1e6 / sum;
        trial = most > TRIAL ? (uint64_t)most : TRIAL;
    }
    most = budget_s * 1e6 / bench->options->rounds / sum;
    *messages = most < TRIAL                   ? TRIAL
                : most > (double)MOST_MESSAGES ? MOST_MESSAGES
                                               : (uint64_t)most;
    return 0;
}

static int make_room(const struct bench *bench, struct lc_bnet_result *out)
{
    size_t rounds = (size_t)bench->options->rounds;

    for (int s = 0; s < LC_BNET_SIDES; s++) {
        if (!bench->sides[s].used)
            continue;
        out->series[s].us = calloc(rounds, sizeof(double));
        out->series[s].cpu = calloc(rounds, sizeof(double));
        if (!out->series[s].us || !out->series[s].cpu)
            return -ENOMEM;
    }
    for (int s = 0; s < LC_BNET_SIDES; s++) {
        if (s == LC_BNET_OURS || !bench->sides[s].used || !bench->sides[LC_BNET_OURS].used)
            continue;
        out->ratios[s] = calloc(rounds, sizeof(double));
        if (!out->ratios[s])
            return -ENOMEM;
    }
    return 0;
}

static void free_result(struct lc_bnet_result *result)
{
    for (int s = 0; s < LC_BNET_SIDES; s++) {
        free(result->series[s].us);
        free(result->series[s].cpu);
        free(result->ratios[s]);
    }
}

static int run_rounds(struct bench *bench, const struct lc_bnet_case *kase,
                      struct lc_bnet_result *result)
{
    int err = 0;

    for (int r = 0; r < result->rounds && !err; r++) {
        for (int i = 0; i < LC_BNET_SIDES && !err; i++) {
            int s = (i + r) % LC_BNET_SIDES; /* what drifts counts for none */

            if (bench->sides[s].used)
                err = turn(bench, s, kase, result->messages, r == result->rounds - 1,
                           &result->series[s].us[r], &result->series[s].cpu[r]);
        }
        for (int s = 0; s < LC_BNET_SIDES && !err; s++) {
            if (result->ratios[s])
                result->ratios[s][r] = result->series[s].us[r] / result->series[LC_BNET_OURS].us[r];
        }
    }
    return err;
}

static int measure(struct bench *bench, const struct lc_bnet_case *kase, double budget_s,
                   struct lc_bnet_output *output)
{
    const struct lc_bnet_order order = { .kind = LC_BNET_ASK_CASE, .kase = *kase };
    struct lc_bnet_result result = { .rounds = bench->options->rounds };
    int err = make_room(bench, &result);

    for (int s = 0; s < LC_BNET_SIDES && !err; s++) {
        if (bench->sides[s].used)
            err = ask_both(bench, &bench->sides[s], &order, lc_bnet_ways[s]->name);
    }
    if (!err)
        err = plan(bench, kase, budget_s, &result.messages);
    if (!err)
        err = run_rounds(bench, kase, &result);
    if (!err)
        lc_bnet_output_result(output, kase, &result);
    free_result(&result);
    return err;
}

static int measure_all(struct bench *bench, struct lc_bnet_output *output)
{
    const struct lc_bnet_options *o = bench->options;
    int cases = 0;
    int err = 0;

    for (int op = 0; op < LC_BNET_OPS; op++)
        cases += o->ops[op] * o->n_sizes * o->n_lives;
    for (int op = 0; op < LC_BNET_OPS && !err; op++) {
        for (int i = 0; o->ops[op] && i < o->n_sizes * o->n_lives && !err; i++) {
            const struct lc_bnet_case kase = { .op = op,
                                               .bytes = o->sizes[i / o->n_lives],
                                               .live = o->lives[i % o->n_lives],
                                               .seed = o->seed };

            err = measure(bench, &kase, o->budget_s / cases, output);
        }
    }
    return err;
}

static int quit(struct bench *bench)
{
    const struct lc_bnet_order order = { .kind = LC_BNET_ASK_QUIT };
    int err = 0;

    for (int s = 0; s < LC_BNET_SIDES && !err; s++) {
        if (bench->sides[s].used)
            err = ask_both(bench, &bench->sides[s], &order, "ending");
    }
    return err;
}

int lc_bnet_main(int argc, char **argv)
{
    static struct lc_bnet_options options;
    static struct bench bench = { .options = &options };
    struct lc_bnet_output *output = NULL;
    int err;

    if (lc_bnet_options_parse(argc, argv, &options))
        return EXIT_USAGE;
    err = lc_bnet_output_open(&options, argc, argv, &output);
    for (int s = 0; s < LC_BNET_SIDES && !err; s++) {
        if (options.sides[s])
            err = start_side(&bench, s);
    }
    if (!err)
        err = measure_all(&bench, output);
    if (!err)
        err = quit(&bench);
    for (int s = 0; s < LC_BNET_SIDES; s++)
        stop_side(&bench.sides[s]);
    if (output) {
        int close_err = lc_bnet_output_close(output, !err);

        err = err ? err : close_err;
    }
    return err ? EXIT_FAILURE : EXIT_SUCCESS;
}
