/* SPDX-License-Identifier: Apache-2.0 */
#include "common/config.h"

#include "common/cleanup.h"
#include "common/input.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/auxv.h>
#include <unistd.h>

#define PREFIX     "LOONGCOMM_"
#define PREFIX_LEN (sizeof(PREFIX) - 1)
#define FILE_MAX   ((size_t)65536)

/* Index of text in a list of names, or -1. */
static int choice(const char *text, const char *const *names, int count)
{
    for (int i = 0; i < count; i++) {
        if (strcasecmp(text, names[i]) == 0)
            return i;
    }
    return -1;
}

static int parse_bool(const char *text, void *field)
{
    static const char *const names[] = { "0",   "1",   "n",  "y",     "no",
                                         "yes", "off", "on", "false", "true" };
    int index = choice(text, names, sizeof(names) / sizeof(*names));

    if (index < 0)
        return -EINVAL;
    *(bool *)field = index & 1;
    return 0;
}

static int parse_level(const char *text, void *field)
{
    static const char *const names[] = { "error", "warn", "info", "debug", "trace" };
    int index = choice(text, names, sizeof(names) / sizeof(*names));

    if (index < 0)
        return -EINVAL;
    *(enum lc_log_level *)field = (enum lc_log_level)index;
    return 0;
}

static int parse_report(const char *text, void *field)
{
    static const char *const names[] = { "off", "text", "json" };
    int index = choice(text, names, sizeof(names) / sizeof(*names));

    if (index < 0)
        return -EINVAL;
    *(enum lc_report_kind *)field = (enum lc_report_kind)index;
    return 0;
}

static int parse_wire(const char *text, void *field)
{
    static const char *const names[] = { "data", "bf16", "bf16-accurate" };
    int index = choice(text, names, sizeof(names) / sizeof(*names));

    if (index < 0)
        return -EINVAL;
    *(enum lc_wire *)field = (enum lc_wire)index;
    return 0;
}

static int parse_rounding(const char *text, void *field)
{
    static const char *const names[] = { "nearest", "stochastic" };
    int index = choice(text, names, sizeof(names) / sizeof(*names));

    if (index < 0)
        return -EINVAL;
    *(enum lc_rounding *)field = (enum lc_rounding)index;
    return 0;
}

static int parse_peer(const char *text, void *field)
{
    static const char *const names[] = { "auto", "force", "off" };
    int index = choice(text, names, sizeof(names) / sizeof(*names));

    if (index < 0)
        return -EINVAL;
    *(enum lc_peer *)field = (enum lc_peer)index;
    return 0;
}

static int parse_exact(const char *text, void *field)
{
    static const char *const names[] = { "fp32", "nccl" };
    int index = choice(text, names, sizeof(names) / sizeof(*names));

    if (index < 0)
        return -EINVAL;
    *(enum lc_exact *)field = (enum lc_exact)index;
    return 0;
}

static int parse_size(const char *text, void *field)
{
    return lc_parse_size(text, field);
}

static int parse_seconds(const char *text, void *field)
{
    unsigned value = 0;

    if (!*text || strlen(text) > 6)
        return -EINVAL;
    for (; *text; text++) {
        if (*text < '0' || *text > '9')
            return -EINVAL;
        value = value * 10 + (unsigned)(*text - '0');
    }
    *(unsigned *)field = value;
    return 0;
}

#define CTAS_LEAST 8
#define CTAS_MOST  128

static int parse_ctas(const char *text, void *field)
{
    size_t value = 0;

    if (lc_parse_size(text, &value) != 0 || value > CTAS_MOST || (value && value < CTAS_LEAST))
        return -EINVAL;
    *(size_t *)field = value;
    return 0;
}

/* The text is a copy that the caller keeps for the life of the process. */
static int parse_path(const char *text, void *field)
{
    *(const char **)field = text;
    return 0;
}

#define ACCEPTS_bool     "yes or no"
#define ACCEPTS_level    "error, warn, info, debug or trace"
#define ACCEPTS_report   "off, text or json"
#define ACCEPTS_path     "a path"
#define ACCEPTS_seconds  "whole seconds, at most 999999"
#define ACCEPTS_size     "a number, k, m or g behind it"
#define ACCEPTS_ctas     "0, or a number from 8 to 128"
#define ACCEPTS_wire     "data, bf16 or bf16-accurate"
#define ACCEPTS_rounding "nearest or stochastic"
#define ACCEPTS_peer     "auto, force or off"
#define ACCEPTS_exact    "fp32 or nccl"

