/* SPDX-License-Identifier: Apache-2.0
 *
 * What a transport (tcp, verbs) gives to the adapters of NCCL's net plugin interface. The
 * interface's versions differ in types only; here every size is a size_t, and an adapter converts.
 *
 * Errors. Functions return 0 or -errno; outputs change on success only. The transport has logged
 * the cause before it returns an error (through common/log.h, whose sink the adapters set before
 * the first call); nobody logs it again. One function of the adapters maps to ncclResult_t:
 *     -EINVAL      the caller broke the interface: a bad argument                      ncclInvalidArgument
 *     -EMSGSIZE    a message is longer than the buffer posted for it                   ncclInvalidUsage
 *     -EREMOTEIO   the peer ended, failed or did not answer in time                    ncclRemoteError
 *     -EPROTO      the peer, or something in its place, does not speak our protocol    ncclRemoteError
 *     anything else: a failing call of the system, memory included                     ncclSystemError
 * An error of a connection is sticky: every later isend, irecv, iflush and test on it returns the
 * same one at once, at the peer as well (there as -EREMOTEIO). Closing always works.
 *
 * Threads. No function blocks: none sleeps, waits for a peer or for another thread that waits, or
 * makes a system call that can. NCCL calls
 *     on any thread, several at once      init, devices, properties, fini
 *     on its service thread               listen, connect, accept, reg_mr, reg_dmabuf, dereg, close_*
 *     on its progress thread              isend, irecv, iflush, test
 * so connections are made and closed while others move data, and reg_mr/dereg run beside
 * isend/irecv/test of the *same* connection. Two calls for one connection out of { isend, irecv,
 * iflush, test, close_* } never run at once. A process has several such pairs of threads.
 *
 * Lifetimes. A context outlives what was made with it; fini comes last, but tolerates what was
 * forgotten. A request belongs to its connection: it is valid until test says done, or until the
 * connection is closed. Closing with requests open is allowed and leaves no access to their
 * buffers behind: when close_* returns nothing is read from or written to them. The same holds for
 * dereg of memory that open requests use (after an abort NCCL frees it before it closes): their
 * connection fails. A failed request stays valid (and failed) until its connection is closed. After
 * fork, the child may call anything; it gets -ECHILD and harms neither the parent's connections nor
 * its own exit. */
#ifndef LC_PLUGIN_NET_TRANSPORT_H
#define LC_PLUGIN_NET_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LC_NET_HANDLE_BYTES 128
#define LC_NET_MAX_REQUESTS \
    32 /* receive groups in flight on a connection; sends: times max_recvs */

/* Bits of ptr_support and the type of reg_mr, with NCCL's values. */
enum lc_net_memory {
    LC_NET_HOST = 1,
    LC_NET_CUDA = 2,
    LC_NET_DMABUF = 4,
};

/* Each transport has its own structs behind these. */
struct lc_net_context;
struct lc_net_listen;
struct
    lc_net_comm; /* one direction of a connection: made by connect (sends) or accept (receives) */
struct lc_net_mr;
struct lc_net_request;

struct lc_net_options {
    uint64_t comm_id;  /* of NCCL's communicator; 0: unknown (interfaces before v11) */
    int traffic_class; /* -1: not set */
};

/* The texts live until the library is unloaded. */
struct lc_net_properties {
    const char *name;     /* unique among the devices */
    const char *pci_path; /* a folder of /sys/devices, or NULL: not a PCI device */
    uint64_t guid;        /* unique among the ports of this machine */
    int ptr_support;      /* lc_net_memory bits */
    bool reg_is_global;   /* an mr made on one connection is valid on every one of the device */
    bool force_flush;     /* received device memory needs iflush whatever the GPU */
    int speed_mbps;       /* > 0 */
    int port;
    float latency_us;
    int max_comms;
    int max_recvs;    /* buffers of one irecv */
    size_t max_bytes; /* of one message */
    int16_t rail_id;  /* -1: not known */
    int16_t plane_id; /* -1: not known */
};

