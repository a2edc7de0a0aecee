/* SPDX-License-Identifier: Apache-2.0
 *
 * Cliques: the shared memory in which the ranks of one communicator meet. The file starts as zeros and every field
 * is meaningful as zero, so whoever comes first need not be known. */
#include "tests/rig/nccl_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ID_MAGIC    0x64692d676972636cull
#define NAME_BYTES  64
#define SLICE_MS    100 /* how often a sleeper looks for dead peers */
#define SHM_DIR     "/dev/shm"
#define STALE_AFTER 600 /* seconds */

/* Guards the list of cliques and their refs. */
static pthread_mutex_t cliques_lock = PTHREAD_MUTEX_INITIALIZER;
static struct rig_clique *cliques;

static void futex_wait(_Atomic uint32_t *word, uint32_t seen, int ms)
{
    struct timespec time = { ms / 1000, (long)(ms % 1000) * 1000000 };

    syscall(SYS_futex, word, FUTEX_WAIT, seen, &time, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void control_changed(struct rig_shared *shared)
{
    atomic_fetch_add(&shared->control, 1);
    futex_wake(&shared->control);
}

int rig_timeout_ms(void)
{
    return (int)lcrig_env("LCRIG_TIMEOUT_S", 60, 3600) * 1000;
}

static void clique_name(const struct rig_id *id, char name[static NAME_BYTES])
{
    snprintf(name, NAME_BYTES, "/lcrig-%d-%016llx%016llx", (int)id->pid,
             (unsigned long long)id->key[0], (unsigned long long)id->key[1]);
}

/* Files of ids whose creator was killed before all its ranks had met. */
static void sweep_stale(void)
{
    DIR *dir = opendir(SHM_DIR);
    struct dirent *entry;
    struct stat st;
    int pid;

    if (!dir)
        return;
    while ((entry = readdir(dir))) {
        if (sscanf(entry->d_name, "lcrig-%d-", &pid) != 1 || (kill(pid, 0) == 0 || errno != ESRCH))
            continue;
        if (fstatat(dirfd(dir), entry->d_name, &st, 0) == 0 &&
            time(NULL) - st.st_mtime > STALE_AFTER)
            unlinkat(dirfd(dir), entry->d_name, 0);
    }
    closedir(dir);
}

struct rig_id rig_id_new(void)
{
    struct rig_id id = {
        .magic = ID_MAGIC,
        .family = AF_INET,
        .address = {127, 0, 0, 1},
        .pid = getpid()
    };

    if (getrandom(id.key, sizeof(id.key), 0) != sizeof(id.key))
        lcrig_fail("getrandom: %s", strerror(errno));
    sweep_stale();
    return id;
}

static bool pid_is_dead(pid_t pid)
{
    struct pollfd poller = { .events = POLLIN };
    bool dead;

    /* A process descriptor tells of a zombie, too, which kill() does not. */
    poller.fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (poller.fd < 0)
        return errno == ESRCH || (kill(pid, 0) != 0 && errno == ESRCH);
    dead = poll(&poller, 1, 0) == 1;
    close(poller.fd);
    return dead;
}

bool rig_rank_is_dead(const struct rig_clique *clique, int rank)
{
    pid_t pid = atomic_load(&clique->shared->slot[rank].pid);

    return pid != 0 && pid != getpid() && pid_is_dead(pid);
}

static size_t ring_data_bytes(int n)
{
    return n <= 4 ? 65536 : n <= 8 ? 32768 : 16384;
}

struct rig_ring *rig_clique_ring(const struct rig_clique *clique, int from, int to)
{
    size_t stride = sizeof(struct rig_ring) + clique->ring_bytes;
    char *first = (char *)clique->shared + sizeof(struct rig_shared);

    return (struct rig_ring *)(void *)(first + ((size_t)from * clique->n + to) * stride);
}

static struct rig_clique *clique_map(const struct rig_id *id, int n)
{
    struct rig_clique *clique = rig_alloc(sizeof(*clique));
    char name[NAME_BYTES];
    uint32_t expected = 0;
    int fd;

    clique->id = *id;
    clique->n = n;
    clique->ring_bytes = ring_data_bytes(n);
    clique->bytes = sizeof(struct rig_shared) +
                    (size_t)n * n * (sizeof(struct rig_ring) + clique->ring_bytes);
    clique_name(id, name);
    fd = shm_open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)clique->bytes) != 0)
        goto fail;
    clique->shared = mmap(NULL, clique->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (clique->shared == MAP_FAILED)
        goto fail;
    close(fd);
    if (!atomic_compare_exchange_strong(&clique->shared->nranks, &expected, (uint32_t)n) &&
        expected != (uint32_t)n)
        lcrig_fail("one unique id is used for %u and for %d ranks", expected, n);
    return clique;

fail:
    rig_error(ncclSystemError, "shared memory %s: %s", name, strerror(errno));
    if (fd >= 0)
        close(fd);
    free(clique);
    return NULL;
}

