/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"

#include "common/cleanup.h"
#include "common/json.h"

#include <errno.h>
#include <math.h>
#include <string.h>

static char *text;
static size_t length;

static void start(struct lc_json *json)
{
    FILE *out;

    free(text);
    out = open_memstream(&text, &length);
    CHECK(out);
    lc_json_init(json, out);
}

static int finish(struct lc_json *json)
{
    int err = lc_json_finish(json);

    fclose(json->out);
    return err;
}

static void a_document_with_everything(void)
{
    struct lc_json json;

    start(&json);
    lc_json_object(&json);
    lc_json_key(&json, "a\"\\\n");
    lc_json_string(&json, "\x01 caf\xc3\xa9 \xff \xc0\x80");
    lc_json_key(&json, "list");
    lc_json_array(&json);
    lc_json_int(&json, INT64_MIN);
    lc_json_uint(&json, UINT64_MAX);
    lc_json_double(&json, 1.5);
    lc_json_double(&json, NAN);
    lc_json_bool(&json, true);
    lc_json_string(&json, NULL);
    lc_json_array(&json);
    lc_json_end(&json);
    lc_json_end(&json);
    lc_json_end(&json);
    CHECK(finish(&json) == 0);
    CHECK(
        strcmp(
            text,
            "{\n  \"a\\\"\\\\\\u000a\": \"\\u0001 caf\xc3\xa9 \xef\xbf\xbd \xef\xbf\xbd\xef\xbf\xbd\",\n"
            "  \"list\": [\n    -9223372036854775808,\n    18446744073709551615,\n    1.5,\n"
            "    null,\n    true,\n    null,\n    []\n  ]\n}\n") == 0);
}

static void misuse_is_reported(void)
{
    struct lc_json json;

    start(&json);
    CHECK(finish(&json) == -EINVAL); /* empty */
    start(&json);
    lc_json_object(&json);
    lc_json_int(&json, 1); /* no key */
    lc_json_end(&json);
    CHECK(finish(&json) == -EINVAL);
    start(&json);
    lc_json_array(&json);
    lc_json_key(&json, "k"); /* key in an array */
    CHECK(finish(&json) == -EINVAL);
    start(&json);
    lc_json_int(&json, 1);
    lc_json_int(&json, 2); /* two documents */
    CHECK(finish(&json) == -EINVAL);
    start(&json);
    lc_json_array(&json); /* not ended */
    CHECK(finish(&json) == -EINVAL);
    start(&json);
    for (int i = 0; i <= LC_JSON_DEPTH; i++)
        lc_json_array(&json);
    CHECK(json.failed && finish(&json) == -EINVAL);
}

static void a_failing_stream_is_reported(void)
{
    struct lc_json json;

    lc_json_init(&json, fopen("/dev/full", "w"));
    CHECK(json.out);
    lc_json_bool(&json, false);
    CHECK(finish(&json) == -EIO);
}

int main(void)
{
    a_document_with_everything();
    misuse_is_reported();
    a_failing_stream_is_reported();
    free(text);
    return 0;
}
