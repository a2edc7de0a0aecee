/* SPDX-License-Identifier: Apache-2.0
 *
 * Peer-mapped reductions of the kernels library: the ranks of one node exchange through rings that lie in memory which
 * each maps from the others. libloongkernels.so runs them as CUDA kernels, libloongkernels-host.so as the same protocol
 * on host memory; both use the same words in the same layout (ring_layout.h), so either can be checked by the other.
 *
 * Memory. Each rank owns one segment (lk_segment_new) and maps everybody else's. All that others write for a rank lies in
 * that rank's own segment: they write, it polls locally. What a rank alone counts lies in its private state (zeroed
 * memory of the device that runs the call, lk_ring_state_bytes). Nothing in here is ever reset: counters run on from
 * call to call, so nothing has to be passed from the host and a replayed graph continues where the last call ended.
 *
 * Legs and rings. For each leg and directed pair (src, dst) there is a ring of `channels` x `slots` slots of
 * LK_SLOT_BYTES in dst's segment. Leg LK_SCATTER brings contributions to the owner of a tile, leg LK_GATHER brings the
 * owner's result to everybody, leg LK_EXCHANGE brings messages from any rank to any other. The unit of progress is (leg,
 * pair, channel); it is a queue with one writer and one reader.
 *  - Slot word, in dst's segment, written by src alone: low 32 bits = number of the slot's message in its unit (counted
 *    from 1, modulo 2^32), high 32 bits = one bit per granule of LK_GRANULE bytes, 1 = it was written. A granule whose
 *    bit is 0 is all zero bits and its bytes in the ring are undefined. Release at system scope, after all payload of the
 *    slot; the reader acquires, and reads the payload by loads that bypass non-coherent caches.
 *  - Credit word, in src's segment, written by dst alone: how many messages of the unit it has taken out. Written when
 *    all its loads of the slot have returned; the writer acquires before it writes a slot again. Message n may be written
 *    when n - credit <= slots. It never goes back.
 *  - Message n lies in slot (n - 1) % slots. Leg LK_EXCHANGE has more of them (lk_leg_slots).
 *  - Short messages of leg LK_EXCHANGE lie in slots of their own, in lines of four bytes of data and a four-byte flag, the
 *    number, each written by one 8-byte store: no word follows, and no release. The credit counts them among the others.
 * Every rank calls the same reductions on one set of rings in the same order, each with equal arguments but for
 * addresses. Which tiles there are, who owns them and which unit carries them follows from the arguments and the shape
 * alone (ring_layout.h), never from the size of the grid.
 *
 * Progress. Taking a result out of a gather slot waits for nothing else. Reducing a tile waits for the scatter slots of
 * all peers and for a credit of each gather unit it writes. Sending a contribution waits for a credit. A rank that is
 * not able to do one of them goes on with the others; so one slot per unit is enough for any number of ranks. Model:
 * tests/model/ring.pml. Waits end by their word or by the abort word only.
 *
 * Result. As in loongkernels.h. All ranks get the same bits: the owner of a tile adds the contributions in fp32 in the
 * order of the ranks, scales, rounds once to the wire's type and keeps that rounded value itself. Its own contribution is
 * not rounded to the wire's type before the sum; the others' are. In a one-shot call everybody adds, so there every
 * contribution is rounded. A NaN result is 0x7fff (16 bits) or 0x7fffffff.
 *
 * After the abort word has been set, calls in flight end early, outputs are undefined and the rings cannot be used again.
 */
#ifndef LOONGKERNELS_RINGS_H
#define LOONGKERNELS_RINGS_H

#include "kernels/loongkernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LK_RANKS_MAX     64u
#define LK_DEVICE_RANKS  16u /* most ranks of libloongkernels.so */
#define LK_CHANNELS_MAX  128u
#define LK_SLOTS_MAX     16u
#define LK_SLOT_BYTES    16384u
#define LK_GRANULE       512u
#define LK_LINES_MAX     ((size_t)1 << 20) /* most bytes of data of a one-shot call */
#define LK_SHORT_MAX     ((size_t)8 << 20)
#define LK_SLOT_GRANULES (LK_SLOT_BYTES / LK_GRANULE)