struct lc_net_ops {
    const char *name;

    /* Once for each communicator, and once in all for interfaces that know no context. Never
     * fails because the transport is of no use here: then there are no devices. */
    int (*init)(const struct lc_net_options *options, struct lc_net_context **out);
    void (*fini)(struct lc_net_context *ctx); /* NULL is allowed */

    /* The devices of the process are found at the first init and do not change after it. Before
     * it there are none. */
    int (*devices)(int *out);
    int (*properties)(int dev, struct lc_net_properties *out);

    /* `handle` is LC_NET_HANDLE_BYTES long at any alignment; all of it is written. It travels to
     * the peer by NCCL's own means. `ctx` may be NULL where the interface knows none. */
    int (*listen)(struct lc_net_context *ctx, int dev, void *handle, struct lc_net_listen **out);

    /* Success with *out = NULL is "not yet": call again with the same memory at `handle`, which
     * the transport changes between the calls (it holds no pointers: a peer may have sent any
     * 128 bytes). After an error a call with the same handle starts anew. What is never asked
     * for again is freed after the deadline of a connection. */
    int (*connect)(struct lc_net_context *ctx, int dev, void *handle, struct lc_net_comm **out);

    /* Success with *out = NULL is "not yet". May be called again after a connection came: one
     * listen serves any number. */
    int (*accept)(struct lc_net_listen *listen, struct lc_net_comm **out);

    /* `type` is one lc_net_memory bit; on sending and receiving connections. Any number of times
     * for one buffer, each with an mr of its own. *out may be NULL where nothing needs to be
     * kept: the callers pass back what they got. The descriptor of reg_dmabuf stays the
     * caller's. -ENOTSUP where the transport cannot reach such memory. */
    int (*reg_mr)(struct lc_net_comm *comm, void *data, size_t size, int type,
                  struct lc_net_mr **out);
    int (*reg_dmabuf)(struct lc_net_comm *comm, void *data, size_t size, int type, uint64_t offset,
                      int fd, struct lc_net_mr **out);
    int (*dereg)(struct lc_net_comm *comm, struct lc_net_mr *mr);

    /* *out is always written on success; NULL is "no room now, call again". The k-th send meets
     * the k-th receive; with max_recvs > 1 a send takes the first free slot with its tag in the
     * oldest group, and is refused with NULL while there is none. Sizes of 0 are messages like
     * others. The arrays of irecv may be reused when it returns. */
    int (*isend)(struct lc_net_comm *comm, void *data, size_t size, int tag, struct lc_net_mr *mr,
                 struct lc_net_request **out);
    int (*irecv)(struct lc_net_comm *comm, int n, void *const *data, const size_t *sizes,
                 const int *tags, struct lc_net_mr *const *mrs, struct lc_net_request **out);

    /* Makes received device memory visible to the GPU; sizes are int in every version. *out =
     * NULL: nothing to wait for. */
    int (*iflush)(struct lc_net_comm *comm, int n, void *const *data, const int *sizes,
                  struct lc_net_mr *const *mrs, struct lc_net_request **out);

    /* *done is always written on success. `sizes` may be NULL; when done, it gets one size for a
     * send, and what really came for each of the n buffers of a receive. Every call moves all
     * that is pending on the connection, within a bound that is small against a message. */
    int (*test)(struct lc_net_request *request, bool *done, size_t *sizes);

    /* NULL is allowed. */
    void (*close_send)(struct lc_net_comm *comm);
    void (*close_recv)(struct lc_net_comm *comm);
    void (*close_listen)(struct lc_net_listen *listen);
};

extern const struct lc_net_ops lc_net_tcp;
extern const struct lc_net_ops lc_net_verbs; /* only in builds with LC_HAVE_VERBS */

/* The transport of this process, decided at the first call and never NULL: the first that has a device, else one that
 * has none. Init of the returned table still has to be called. */
const struct lc_net_ops *lc_net_choose(void);

#endif