static struct rig_clique *clique_get(const struct rig_id *id, int n)
{
    struct rig_clique *clique;

    pthread_mutex_lock(&cliques_lock);
    for (clique = cliques; clique; clique = clique->next)
        if (memcmp(&clique->id, id, sizeof(*id)) == 0)
            break;
    if (clique && clique->n != n)
        lcrig_fail("one unique id is used for %d and for %d ranks", clique->n, n);
    if (!clique) {
        clique = clique_map(id, n);
        if (clique) {
            clique->next = cliques;
            cliques = clique;
        }
    }
    if (clique)
        clique->refs++;
    pthread_mutex_unlock(&cliques_lock);
    return clique;
}

static void clique_put(struct rig_clique *clique)
{
    struct rig_clique **link = &cliques;

    pthread_mutex_lock(&cliques_lock);
    if (--clique->refs == 0) {
        while (*link != clique)
            link = &(*link)->next;
        *link = clique->next;
        munmap(clique->shared, clique->bytes);
        free(clique);
    }
    pthread_mutex_unlock(&cliques_lock);
}

/* Why a wait for peers must end, ncclSuccess if it need not. */
static ncclResult_t wait_trouble(struct rig_clique *clique, int rank, const _Atomic bool *abort,
                                 struct lc_deadline deadline, const char *what)
{
    struct rig_shared *shared = clique->shared;

    if (atomic_load(abort))
        return rig_error(ncclInternalError, "%s: aborted by the caller", what);
    if (atomic_load(&shared->broken))
        return rig_error(ncclRemoteError, "%s: rank %u aborted or died", what,
                         atomic_load(&shared->broken) - 1);
    if (atomic_load(&shared->failed))
        return rig_error(ncclRemoteError, "%s: a peer gave up", what);
    for (int peer = 0; peer < clique->n; peer++) {
        if (peer != rank && rig_rank_is_dead(clique, peer)) {
            rig_clique_break(clique, peer);
            return rig_error(ncclRemoteError, "%s: the process of rank %d is gone", what, peer);
        }
    }
    if (lc_deadline_passed(deadline))
        return rig_error(ncclSystemError, "%s: not all ranks came within %d s", what,
                         rig_timeout_ms() / 1000);
    return ncclSuccess;
}

static ncclResult_t wait_attached(struct rig_clique *clique, int rank, const _Atomic bool *abort)
{
    struct lc_deadline deadline = lc_deadline_in_ms(rig_timeout_ms());
    struct rig_shared *shared = clique->shared;
    ncclResult_t result;

    for (;;) {
        uint32_t seen = atomic_load(&shared->control);

        if (atomic_load(&shared->attached) == (uint32_t)clique->n)
            return ncclSuccess;
        result = wait_trouble(clique, rank, abort, deadline, "communicator set-up");
        if (result != ncclSuccess)
            return result;
        futex_wait(&shared->control, seen, SLICE_MS);
    }
}

