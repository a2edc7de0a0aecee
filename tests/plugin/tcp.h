/* SPDX-License-Identifier: Apache-2.0
 *
 * Pairs of connections over the TCP transport, driven as NCCL drives it, and a relay between their ends. */
#ifndef LC_TESTS_PLUGIN_TCP_H
#define LC_TESTS_PLUGIN_TCP_H

#include "plugin/net/transport.h"
#include "tests/check.h"

#include <stdatomic.h>
#include <stdint.h>

#define PATIENCE_MS 60000 /* of every wait: far more than a loaded machine needs */

struct pair {
    struct lc_net_comm *send;
    struct lc_net_comm *recv;
};

/* What a relay does to what it forwards. */
struct harm {
    size_t chunk; /* bytes of one write, 0: as they come */
    uint64_t
        cut_at; /* a connection ends when so many bytes have passed in both directions; 0: never */
    unsigned cuts;    /* so many connections are cut, then no more */
    unsigned kill_us; /* a random connection is cut every so often; 0: never */
};

/* Settings for the tests, before the first call of the transport: loopback, so many sockets. */
void tcp_settings(int sockets, int piece, int timeout_s);

/* `relay_port`: where the connecting side is sent, 0: where the handle says. The other sockets are on their way, as after a
 * long message. */
struct pair pair_open(struct lc_net_context *ctx, uint16_t relay_port);

/* As NCCL does it: there is one socket. */
struct pair pair_open_narrow(struct lc_net_context *ctx, uint16_t relay_port);

/* The port that a handle names, in network order. */
uint16_t pair_port(const void *handle);
void pair_close(struct pair *pair);

/* Through both ends until both are done; sizes as test reports them. */
void pair_wait(struct lc_net_request *send, struct lc_net_request *recv, size_t *sent, size_t *got);
void pair_send(struct pair *pair, void *from, size_t size, void *to, size_t room);

/* So many messages of random sizes up to `max`, `depth` in flight, every byte looked at. */
void pair_stream(struct pair *pair, unsigned messages, size_t max, unsigned depth, unsigned seed);

struct relay;
struct relay *relay_open(struct harm harm);
void relay_target(struct relay *relay, uint16_t port);
uint16_t relay_port(const struct relay *relay);
unsigned relay_cuts(struct relay *relay);
unsigned relay_links(struct relay *relay); /* open now */

/* Whoever comes is turned away at once. */
void relay_refuse(struct relay *relay, bool refuse);

/* One connection ends the next time that a full buffer is on its way in it. */
void relay_kill_when_busy(struct relay *relay);

void relay_stop_killing(struct relay *relay);
void relay_close(struct relay *relay);

#endif
