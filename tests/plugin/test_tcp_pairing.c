/* SPDX-License-Identifier: Apache-2.0
 *
 * Which interfaces of two machines serve a connection together. No socket is connected. */
#include "plugin/net/tcp/tcp_internal.h"
#include "tests/check.h"

#include <arpa/inet.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 5

static struct lc_tcp_device devices[MOST];

static union lc_tcp_address address(const char *text, uint16_t port)
{
    union lc_tcp_address a;

    memset(&a, 0, sizeof(a));
    if (strchr(text, ':')) {
        a.v6.sin6_family = AF_INET6;
        a.v6.sin6_port = htons(port);
        CHECK(inet_pton(AF_INET6, text, &a.v6.sin6_addr) == 1);
    } else {
        a.v4.sin_family = AF_INET;
        a.v4.sin_port = htons(port);
        CHECK(inet_pton(AF_INET, text, &a.v4.sin_addr) == 1);
    }
    return a;
}

/* This machine's interfaces, each in a network of 24 or 64 bits; up to NULL. */
static void have(const char *first, ...)
{
    va_list ap;

    va_start(ap, first);
    engine.devices = devices;
    engine.n_devices = 0;
    engine.rails = LC_TCP_RAILS;
    for (const char *text = first; text; text = va_arg(ap, const char *)) {
        struct lc_tcp_device *dev = &devices[engine.n_devices];

        CHECK(engine.n_devices < MOST);
        memset(dev, 0, sizeof(*dev));
        (void)snprintf(dev->name, sizeof(dev->name), "eth%d", engine.n_devices);
        dev->address = address(text, 0);
        dev->mask = address(strchr(text, ':') ? "ffff:ffff:ffff:ffff::" : "255.255.255.0", 0);
        dev->index = 10 + (uint32_t)engine.n_devices++;
    }
    va_end(ap);
}

/* What goes with what for a connection over `dev` to the first address: "0-10.1.0.9 1-10.2.0.9"; up to NULL. */
static void expect(int dev, const char *pairs, const char *first, ...)
{
    struct lc_tcp_handle h = { .magic = LC_TCP_MAGIC, .version = LC_TCP_VERSION };
    struct rail rails[LC_TCP_RAILS];
    union lc_tcp_address to = address(first, 77);
    char got[512] = "";
    va_list ap;
    int n = 0;

    lc_tcp_address_write(&to, &h.address);
    va_start(ap, first);
    for (const char *text; (text = va_arg(ap, const char *));) {
        to = address(text, 78);
        lc_tcp_address_write(&to, &h.more[n++]);
    }
    va_end(ap);
    CHECK(rail_choose(dev, &h, rails, &n) == 0);
    for (int i = 0; i < n; i++) {
        char text[LC_TCP_ADDRESS_TEXT];
        size_t used = strlen(got);

        (void)lc_tcp_address_text(&rails[i].to, text);
        *strrchr(text, ':') = '\0';
        (void)snprintf(got + used, sizeof(got) - used, "%s%d-%s", i ? " " : "", rails[i].dev, text);
    }
    if (strcmp(got, pairs) != 0)
        (void)fprintf(stderr, "got '%s', not '%s'\n", got, pairs);
    CHECK(strcmp(got, pairs) == 0);
}

static void ranks_share_the_processors_they_are_not_bound_to(void)
{
    CHECK(engine_share(16, 16, 1) == 16);
    CHECK(engine_share(16, 16, 8) == 2);
    CHECK(engine_share(12, 96, 8) == 12); /* bound to its own */
    CHECK(engine_share(48, 96, 8) == 12); /* to half of the machine, as half of them are */
    CHECK(engine_share(16, 32, 2) == 16);
    CHECK(engine_share(16, 32, 4) == 8);
    CHECK(engine_share(2, 2, 8) == 1);
    CHECK(engine_share(1, 96, 128) == 1);
}

/* Last: the settings are read once. */
static void many_ranks_of_a_machine_have_one_thread_each(void)
{
    CHECK(setenv("NCCL_SOCKET_IFNAME", "lo", 1) == 0 && setenv("LOCAL_WORLD_SIZE", "4096", 1) == 0);
    CHECK(unsetenv("LOONGCOMM_NET_THREADS") == 0 && unsetenv("LOONGCOMM_NET_SOCKETS") == 0);
    CHECK(engine_configure() == 0);
    CHECK(engine.threads_wanted == 1 && engine.sockets == 2 && !engine.relieves);
    CHECK(engine.piece == 512 << 10 && engine.spin_ns == 100000 && engine.lookers == 0 &&
          engine.parts == 1);
}

int main(void)
{
    ranks_share_the_processors_they_are_not_bound_to();
    have("10.99.1.1", "10.99.2.1", "10.99.3.1", NULL);
    /* By network, in whatever order they come. */
    expect(0, "0-10.99.1.9 1-10.99.2.9", "10.99.1.9", "10.99.2.9", NULL);
    expect(0, "0-10.99.1.9 2-10.99.3.9 1-10.99.2.9", "10.99.1.9", "10.99.3.9", "10.99.2.9", NULL);
    /* NCCL has put different networks together. */
    expect(0, "0-10.99.1.9 1-10.99.2.9", "10.99.2.9", "10.99.1.9", NULL);
    /* Routed: in any order, behind those that are near. */
    expect(0, "0-10.98.1.9 2-10.99.3.9 1-10.98.2.9", "10.98.1.9", "10.98.2.9", "10.99.3.9", NULL);
    /* Addresses that this machine has, too, are those of networks within a machine. */
    expect(0, "0-10.99.1.9", "10.99.1.9", "127.0.0.1", NULL);
    /* Within this machine nothing passes an interface. */
    expect(0, "0-127.0.0.1", "127.0.0.1", "10.99.2.9", NULL);
    /* More than this machine has; fewer. */
    expect(1, "1-10.99.2.9 2-10.99.3.9 0-10.98.1.9", "10.99.2.9", "10.99.3.9", "10.98.1.9",
           "10.98.2.9", NULL);
    expect(1, "1-10.99.2.9", "10.99.2.9", NULL);
    engine.rails = 1;
    expect(1, "1-10.99.3.9", "10.99.3.9", "10.99.2.9", NULL);
    engine.rails = 2;
    expect(0, "0-10.99.1.9 1-10.99.2.9", "10.99.1.9", "10.99.2.9", "10.99.3.9", NULL);
    /* Link-local addresses are of the interface they go over; families do not mix. */
    have("fe80::1", "fd00:99::1", NULL);
    expect(1, "1-[fd00:99::9]", "fd00:99::9", "10.99.2.9", NULL);
    expect(1, "1-[fd00:99::9] 0-[fe80::9]", "fd00:99::9", "fe80::9", NULL);
    engine.devices = NULL;
    engine.n_devices = 0;
    many_ranks_of_a_machine_have_one_thread_each();
    return 0;
}
