/* SPDX-License-Identifier: Apache-2.0 */
#include "topology/topo_internal.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define BIT(type) (1U << (LC_TOPO_##type))

const struct lc_topo_tag lc_topo_tags[LC_TOPO_TYPES] = {
    [LC_TOPO_SYSTEM] = {"system",   0                  },
    [LC_TOPO_CPU] = { "cpu",     BIT(SYSTEM)        },
    [LC_TOPO_PCI] = { "pci",     BIT(CPU) | BIT(PCI)},
    [LC_TOPO_GPU] = { "gpu",     BIT(PCI)           },
    [LC_TOPO_NIC] = { "nic",     BIT(CPU) | BIT(PCI)},
    [LC_TOPO_NET] = { "net",     BIT(NIC)           },
    [LC_TOPO_NVLINK] = { "nvlink",  BIT(GPU)           },
    [LC_TOPO_XGMI] = { "xgmi",    BIT(GPU)           },
    [LC_TOPO_C2C] = { "c2c",     BIT(GPU)           },
    [LC_TOPO_PCILINK] = { "pcilink", BIT(PCI)           },
};

static void defuse(char *text)
{
    for (; *text; text++) {
        if (iscntrl((unsigned char)*text) || (*text & 0x80))
            *text = '?';
    }
}

/* "NAME:LINE: text", "NAME: text" */
__attribute__((format(printf, 5, 0))) static void write_line(const struct lc_topo *topo, int line,
                                                             char *out, size_t size,
                                                             const char *fmt, va_list ap)
{
    int used = line > 0 ? snprintf(out, size, "%s:%d: ", topo->name, line)
                        : snprintf(out, size, "%s: ", topo->name);

    if (used > 0 && (size_t)used < size)
        (void)vsnprintf(out + used, size - (size_t)used, fmt, ap);
    defuse(out);
}

int lc_topo_fail(const struct lc_topo *topo, int err, int line, const char *fmt, ...)
{
    va_list ap;

    if (topo->error_size) {
        va_start(ap, fmt);
        write_line(topo, line, topo->error, topo->error_size, fmt, ap);
        va_end(ap);
    }
    return -err;
}

void lc_topo_remark(struct lc_topo *topo, int line, const char *fmt, ...)
{
    char text[512];
    va_list ap;

    if (topo->note_count == LC_TOPO_MAX_NOTES)
        return;
    va_start(ap, fmt);
    if (topo->note_count == LC_TOPO_MAX_NOTES - 1)
        (void)snprintf(text, sizeof(text), "and more");
    else
        write_line(topo, line, text, sizeof(text), fmt, ap);
    va_end(ap);
    topo->notes[topo->note_count] = strdup(text);
    if (topo->notes[topo->note_count])
        topo->note_count++;
}

struct lc_topo *lc_topo_new(const char *name, enum lc_topo_format format, char *error,
                            size_t error_size)
{
    struct lc_topo *topo = calloc(1, sizeof(*topo));

    if (!topo)
        return NULL;
    topo->format = format;
    topo->error = error;
    topo->error_size = error_size;
    topo->name = strdup(name);
    if (!topo->name || lc_topo_add(topo, -1, LC_TOPO_SYSTEM, 0) < 0) {
        lc_topo_free(topo);
        return NULL;
    }
    return topo;
}

void lc_topo_free(struct lc_topo *topo)
{
    if (!topo)
        return;
    for (int i = 0; i < topo->count; i++) {
        for (int a = 0; a < topo->raw[i].attr_count; a++) {
            free(topo->raw[i].attrs[a].name);
            free(topo->raw[i].attrs[a].value);
        }
        free(topo->raw[i].attrs);
    }
    for (int i = 0; i < topo->note_count; i++)
        free(topo->notes[i]);
    free(topo->nodes);
    free(topo->raw);
    free(topo->name);
    free(topo);
}

static int grow(struct lc_topo *topo)
{
    int room = topo->room ? 2 * topo->room : 64;
    void *nodes = realloc(topo->nodes, (size_t)room * sizeof(*topo->nodes));
    void *raw;

    if (!nodes)
        return -ENOMEM;
    topo->nodes = nodes;
    raw = realloc(topo->raw, (size_t)room * sizeof(*topo->raw));
    if (!raw)
        return -ENOMEM;
    topo->raw = raw;
    topo->room = room;
    return 0;
}

