/* SPDX-License-Identifier: Apache-2.0
 *
 * Several interfaces for one connection: which go together, which of them takes a piece, and which has gone silent. */
#include "common/deadline.h"
#include "common/log.h"
#include "plugin/net/tcp/tcp_internal.h"

#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <string.h>
#include <sys/ioctl.h>

#define RATE_NS ((int64_t)100 * 1000) /* a rate is looked at so often at most */
#define BUSY_NS \
    ((int64_t)20 * 1000000) /* what is shorter may be a burst into a buffer on the way */
#define RETRY_NS \
    ((int64_t)500 * 1000000) /* a slow lane gets a piece so often, lest it be slow for ever */
#define SLACK_NS  ((int64_t)500 * 1000)    /* an advantage that is none */
#define WATCH_NS  ((int64_t)100 * 1000000) /* how often lanes are looked at */
#define SILENT_NS ((int64_t)700 * 1000000) /* a segment that was lost has been sent again twice */

/* ---- which go together ---- */

/* The first address is of the device that NCCL has chosen; the others follow it in turn, so that connections of
 * different devices do not all take the same one next. */
void rail_fill_handle(int dev, struct lc_tcp_handle *h)
{
    int n = 0;

    for (int i = 1; i < engine.n_devices && n + 1 < engine.rails; i++) {
        int other = (dev + i) % engine.n_devices;
        union lc_tcp_address address = engine.devices[other].address;
        uint16_t port;

        if (address.sa.sa_family != engine.devices[dev].address.sa.sa_family ||
            service_listen(other, &port) != 0)
            continue;
        if (address.sa.sa_family == AF_INET)
            address.v4.sin_port = port;
        else
            address.v6.sin6_port = port;
        lc_tcp_address_write(&address, &h->more[n++]);
    }
}

static bool is_taken(const struct rail *rails, int n, int dev)
{
    for (int i = 0; i < n; i++) {
        if (rails[i].dev == dev)
            return true;
    }
    return false;
}

/* A free device for an address: one that is in its network, else, if allowed, any. */
static int find_device(const struct rail *rails, int n, const union lc_tcp_address *to, bool any)
{
    for (int i = 1; i < engine.n_devices; i++) {
        int dev = (rails[0].dev + i) % engine.n_devices;

        if (!is_taken(rails, n, dev) &&
            engine.devices[dev].address.sa.sa_family == to->sa.sa_family &&
            (any || lc_tcp_device_reaches(&engine.devices[dev], to)))
            return dev;
    }
    return -1;
}

/* Networks that only one machine knows (of containers, of virtual machines) have the same addresses on all. */
static bool is_mine(const union lc_tcp_address *to)
{
    return lc_tcp_address_is_local(to);
}

/* NCCL may have put interfaces together that are in different networks, where the peer has another one that is in this
 * one's. */
static void put_nearest_first(int dev, struct lc_tcp_handle *h, union lc_tcp_address *first)
{
    const struct lc_tcp_device *device = &engine.devices[dev];

    if (lc_tcp_device_reaches(device, first))
        return;
    for (int i = 0; i < LC_TCP_RAILS - 1; i++) {
        union lc_tcp_address to;
        struct lc_tcp_wire_address far;

        if (lc_tcp_address_read(&h->more[i], device->index, &to) != 0 ||
            !lc_tcp_device_reaches(device, &to) || is_mine(&to))
            continue;
        far = h->address;
        h->address = h->more[i];
        h->more[i] = far;
        *first = to;
        return;
    }
}

static void add_rails(const struct lc_tcp_handle *h, struct rail *rails, int *n)
{
    bool used[LC_TCP_RAILS - 1] = { false };

    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < LC_TCP_RAILS - 1 && *n < engine.rails; i++) {
            union lc_tcp_address to;
            int with;

            if (used[i] || lc_tcp_address_read(&h->more[i], 0, &to) != 0)
                continue;
            with = find_device(rails, *n, &to, pass == 1);
            /* A link-local address means something on the right device only. */
            if (with < 0 ||
                lc_tcp_address_read(&h->more[i], engine.devices[with].index, &to) != 0 ||
                is_mine(&to))
                continue;
            used[i] = true;
            rails[(*n)++] = (struct rail){ .dev = with, .to = to };
        }
    }
}

int rail_choose(int dev, const struct lc_tcp_handle *h, struct rail rails[LC_TCP_RAILS], int *n_out)
{
    struct lc_tcp_handle nearest = *h;
    int err;

    memset(rails, 0, LC_TCP_RAILS * sizeof(*rails));
    rails[0].dev = dev;
    err = lc_tcp_address_read(&h->address, engine.devices[dev].index, &rails[0].to);
    if (err)
        return err;
    *n_out = 1;
    /* Inside one machine nothing passes an interface. */
    if (engine.rails > 1 && !is_mine(&rails[0].to)) {
        put_nearest_first(dev, &nearest, &rails[0].to);
        add_rails(&nearest, rails, n_out);
    }
    return 0;
}

const char *rail_name(const struct lane *lane)
{
    return engine.devices ? engine.devices[lane->dev].name : "?";
}

/* ---- which takes a piece ---- */

static bool read_info(const struct lane *lane, struct tcp_info *info)
{
    socklen_t size = sizeof(*info);

    memset(info, 0, sizeof(*info));
    return getsockopt(lane->fd, IPPROTO_TCP, TCP_INFO, info, &size) == 0;
}

