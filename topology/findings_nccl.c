/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's settings beside the machine that they are set on. */
#include "topology/findings.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static bool is_level(const char *text)
{
    for (int type = 0; type <= LC_TOPO_PATH_SYS; type++) {
        if (strcmp(text, lc_topo_path_name((enum lc_topo_path_type)type)) == 0)
            return true;
    }
    return *text >= '0' && *text <= '9';
}

static void check_words(const struct lc_exam *exam)
{
    static const char *const levels[] = { "NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL" };
    const char *policy = lc_exam_get(exam, "NCCL_NETDEVS_POLICY");

    for (size_t i = 0; i < 2; i++) {
        const char *value = lc_exam_get(exam, levels[i]);

        if (value && !is_level(value))
            lc_exam_find(exam, LC_TOPO_WARNING, "nccl-setting-unknown",
                         "%s=%.64s is no way that NCCL knows, it goes on as if it were not set\n"
                         "LOC, NVL, NVB, C2C, PIX, PXB, P2C, PXN, PHB or SYS",
                         levels[i], value);
    }
    if (policy && strcasecmp(policy, "AUTO") != 0 && strcasecmp(policy, "ALL") != 0 &&
        (strncasecmp(policy, "MAX:", 4) != 0 || strtol(policy + 4, NULL, 10) <= 0))
        lc_exam_find(exam, LC_TOPO_WARNING, "nccl-setting-unknown",
                     "NCCL_NETDEVS_POLICY=%.64s is none that NCCL knows, it takes AUTO\n"
                     "AUTO, ALL or MAX:n",
                     policy);
}

/* Does an entry such as "mlx5_0:1" name it? Names are beginnings unless `exact`. */
static bool names(const char *entry, size_t length, const char *name, bool exact)
{
    const char *colon = memchr(entry, ':', length);

    length = colon ? (size_t)(colon - entry) : length;
    return length && strncmp(entry, name, length) == 0 && (!exact || name[length] == '\0');
}

typedef bool has_function(const struct lc_exam *exam, const char *entry, size_t length, bool exact);

static bool has_rdma_port(const struct lc_exam *exam, const char *entry, size_t length, bool exact)
{
    for (int i = lc_topo_next(exam->topo, LC_TOPO_NET, -1); i >= 0;
         i = lc_topo_next(exam->topo, LC_TOPO_NET, i)) {
        if (lc_topo_attribute(exam->topo, i, "port") &&
            names(entry, length, exam->topo->nodes[i].id, exact))
            return true;
    }
    return false;
}

static bool has_interface(const struct lc_exam *exam, const char *entry, size_t length, bool exact)
{
    char **list;
    int count = lc_root_names(exam->root, &list, 4096, "sys/class/net");
    bool found = false;

    for (int i = 0; i < count; i++)
        found |= names(entry, length, list[i], exact);
    lc_root_free_names(list, count > 0 ? count : 0);
    return found;
}

/* Entries behind ^ only exclude, and may name what is not here. */
static void check_names(const struct lc_exam *exam, const char *variable, const char *what,
                        has_function *has, const char *none)
{
    const char *value = lc_exam_get(exam, variable);
    const char *at = value;
    struct lc_exam_list missing = { .count = 0 };
    bool exact = value && *value == '=';
    int found = 0;

    if (!value || *value == '^')
        return;
    at += exact;
    while (*at) {
        size_t length = strcspn(at, ",");

        if (length && has(exam, at, length, exact))
            found++;
        else if (length)
            lc_exam_add(&missing, "%.*s", (int)(length < 40 ? length : 40), at);
        at += length;
        at += *at == ',';
    }
    if (missing.count)
        lc_exam_find(exam, has == has_rdma_port || found ? LC_TOPO_WARNING : LC_TOPO_ERROR,
                     "nccl-setting-name",
                     "%s names %s, and there is no such %s here%s\n"
                     "`loongcomm topo` lists what is here; correct or unset it",
                     variable, missing.text.s, what, found ? "" : none);
}

