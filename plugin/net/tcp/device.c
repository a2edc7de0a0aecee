/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/tcp/device.h"

#include "common/cleanup.h"
#include "common/config.h"
#include "common/log.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Loopback, veth, bridges: what a few connections bring there. NCCL weighs protocols and algorithms by it, and by more it
 * would send what is twice as long in the hope of a shorter wait, up to 400 KiB. */
#define VIRTUAL_MBPS 25000
#define UNKNOWN_MBPS 25000 /* a card that does not say */

bool lc_tcp_name_matches(const char *list, const char *name)
{
    bool all_but = *list == '^';
    bool whole;
    bool found = false;
    bool any = false;

    list += all_but;
    whole = *list == '=';
    list += whole;
    while (*list) {
        size_t entry = strcspn(list, ",");
        size_t n = strcspn(list, ":,");

        if (n) {
            any = true;
            if (strncmp(name, list, n) == 0 && (!whole || name[n] == '\0'))
                found = true;
        }
        list += entry + (list[entry] == ',');
    }
    /* As NCCL: an empty list names every interface. */
    return (found || !any) != all_but;
}

/* First line of a small file of sysfs. */
static bool read_line(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got;

    if (fd < 0)
        return false;
    got = read(fd, text, size - 1);
    close(fd);
    if (got <= 0)
        return false;
    text[got] = '\0';
    text[strcspn(text, "\n")] = '\0';
    return true;
}

static bool subsystem_is(const char *folder, const char *name)
{
    char path[PATH_MAX + 16];
    char target[PATH_MAX];
    ssize_t got;
    const char *slash;

    (void)snprintf(path, sizeof(path), "%s/subsystem", folder);
    got = readlink(path, target, sizeof(target) - 1);
    if (got <= 0)
        return false;
    target[got] = '\0';
    slash = strrchr(target, '/');
    return strcmp(slash ? slash + 1 : target, name) == 0;
}

/* The PCI function behind an interface; virtio and the like sit one level below theirs. NULL: none. */
static char *find_pci_path(const char *name, bool *has_device)
{
    char link[64 + IF_NAMESIZE];
    char *path;

    (void)snprintf(link, sizeof(link), "/sys/class/net/%s/device", name);
    path = realpath(link, NULL);
    *has_device = path != NULL;
    for (int up = 0; path && up < 2; up++) {
        char *slash;

        if (subsystem_is(path, "pci"))
            return path;
        slash = strrchr(path, '/');
        if (!slash || slash == path)
            break;
        *slash = '\0';
    }
    free(path);
    return NULL;
}

static int read_speed(const char *name)
{
    char path[64 + IF_NAMESIZE];
    char text[32];
    long value;

    (void)snprintf(path, sizeof(path), "/sys/class/net/%s/speed", name);
    if (!read_line(path, text, sizeof(text)))
        return 0;
    value = strtol(text, NULL, 10);
    return value > 0 && value < INT_MAX ? (int)value : 0;
}

static uint64_t hash_name(const char *name)
{
    uint64_t hash = 0xcbf29ce484222325u;

    while (*name)
        hash = (hash ^ (unsigned char)*name++) * 0x100000001b3u;
    return hash;
}

static void describe(struct lc_tcp_device *dev, const struct ifaddrs *ifa, int speed_mbps)
{
    bool has_device;

    memset(dev, 0, sizeof(*dev));
    (void)snprintf(dev->name, sizeof(dev->name), "%s", ifa->ifa_name);
    if (ifa->ifa_addr->sa_family == AF_INET)
        memcpy(&dev->address, ifa->ifa_addr, sizeof(dev->address.v4));
    else
        memcpy(&dev->address, ifa->ifa_addr, sizeof(dev->address.v6));
    if (ifa->ifa_netmask && ifa->ifa_addr->sa_family == AF_INET)
        memcpy(&dev->mask, ifa->ifa_netmask, sizeof(dev->mask.v4));
    else if (ifa->ifa_netmask)
        memcpy(&dev->mask, ifa->ifa_netmask, sizeof(dev->mask.v6));
    dev->index = if_nametoindex(dev->name);
    dev->pci_path = find_pci_path(dev->name, &has_device);
    dev->guid = hash_name(dev->name);
    dev->speed_mbps = speed_mbps > 0 ? speed_mbps : read_speed(dev->name);
    /* Some virtual interfaces say 10000 whatever they can do. */
    if (!has_device && speed_mbps <= 0 && dev->speed_mbps < VIRTUAL_MBPS)
        dev->speed_mbps = VIRTUAL_MBPS;
    if (dev->speed_mbps <= 0) {
        dev->speed_mbps = UNKNOWN_MBPS;
        lc_info("%s does not say how fast it is: taken for %d Gb/s (LOONGCOMM_NET_SPEED)",
                dev->name, UNKNOWN_MBPS / 1000);
    }
}

