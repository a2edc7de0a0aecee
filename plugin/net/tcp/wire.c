/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/tcp/wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "common/log.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are little-endian");
_Static_assert(sizeof(struct lc_tcp_handle) == LC_NET_HANDLE_BYTES, "fills NCCL's handle");
_Static_assert(sizeof(struct lc_tcp_wire_address) == 20, "no padding on the wire");
_Static_assert(sizeof(struct lc_tcp_hello) == 80, "no padding on the wire");
_Static_assert(sizeof(struct lc_tcp_reply) == 40, "no padding on the wire");
_Static_assert(sizeof(struct lc_tcp_frame) == 56, "no padding on the wire");
_Static_assert(sizeof(struct lc_tcp_lane_word) == 16, "no padding on the wire");

static int check_piece(const struct lc_tcp_frame *f)
{
    /* Less than the whole of a long message: the pieces before and behind it come by other frames. */
    if (f->number == 0 || f->size > LC_TCP_MAX_BYTES || f->length > LC_TCP_PIECE_MAX ||
        f->offset > f->size || f->length > f->size - f->offset)
        return -EPROTO;
    if (f->arg & ~(LC_TCP_SPARSE | LC_TCP_COPIED) || (f->arg & LC_TCP_SPARSE && f->length == 0) ||
        (f->arg & LC_TCP_COPIED && (f->length != f->size || f->length > LC_TCP_KEPT_MAX)))
        return -EPROTO;
    return 0;
}

static int check_control(const struct lc_tcp_frame *f)
{
    if (f->seq > f->size || f->size - f->seq > LC_TCP_WINDOW || f->arg > LC_TCP_LANES ||
        f->length != f->arg * sizeof(struct lc_tcp_lane_word) + (f->size - f->seq) * 8)
        return -EPROTO;
    return 0;
}

int lc_tcp_frame_check(const struct lc_tcp_frame *frame, bool to_receiver)
{
    if (frame->magic != LC_TCP_FRAME_MAGIC || frame->pad != 0 || frame->lane >= LC_TCP_LANES)
        return -EPROTO;
    switch (frame->type) {
    case LC_TCP_PIECE: return to_receiver ? check_piece(frame) : -EPROTO;
    case LC_TCP_PARK: return frame->length == 0 ? 0 : -EPROTO;
    case LC_TCP_DOWN:
    case LC_TCP_ASK: return to_receiver && frame->length == 0 ? 0 : -EPROTO;
    case LC_TCP_CONTROL: return to_receiver ? -EPROTO : check_control(frame);
    case LC_TCP_ERROR: return frame->length <= LC_TCP_TEXT ? 0 : -EPROTO;
    case LC_TCP_BYE: return frame->length == 0 && frame->arg <= to_receiver ? 0 : -EPROTO;
    default: return -EPROTO;
    }
}

int lc_tcp_hello_check(const struct lc_tcp_hello *hello)
{
    if (hello->magic != LC_TCP_MAGIC || hello->version != LC_TCP_VERSION || hello->lanes == 0 ||
        hello->lanes > LC_TCP_LANES || hello->lane >= hello->lanes || hello->epoch == 0 ||
        hello->piece < LC_TCP_PIECE_MIN || hello->piece > LC_TCP_PIECE_MAX ||
        hello->kind >= LC_TCP_KINDS)
        return -EPROTO;
    return 0;
}

int lc_tcp_reply_check(const struct lc_tcp_reply *reply)
{
    if (reply->magic != LC_TCP_MAGIC || reply->version != LC_TCP_VERSION ||
        reply->status >= LC_TCP_STATUSES)
        return -EPROTO;
    return 0;
}

int lc_tcp_handle_read(const void *handle, struct lc_tcp_handle *out)
{
    struct lc_tcp_handle read;

    memcpy(&read, handle, sizeof(read));
    if (read.magic != LC_TCP_MAGIC) {
        lc_warn("the peer's handle is not one of loongcomm: do all ranks use this net plugin?");
        return -EPROTO;
    }
    if (read.version != LC_TCP_VERSION) {
        lc_warn("the peer speaks version %u of loongcomm's wire protocol, this rank version %u",
                read.version, LC_TCP_VERSION);
        return -EPROTO;
    }
    *out = read;
    return 0;
}

void lc_tcp_address_write(const union lc_tcp_address *address, struct lc_tcp_wire_address *out)
{
    memset(out, 0, sizeof(*out));
    if (address->sa.sa_family == AF_INET) {
        out->family = 4;
        out->port = address->v4.sin_port;
        memcpy(out->bytes, &address->v4.sin_addr, 4);
    } else {
        out->family = 6;
        out->port = address->v6.sin6_port;
        memcpy(out->bytes, &address->v6.sin6_addr, 16);
    }
}

int lc_tcp_address_read(const struct lc_tcp_wire_address *wire, uint32_t scope,
                        union lc_tcp_address *out)
{
    union lc_tcp_address read;

    memset(&read, 0, sizeof(read));
    if (wire->family == 4) {
        read.v4.sin_family = AF_INET;
        read.v4.sin_port = wire->port;
        memcpy(&read.v4.sin_addr, wire->bytes, 4);
    } else if (wire->family == 6) {
        read.v6.sin6_family = AF_INET6;
        read.v6.sin6_port = wire->port;
        memcpy(&read.v6.sin6_addr, wire->bytes, 16);
        if (IN6_IS_ADDR_LINKLOCAL(&read.v6.sin6_addr))
            read.v6.sin6_scope_id = scope;
    } else {
        return -EPROTO;
    }
    if (wire->port == 0)
        return -EPROTO;
    *out = read;
    return 0;
}

socklen_t lc_tcp_address_size(const union lc_tcp_address *address)
{
    return address->sa.sa_family == AF_INET ? sizeof(address->v4) : sizeof(address->v6);
}

const char *lc_tcp_address_text(const union lc_tcp_address *address, char text[LC_TCP_ADDRESS_TEXT])
{
    char host[INET6_ADDRSTRLEN] = "?";

    if (address->sa.sa_family == AF_INET) {
        (void)inet_ntop(AF_INET, &address->v4.sin_addr, host, sizeof(host));
        (void)snprintf(text, LC_TCP_ADDRESS_TEXT, "%s:%u", host, ntohs(address->v4.sin_port));
    } else {
        (void)inet_ntop(AF_INET6, &address->v6.sin6_addr, host, sizeof(host));
        (void)snprintf(text, LC_TCP_ADDRESS_TEXT, "[%s]:%u", host, ntohs(address->v6.sin6_port));
    }
    return text;
}
