/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's variables, read with NCCL's leniency: what it cannot make sense of counts as not set. */
#include "topology/loongtopo.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static bool number(lc_topo_getter *get, const char *name, int *out)
{
    const char *text = get(name);
    char *end;
    long value;

    if (!text || !*text)
        return false;
    errno = 0;
    value = strtol(text, &end, 0);
    if (errno || end == text || value < -1000 || value > 1000)
        return false;
    *out = (int)value;
    return true;
}

/* A name of a path type, or a number of the time before there were names. */
static int level(lc_topo_getter *get, const char *disable, const char *name)
{
    static const int old[] = { LC_TOPO_PATH_LOC, LC_TOPO_PATH_PIX, LC_TOPO_PATH_PXB,
                               LC_TOPO_PATH_PHB, LC_TOPO_PATH_SYS, LC_TOPO_PATH_SYS };
    const char *text = get(name);
    int off = 0;

    if (disable && number(get, disable, &off) && off == 1)
        return LC_TOPO_PATH_LOC;
    if (!text)
        return LC_TOPO_UNKNOWN;
    for (int type = 0; type <= LC_TOPO_PATH_SYS; type++) {
        if (strcmp(text, lc_topo_path_name((enum lc_topo_path_type)type)) == 0)
            return type;
    }
    if (*text >= '0' && *text <= '9') {
        long value = strtol(text, NULL, 0);

        return old[value > 5 ? 5 : value];
    }
    return LC_TOPO_UNKNOWN;
}

static bool policy(const char *text, struct lc_topo_nccl *out)
{
    if (!text)
        return false;
    if (strcasecmp(text, "ALL") == 0) {
        out->policy = LC_TOPO_POLICY_ALL;
    } else if (strncasecmp(text, "MAX:", 4) == 0 && strtol(text + 4, NULL, 10) > 0) {
        long most = strtol(text + 4, NULL, 10);

        out->policy = LC_TOPO_POLICY_MAX;
        out->nets_per_gpu = (int)(most < 1000 ? most : 1000);
    }
    return true;
}

void lc_topo_nccl_read(lc_topo_getter *get, struct lc_topo_nccl *out)
{
    *out = (struct lc_topo_nccl){
        .p2p_pxn_level = 2,
        .pxn_c2c = 1,
        .cross_nic = 2,
        .p2p_level = LC_TOPO_UNKNOWN,
        .gdr_level = LC_TOPO_UNKNOWN,
        .gdr_read = -2,
        .gdr_c2c = 1,
    };
    if (!get)
        return;
    out->pxn_given = number(get, "NCCL_PXN_DISABLE", &out->pxn_disable);
    out->level_given = number(get, "NCCL_P2P_PXN_LEVEL", &out->p2p_pxn_level);
    out->cross_given = number(get, "NCCL_CROSS_NIC", &out->cross_nic);
    (void)number(get, "NCCL_PXN_C2C", &out->pxn_c2c);
    (void)number(get, "NCCL_NET_GDR_READ", &out->gdr_read);
    (void)number(get, "NCCL_NET_GDR_C2C", &out->gdr_c2c);
    out->p2p_level = level(get, "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL");
    out->gdr_level = level(get, NULL, "NCCL_NET_GDR_LEVEL");
    out->policy_given = policy(get("NCCL_NETDEVS_POLICY"), out);
    out->file_given = get("NCCL_TOPO_FILE") && *get("NCCL_TOPO_FILE");
}
