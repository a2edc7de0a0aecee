/* SPDX-License-Identifier: Apache-2.0
 *
 * Pieces that travel without their zeros. The receiver fills what does not come, so what arrives is the same bits: blocks
 * count as zero by their bits, and -0.0 does not. Pure functions of bytes, for both ends and the fuzzer. */
#ifndef LC_PLUGIN_NET_TCP_SPARSE_H
#define LC_PLUGIN_NET_TCP_SPARSE_H

#include <stdbool.h>
#include <stddef.h>

#define LC_TCP_BLOCK     ((size_t)4096)
#define LC_TCP_MAP_BYTES (((size_t)16 << 20) / LC_TCP_BLOCK / 8) /* of the longest piece */

/* Of a piece: one bit a block, the first in the lowest bit of the first byte, 1: the block comes. */
static inline size_t lc_tcp_map_size(size_t length)
{
    return ((length + LC_TCP_BLOCK - 1) / LC_TCP_BLOCK + 7) / 8;
}

/* Writes the map; returns the bytes that have to travel. */
size_t lc_tcp_map_make(const unsigned char *data, size_t length, unsigned char *map);

/* A run of blocks that come, at or after `*at`: its place and length. False: there is none. */
bool lc_tcp_map_next(const unsigned char *map, size_t length, size_t *at, size_t *run);

/* No bit stands behind the last block. */
bool lc_tcp_map_is_sane(const unsigned char *map, size_t length);

/* What does not come. */
void lc_tcp_map_zero(const unsigned char *map, size_t length, unsigned char *out);

#endif
