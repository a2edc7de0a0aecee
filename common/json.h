/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_COMMON_JSON_H
#define LC_COMMON_JSON_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define LC_JSON_DEPTH 16

/* Writes one JSON document to a stream, piece by piece. A misuse (value without key inside an object,
 * more than LC_JSON_DEPTH levels, an end that does not match) and a failing stream are remembered and
 * returned by lc_json_finish; nothing is written after a misuse. Use by one thread. */
struct lc_json {
    FILE *out;
    int depth;
    bool failed;
    bool begun; /* the one value at the top has been opened */
    bool after_key;
    char open[LC_JSON_DEPTH];  /* '{' or '[' of each level */
    bool empty[LC_JSON_DEPTH]; /* nothing written in that level yet */
};

void lc_json_init(struct lc_json *json, FILE *out);

void lc_json_object(struct lc_json *json);
void lc_json_array(struct lc_json *json);
void lc_json_end(struct lc_json *json); /* of the innermost object or array */

void lc_json_key(struct lc_json *json, const char *key);

/* Bytes that are not valid UTF-8 are written as U+FFFD. NULL is written as null. */
void lc_json_string(struct lc_json *json, const char *text);
void lc_json_int(struct lc_json *json, int64_t value);
void lc_json_uint(struct lc_json *json, uint64_t value);
void lc_json_double(struct lc_json *json, double value); /* NaN and infinities become null */
void lc_json_bool(struct lc_json *json, bool value);

/* A key and its value. */
static inline void lc_json_key_string(struct lc_json *json, const char *key, const char *text)
{
    lc_json_key(json, key);
    lc_json_string(json, text);
}

static inline void lc_json_key_int(struct lc_json *json, const char *key, int64_t value)
{
    lc_json_key(json, key);
    lc_json_int(json, value);
}

static inline void lc_json_key_double(struct lc_json *json, const char *key, double value)
{
    lc_json_key(json, key);
    lc_json_double(json, value);
}

static inline void lc_json_key_bool(struct lc_json *json, const char *key, bool value)
{
    lc_json_key(json, key);
    lc_json_bool(json, value);
}

/* Ends the document with a newline. 0, or -EINVAL after a misuse, or -EIO. */
int lc_json_finish(struct lc_json *json);

#endif