ncclResult_t rig_clique_join(const struct rig_id *id, int rank, int n, int device,
                             const _Atomic bool *abort, struct rig_clique **out)
{
    struct rig_clique *clique;
    struct rig_slot *slot;
    char name[NAME_BYTES];
    ncclResult_t result;
    int32_t nobody = 0;

    if (id->magic != ID_MAGIC)
        return rig_error(ncclInvalidArgument, "the unique id comes from another library");
    clique = clique_get(id, n);
    if (!clique)
        return ncclSystemError;
    slot = &clique->shared->slot[rank];
    if (!atomic_compare_exchange_strong(&slot->pid, &nobody, getpid())) {
        atomic_store(&clique->shared->failed, 1); /* or the others would wait for us */
        control_changed(clique->shared);
        lcrig_fail("rank %d of one communicator is taken by processes %d and %d", rank, nobody,
                   getpid());
    }
    slot->device = device;
    slot->host = rig_host_hash();
    clique_name(id, name);
    if (atomic_fetch_add(&clique->shared->attached, 1) + 1 == (uint32_t)n)
        shm_unlink(name);
    control_changed(clique->shared);
    result = wait_attached(clique, rank, abort);
    if (result != ncclSuccess) {
        atomic_store(&clique->shared->failed, 1);
        control_changed(clique->shared);
        shm_unlink(name);
        clique_put(clique);
        return result;
    }
    *out = clique;
    return ncclSuccess;
}

void rig_clique_leave(struct rig_clique *clique, int rank)
{
    atomic_store(&clique->shared->slot[rank].departed, 1);
    control_changed(clique->shared);
    for (int peer = 0; peer < clique->n; peer++)
        rig_bell_ring(clique, peer);
    clique_put(clique);
}

/* Either the owner sees the new bell before it sleeps, or we see that it sleeps: both sides store first. */
void rig_bell_ring(struct rig_clique *clique, int rank)
{
    struct rig_slot *slot = &clique->shared->slot[rank];

    atomic_fetch_add(&slot->bell, 1);
    if (atomic_load(&slot->sleeping))
        futex_wake(&slot->bell);
}

void rig_bell_wait(struct rig_clique *clique, int rank, uint32_t seen, int ms)
{
    struct rig_slot *slot = &clique->shared->slot[rank];

    atomic_store(&slot->sleeping, 1);
    if (atomic_load(&slot->bell) == seen)
        futex_wait(&slot->bell, seen, ms);
    atomic_store(&slot->sleeping, 0);
}

static void wake_all(struct rig_clique *clique)
{
    control_changed(clique->shared);
    for (int peer = 0; peer < clique->n; peer++)
        rig_bell_ring(clique, peer);
}

void rig_clique_break(struct rig_clique *clique, int by)
{
    uint32_t whole = 0;

    if (atomic_compare_exchange_strong(&clique->shared->broken, &whole, (uint32_t)by + 1))
        wake_all(clique);
}

void rig_clique_revoke(struct rig_clique *clique)
{
    if (!atomic_exchange(&clique->shared->revoked, 1))
        wake_all(clique);
}

/* True when every rank has posted its part of exchange number `turn`. */
static bool all_posted(const struct rig_clique *clique, uint32_t turn)
{
    for (int peer = 0; peer < clique->n; peer++)
        if ((int32_t)(atomic_load(&clique->shared->slot[peer].posts) - turn) < 0)
            return false;
    return true;
}

ncclResult_t rig_clique_exchange(struct rig_clique *clique, int rank, uint32_t turn,
                                 const struct rig_post *mine, const _Atomic bool *abort,
                                 struct rig_post *all)
{
    struct lc_deadline deadline = lc_deadline_in_ms(rig_timeout_ms());
    struct rig_slot *slot = clique->shared->slot;
    ncclResult_t result;

    /* Everybody has read turn - 2 from this place: nobody posts turn - 1 before that, and all did post it. */
    slot[rank].post[turn % 2] = *mine;
    atomic_store(&slot[rank].posts, turn);
    control_changed(clique->shared);
    for (;;) {
        uint32_t seen = atomic_load(&clique->shared->control);

        if (all_posted(clique, turn))
            break;
        result = wait_trouble(clique, rank, abort, deadline, "split");
        if (result != ncclSuccess)
            return result;
        futex_wait(&clique->shared->control, seen, SLICE_MS);
    }
    for (int peer = 0; peer < clique->n; peer++)
        all[peer] = slot[peer].post[turn % 2];
    return ncclSuccess;
}
