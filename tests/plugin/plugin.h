/* SPDX-License-Identifier: Apache-2.0
 *
 * The plugin as NCCL drives it: opened by name, any version behind the newest form of its interface. */
#ifndef LC_TESTS_PLUGIN_PLUGIN_H
#define LC_TESTS_PLUGIN_PLUGIN_H

#include "plugin/net/abi/abi.h"
#include "tests/check.h"
#include "tests/plugin/guard.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NEWEST   12
#define STALE    ((void *)0x5a5a5a5a5a5a5a50) /* what an output holds before a call */
#define PATIENCE 60000 /* milliseconds for what should take few; never a measure */

/* Of the version that is loaded, older ones behind shims like NCCL's. Written by plugin_load, read by any thread after. */
extern struct lc_nccl_net_v12 net;
extern int plugin_version;
extern const char *plugin_path;
extern void *plugin_context; /* of the first init; NULL before v11 */
extern bool plugin_soak;     /* long forms */

/* Opens, inits and returns the number of devices. */
int plugin_load(void);
/* As NCCL ends: finalize where there is one, then dlclose. */
void plugin_unload(void);
/* Another init, as for a further communicator. */
void *plugin_init_again(uint64_t comm_id);

/* Every call into the plugin: its result. */
#define CALL(call)                   \
    ({                               \
        enum lc_nccl_result result_; \
        guard_enter(#call);          \
        result_ = (call);            \
        guard_leave();               \
        result_;                     \
    })
#define OK(call) CHECK(CALL(call) == LC_NCCL_SUCCESS)

/* Lines that the plugin gave to NCCL's logger; any thread. */
void plugin_log_clear(void);
unsigned plugin_log_count(enum lc_nccl_log_level level, const char *part);
void plugin_log_print(void);

struct pair {
    void *listener;
    void *send;
    void *recv;
    char handle[LC_NCCL_HANDLE_BYTES];
};

/* One end after the other, as a single thread does; closes the listener like NCCL once accepted. */
void pair_open(struct pair *pair, int dev);
void pair_listen(struct pair *pair, int dev);
/* One try of each end that is not there yet; both results must be success. True: both are there. */
bool pair_step(struct pair *pair, int dev);
void pair_close(struct pair *pair);

/* A sequence of messages in one direction of one pair, checked byte by byte. */
struct flow {
    struct pair *pair;
    size_t count;                 /* messages */
    size_t window;                /* in flight, at most LC_NCCL_MAX_REQUESTS */
    size_t largest;               /* of all messages */
    size_t (*size)(size_t index); /* what is sent */
    size_t (*room)(size_t index); /* what is posted; NULL: just that */
    bool fails;                   /* errors end it instead of the test */
    /* state */
    enum lc_nccl_result error;
    size_t sent, received, posted, started;
    unsigned char *out, *in;
    void *out_mr, *in_mr;
    void *sends[LC_NCCL_MAX_REQUESTS], *recvs[LC_NCCL_MAX_REQUESTS];
};

void flow_begin(struct flow *flow);
/* One round: posts what fits, tests the oldest of each end. False: all came, or it failed. */
bool flow_step(struct flow *flow);
void flow_end(struct flow *flow);
void flow_run(struct flow *flow); /* begin, steps, end */

/* Tests once: outputs must be written, sizes only when done. */
enum lc_nccl_result test_once(void *request, bool *done, int *sizes);
/* Until done; the number of bytes. Only where nothing else has to move meanwhile. */
int wait_done(void *request);
/* As NCCL does it, each request is asked about in turn until all are done: either end of a connection may be moved by that
 * alone. `sizes` as test gives them. */
struct waited {
    void *request;
    bool done;
    int sizes[32];
};
void wait_all(struct waited *waited, int n);
void wait_both(void *recv, void *send, int size); /* so many bytes have come, and were sent */
/* Posts until there is a request. */
void *post_send(void *comm, void *data, size_t size, int tag);
void *post_recv(void *comm, void *data, size_t size, int tag);

/* As NCCL does it, memory is registered with its connection before it is used, and no more when that is closed. The
 * first call for it registers, others find it; any thread. */
void *mr_of(void *comm, void *data, size_t size);
void close_send(void *comm);
void close_recv(void *comm);

long now_ms(void);
long patience_ms(void);
void pause_ms(long ms);
/* Aborts with the text when `since` is longer ago than patience_ms(). */
void still_patient(long since, const char *text);
uint64_t random_next(uint64_t *state);

/* What a process holds. */
struct holdings {
    int descriptors;
    int threads;
    int mappings;
};
struct holdings holdings_now(void);
/* Once it is no more than `before`, or after patience_ms(): a thread that was joined is seen for a moment longer, and a
 * goodbye may still be under way. */
struct holdings holdings_since(const struct holdings *before);

#endif
