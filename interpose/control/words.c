/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/control/words.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum word {
    UNDECIDED,
    SKIPPED,
    COMMITTED
};

struct pair {
    _Atomic uint64_t voted[2]; /* by the source, by the destination; 0 or an epoch index */
    _Atomic unsigned char word[LC_EPOCHS]; /* enum word */
};

/* The mapped file: epoch words, votes, votes for changes, pairs. */
struct lc_words {
    uint32_t nranks;
    size_t size;
    _Atomic unsigned char *word;
    _Atomic uint64_t *voted;   /* by rank: 0, an epoch index, or UINT64_MAX: withheld for good */
    _Atomic uint64_t *changes; /* by rank: 0, or the last vote_word */
    struct pair *pairs;        /* NULL beyond LC_PAIR_RANKS_MAX */
    void *base;
};

_Static_assert(sizeof(_Atomic unsigned char) == 1 && sizeof(_Atomic uint64_t) == 8,
               "the words are plain memory shared between processes");

static size_t file_size(uint32_t nranks)
{
    size_t size = LC_EPOCHS + 2 * (size_t)nranks * sizeof(uint64_t);

    return nranks <= LC_PAIR_RANKS_MAX ? size + (size_t)nranks * nranks * sizeof(struct pair)
                                       : size;
}

int lc_words_map(int fd, uint32_t nranks, struct lc_words **out)
{
    struct lc_words *words;
    struct stat st;
    int err;

    if (fstat(fd, &st) != 0)
        return -errno;
    if (!S_ISREG(st.st_mode) || nranks == 0 || (size_t)st.st_size != file_size(nranks))
        return -EINVAL;
    words = calloc(1, sizeof(*words));
    if (!words)
        return -ENOMEM;
    words->nranks = nranks;
    words->size = (size_t)st.st_size;
    words->base = mmap(NULL, words->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (words->base == MAP_FAILED) {
        err = -errno;
        free(words);
        return err;
    }
    words->word = words->base;
    words->voted = (_Atomic uint64_t *)((char *)words->base + LC_EPOCHS);
    words->changes = words->voted + nranks;
    if (nranks <= LC_PAIR_RANKS_MAX)
        words->pairs = (struct pair *)(words->changes + nranks);
    *out = words;
    return 0;
}

/* Sealed against shrinking, so that no member can be killed by SIGBUS. */
int lc_words_create(uint32_t nranks, struct lc_words **out, int *fd_out)
{
    int fd = memfd_create("loongcomm-words", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int err;

    if (fd < 0)
        return -errno;
    if (ftruncate(fd, (off_t)file_size(nranks)) != 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        err = -errno;
        goto close_fd;
    }
    err = lc_words_map(fd, nranks, out);
    if (err)
        goto close_fd;
    *fd_out = fd;
    return 0;

close_fd:
    close(fd);
    return err;
}

void lc_words_unmap(struct lc_words *words)
{
    if (!words)
        return;
    munmap(words->base, words->size);
    free(words);
}

int lc_words_vote(struct lc_words *words, uint32_t rank, uint64_t from)
{
    uint64_t none = 0;

    if (rank >= words->nranks || !lc_is_epoch(from))
        return -EINVAL;
    return atomic_compare_exchange_strong(&words->voted[rank], &none, from) ? 0 : -EALREADY;
}

static bool counts(uint64_t vote, uint64_t index)
{
    return vote != 0 && vote <= index;
}

bool lc_words_withhold(struct lc_words *words, uint32_t rank)
{
    uint64_t none = 0;

    for (uint32_t r = 0; words->pairs && r < words->nranks; r++) {
        if (atomic_load(&words->pairs[(size_t)rank * words->nranks + r].voted[0]) ||
            atomic_load(&words->pairs[(size_t)r * words->nranks + rank].voted[1]))
            return false;
    }
    return atomic_compare_exchange_strong(&words->voted[rank], &none, UINT64_MAX);
}

/* The first to come writes; everybody obeys what is there. */
static enum lc_verdict settle(_Atomic unsigned char *word, bool all_in)
{
    unsigned char expected = UNDECIDED;
    unsigned char mine = all_in ? COMMITTED : SKIPPED;

    if (!atomic_compare_exchange_strong(word, &expected, mine))
        mine = expected;
    return mine == COMMITTED ? LC_VERDICT_COMMIT : LC_VERDICT_SKIP;
}

enum lc_verdict lc_words_decide(struct lc_words *words, uint64_t index)
{
    bool all_in = true;

    if (!lc_is_epoch(index))
        return LC_VERDICT_SKIP;
    for (uint32_t r = 0; all_in && r < words->nranks; r++)
        all_in = counts(atomic_load(&words->voted[r]), index);
    return settle(&words->word[__builtin_ctzll(index)], all_in);
}

/* A vote for change `change` from index 2^`epoch` on. */
static uint64_t vote_word(uint32_t change, uint32_t epoch)
{
    return (uint64_t)change << 32 | epoch;
}

int lc_words_vote_change(struct lc_words *words, uint32_t rank, uint32_t change, uint64_t from)
{
    uint64_t last;

    if (rank >= words->nranks || !change || !lc_is_epoch(from))
        return -EINVAL;
    last = atomic_load(&words->changes[rank]);
    if (last >> 32 >= change)
        return -EALREADY;
    return atomic_compare_exchange_strong(&words->changes[rank], &last,
                                          vote_word(change, (uint32_t)__builtin_ctzll(from)))
               ? 0
               : -EALREADY;
}

/* Whoever is the first at the index has passed all earlier ones, so that no change before this one is open. */
enum lc_verdict lc_words_decide_change(struct lc_words *words, uint32_t change, uint64_t index)
{
    bool all_in = true;

    if (!lc_is_epoch(index))
        return LC_VERDICT_SKIP;
    for (uint32_t r = 0; all_in && r < words->nranks; r++) {
        uint64_t vote = atomic_load(&words->changes[r]);

        all_in = vote >> 32 == change && (uint32_t)vote <= (uint32_t)__builtin_ctzll(index);
    }
    return settle(&words->word[__builtin_ctzll(index)], all_in);
}

enum lc_verdict lc_words_decide_pair(struct lc_words *words, uint32_t src, uint32_t dst,
                                     bool by_src, uint64_t index)
{
    struct pair *pair;
    uint64_t none = 0;

    if (!words->pairs || src >= words->nranks || dst >= words->nranks || !lc_is_epoch(index))
        return LC_VERDICT_SKIP;
    pair = &words->pairs[(size_t)src * words->nranks + dst];
    (void)atomic_compare_exchange_strong(&pair->voted[by_src ? 0 : 1], &none, index);
    return settle(&pair->word[__builtin_ctzll(index)],
                  counts(atomic_load(&pair->voted[0]), index) &&
                      counts(atomic_load(&pair->voted[1]), index));
}
