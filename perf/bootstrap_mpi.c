/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/bench.h"

#include <errno.h>

#ifdef LC_HAVE_MPI
#include <mpi.h>

#include <limits.h>
#include <time.h>

/* Blocking MPI calls spin and never give up: the launchers would steal the cores from the ranks. */
static int wait_for(struct lc_bench_bootstrap *self, MPI_Request *request)
{
    /* Others may be busy with a turn that is itself bounded by the timeout, so twice as long. */
    struct lc_deadline deadline = lc_deadline_in_ms((int64_t)self->timeout_s * 2000 + 5000);
    const struct timespec pause = { .tv_nsec = 200000 };
    int done = 0;

    while (MPI_Test(request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
        if (lc_deadline_passed(deadline)) {
            fprintf(stderr, "loongcomm-bench: launcher %d waited in vain for the others\n",
                    self->rank);
            return -ETIMEDOUT;
        }
        nanosleep(&pause, NULL);
    }
    return done ? 0 : -EIO;
}

/* The checker of MPI requests does not see that wait_for waits. */
/* NOLINTBEGIN(clang-analyzer-optin.mpi.MPI-Checker) */
static int mpi_bcast(struct lc_bench_bootstrap *self, void *data, size_t bytes)
{
    MPI_Request request;

    if (bytes > INT_MAX || MPI_Ibcast(data, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD, &request))
        return -EIO;
    return wait_for(self, &request);
}

static int mpi_gather(struct lc_bench_bootstrap *self, const void *data, size_t bytes, void *out)
{
    MPI_Request request;

    if (bytes > INT_MAX || MPI_Igather(data, (int)bytes, MPI_BYTE, out, (int)bytes, MPI_BYTE, 0,
                                       MPI_COMM_WORLD, &request))
        return -EIO;
    return wait_for(self, &request);
}
/* NOLINTEND(clang-analyzer-optin.mpi.MPI-Checker) */

static int mpi_barrier(struct lc_bench_bootstrap *self)
{
    MPI_Request request;

    if (MPI_Ibarrier(MPI_COMM_WORLD, &request))
        return -EIO;
    return wait_for(self, &request);
}

static void mpi_close(struct lc_bench_bootstrap *self)
{
    if (mpi_barrier(self) == 0)
        MPI_Finalize();
}

static void mpi_abort(struct lc_bench_bootstrap *self __attribute__((unused)))
{
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static const struct lc_bench_bootstrap_ops mpi_ops = {
    .bcast = mpi_bcast,
    .gather = mpi_gather,
    .barrier = mpi_barrier,
    .close = mpi_close,
    .abort = mpi_abort,
};

int lc_bench_bootstrap_mpi(struct lc_bench_bootstrap *out)
{
    struct lc_bench_bootstrap boot = { .ops = &mpi_ops };
    MPI_Comm node;

    if (MPI_Init(NULL, NULL) || MPI_Comm_rank(MPI_COMM_WORLD, &boot.rank) ||
        MPI_Comm_size(MPI_COMM_WORLD, &boot.size))
        return -EIO;
    if (MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, boot.rank, MPI_INFO_NULL,
                            &node) ||
        MPI_Comm_rank(node, &boot.local_rank) || MPI_Comm_size(node, &boot.local_size))
        return -EIO;
    MPI_Comm_free(&node);
    *out = boot;
    return 0;
}
#else
int lc_bench_bootstrap_mpi(struct lc_bench_bootstrap *out)
{
    return -ENOTSUP;
}
#endif
