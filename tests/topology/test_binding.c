/* SPDX-License-Identifier: Apache-2.0
 *
 * The findings that need what a test cannot have: another binding of this process. */
#include "tests/check.h"
#include "topology/loongtopo.h"

#include <string.h>

static const char text[] =
    "<system version=\"1\"><cpu numaid=\"0\" affinity=\"00000000,0000ffff\"><pci busid=\"0000:11:00.0\""
    " class=\"0x030200\"><gpu dev=\"0\" sm=\"80\"/></pci></cpu>"
    "<cpu numaid=\"1\" affinity=\"0000000f,ffff0000\"><pci busid=\"0000:21:00.0\" class=\"0x030200\">"
    "<gpu dev=\"1\" sm=\"80\"/></pci></cpu></system>";

static char binding[256]; /* evidence of the finding; "" */

static void take(void *arg, enum lc_topo_severity severity, const char *id, const char *evidence,
                 const char *remedy)
{
    CHECK(arg == binding && remedy);
    if (strcmp(id, "numa-binding") != 0)
        return;
    CHECK(severity == LC_TOPO_WARNING && *remedy);
    (void)snprintf(binding, sizeof(binding), "%s", evidence);
}

static const char *bound(const struct lc_topo *topo, const char *affinity)
{
    struct lc_topo_checks checks = { .affinity = affinity };

    *binding = '\0';
    CHECK(lc_topo_examine(topo, &checks, take, binding) == 0);
    return binding;
}

static void bindings_to_another_numa_node_are_found(void)
{
    struct lc_topo *topo = NULL;
    char error[256];

    CHECK(lc_topo_load_text(text, strlen(text), "given", &topo, error, sizeof(error)) == 0);
    CHECK(!*bound(topo, NULL));
    CHECK(!*bound(topo, "0000000f,ffffffff"));
    CHECK(!*bound(topo, "00018000"));
    CHECK(strstr(bound(topo, "0000ffff"), "node of GPU 1,"));
    CHECK(strstr(bound(topo, "00000001,00000000"), "node of GPU 0,"));
    CHECK(strstr(bound(topo, "00000100,00000000,00000000"), "GPU 0, GPU 1"));
    lc_topo_free(topo);
}

int main(void)
{
    bindings_to_another_numa_node_are_found();
    return 0;
}
