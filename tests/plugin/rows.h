/* SPDX-License-Identifier: Apache-2.0
 *
 * Each row is one test in a process of its own. Numbers are those of the collection of public bug reports that the rows
 * come from; the table in rows.def says for each what once went wrong. */
#ifndef LC_TESTS_PLUGIN_ROWS_H
#define LC_TESTS_PLUGIN_ROWS_H

#include "tests/plugin/plugin.h"

#include <stdint.h>
#include <sys/types.h>

#define ROW(number, function, versions, story) void function(void);
#include "tests/plugin/rows.def"
#undef ROW

/* Ends the row as skipped. */
_Noreturn __attribute__((format(printf, 1, 2))) void skip(const char *fmt, ...);

/* Loads the plugin, which must have a device. */
void start(void);

/* `quick`, or `soak` in the long form. */
size_t times(size_t quick, size_t soak);

/* Another process, forked before this one has threads; `body` gets its end of a socket and exits by returning. */
struct peer {
    pid_t pid;
    int fd;
};
struct peer peer_start(void (*body)(int fd));
void peer_kill(struct peer *peer);
void peer_wait(struct peer *peer); /* it must end well */
void tell(int fd, const void *data, size_t size);
void hear(int fd, void *data, size_t size);

/* Both directions of a pair whose other end is in another process. */
void open_sending(struct pair *pair, int fd);   /* hears the handle */
void open_receiving(struct pair *pair, int fd); /* tells it */

/* A network of its own with `lo` up, or the row is skipped. */
void own_network(void);
/* Runs a command, which must succeed; `quiet` ones may fail: their status. */
void shell(const char *command);
int shell_status(const char *command);

/* Sizes for flows. */
size_t size_mixed(size_t index);
size_t size_small(size_t index);
size_t size_step(size_t index); /* 512 KiB, as NCCL's Simple protocol sends */
size_t size_page(size_t index);
#define LARGEST_MIXED ((size_t)1 << 20)

/* Leads connections made from now on through a relay in this process. */
struct relay_rule {
    size_t chunk;        /* bytes a time in each direction, 0: what comes */
    size_t cut;          /* a pause after this many bytes of each connection, 0: none */
    size_t sever;        /* connections end after this many bytes, 0: never */
    unsigned sever_most; /* so many connections at most */
};
void relay_start(const struct relay_rule *rule);
/* The first bytes that a client sent through the newest relayed connection. */
size_t relay_first(unsigned char *out, size_t max);
unsigned relay_connections(void);
void relay_stall(bool on); /* nothing passes while true */

/* A plain connection to a port of this machine, not through the plugin: a descriptor. */
int stranger(uint16_t port);

#endif