static bool usable(const struct ifaddrs *ifa, int family)
{
    if (!ifa->ifa_addr || !(ifa->ifa_flags & IFF_RUNNING))
        return false;
    if (ifa->ifa_addr->sa_family != AF_INET && ifa->ifa_addr->sa_family != AF_INET6)
        return false;
    if (family && ifa->ifa_addr->sa_family != family)
        return false;
    return ifa->ifa_addr->sa_family != AF_INET6 ||
           !IN6_IS_ADDR_LOOPBACK(&((struct sockaddr_in6 *)ifa->ifa_addr)->sin6_addr);
}

/* An address of IPv6 belongs to the interface before one may use it: until its network has been asked whether somebody
 * else has it (RFC 4862, 5.4), and for ever if somebody has. What cannot be tried counts as one to use. */
static bool may_be_bound(const struct ifaddrs *ifa)
{
    struct sockaddr_in6 address;
    bool refused;
    int fd;

    if (ifa->ifa_addr->sa_family != AF_INET6)
        return true;
    memcpy(&address, ifa->ifa_addr, sizeof(address));
    address.sin6_port = 0;
    fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return true;
    refused = bind(fd, (struct sockaddr *)&address, sizeof(address)) != 0 && errno == EADDRNOTAVAIL;
    close(fd);
    return !refused;
}

struct search {
    struct ifaddrs *all;
    int family; /* 0: any */
    int speed_mbps;
    struct lc_tcp_device *found;
    int n;
    int room;
};

static int add(struct search *s, const struct ifaddrs *ifa)
{
    for (int i = 0; i < s->n; i++) {
        if (strncmp(s->found[i].name, ifa->ifa_name, IF_NAMESIZE) == 0)
            return 0; /* the first address of an interface that can be used counts */
    }
    if (!may_be_bound(ifa)) {
        lc_info("an address of %s is left out: it may not be used (yet)", ifa->ifa_name);
        return 0;
    }
    if (s->n == s->room) {
        int room = s->room ? 2 * s->room : 8;
        struct lc_tcp_device *more = realloc(s->found, (size_t)room * sizeof(*more));

        if (!more)
            return -ENOMEM;
        s->found = more;
        s->room = room;
    }
    describe(&s->found[s->n++], ifa, s->speed_mbps);
    return 0;
}

static int search_names(struct search *s, const char *list)
{
    int err = 0;

    for (struct ifaddrs *ifa = s->all; ifa && !err; ifa = ifa->ifa_next) {
        if (usable(ifa, s->family) && lc_tcp_name_matches(list, ifa->ifa_name))
            err = add(s, ifa);
    }
    return err;
}

static bool same_network(const struct sockaddr *mask, const struct sockaddr *a,
                         const union lc_tcp_address *b)
{
    const unsigned char *m;
    const unsigned char *x;
    const unsigned char *y;
    size_t n;

    if (!mask || a->sa_family != b->sa.sa_family)
        return false;
    if (a->sa_family == AF_INET) {
        m = (const unsigned char *)&((const struct sockaddr_in *)mask)->sin_addr;
        x = (const unsigned char *)&((const struct sockaddr_in *)a)->sin_addr;
        y = (const unsigned char *)&b->v4.sin_addr;
        n = 4;
    } else {
        m = (const unsigned char *)&((const struct sockaddr_in6 *)mask)->sin6_addr;
        x = (const unsigned char *)&((const struct sockaddr_in6 *)a)->sin6_addr;
        y = (const unsigned char *)&b->v6.sin6_addr;
        n = 16;
    }
    for (size_t i = 0; i < n; i++) {
        if ((x[i] ^ y[i]) & m[i])
            return false;
    }
    return true;
}

