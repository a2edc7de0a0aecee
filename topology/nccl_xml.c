/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's topology file, and RCCL's, which differs in the version and has XGMI links. */
#include "topology/topo_internal.h"
#include "topology/xml.h"

#include <errno.h>
#include <string.h>

struct reading {
    struct lc_topo *topo;
    int open[LC_TOPO_MAX_DEPTH +
             2]; /* node of each level; -1: a tag that is skipped, with all below it */
};

static int type_of(const char *tag)
{
    for (int type = 0; type < LC_TOPO_TYPES; type++) {
        if (strcmp(tag, lc_topo_tags[type].name) == 0)
            return type;
    }
    return -1;
}

static int take_attribute(void *arg, int line, const char *name, const char *value)
{
    struct reading *reading = arg;
    int node = reading->topo->count - 1;

    if (strlen(name) > LC_TOPO_MAX_VALUE || strlen(value) > LC_TOPO_MAX_VALUE)
        return lc_topo_fail(reading->topo, E2BIG, line, "an attribute is longer than %d bytes",
                            LC_TOPO_MAX_VALUE);
    return lc_topo_set(reading->topo, node, name, value);
}

static int take_root(struct reading *reading, struct lc_xml *xml, int line, const char *tag)
{
    struct lc_topo *topo = reading->topo;
    const char *version;
    int err;

    if (strcmp(tag, "system") != 0)
        return lc_topo_fail(topo, EINVAL, line, "<%.40s> where <system> was expected", tag);
    topo->nodes[0].line = line;
    reading->open[0] = 0;
    err = lc_xml_attributes(xml, take_attribute, reading);
    if (err)
        return err;
    version = lc_topo_attribute(topo, 0, "version");
    if (!version || (strcmp(version, "1") != 0 && strcmp(version, "2") != 0))
        return lc_topo_fail(topo, EINVAL, line,
                            "<system> of version %s; 1 (NCCL) and 2 (RCCL) are known",
                            version ? version : "none");
    topo->format = *version == '1' ? LC_TOPO_NCCL : LC_TOPO_RCCL;
    return 0;
}

static int take_element(void *arg, struct lc_xml *xml, int line, int depth, const char *tag)
{
    struct reading *reading = arg;
    struct lc_topo *topo = reading->topo;
    int type = type_of(tag);
    int parent;
    int node;

    if (depth == 0)
        return take_root(reading, xml, line, tag);
    if (depth > LC_TOPO_MAX_DEPTH)
        return lc_topo_fail(topo, E2BIG, line, "more than %d levels", LC_TOPO_MAX_DEPTH);
    parent = reading->open[depth - 1];
    reading->open[depth] = -1;
    if (parent < 0)
        return 0;
    if (type < 0) {
        lc_topo_remark(topo, line, "<%.40s> is unknown and left out", tag);
        return 0;
    }
    if (!(lc_topo_tags[type].parents & 1U << topo->nodes[parent].type))
        return lc_topo_fail(topo, EINVAL, line, "<%s> cannot stand in <%s>", tag,
                            lc_topo_tags[topo->nodes[parent].type].name);
    node = lc_topo_add(topo, parent, (enum lc_topo_type)type, line);
    if (node < 0)
        return node;
    reading->open[depth] = node;
    return lc_xml_attributes(xml, take_attribute, reading);
}

int lc_topo_read_nccl(struct lc_topo *topo, const char *text, size_t size)
{
    struct reading reading = { .topo = topo };

    return lc_xml_walk(topo, text, size, false, take_element, &reading);
}

/* NCCL takes a value as it stands between the quotation marks. */
static bool writable(const char *text)
{
    for (; *text; text++) {
        if (strchr("\"<>&", *text) || (unsigned char)*text < ' ')
            return false;
    }
    return true;
}

static int write_attribute(const struct lc_topo_node *node, const struct lc_topo_attr *attr,
                           int64_t most_mbps, FILE *out)
{
    if (!writable(attr->name) || !writable(attr->value))
        return -EILSEQ;
    if (most_mbps && node->type == LC_TOPO_NET && node->net.mbps > most_mbps &&
        strcmp(attr->name, "speed") == 0)
        (void)fprintf(out, " speed=\"%lld\"", (long long)most_mbps);
    else
        (void)fprintf(out, " %s=\"%s\"", attr->name, attr->value);
    return 0;
}

static int write_node(const struct lc_topo *topo, int index, int depth, int64_t most_mbps,
                      FILE *out)
{
    const struct lc_topo_node *node = &topo->nodes[index];
    const struct lc_topo_raw *raw = &topo->raw[index];
    const char *tag = lc_topo_tags[node->type].name;
    int err = 0;

    (void)fprintf(out, "%*s<%s", 2 * depth, "", tag);
    if (index == 0 && !lc_topo_attribute(topo, 0, "version"))
        (void)fprintf(out, " version=\"1\"");
    for (int a = 0; a < raw->attr_count && !err; a++)
        err = write_attribute(node, &raw->attrs[a], most_mbps, out);
    if (err)
        return err;
    if (node->child < 0) {
        (void)fprintf(out, "/>\n");
        return 0;
    }
    (void)fprintf(out, ">\n");
    for (int at = node->child; at >= 0 && !err; at = topo->nodes[at].next)
        err = write_node(topo, at, depth + 1, most_mbps, out);
    (void)fprintf(out, "%*s</%s>\n", 2 * depth, "", tag);
    return err;
}

int lc_topo_write_nccl(const struct lc_topo *topo, FILE *out)
{
    return lc_topo_write_nccl_slowed(topo, 0, out);
}

int lc_topo_write_nccl_slowed(const struct lc_topo *topo, int64_t most_mbps, FILE *out)
{
    int err = write_node(topo, 0, 0, most_mbps, out);

    if (!err && (fflush(out) != 0 || ferror(out)))
        err = -EIO;
    return err;
}
