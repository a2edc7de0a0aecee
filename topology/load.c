/* SPDX-License-Identifier: Apache-2.0 */
#include "common/cleanup.h"
#include "common/input.h"
#include "topology/topo_internal.h"
#include "topology/xml.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#define STOP 1 /* ends the look at the root element */

static int take_root(void *arg, struct lc_xml *xml, int line, int depth, const char *tag)
{
    (void)snprintf(arg, 32, "%s", tag);
    return STOP;
}

static int read_text(struct lc_topo *topo, const char *text, size_t size)
{
    char root[32] = "";
    int err;

    if (memchr(text, '\0', size))
        return lc_topo_fail(topo, EILSEQ, 0,
                            "no text (an archive of a machine has to be unpacked)");
    err = lc_xml_walk(topo, text, size, true, take_root, root);
    if (err < 0)
        return err;
    if (strcmp(root, "topology") == 0)
        return lc_topo_read_hwloc(topo, text, size);
    if (strcmp(root, "graphs") == 0)
        return lc_topo_fail(topo, EINVAL, 0,
                            "an NCCL graph file (NCCL_GRAPH_FILE), not a topology");
    return lc_topo_read_nccl(topo, text, size);
}

static int finish(struct lc_topo *topo, int err, struct lc_topo **out)
{
    if (!err)
        err = lc_topo_finish(topo);
    if (err) {
        lc_topo_free(topo);
        return err;
    }
    topo->error = NULL;
    topo->error_size = 0;
    *out = topo;
    return 0;
}

static struct lc_topo *begin(const char *name, enum lc_topo_format format, char *error, size_t size)
{
    struct lc_topo *topo = lc_topo_new(name, format, error, size);

    if (!topo && size)
        (void)snprintf(error, size, "no memory");
    return topo;
}

int lc_topo_load_text(const char *text, size_t size, const char *name, struct lc_topo **out,
                      char *error, size_t error_size)
{
    struct lc_topo *topo = begin(name, LC_TOPO_NCCL, error, error_size);

    return topo ? finish(topo, read_text(topo, text, size), out) : -ENOMEM;
}

static int read_path(struct lc_topo *topo, const char *path)
{
    lc_autofree char *text = NULL;
    size_t size;
    int err = lc_input_read(AT_FDCWD, path, 0, LC_TOPO_MAX_FILE, &text, &size);

    switch (err) {
    case 0: break;
    case -EISDIR: return lc_topo_read_sysfs(topo, path, false);
    case -ENXIO: return lc_topo_fail(topo, EINVAL, 0, "neither a file nor a folder");
    case -EFBIG: return lc_topo_fail(topo, EFBIG, 0, "larger than %zu MiB", LC_TOPO_MAX_FILE >> 20);
    default: return lc_topo_fail(topo, -err, 0, "%s", lc_input_why(err));
    }
    if (size == 0)
        return lc_topo_fail(topo, EINVAL, 0, "empty");
    return read_text(topo, text, size);
}

static int load(const char *path, bool as_nccl, struct lc_topo **out, char *error,
                size_t error_size)
{
    struct lc_topo *topo = begin(path ? path : "this machine", LC_TOPO_SYSFS, error, error_size);

    if (!topo)
        return -ENOMEM;
    topo->as_nccl = as_nccl;
    return finish(topo, path ? read_path(topo, path) : lc_topo_read_sysfs(topo, "/", true), out);
}

int lc_topo_load(const char *path, struct lc_topo **out, char *error, size_t error_size)
{
    return load(path, false, out, error, error_size);
}

int lc_topo_load_as_nccl(const char *path, struct lc_topo **out, char *error, size_t error_size)
{
    return load(path, true, out, error, error_size);
}
