/* SPDX-License-Identifier: Apache-2.0
 *
 * Any text as a topology file; what loads is printed in every way (which finds its paths, too), and what is written loads again. hwloc's own
 * parser is not ours to test. */
#include "topology/loongtopo.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void load_again(const struct lc_topo *topo)
{
    struct lc_topo *again = NULL;
    char error[256];
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);

    if (out) {
        int err = lc_topo_write_nccl(topo, out);

        if (fclose(out) == 0 && !err) {
            if (lc_topo_load_text(text, size, "again", &again, error, sizeof(error)) != 0 ||
                lc_topo_count(again) != lc_topo_count(topo))
                abort();
            lc_topo_free(again);
        }
    }
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct lc_topo *topo = NULL;
    char error[256];
    FILE *out;

    if (memmem(data, size, "<topology", 9))
        return 0;
    if (lc_topo_load_text((const char *)data, size, "fuzz", &topo, error, sizeof(error)) != 0) {
        if (!*error || strchr(error, '\n'))
            abort();
        return 0;
    }
    out = fopen("/dev/null", "we");
    if (out) {
        (void)lc_topo_print_text(topo, out);
        if (lc_topo_print_json(topo, out) != 0)
            abort();
        if (lc_topo_count(topo) < 200) {
            (void)lc_topo_print_json_paths(topo, NULL, out);
            (void)lc_topo_print_paths(topo, NULL, out);
            if (lc_topo_misplaced(topo, topo, error, sizeof(error)) > 0)
                abort();
        }
        (void)lc_topo_print_svg(topo, out);
        (void)fclose(out);
    }
    load_again(topo);
    lc_topo_free(topo);
    return 0;
}