static uint64_t queued(const struct lane *lane)
{
    int bytes = 0;

    return ioctl(lane->fd, SIOCOUTQ, &bytes) == 0 && bytes > 0 ? (uint64_t)bytes : 0;
}

/* What a socket that always had something to send has brought to the peer's system in a while is its rate; what it was
 * through with before the while was over tells only that it is no slower. */
static void refresh_rate(struct lane *lane, int64_t now, uint64_t left)
{
    struct tcp_info info;
    uint64_t rate;

    if (!lane->rate)
        lane->rate = (uint64_t)engine.devices[lane->dev].speed_mbps * 125000 /
                     (unsigned)engine.sockets;
    if (now - lane->rate_at < RATE_NS || lane->busy_since == 0)
        return;
    lane->rate_at = now;
    /* Nothing at all tells of a loss that is being repaired, and counts when that is over. */
    if (!read_info(lane, &info) || info.tcpi_bytes_acked == lane->busy_from ||
        (left && now - lane->busy_since < BUSY_NS))
        return;
    rate = (uint64_t)((double)(info.tcpi_bytes_acked - lane->busy_from) * 1e9 /
                      (double)(now - lane->busy_since));
    /* A burst may have gone into a buffer on the way: it raises the rate by degrees. */
    if (!left && rate > 4 * lane->rate)
        rate = 4 * lane->rate;
    if (left || rate > lane->rate)
        lane->rate = rate ? rate : 1;
    lane->busy_since = left ? now : 0;
    lane->busy_from = info.tcpi_bytes_acked;
}

/* A piece is about to be given to the lane. */
static void begin_busy(struct lane *lane, int64_t now)
{
    struct tcp_info info;

    if (lane->busy_since || !read_info(lane, &info))
        return;
    lane->busy_since = now;
    lane->busy_from = info.tcpi_bytes_acked;
}

/* When a piece that the lane takes now would have arrived. */
static int64_t arrival(struct lane *lane, int64_t now)
{
    uint64_t left = queued(lane);

    refresh_rate(lane, now, left);
    return (int64_t)((double)(left + lane->conn->piece) * 1e9 / (double)lane->rate);
}

/* The lane of another rail that would bring the next piece first, and takes such. NULL: none that is much better. */
static struct lane *find_better(struct lane *lane, int64_t now)
{
    struct conn *conn = lane->conn;
    struct lane *best = NULL;
    int64_t best_ns = INT64_MAX;
    int64_t mine = arrival(lane, now);
    int last = conn_is_for_pool(conn) ? 1 : 0;

    if (now - lane->took_at >= RETRY_NS)
        return NULL;
    /* The last one is NCCL's: of its equals those of the pool come first. */
    for (int i = conn->n_lanes - 1; i >= last; i--) {
        struct lane *other = &conn->lanes[i];
        int64_t ns;

        if (!other->up || other->rail == lane->rail || other->count - other->told >= RING)
            continue;
        ns = arrival(other, now);
        if (ns < best_ns) {
            best_ns = ns;
            best = other;
        }
    }
    return best && best_ns + best_ns / 2 + SLACK_NS < mine ? best : NULL;
}

/* False: a lane of another rail, woken if need be, would bring the piece sooner. */
bool rail_may_take(struct lane *lane)
{
    struct lane *better;
    int64_t now;

    if (lane->conn->n_rails <= 1)
        return true;
    now = lc_now_ns();
    better = find_better(lane, now);
    if (better) {
        (void)conn_wake_lane(better);
        return false;
    }
    begin_busy(lane, now);
    return true;
}

/* ---- which has gone silent ---- */

/* True if what is on its way has not come nearer for long. */
static bool is_silent(struct lane *lane, int64_t now)
{
    struct tcp_info info;

    /* Most lanes of most connections rest: they cost nothing. */
    if (!atomic_exchange(&lane->wrote, false) && lane->drained)
        return false;
    lane->drained = queued(lane) == 0;
    if (!read_info(lane, &info))
        return false;
    if (info.tcpi_bytes_acked != lane->gone || lane->moving_at == 0 || lane->drained) {
        lane->gone = info.tcpi_bytes_acked;
        lane->moving_at = now;
    }
    return now - lane->moving_at > SILENT_NS;
}

/* A rail whose packets get lost says nothing by itself. It is given up only if another one is there that is not silent,
 * for it may be the peer that stands still. */
int64_t rail_watch(struct conn *conn, int64_t now, bool *stuck)
{
    bool silent[LC_TCP_LANES] = { false };
    bool several = false;

    for (int i = 1; i < conn->n_lanes && !several; i++)
        several = conn->lanes[i].dev != conn->lanes[0].dev;
    if (!several || conn->n_up < 2)
        return INT64_MAX;
    for (int i = 0; i < conn->n_lanes; i++)
        silent[i] = conn->lanes[i].up && is_silent(&conn->lanes[i], now);
    for (int i = 0; i < conn->n_lanes; i++) {
        struct lane *lane = &conn->lanes[i];

        for (int j = 0; j < conn->n_lanes && silent[i]; j++) {
            const struct lane *other = &conn->lanes[j];

            if (!other->up || silent[j] || other->dev == lane->dev)
                continue;
            lane->stuck = true;
            lane->retire = lane->epoch;
            atomic_store(&lane->condemned, true);
            *stuck = true;
            break;
        }
    }
    return now + WATCH_NS;
}