static void check_nvlink(const struct lc_exam *exam)
{
    struct lc_exam_list pairs = { .count = 0 };

    for (int a = 0; a < exam->routes->gpu_count; a++) {
        for (int b = a + 1; b < exam->routes->gpu_count; b++) {
            if (lc_topo_peers(exam->default_routes, a, b) && !lc_topo_peers(exam->routes, a, b))
                lc_exam_add(&pairs, "%d-%d", lc_topo_dev(exam->routes, a),
                            lc_topo_dev(exam->routes, b));
        }
    }
    if (pairs.count)
        lc_exam_find(exam, LC_TOPO_WARNING, "nccl-setting-p2p",
                     "%s keeps GPUs %s from reaching each other's memory, which they could\n"
                     "unset it",
                     lc_exam_get(exam, "NCCL_P2P_DISABLE") ? "NCCL_P2P_DISABLE" : "NCCL_P2P_LEVEL",
                     pairs.text.s);
}

static void check_gdr_level(const struct lc_exam *exam)
{
    struct lc_exam_list gpus = { .count = 0 };

    for (int g = 0; g < exam->routes->gpu_count; g++) {
        int net = lc_topo_own_net(exam->default_routes, g, 0);

        if (net >= 0 && lc_topo_gpudirect(exam->default_routes, g, net, true) &&
            !lc_topo_gpudirect(exam->routes, g, net, true))
            lc_exam_add_gpu(&gpus, exam->routes, g);
    }
    if (gpus.count)
        lc_exam_find(exam, LC_TOPO_WARNING, "nccl-setting-gpudirect",
                     "%s takes GPUDirect RDMA from %s\n"
                     "unset it",
                     lc_exam_get(exam, "NCCL_NET_GDR_LEVEL") ? "NCCL_NET_GDR_LEVEL"
                                                             : "NCCL_NET_GDR_READ",
                     gpus.text.s);
}

static void check_shared_memory(const struct lc_exam *exam)
{
    const char *off = lc_exam_get(exam, "NCCL_SHM_DISABLE");

    if (!off || strtol(off, NULL, 0) != 1)
        return;
    for (int a = 0; a < exam->routes->gpu_count; a++) {
        for (int b = 0; b < exam->routes->gpu_count; b++) {
            if (lc_topo_peers(exam->routes, a, b))
                continue;
            lc_exam_find(exam, LC_TOPO_WARNING, "nccl-setting-shm",
                         "NCCL_SHM_DISABLE=1 on a machine where GPUs (%d and %d) have no peer "
                         "access: their data would go over the network\n"
                         "unset it",
                         lc_topo_dev(exam->routes, a), lc_topo_dev(exam->routes, b));
            return;
        }
    }
}

static void check_rdma_off(const struct lc_exam *exam)
{
    const char *off = lc_exam_get(exam, "NCCL_IB_DISABLE");

    if (!off || strtol(off, NULL, 0) != 1)
        return;
    for (int n = 0; n < exam->routes->net_count; n++) {
        if (!lc_topo_attribute(exam->topo, exam->routes->nets[n], "port"))
            continue;
        lc_exam_find(exam, LC_TOPO_WARNING, "nccl-setting-rdma",
                     "NCCL_IB_DISABLE=1 leaves the RDMA ports unused (%s): NCCL takes sockets\n"
                     "unset it",
                     exam->topo->nodes[exam->routes->nets[n]].id);
        return;
    }
}

