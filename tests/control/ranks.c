/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/control/ranks.h"

#include "common/deadline.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

bool tcp_only;
struct board *board;

void sleep_ms(int ms)
{
    (void)poll(NULL, 0, ms);
}

void meet(int number, int n)
{
    atomic_fetch_add(&board->arrived[number], 1);
    WAIT_FOR(atomic_load(&board->arrived[number]) >= n);
}

struct lc_record record_of(uint32_t rank)
{
    struct lc_record record = { .version = 1,
                                .rank = rank,
                                .pid = (uint32_t)getpid(),
                                .settings_hash = 7,
                                .capabilities = 0xf0f0u | rank,
                                .host = "here" };

    return record;
}

void get_id(uint32_t rank)
{
    if (rank == 0) {
        memset(board->id, 0, sizeof(board->id));
        CHECK(lc_control_stamp(board->id) == 0);
        atomic_store(&board->ready, 1);
    }
    WAIT_FOR(atomic_load(&board->ready));
}

struct lc_room *join(uint32_t rank, uint32_t n)
{
    struct lc_record mine = record_of(rank);
    struct lc_room *room = NULL;

    get_id(rank);
    CHECK(lc_room_join(board->id, n, &mine, &room) == 0);
    return room;
}

void run_processes(const char *name, rank_fn *fn, int n)
{
    pid_t pids[RANKS];
    int bad = 0;

    memset(board, 0, sizeof(*board));
    for (int r = 0; r < n; r++) {
        pids[r] = fork();
        CHECK(pids[r] >= 0);
        if (pids[r] == 0) {
            alarm(120);
            atomic_store(&board->pid[r], (int)getpid());
            fn((uint32_t)r);
            lc_control_fini();
            _exit(0);
        }
    }
    for (int r = 0; r < n; r++) {
        int status;

        CHECK(waitpid(pids[r], &status, 0) == pids[r]);
        if (!WIFEXITED(status) || WEXITSTATUS(status) > 1) {
            fprintf(stderr, "%s: rank %d ended with status %x\n", name, r, status);
            bad++;
        }
    }
    CHECK(bad == 0);
    printf("%s: ok\n", name);
}

void set_up(int argc, char **argv)
{
    tcp_only = argc > 1 && strcmp(argv[argc - 1], "tcp") == 0;
    control.tcp_only = tcp_only;
    board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != MAP_FAILED);
    setvbuf(stdout, NULL, _IONBF, 0);
}