/* "1.2.3.4:567" or "[fe80::1%eth0]:567"; a name would have to be looked up, which may take long. */
static bool parse_comm_id(const char *text, union lc_tcp_address *out)
{
    char host[64];
    size_t n;

    memset(out, 0, sizeof(*out));
    if (*text == '[') {
        n = strcspn(text + 1, "%]");
        if (n >= sizeof(host))
            return false;
        memcpy(host, text + 1, n);
        host[n] = '\0';
        out->v6.sin6_family = AF_INET6;
        return inet_pton(AF_INET6, host, &out->v6.sin6_addr) == 1;
    }
    n = strcspn(text, ":");
    if (n >= sizeof(host))
        return false;
    memcpy(host, text, n);
    host[n] = '\0';
    out->v4.sin_family = AF_INET;
    return inet_pton(AF_INET, host, &out->v4.sin_addr) == 1;
}

static int search_network(struct search *s, const char *comm_id)
{
    union lc_tcp_address address;

    if (!parse_comm_id(comm_id, &address))
        return 0;
    for (struct ifaddrs *ifa = s->all; ifa; ifa = ifa->ifa_next) {
        int err = 0;

        if (usable(ifa, 0) && same_network(ifa->ifa_netmask, ifa->ifa_addr, &address))
            err = add(s, ifa);
        if (err || s->n)
            return err;
    }
    return 0;
}

static int search_by_rules(struct search *s)
{
    const char *names = lc_environment_get("NCCL_SOCKET_IFNAME");
    const char *family = lc_environment_get("NCCL_SOCKET_FAMILY");
    const char *comm_id = lc_environment_get("NCCL_COMM_ID");
    /* NCCL's order where the user says nothing. */
    static const char *const fallbacks[] = { "^docker,lo,virbr", "docker", "lo", "virbr" };
    int err;

    if (family && strcmp(family, "AF_INET") == 0)
        s->family = AF_INET;
    else if (family && strcmp(family, "AF_INET6") == 0)
        s->family = AF_INET6;
    if (names && strlen(names) > 1) {
        err = search_names(s, names);
        if (!err && s->n == 0)
            lc_warn_once(
                "NCCL_SOCKET_IFNAME is '%.100s', and no interface that runs and has an address%s "
                "to use is named so",
                names, s->family ? " of NCCL_SOCKET_FAMILY" : "");
        return err;
    }
    err = search_names(s, "ib");
    if (!err && s->n == 0 && comm_id)
        err = search_network(s, comm_id);
    for (size_t i = 0; i < sizeof(fallbacks) / sizeof(*fallbacks) && !err && s->n == 0; i++)
        err = search_names(s, fallbacks[i]);
    if (!err && s->n == 0)
        lc_warn_once("no network interface runs%s: the net plugin offers no device",
                     s->family ? " with an address of NCCL_SOCKET_FAMILY" : "");
    return err;
}

int lc_tcp_devices_find(int speed_mbps, struct lc_tcp_device **out, int *n_out)
{
    struct search s = { .speed_mbps = speed_mbps };
    int err;

    if (getifaddrs(&s.all) != 0) {
        err = -errno;
        lc_warn("the network interfaces cannot be listed: %s", strerror(-err));
        return err;
    }
    err = search_by_rules(&s);
    freeifaddrs(s.all);
    if (err) {
        lc_tcp_devices_free(s.found, s.n);
        return err;
    }
    *out = s.found;
    *n_out = s.n;
    return 0;
}

void lc_tcp_devices_free(struct lc_tcp_device *devices, int n)
{
    for (int i = 0; i < n; i++)
        free(devices[i].pci_path);
    free(devices);
}

bool lc_tcp_device_reaches(const struct lc_tcp_device *device, const union lc_tcp_address *address)
{
    return device->mask.sa.sa_family &&
           same_network(&device->mask.sa, &device->address.sa, address);
}

bool lc_tcp_address_is_local(const union lc_tcp_address *address)
{
    union lc_tcp_address probe = *address;
    bool local = false;
    int fd;

    /* One can bind to own addresses only. */
    if (probe.sa.sa_family == AF_INET)
        probe.v4.sin_port = 0;
    else
        probe.v6.sin6_port = 0;
    fd = socket(probe.sa.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0) {
        local = bind(fd, &probe.sa, lc_tcp_address_size(&probe)) == 0;
        close(fd);
    }
    return local;
}
