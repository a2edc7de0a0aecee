/* SPDX-License-Identifier: Apache-2.0
 *
 * Sockets that have not found their lane: of the service thread alone. */
#ifndef LC_PLUGIN_NET_TCP_TALK_H
#define LC_PLUGIN_NET_TCP_TALK_H

#include "plugin/net/tcp/tcp_internal.h"

#define HANDSHAKE_NS ((int64_t)10 * 1000000000)

enum kind {
    WAKE,
    LISTENER,
    GUEST,
    DIAL,
    PROBE,
};

/* One socket that the service thread polls. */
struct talk {
    enum kind kind;
    int fd;
    struct talk *next;
    bool over; /* freed when the events at hand are done */
    int64_t until;
    size_t done; /* bytes of hello or reply */
    struct lc_tcp_hello hello;

    /* LISTENER, GUEST */
    int dev;
    /* GUEST */
    union lc_tcp_address from;
    /* DIAL, PROBE */
    struct lane *lane; /* with a reference on its connection */
    bool connected;
    bool hello_sent;
    struct lc_tcp_reply reply;
};

/* service.c */
int service_socket(int family); /* or -errno */
bool service_is_scarce(int fd);
int service_poll(struct talk *talk, uint32_t events, bool add);
struct talk *service_add(enum kind kind, int fd, int64_t until);
void service_end(struct talk *talk, bool keep);

/* dial.c */
void dial(struct lane *lane, uint32_t epoch, unsigned tries, int64_t now);
void dial_probe(struct lane *lane, int64_t now);
void dial_move(struct talk *talk);
void dial_again(struct talk *talk, const char *cause, bool refused); /* this attempt is over */

#endif
