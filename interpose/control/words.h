/* SPDX-License-Identifier: Apache-2.0
 *
 * The shared words of one room, in a memory file that the arbiter makes and the members of its host map.
 *
 * Every word is written once (votes, epoch words; votes for changes: once for each, in their order) and read by all
 * members; all accesses are sequentially consistent.
 * Sizes are fixed by nranks; untouched pages of the pair area cost nothing.
 */
#ifndef LC_INTERPOSE_CONTROL_WORDS_H
#define LC_INTERPOSE_CONTROL_WORDS_H

#include "interpose/control/control.h"

#define LC_EPOCHS 64 /* indices 2^0 .. 2^63 */
#define LC_PAIR_RANKS_MAX \
    1024 /* larger communicators decide no pairs: SKIP for all, by size alone */

struct lc_words;

/* A new zeroed memory file and its mapping. *fd_out may be passed to other processes. 0 or -errno. */
int lc_words_create(uint32_t nranks, struct lc_words **out, int *fd_out);

/* Maps a file that somebody else made; refuses a file of another size or kind. Does not take the descriptor. */
int lc_words_map(int fd, uint32_t nranks, struct lc_words **out);
void lc_words_unmap(struct lc_words *words);

/* -EALREADY if the rank has voted. `from` is an epoch index. */
int lc_words_vote(struct lc_words *words, uint32_t rank, uint64_t from);

/* A rank that will never vote: false if it has, for itself or for a pair. */
bool lc_words_withhold(struct lc_words *words, uint32_t rank);
enum lc_verdict lc_words_decide(struct lc_words *words, uint64_t index);

/* The same for a later change (control.h). -EALREADY if the rank has voted for this one or a later one. */
int lc_words_vote_change(struct lc_words *words, uint32_t rank, uint32_t change, uint64_t from);
enum lc_verdict lc_words_decide_change(struct lc_words *words, uint32_t change, uint64_t index);

enum lc_verdict lc_words_decide_pair(struct lc_words *words, uint32_t src, uint32_t dst,
                                     bool by_src, uint64_t index);

#endif