/* Equal on all ranks. ranks 2 .. LK_RANKS_MAX (CUDA: LK_DEVICE_RANKS), channels 1 .. LK_CHANNELS_MAX, slots
 * 1 .. LK_SLOTS_MAX. line_bytes: data of the largest one-shot call, a multiple of LK_GRANULE up to LK_LINES_MAX; 0: no
 * such calls. short_bytes: of the largest message of an exchange that travels in lines, which costs less time but twice the
 * bytes, with zeros or not; up to LK_SHORT_MAX; 0: none does. */
struct lk_ring_shape {
    uint32_t ranks;
    uint32_t channels;
    uint32_t slots;
    uint32_t line_bytes;
    uint32_t short_bytes;
};

/* Bytes of a rank's segment and of its private state; 0: the shape is none. */
size_t lk_ring_bytes(const struct lk_ring_shape *shape);
size_t lk_ring_state_bytes(const struct lk_ring_shape *shape);

/* ---- segments ----
 * Memory of the current device (host library: of this machine) that a process of the same user can map by a file
 * descriptor. Sizes are rounded up inside. */

/* *address: zeroed in the order of the stream. *fd: close-on-exec, the caller's to send and close; it may be closed when
 * every peer has mapped it. Positive result: CUDA runtime or driver error number; -ENOTSUP: the device cannot share
 * memory by file descriptor. */
int lk_segment_new(size_t bytes, void *stream, void **address, int *fd);

/* Maps another rank's segment, of another process or of this one, for loads and stores of the current device. The memory
 * lives as long as one mapping does, whatever becomes of its owner. -EINVAL: no segment of that size. */
int lk_segment_map(int fd, size_t bytes, void **address);

/* Of both kinds. No work that uses it may be in flight. */
int lk_segment_free(void *address, size_t bytes);

/* ---- calls ---- */

/* Loads the kernels of the calls below on the current device; lk_load_all() does not: whoever uses no rings need not wait
 * for them, nor have a device that takes them. As there. */
int lk_rings_load(void);

/* One rank's view. Copied by each call. */
struct lk_rings {
    struct lk_ring_shape shape;
    uint32_t rank;
    void *segments[LK_RANKS_MAX]; /* where this rank sees each rank's segment, its own included */
    void *state; /* lk_ring_state_bytes, zeroed before the first call, this rank's alone */
    /* The device reads and writes it. 0; 1 once a thread of the host wants calls to end early (it replaces a 0 only); 2
     * once a call that was waiting has ended early because of that, so that what has not been cut short is known. */
    uint32_t *abort;
    /* NULL, or a word that becomes 1 when a two-shot call has had to wait for more than LK_WAITS_ALLOWED slots of one CTA
     * although the peers were in it, too: more slots would have helped. Written by calls, relaxed; whoever has seen it may
     * set it to 0. As abort otherwise. */
    uint32_t *too_few;
};
#define LK_WAITS_ALLOWED 3u

/* One tensor of a list. All-reduce: count elements each; out may be in, other overlaps are undefined. Reduce-scatter: in
 * holds ranks * count elements, rank r gets the r-th part; out may be in + rank * count elements. count 0: skipped. */
struct lk_buffers {
    const void *in;
    void *out;
    uint64_t count;
};

/* What is done with the elements. Contribution = pre * element in fp32, rounded to the wire's type where it travels;
 * result = post * sum in fp32, rounded once. wire is the data's type, or LK_BF16 with LK_FP32 data. rounding and residual
 * concern a bf16 wire with fp32 data only. Element i of the tile space (ring_layout.h) draws number rng->offset + i when it is
 * sent and rng->offset + LK_RESULT_DRAWS + i when the result is rounded. The generator alone may differ between ranks, and
 * should: ranks with one seed round an element alike, and their errors add up.
 *
 * Error feedback: what rounding loses is kept in residual and added to what is rounded at the next call with the same
 * residuals and a list of the same counts, as lk_cast_feedback does it, whose rules hold. Element i of the tile space has
 * residual[i], zero before the first call; the residuals of a reduce-scatter's parts, which have spaces of their own, lie one
 * part's behind another's. An element that another rank owns has what this rank's contribution lost,
 * one of this rank's own what the result lost: its contribution is not rounded. Which are its own follows from the list's
 * counts, ranks, channels and rank, so with another of those the residuals are another call's. Each rank has residuals of its
 * own, or none: the others need not know. */
