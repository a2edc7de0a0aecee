/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls and progress as text and JSON, for reports. Notes may come from other processes: every number is checked. */
#ifndef LC_INTERPOSE_NOTE_H
#define LC_INTERPOSE_NOTE_H

#include "common/json.h"
#include "interpose/control/progress.h"

#include <stddef.h>

/* "all-reduce (sum) of 4096 float32". Returns `out`, which is cut. */
const char *lc_note_text(const struct lc_note *note, char *out, size_t size);

/* An object; null for seq 0. */
void lc_note_json(struct lc_json *json, const struct lc_note *note);

/* 16 hexadecimal digits; null for 0. */
void lc_note_json_id(struct lc_json *json, uint64_t id);

/* Members of the object that is open. */
void lc_note_json_progress(struct lc_json *json, const struct lc_progress_copy *progress);

#endif
