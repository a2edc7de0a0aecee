/* SPDX-License-Identifier: Apache-2.0
 *
 * What connections have done, for the report of the process, which libloongcomm.so makes. */
#include "plugin/net/tcp/tcp_internal.h"

#include <arpa/inet.h>
#include <dlfcn.h>

typedef void add_fn(const char *source, const char *device, const char *peer, const char *name,
                    uint64_t value);
typedef void flush_fn(void (*flush)(void), int wanted);

/* NULL: that library is not there. Written once, under engine.life, before there is a connection. */
static add_fn *add;
static flush_fn *flush;

/* Processes of one machine together: a host is what one looks for. */
static void peer_name(const struct conn *conn, char text[INET6_ADDRSTRLEN])
{
    const union lc_tcp_address *peer = &conn->peer;
    bool v4 = peer->sa.sa_family == AF_INET;

    if (!inet_ntop(peer->sa.sa_family,
                   v4 ? (const void *)&peer->v4.sin_addr : (const void *)&peer->v6.sin6_addr, text,
                   INET6_ADDRSTRLEN))
        text[0] = '\0';
}

static void count(int dev, const char *peer, const char *name, uint64_t now, uint64_t *told)
{
    if (now != *told)
        add("tcp", engine.devices[dev].name, peer, name, now - *told);
    *told = now;
}

void count_conn(struct conn *conn)
{
    struct counts *c = &conn->counts;
    struct counts *told = &conn->told_counts;
    char peer[INET6_ADDRSTRLEN];

    if (!add || !engine.devices)
        return;
    peer_name(conn, peer);
    conn_lock(conn);
    c->messages = conn->sends ? conn->cut : conn->acked;
    count(conn->dev, peer, conn->sends ? "messages_sent" : "messages_received", c->messages,
          &told->messages);
    for (int i = 0; i < conn->n_lanes; i++) {
        struct lane *lane = &conn->lanes[i];

        count(lane->dev, peer, conn->sends ? "bytes_sent" : "bytes_received", lane->bytes,
              &lane->told_bytes);
        count(lane->dev, peer, "sockets_lost", lane->lost, &lane->told_lost);
        count(lane->dev, peer, "rails_lost", lane->rail_lost, &lane->told_rail_lost);
    }
    count(conn->dev, peer, "pieces_sent_again", c->resent, &told->resent);
    count(conn->dev, peer, "zero_bytes_not_sent",
          atomic_load_explicit(&conn->elided, memory_order_relaxed), &conn->told_elided);
    count(conn->dev, peer, "waits", c->waits, &told->waits);
    conn_unlock(conn);
}

/* Before the report is made: of connections that are still open. */
static void count_all(void)
{
    if (atomic_load(&engine.dead))
        return;
    pthread_mutex_lock(&engine.lock);
    for (struct conn *conn = engine.conns; conn; conn = conn->next)
        count_conn(conn);
    pthread_mutex_unlock(&engine.lock);
}

void count_begin(void)
{
    *(void **)&add = dlsym(RTLD_DEFAULT, "loongcomm_metrics_add_v1");
    *(void **)&flush = dlsym(RTLD_DEFAULT, "loongcomm_metrics_flush_v1");
    if (flush)
        flush(count_all, 1);
}

void count_end(void)
{
    if (flush)
        flush(count_all, 0);
}