struct lk_reduction {
    enum lk_type type;
    enum lk_type wire;
    const struct lk_scale *pre; /* NULL: 1 */
    float post;
    enum lk_rounding rounding;
    const struct lk_rng *rng; /* NULL with LK_NEAREST */
    float *residual;          /* memory of the device, aligned to 32 bytes; NULL: no feedback */
};
#define LK_RESULT_DRAWS (UINT64_C(1) << 48)

/* No fewer than the elements of a list's tile space, with what is between tensors: so many random numbers a call draws of each
 * kind at most, and for so many residuals it needs room, a reduce-scatter for `ranks` times as many. */
uint64_t lk_rings_elements(const struct lk_reduction *how, const struct lk_buffers *list, size_t n);

/* Two-shot, any sizes. `ctas`: size of the grid, 1 .. channels (more is cut down to that); ranks may differ in it, but
 * all CTAs of all ranks that share a device have to be resident together. */
int lk_rings_all_reduce(const struct lk_rings *rings, const struct lk_reduction *how,
                        const struct lk_buffers *list, size_t n, uint32_t ctas, void *stream);
int lk_rings_reduce_scatter(const struct lk_rings *rings, const struct lk_reduction *how,
                            const struct lk_buffers *list, size_t n, uint32_t ctas, void *stream);

/* One-shot, for small calls: everybody sends everything to everybody in lines of four bytes of data and a four-byte
 * flag, each written by one 8-byte store, and adds for itself. The wire's type is the data's. -EINVAL: lk_lines_bytes is
 * more than shape.line_bytes. */
size_t lk_lines_bytes(const struct lk_reduction *how, const struct lk_buffers *list, size_t n);
int lk_lines_all_reduce(const struct lk_rings *rings, const struct lk_reduction *how,
                        const struct lk_buffers *list, size_t n, uint32_t ctas, void *stream);

/* ---- exchanges: bytes from rank to rank, bit by bit ----
 * The i-th message that a rank sends to another one is received by the i-th receive that the other one has from it, over
 * all calls, whichever calls they are in; both have the same bytes. Only the ranks of the messages take part: a single send
 * is a call of its rank alone. Calls of a rank run one after another, and the messages of one call all at once, so what
 * ends with a transfer that begins when both sides are there ends here, too; one slot per unit is enough. Units of their
 * own: exchanges and reductions know nothing of each other, whatever the order in which either end calls them, and one of
 * each may run at a time. */
struct lk_message {
    void *address;  /* any alignment; a send's is only read */
    uint64_t bytes; /* 0: none, it is matched with nothing */
    uint32_t peer;  /* own rank: the i-th send to it is copied to the i-th receive from it */
    uint32_t
        scan; /* of a send: 1: granules of zero bits are looked for, and do not travel; 0: all travel */
};

/* Rows of the send buffer. Bit r % 32 of bits[r / 32]: row r is live. Others are not read and arrive as zero bits. Sends
 * that lie in the buffer are not scanned, those outside it know no mask; none may lie across an end of it. `bits` is read
 * when the call runs. */
struct lk_row_mask {
    const void *base;
    const uint32_t *bits;
    uint64_t rows;
    uint64_t row_bytes;
};

/* Up to this many messages of each directed pair are under way at once; a call with more is several, each with the next
 * so many of every pair, and then both ends of such a pair have to have them in one call. */
uint32_t lk_exchange_most(const struct lk_ring_shape *shape);

/* mask may be NULL. `ctas` as above. Memory that is sent must not be received into, but for a send to itself in place. */
int lk_rings_exchange(const struct lk_rings *rings, const struct lk_message *sends, size_t n_sends,
                      const struct lk_message *recvs, size_t n_recvs,
                      const struct lk_row_mask *mask, uint32_t ctas, void *stream);

/* What the device has counted in the private state, for the ledger. Read with a copy from `state`, at offset 0. Each message
 * counts with a word and a credit, even where one credit has been written for several. */
struct lk_ring_counts {
    uint64_t bytes_sent;                     /* payload and words written to peers */
    uint64_t bytes_elided;                   /* payload that was all zero and not written */
    uint64_t exchange_sent, exchange_elided; /* of both, what exchanges did */
};

#ifdef __cplusplus
}
#endif

#endif
