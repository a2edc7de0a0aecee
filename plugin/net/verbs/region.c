/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/verbs/region.h"

#include "common/log.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PAGE ((uintptr_t)4096)

/* Guarded by the device's lock. */
struct lc_verbs_region {
    struct lc_verbs_region *next;
    uintptr_t begin;
    uintptr_t end;
    int refs;
    bool shared; /* found by address; a DMA-BUF is not */
    struct ibv_mr *mr;
};

static struct ibv_mr *make_mr(struct lc_verbs_nic *nic, struct lc_verbs_region *region, int fd,
                              uint64_t offset)
{
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    void *begin = (void *)region->begin; // NOLINT(performance-no-int-to-ptr)
    size_t size = region->end - region->begin;

    if (fd >= 0)
        return lc_ibv.ibv_reg_dmabuf_mr(nic->pd, offset, size, region->begin, fd, access);
    /* Relaxed ordering is what PCIe needs for full speed on some hosts; a device that cannot do it ignores the wish. */
    if (lc_ibv.ibv_reg_mr_iova2)
        return lc_ibv.ibv_reg_mr_iova2(nic->pd, begin, size, region->begin,
                                       access | IBV_ACCESS_RELAXED_ORDERING);
    return lc_ibv.ibv_reg_mr(nic->pd, begin, size, access);
}

static int get_region(struct lc_verbs_nic *nic, uintptr_t begin, uintptr_t end, int fd,
                      uint64_t offset, struct lc_verbs_region **out)
{
    struct lc_verbs_region *region;
    int err = 0;

    *out = NULL;
    (void)pthread_mutex_lock(&nic->lock);
    /* The same pages, each of which whoever shares it has something in. Part of a region would keep all of it. */
    for (region = nic->regions; region && fd < 0; region = region->next)
        if (region->shared && region->begin == begin && region->end == end)
            break;
    if (region && fd < 0) {
        region->refs++;
        *out = region;
        goto unlock;
    }
    region = calloc(1, sizeof(*region));
    if (!region) {
        err = -ENOMEM;
        goto unlock;
    }
    *region = (struct lc_verbs_region){ nic->regions, begin, end, 1, fd < 0, NULL };
    region->mr = make_mr(nic, region, fd, offset);
    if (!region->mr) {
        err = errno ? -errno : -EIO;
        free(region);
        goto unlock;
    }
    nic->regions = region;
    *out = region;
unlock:
    (void)pthread_mutex_unlock(&nic->lock);
    return err;
}

static int put_region(struct lc_verbs_nic *nic, struct lc_verbs_region *region)
{
    struct lc_verbs_region **at;
    int err = 0;

    (void)pthread_mutex_lock(&nic->lock);
    if (--region->refs == 0) {
        for (at = &nic->regions; *at != region;)
            at = &(*at)->next;
        *at = region->next;
        err = -lc_ibv.ibv_dereg_mr(region->mr);
        free(region);
    }
    (void)pthread_mutex_unlock(&nic->lock);
    return err;
}

int lc_verbs_mr_open(const struct lc_verbs_device *dev, void *data, size_t size, int fd,
                     uint64_t offset, struct lc_net_mr **out)
{
    struct lc_net_mr *mr = calloc(1, sizeof(*mr));
    uintptr_t begin = (uintptr_t)data, end = begin + size;

    if (!mr)
        return -ENOMEM;
    /* Whole pages: that is what is pinned anyway. */
    if (fd < 0) {
        begin &= ~(PAGE - 1);
        end = (end + PAGE - 1) & ~(PAGE - 1);
    }
    for (; mr->n < dev->n_ports; mr->n++) {
        struct lc_verbs_nic *nic = dev->ports[mr->n]->nic;
        int err = get_region(nic, begin, end, fd, offset, &mr->regions[mr->n]);

        if (err || !mr->regions[mr->n]) {
            lc_warn("%s: %zu bytes at %p cannot be registered: %s%s", nic->name, size, data,
                    strerror(-err),
                    err == -ENOMEM ? " (is the limit of locked memory, ulimit -l, too low?)" : "");
            (void)lc_verbs_mr_close(mr);
            return err ? err : -EIO;
        }
        mr->nics[mr->n] = nic;
        mr->mrs[mr->n] = mr->regions[mr->n]->mr;
    }
    *out = mr;
    return 0;
}

int lc_verbs_mr_close(struct lc_net_mr *mr)
{
    int err = 0;

    for (int i = 0; mr && i < mr->n; i++) {
        int failed = put_region(mr->nics[i], mr->regions[i]);

        err = err ? err : failed;
    }
    free(mr);
    return err;
}
