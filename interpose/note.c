/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/note.h"

#include "interpose/ledger.h"
#include "interpose/op.h"

#include <inttypes.h>
#include <stdio.h>

static const char *redop_name(const struct lc_note *note)
{
    static const char *const names[] = { "sum", "product", "max", "min", "average" };

    if (note->kind != LC_OP_ALL_REDUCE && note->kind != LC_OP_REDUCE_SCATTER &&
        note->kind != LC_OP_REDUCE)
        return NULL;
    return note->redop < sizeof(names) / sizeof(*names) ? names[note->redop] : "own operation";
}

const char *lc_note_text(const struct lc_note *note, char *out, size_t size)
{
    const char *type = lc_type_name(note->type);
    const char *redop = redop_name(note);
    char number[16], peer[32] = "";

    (void)snprintf(number, sizeof(number), "type %u", note->type);
    if (note->peer >= 0)
        (void)snprintf(peer, sizeof(peer), ", %s %d",
                       note->kind == LC_OP_SEND   ? "to"
                       : note->kind == LC_OP_RECV ? "from"
                                                  : "root",
                       note->peer);
    (void)snprintf(out, size, "%s%s%s%s of %" PRIu64 " %s%s",
                   note->kind < LC_OP_KINDS ? lc_op_name((enum lc_op_kind)note->kind)
                                            : "unknown operation",
                   redop ? " (" : "", redop ? redop : "", redop ? ")" : "", note->count,
                   type ? type : number, peer);
    return out;
}

void lc_note_json(struct lc_json *json, const struct lc_note *note)
{
    if (!note->seq) {
        lc_json_string(json, NULL);
        return;
    }
    lc_json_object(json);
    lc_json_key(json, "seq");
    lc_json_uint(json, note->seq);
    lc_json_key(json, "call");
    lc_json_string(json,
                   note->kind < LC_OP_KINDS ? lc_op_nccl_name((enum lc_op_kind)note->kind) : NULL);
    lc_json_key(json, "reduction");
    lc_json_string(json, redop_name(note));
    lc_json_key(json, "count");
    lc_json_uint(json, note->count);
    lc_json_key(json, "type");
    lc_json_string(json, lc_type_name(note->type));
    lc_json_key(json, "bytes");
    lc_json_uint(json, note->count * lc_type_size((ncclDataType_t)note->type));
    lc_json_key(json, "peer");
    if (note->peer >= 0)
        lc_json_int(json, note->peer);
    else
        lc_json_string(json, NULL);
    lc_json_key(json, "path");
    lc_json_string(json,
                   note->path < LC_OUTCOMES ? lc_outcome_path((enum lc_outcome)note->path) : NULL);
    lc_json_end(json);
}

void lc_note_json_id(struct lc_json *json, uint64_t id)
{
    char text[17];

    (void)snprintf(text, sizeof(text), "%016" PRIx64, id);
    lc_json_string(json, id ? text : NULL);
}

void lc_note_json_progress(struct lc_json *json, const struct lc_progress_copy *progress)
{
    lc_json_key(json, "collectives");
    lc_json_uint(json, progress->collectives);
    lc_json_key(json, "messages");
    lc_json_uint(json, progress->messages);
    lc_json_key(json, "returned");
    lc_json_uint(json, progress->returned);
    lc_json_key(json, "recent");
    lc_json_array(json);
    for (uint32_t i = 0; i < progress->n; i++)
        lc_note_json(json, &progress->recent[i]);
    lc_json_end(json);
    lc_json_key(json, "message");
    lc_note_json(json, &progress->message);
}