static const struct entry {
    const char *name;
    const char *dflt;
    const char *help;
    const char *accepts;
    size_t offset;
    int (*parse)(const char *text, void *field);
} entries[] = {
#define LC_CONF(type, field, name, dflt, help) \
    { PREFIX name, dflt, help, ACCEPTS_##type, offsetof(struct lc_config, field), parse_##type },
#include "common/config.def"
#undef LC_CONF
};
#define N_ENTRIES (sizeof(entries) / sizeof(*entries))

/* Where each setting comes from. The texts are never freed: the configuration points to them. */
struct source {
    const char *text[N_ENTRIES]; /* NULL: not given */
    int line[N_ENTRIES];         /* 0: the environment */
    const char *file;
    bool quiet;
    int bad;
};

#define COMPLAIN(source, ...)     \
    do {                          \
        (source)->bad++;          \
        if (!(source)->quiet)     \
            lc_warn(__VA_ARGS__); \
    } while (0)

/* Index of a setting's name, given without the prefix and not terminated; -1 if there is none. */
static int find(const char *name, size_t len)
{
    for (size_t i = 0; i < N_ENTRIES; i++) {
        if (strlen(entries[i].name) == PREFIX_LEN + len &&
            memcmp(entries[i].name + PREFIX_LEN, name, len) == 0)
            return (int)i;
    }
    return -1;
}

static void take(struct source *src, int index, const char *text, size_t len, int line)
{
    char *copy = strndup(text, len);

    if (!copy) {
        COMPLAIN(src, "%s: out of memory, using '%s'", entries[index].name, entries[index].dflt);
        return;
    }
    free((void *)src->text[index]); /* an earlier line's, which nothing points to yet */
    src->text[index] = copy;
    src->line[index] = line;
}

/* The caller of a program that has more rights than he must not choose what it loads and writes to. */
static bool is_privileged(void)
{
    return getauxval(AT_SECURE) != 0;
}

static void read_environment(struct source *src)
{
    for (char **env = environ; env && *env; env++) {
        const char *name = *env + PREFIX_LEN;
        const char *equals;
        int index;

        if (strncmp(*env, PREFIX, PREFIX_LEN) != 0 || !(equals = strchr(name, '=')))
            continue;
        if (is_privileged()) {
            COMPLAIN(src, PREFIX "* in the environment is ignored: this program has more rights "
                                 "than its caller");
            return;
        }
        index = find(name, (size_t)(equals - name));
        if (index < 0)
            COMPLAIN(src,
                     "unknown variable " PREFIX
                     "%.*s is ignored; `loongcomm config` lists the known ones",
                     (int)(equals - name < 64 ? equals - name : 64), name);
        else
            take(src, index, equals + 1, strlen(equals + 1), 0);
    }
}

static void read_line(struct source *src, const char *line, const char *end, int number)
{
    const char *equals = memchr(line, '=', (size_t)(end - line));
    const char *name_end = equals;
    const char *value;
    int index;

    if (!equals) {
        COMPLAIN(src, "%s:%d: no NAME = value, ignored", src->file, number);
        return;
    }
    while (name_end > line && isspace((unsigned char)name_end[-1]))
        name_end--;
    for (value = equals + 1; value < end && isspace((unsigned char)*value);)
        value++;
    if ((size_t)(name_end - line) > PREFIX_LEN && memcmp(line, PREFIX, PREFIX_LEN) == 0)
        line += PREFIX_LEN;
    index = find(line, (size_t)(name_end - line));
    if (index < 0 || strcmp(entries[index].name, PREFIX "CONFIG") == 0)
        COMPLAIN(src,
                 "%s:%d: unknown setting '%.*s', ignored; `loongcomm config` lists the known ones",
                 src->file, number, (int)(name_end - line < 64 ? name_end - line : 64), line);
    else if (!src->text[index] || src->line[index]) /* a variable wins; among lines the last */
        take(src, index, value, (size_t)(end - value), number);
}

static void read_lines(struct source *src, const char *text, size_t size)
{
    const char *stop = text + size;
    int number = 1;

    for (const char *line = text; line < stop; number++) {
        const char *newline = memchr(line, '\n', (size_t)(stop - line));
        const char *next = newline ? newline + 1 : stop;
        const char *end = newline ? newline : stop;

        while (line < end && isspace((unsigned char)*line))
            line++;
        while (end > line && isspace((unsigned char)end[-1]))
            end--;
        if (line < end && *line != '#')
            read_line(src, line, end, number);
        line = next;
    }
}

static void read_file(struct source *src)
{
    int index = find("CONFIG", strlen("CONFIG"));
    lc_autofree char *text = NULL;
    size_t size = 0;
    int err;

    if (!src->text[index] || !*src->text[index])
        return;
    src->file = src->text[index];
    err = lc_input_read(AT_FDCWD, src->file, 0, FILE_MAX, &text, &size);
    if (!err && memchr(text, '\0', size))
        err = -EILSEQ;
    if (err)
        COMPLAIN(src,
                 PREFIX
                 "CONFIG: cannot use %s (%s): a text file of at most 64 KB is accepted; ignored",
                 src->file, lc_input_why(err));
    else
        read_lines(src, text, size);
}

static void gather(struct source *src)
{
    read_environment(src);
    read_file(src);
}

int lc_config_load(struct lc_config *out)
{
    struct source src = { 0 };

    gather(&src);
    for (size_t i = 0; i < N_ENTRIES; i++) {
        const struct entry *e = &entries[i];
        void *field = (char *)out + e->offset;

        if (src.text[i] && e->parse(src.text[i], field) == 0)
            continue;
        if (src.text[i])
            COMPLAIN(&src, "%s: '%.64s' is not accepted (%s), using '%s'", e->name, src.text[i],
                     e->accepts, e->dflt);
        (void)e->parse(e->dflt, field);
    }
    return src.bad;
}

size_t lc_config_list(struct lc_config_entry *out, size_t max)
{
    struct source src = { .quiet = true };
    struct lc_config scratch;

    gather(&src);
    for (size_t i = 0; i < N_ENTRIES && i < max; i++) {
        const struct entry *e = &entries[i];
        bool given = src.text[i] && e->parse(src.text[i], (char *)&scratch + e->offset) == 0;

        out[i] = (struct lc_config_entry){ .name = e->name,
                                           .value = given ? src.text[i] : e->dflt,
                                           .dflt = e->dflt,
                                           .help = e->help };
        if (given && src.line[i])
            (void)snprintf(out[i].origin, sizeof(out[i].origin), "%s:%d", src.file, src.line[i]);
        else
            (void)snprintf(out[i].origin, sizeof(out[i].origin), given ? "environment" : "default");
    }
    return N_ENTRIES;
}

/* FNV-1a (Fowler, Noll, Vo) over the fields' bytes; fields have no padding. */
static uint64_t hash_bytes(uint64_t hash, const void *data, size_t length)
{
    const unsigned char *p = data;

    while (length--)
        hash = (hash ^ *p++) * 0x100000001b3u;
    return hash;
}

uint64_t lc_config_hash(const struct lc_config *config)
{
    uint64_t hash = 0xcbf29ce484222325u;

#define LC_CONF(type, field, name, dflt, help)
#define LC_CONF_AGREED(type, field, name, dflt, help) \
    hash = hash_bytes(hash, &config->field, sizeof(config->field));
#include "common/config.def"
#undef LC_CONF
    return hash;
}

bool lc_environment_has(const char *name)
{
    return getenv(name) != NULL;
}

const char *lc_environment_get(const char *name)
{
    return getenv(name);
}

int lc_parse_size(const char *text, size_t *out)
{
    unsigned long long value;
    unsigned shift = 0;
    char *end;

    if (*text < '0' || *text > '9')
        return -EINVAL;
    errno = 0;
    value = strtoull(text, &end, 10);
    switch (tolower((unsigned char)*end)) {
    case 'k': shift = 10; break;
    case 'm': shift = 20; break;
    case 'g': shift = 30; break;
    default: break;
    }
    if (errno || (shift ? end[1] : *end) || value > (SIZE_MAX >> shift))
        return -EINVAL;
    *out = (size_t)value << shift;
    return 0;
}
