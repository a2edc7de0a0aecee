/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/json_walk.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define DEPTH    16
#define TEXT_MAX 1024

struct walker {
    const char *at; /* never beyond the NUL */
    int depth;
    char path[TEXT_MAX];
    char value[TEXT_MAX];
    void (*visit)(const char *path, const char *value, void *arg);
    void *arg;
};

static int walk_value(struct walker *w);

static void skip_blanks(struct walker *w)
{
    w->at += strspn(w->at, " \t\r\n");
}

static bool take(struct walker *w, char c)
{
    skip_blanks(w);
    if (*w->at != c)
        return false;
    w->at++;
    return true;
}

static size_t put_utf8(uint32_t c, char *out)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xc0 | (c >> 6));
        out[1] = (char)(0x80 | (c & 0x3f));
        return 2;
    }
    out[0] = (char)(0xe0 | (c >> 12));
    out[1] = (char)(0x80 | (c >> 6 & 0x3f));
    out[2] = (char)(0x80 | (c & 0x3f));
    return 3;
}

/* Behind "\u". Halves of surrogate pairs and NUL become '?': they are in no name that is looked for. */
static int take_code(struct walker *w, uint32_t *out)
{
    uint32_t code = 0;

    for (int i = 0; i < 4; i++, w->at++) {
        static const char digits[] = "0123456789abcdef0123456789ABCDEF";
        const char *digit = *w->at ? strchr(digits, *w->at) : NULL;

        if (!digit)
            return -EINVAL;
        code = code << 4 | (uint32_t)((digit - digits) & 15);
    }
    *out = code == 0 || (code >= 0xd800 && code < 0xe000) ? '?' : code;
    return 0;
}

static int take_escape(struct walker *w, uint32_t *out)
{
    static const char from[] = "\"\\/bfnrt";
    static const char to[] = "\"\\/\b\f\n\r\t";
    const char *known;

    if (*w->at == 'u') {
        w->at++;
        return take_code(w, out);
    }
    known = *w->at ? strchr(from, *w->at) : NULL;
    if (!known)
        return -EINVAL;
    w->at++;
    *out = (unsigned char)to[known - from];
    return 0;
}

/* A string into w->value. */
static int take_string(struct walker *w)
{
    size_t len = 0;

    if (!take(w, '"'))
        return -EINVAL;
    while (*w->at != '"') {
        char bytes[4];
        size_t count = 1;
        uint32_t code;

        if ((unsigned char)*w->at < ' ')
            return -EINVAL; /* the end of the text too */
        bytes[0] = *w->at++;
        if (bytes[0] == '\\') {
            if (take_escape(w, &code) != 0)
                return -EINVAL;
            count = put_utf8(code, bytes);
        }
        if (len + count < TEXT_MAX) {
            memcpy(w->value + len, bytes, count);
            len += count;
        }
    }
    w->at++;
    w->value[len] = '\0';
    return 0;
}

/* A number or a word, loosely: whoever wants a number parses the token. */
static int take_token(struct walker *w)
{
    size_t len = strspn(w->at, "+-.0123456789abcdefghijklmnopqrstuvwxyzE");

    if (!len || len >= TEXT_MAX)
        return -EINVAL;
    memcpy(w->value, w->at, len);
    w->value[len] = '\0';
    w->at += len;
    return 0;
}

static int walk_member(struct walker *w)
{
    size_t old = strlen(w->path);
    size_t len;
    int err = take_string(w);

    if (err)
        return err;
    len = strlen(w->value);
    if (old + len + 2 > TEXT_MAX || !take(w, ':'))
        return -EINVAL;
    if (old)
        w->path[old] = '.';
    memcpy(w->path + old + (old != 0), w->value, len + 1);
    err = walk_value(w);
    w->path[old] = '\0';
    return err;
}

static int walk_list(struct walker *w, char end, int (*element)(struct walker *w))
{
    int err = 0;

    if (w->depth == DEPTH)
        return -EINVAL;
    w->depth++;
    if (!take(w, end)) {
        do {
            err = element(w);
        } while (!err && take(w, ','));
        if (!err && !take(w, end))
            err = -EINVAL;
    }
    w->depth--;
    return err;
}

static int walk_value(struct walker *w)
{
    int err;

    if (take(w, '{'))
        return walk_list(w, '}', walk_member);
    if (take(w, '['))
        return walk_list(w, ']', walk_value);
    err = *w->at == '"' ? take_string(w) : take_token(w);
    if (!err)
        w->visit(w->path, w->value, w->arg);
    return err;
}

int lc_cli_json_walk(const char *text,
                     void (*visit)(const char *path, const char *value, void *arg), void *arg)
{
    struct walker w = { .at = text, .visit = visit, .arg = arg };
    int err = walk_value(&w);

    skip_blanks(&w);
    return err ? err : *w.at ? -EINVAL : 0;
}