int lc_topo_add(struct lc_topo *topo, int parent, enum lc_topo_type type, int line)
{
    int depth = 0;
    int index = topo->count;

    for (int at = parent; at >= 0; at = topo->nodes[at].parent)
        depth++;
    if (depth > LC_TOPO_MAX_DEPTH)
        return lc_topo_fail(topo, E2BIG, line, "more than %d levels", LC_TOPO_MAX_DEPTH);
    if (index == LC_TOPO_MAX_NODES)
        return lc_topo_fail(topo, E2BIG, line, "more than %d elements", LC_TOPO_MAX_NODES);
    if (index == topo->room && grow(topo) != 0)
        return lc_topo_fail(topo, ENOMEM, 0, "no memory");
    topo->nodes[index] = (struct lc_topo_node){ .type = type,
                                                .parent = parent,
                                                .child = -1,
                                                .next = -1,
                                                .line = line,
                                                .id = "" };
    topo->raw[index] = (struct lc_topo_raw){ .last_child = -1 };
    topo->count++;
    if (parent < 0)
        return index;
    if (topo->raw[parent].last_child >= 0)
        topo->nodes[topo->raw[parent].last_child].next = index;
    else
        topo->nodes[parent].child = index;
    topo->raw[parent].last_child = index;
    return index;
}

static struct lc_topo_attr *find_attr(const struct lc_topo *topo, int node, const char *name)
{
    for (int a = 0; a < topo->raw[node].attr_count; a++) {
        if (strcmp(topo->raw[node].attrs[a].name, name) == 0)
            return &topo->raw[node].attrs[a];
    }
    return NULL;
}

static int add_attr(struct lc_topo *topo, int node, const char *name, char *value)
{
    struct lc_topo_raw *raw = &topo->raw[node];
    char *copy = strdup(name);
    void *attrs = realloc(raw->attrs, (size_t)(raw->attr_count + 1) * sizeof(*raw->attrs));

    if (attrs)
        raw->attrs = attrs;
    if (!attrs || !copy) {
        free(copy);
        return -ENOMEM;
    }
    raw->attrs[raw->attr_count++] = (struct lc_topo_attr){ copy, value };
    return 0;
}

int lc_topo_set(struct lc_topo *topo, int node, const char *name, const char *value)
{
    struct lc_topo_attr *attr = find_attr(topo, node, name);
    int line = topo->nodes[node].line;
    char *copy;

    if (!attr && topo->raw[node].attr_count == LC_TOPO_MAX_ATTRS)
        return lc_topo_fail(topo, E2BIG, line, "more than %d attributes", LC_TOPO_MAX_ATTRS);
    copy = strndup(value, LC_TOPO_MAX_VALUE);
    if (!copy)
        return lc_topo_fail(topo, ENOMEM, 0, "no memory");
    if (attr) {
        free(attr->value);
        attr->value = copy;
    } else if (add_attr(topo, node, name, copy) != 0) {
        free(copy);
        return lc_topo_fail(topo, ENOMEM, 0, "no memory");
    }
    return 0;
}

int lc_topo_setf(struct lc_topo *topo, int node, const char *name, const char *fmt, ...)
{
    char value[LC_TOPO_MAX_VALUE + 1];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(value, sizeof(value), fmt, ap);
    va_end(ap);
    return lc_topo_set(topo, node, name, value);
}

int lc_topo_find_child(const struct lc_topo *topo, int parent, enum lc_topo_type type,
                       const char *attr, const char *value)
{
    for (int at = topo->nodes[parent].child; at >= 0; at = topo->nodes[at].next) {
        const char *have = attr ? lc_topo_attribute(topo, at, attr) : NULL;

        if (topo->nodes[at].type == type && (!attr || (have && strcmp(have, value) == 0)))
            return at;
    }
    return -1;
}

int lc_topo_count(const struct lc_topo *topo)
{
    return topo->count;
}

const struct lc_topo_node *lc_topo_at(const struct lc_topo *topo, int index)
{
    return index >= 0 && index < topo->count ? &topo->nodes[index] : NULL;
}

enum lc_topo_format lc_topo_format(const struct lc_topo *topo)
{
    return topo->format;
}

const char *lc_topo_name(const struct lc_topo *topo)
{
    return topo->name;
}

const char *lc_topo_attribute(const struct lc_topo *topo, int index, const char *name)
{
    const struct lc_topo_attr *attr = find_attr(topo, index, name);

    return attr ? attr->value : NULL;
}

int lc_topo_next(const struct lc_topo *topo, enum lc_topo_type type, int after)
{
    for (int i = after + 1; i < topo->count; i++) {
        if (topo->nodes[i].type == type)
            return i;
    }
    return -1;
}

int lc_topo_above(const struct lc_topo *topo, int index, enum lc_topo_type type)
{
    while (index >= 0 && topo->nodes[index].type != type)
        index = topo->nodes[index].parent;
    return index;
}

int lc_topo_note_count(const struct lc_topo *topo)
{
    return topo->note_count;
}

const char *lc_topo_note(const struct lc_topo *topo, int number)
{
    return topo->notes[number];
}
