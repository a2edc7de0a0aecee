/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/verbs/wire.h"

#include "common/log.h"

#include <errno.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "everything here is little-endian");
_Static_assert(sizeof(struct lc_verbs_handle) == LC_NET_HANDLE_BYTES, "fills NCCL's handle");
_Static_assert(sizeof(struct lc_verbs_hello) == 64, "no padding on the wire");
_Static_assert(sizeof(struct lc_verbs_path_info) == 40, "no padding on the wire");
_Static_assert(sizeof(struct lc_verbs_frame) == 312, "no padding on the wire");
_Static_assert(sizeof(struct lc_verbs_buffer) == 40, "no padding on the wire");
_Static_assert(sizeof(struct lc_verbs_cts) == 16 + 40 * LC_VERBS_RECVS, "no padding on the wire");
_Static_assert(LC_VERBS_PATHS == 4 && LC_VERBS_GROUPS == 32, "the immediate has 4 and 5 bits");

int lc_verbs_hello_check(const struct lc_verbs_hello *hello)
{
    if (hello->magic != LC_VERBS_MAGIC || hello->version != LC_VERBS_VERSION ||
        hello->n_ports == 0 || hello->n_ports > LC_VERBS_PATHS)
        return -EPROTO;
    return 0;
}

static int check_path(const struct lc_verbs_path_info *path)
{
    /* 24 bits each; the MTU is one of verbs' five. */
    if (path->qpn > 0xffffff || path->psn > 0xffffff || path->mtu < 1 || path->mtu > 5 ||
        path->ethernet > 1)
        return -EPROTO;
    return 0;
}

int lc_verbs_frame_check(const struct lc_verbs_frame *frame, int n_paths, bool to_sender)
{
    if (frame->magic != LC_VERBS_FRAME_MAGIC || frame->type == 0 ||
        frame->type >= LC_VERBS_FRAME_TYPES || frame->usable >> n_paths)
        return -EPROTO;
    if (!to_sender && (frame->open || frame->posted))
        return -EPROTO;
    if (frame->type != LC_VERBS_FRAME_PATHS)
        return 0;
    for (int i = 0; i < n_paths; i++)
        if (frame->usable >> i & 1 && check_path(&frame->paths[i]))
            return -EPROTO;
    return 0;
}

int lc_verbs_cts_check(const struct lc_verbs_cts *cts, size_t bytes)
{
    if (bytes < offsetof(struct lc_verbs_cts, buffers) || cts->n == 0 || cts->n > LC_VERBS_RECVS ||
        bytes != offsetof(struct lc_verbs_cts, buffers) + cts->n * sizeof(*cts->buffers))
        return -EPROTO;
    for (uint32_t i = 0; i < cts->n; i++)
        if (cts->buffers[i].size > LC_VERBS_MAX_BYTES)
            return -EPROTO;
    return 0;
}

int lc_verbs_handle_read(const void *handle, struct lc_verbs_handle *out)
{
    struct lc_verbs_handle read;

    memcpy(&read, handle, sizeof(read));
    if (read.magic != LC_VERBS_MAGIC) {
        lc_warn(
            "the peer's handle is not one of loongcomm's verbs transport: do all ranks use this net plugin, and "
            "have RDMA devices?");
        return -EPROTO;
    }
    if (read.version != LC_VERBS_VERSION) {
        lc_warn("the peer speaks version %u of loongcomm's verbs protocol, this rank version %u",
                read.version, LC_VERBS_VERSION);
        return -EPROTO;
    }
    *out = read;
    return 0;
}