/* Whatever the variables are: do they make it worse than NCCL alone would? */
static void check_loads(const struct lc_exam *exam)
{
    static const char *const variables[] = { "NCCL_PXN_DISABLE", "NCCL_P2P_PXN_LEVEL",
                                             "NCCL_CROSS_NIC", "NCCL_NETDEVS_POLICY",
                                             "NCCL_PXN_C2C" };
    struct lc_topo_kind kind = { exam->topo, 4 };
    struct lc_topo_plan *set = NULL;
    struct lc_topo_plan *unset = NULL;
    struct lc_exam_list given = { .count = 0 };

    for (size_t i = 0; i < sizeof(variables) / sizeof(*variables); i++) {
        if (lc_exam_get(exam, variables[i]))
            lc_exam_add(&given, "%s=%.20s", variables[i], lc_exam_get(exam, variables[i]));
    }
    if (given.count && lc_topo_is_plannable(exam->topo) &&
        lc_topo_plan_make(&kind, 1, exam->checks->get, &set) == 0 &&
        lc_topo_plan_make(&kind, 1, NULL, &unset) == 0) {
        struct lc_topo_side_loads a = lc_topo_plan_loads(set, LC_TOPO_NCCLS);
        struct lc_topo_side_loads b = lc_topo_plan_loads(unset, LC_TOPO_NCCLS);

        if (a.all_to_all.ms > 1.01 * b.all_to_all.ms || a.between_rails > b.between_rails + 0.01)
            lc_exam_find(exam, LC_TOPO_WARNING, "nccl-setting-slow",
                         "with %s the most loaded link takes %.1f ms instead of %.1f for each GB "
                         "of an all-to-all, and %.0f %% instead of %.0f %% go between rails\n"
                         "unset it",
                         given.text.s, a.all_to_all.ms, b.all_to_all.ms, 100 * a.between_rails,
                         100 * b.between_rails);
    }
    lc_topo_plan_free(set);
    lc_topo_plan_free(unset);
}

/* A topology file that describes another machine sends NCCL wrong ways without a word. */
static void check_file(const struct lc_exam *exam)
{
    const char *path = lc_exam_get(exam, "NCCL_TOPO_FILE");
    struct lc_topo *file = NULL;
    char error[512];
    int known = 0;
    int gpus = 0;

    if (!path)
        return;
    if (lc_topo_load(path, &file, error, sizeof(error)) != 0) {
        lc_exam_find(exam, LC_TOPO_WARNING, "nccl-topology-file",
                     "NCCL_TOPO_FILE: %s\ncorrect or unset it", error);
        return;
    }
    for (int i = lc_topo_next(exam->topo, LC_TOPO_GPU, -1); i >= 0;
         i = lc_topo_next(exam->topo, LC_TOPO_GPU, i)) {
        const char *id = exam->topo->nodes[exam->topo->nodes[i].parent].id;

        gpus++;
        for (int at = lc_topo_next(file, LC_TOPO_PCI, -1); at >= 0;
             at = lc_topo_next(file, LC_TOPO_PCI, at)) {
            if (strcmp(file->nodes[at].id, id) == 0) {
                known++;
                break;
            }
        }
    }
    if (gpus && known < gpus && lc_topo_next(file, LC_TOPO_GPU, -1) >= 0)
        lc_exam_find(exam, LC_TOPO_WARNING, "nccl-topology-file",
                     "NCCL_TOPO_FILE=%.200s knows %d of the %d GPUs here: it describes another "
                     "machine\n"
                     "correct or unset it",
                     path, known, gpus);
    lc_topo_free(file);
}

void lc_exam_settings(const struct lc_exam *exam)
{
    bool machine = exam->topo->format == LC_TOPO_SYSFS;

    check_words(exam);
    check_file(exam);
    if (machine)
        check_names(exam, "NCCL_IB_HCA", "RDMA port", has_rdma_port, "; NCCL would take sockets");
    if (machine && exam->root)
        check_names(exam, "NCCL_SOCKET_IFNAME", "interface", has_interface,
                    "; NCCL would find no network");
    if (!exam->routes || !exam->default_routes || !exam->routes->gpu_count)
        return;
    check_rdma_off(exam);
    check_nvlink(exam);
    check_gdr_level(exam);
    check_shared_memory(exam);
    check_loads(exam);
}
