/* SPDX-License-Identifier: Apache-2.0 */
#include "common/json.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

void lc_json_init(struct lc_json *json, FILE *out)
{
    *json = (struct lc_json){ .out = out };
}

static void newline(struct lc_json *json)
{
    fprintf(json->out, "\n%*s", 2 * json->depth, "");
}

/* Before any value or key: checks that one may stand here, writes the comma and the line break. */
static bool begin(struct lc_json *json, bool key)
{
    int level = json->depth - 1;

    if (json->failed)
        return false;
    if (json->after_key) {
        json->failed = key;
        json->after_key = false;
        return !json->failed;
    }
    if (level < 0) {
        json->failed = key || json->begun;
        json->begun = true;
        return !json->failed;
    }
    json->failed = (json->open[level] == '{') != key;
    if (json->failed)
        return false;
    if (!json->empty[level])
        fputc(',', json->out);
    json->empty[level] = false;
    newline(json);
    return true;
}

static void push(struct lc_json *json, char open)
{
    if (!begin(json, false))
        return;
    if (json->depth == LC_JSON_DEPTH) {
        json->failed = true;
        return;
    }
    fputc(open, json->out);
    json->open[json->depth] = open;
    json->empty[json->depth] = true;
    json->depth++;
}

void lc_json_object(struct lc_json *json)
{
    push(json, '{');
}

void lc_json_array(struct lc_json *json)
{
    push(json, '[');
}

void lc_json_end(struct lc_json *json)
{
    if (json->failed)
        return;
    if (json->depth == 0 || json->after_key) {
        json->failed = true;
        return;
    }
    json->depth--;
    if (!json->empty[json->depth])
        newline(json);
    fputc(json->open[json->depth] == '{' ? '}' : ']', json->out);
}

/* Length of the valid UTF-8 sequence at text, 0 if there is none. */
static int utf8_length(const unsigned char *text)
{
    static const struct {
        unsigned char mask, lead, low, high; /* range of the second byte */
        int length;
    } forms[] = {
        {0xe0,  0xc0, 0x80, 0xbf, 2},
        { 0xf0, 0xe0, 0x80, 0xbf, 3},
        { 0xf8, 0xf0, 0x80, 0xbf, 4},
    };

    for (size_t i = 0; i < sizeof(forms) / sizeof(*forms); i++) {
        if ((text[0] & forms[i].mask) != forms[i].lead)
            continue;
        for (int k = 1; k < forms[i].length; k++) {
            if ((text[k] & 0xc0) != 0x80)
                return 0;
        }
        if (text[0] < 0xc2 || (text[0] == 0xe0 && text[1] < 0xa0) ||
            (text[0] == 0xed && text[1] > 0x9f) || (text[0] == 0xf0 && text[1] < 0x90) ||
            text[0] > 0xf4 || (text[0] == 0xf4 && text[1] > 0x8f))
            return 0;
        return forms[i].length;
    }
    return 0;
}

static void quoted(FILE *out, const char *text)
{
    const unsigned char *p = (const unsigned char *)text;

    fputc('"', out);
    while (*p) {
        int length = *p < 0x80 ? 1 : utf8_length(p);

        if (*p == '"' || *p == '\\')
            fprintf(out, "\\%c", *p);
        else if (*p < 0x20 || *p == 0x7f)
            fprintf(out, "\\u%04x", *p);
        else if (length == 0)
            fputs("\xef\xbf\xbd", out);
        else
            fwrite(p, 1, (size_t)length, out);
        p += length ? length : 1;
    }
    fputc('"', out);
}

void lc_json_key(struct lc_json *json, const char *key)
{
    if (!begin(json, true))
        return;
    quoted(json->out, key);
    fputs(": ", json->out);
    json->after_key = true;
}

void lc_json_string(struct lc_json *json, const char *text)
{
    if (!begin(json, false))
        return;
    if (text)
        quoted(json->out, text);
    else
        fputs("null", json->out);
}

void lc_json_int(struct lc_json *json, int64_t value)
{
    if (begin(json, false))
        fprintf(json->out, "%" PRId64, value);
}

void lc_json_uint(struct lc_json *json, uint64_t value)
{
    if (begin(json, false))
        fprintf(json->out, "%" PRIu64, value);
}

void lc_json_double(struct lc_json *json, double value)
{
    char text[40];

    if (!begin(json, false))
        return;
    if (!isfinite(value)) {
        fputs("null", json->out);
        return;
    }
    (void)snprintf(text, sizeof(text), "%.9g", value);
    for (char *p = text; *p;
         p++) { /* the host process may have set a locale with a decimal comma */
        if (!strchr("0123456789+-e", *p))
            *p = '.';
    }
    fputs(text, json->out);
}

void lc_json_bool(struct lc_json *json, bool value)
{
    if (begin(json, false))
        fputs(value ? "true" : "false", json->out);
}

int lc_json_finish(struct lc_json *json)
{
    if (json->failed || json->depth || json->after_key || !json->begun)
        return -EINVAL;
    fputc('\n', json->out);
    return fflush(json->out) || ferror(json->out) ? -EIO : 0;
}
