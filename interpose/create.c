/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/create.h"

#include "interpose/backend.h"
#include "interpose/call.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define CONFIG_MAGIC 0xcafebeefu

/* The program may have been built with an older, shorter struct: its own size says what is there. */
static bool has(const ncclConfig_t *config, size_t offset, size_t size)
{
    return config && config->magic == CONFIG_MAGIC && config->size >= offset + size;
}
#define HAS(config, field) has(config, offsetof(ncclConfig_t, field), sizeof((config)->field))

static void copy_name(const ncclConfig_t *config, char *name)
{
    name[0] = '\0';
    if (HAS(config, commName) && config->commName)
        strncat(name, config->commName, LC_COMM_NAME - 1);
}

/* False: NCCL may take it for another number. */
static bool is_number(const char *name, uint32_t *out)
{
    const char *text = lc_environment_get(name);
    size_t number = 0;

    if (text && *text && (lc_parse_size(text, &number) != 0 || number >= UINT32_MAX))
        return false;
    *out = (uint32_t)number;
    return true;
}

static uint32_t max_ctas(void)
{
    uint32_t most;

    return is_number("NCCL_MAX_CTAS", &most) ? most : 0;
}

/* CTAs of a cluster run on multiprocessors next to each other, whatever number of others is free: unless the job says
 * otherwise NCCL's kernels have clusters of 4 on devices that know them. */
static bool has_clusters(void)
{
    const char *size = lc_environment_get("NCCL_CGA_CLUSTER_SIZE");

    return !size || (strcmp(size, "0") != 0 && strcmp(size, "1") != 0);
}

uint32_t lc_create_nccl_ctas(void)
{
    /* Of these NCCL takes the number, however few NCCL_MAX_CTAS allows. */
    static const char *const least[] = { "NCCL_MIN_NCHANNELS", "NCCL_MIN_NRINGS",
                                         "NCCL_MIN_P2P_NCHANNELS", "NCCL_SYM_CTAS" };
    uint32_t most = max_ctas(), other;

    for (size_t i = 0; most && i < sizeof(least) / sizeof(*least); i++) {
        if (!is_number(least[i], &other))
            return 0;
        most = most > other ? most : other;
    }
    return has_clusters() ? 0 : most;
}

/* The variable wins over the program, as with NCCL. */
static uint32_t ctas_of(const ncclConfig_t *config)
{
    uint32_t most = max_ctas();

    if (most)
        return most;
    return HAS(config, maxCTAs) && config->maxCTAs > 0 ? (uint32_t)config->maxCTAs : 0;
}

#define POLICY_DELIMITER "|"

/* As NCCL reads its variable: one digit, or names. -1: nothing that it knows, so it is not set. */
static int policy_of(const char *text)
{
    static const struct {
        const char *name;
        int policy;
    } names[] = {
        {"DEFAULT",     NCCL_CTA_POLICY_DEFAULT   },
        { "EFFICIENCY", NCCL_CTA_POLICY_EFFICIENCY},
        { "ZERO",       NCCL_CTA_POLICY_ZERO      }
    };
    int policy = -1;

    if (*text >= '0' && *text <= '9')
        return *text <= '2' ? *text - '0' : -1;
    for (size_t n; *text; text += n + (text[n] != '\0')) {
        n = strcspn(text, POLICY_DELIMITER);
        for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
            if (strlen(names[i].name) == n && strncasecmp(text, names[i].name, n) == 0)
                policy = (policy < 0 ? 0 : policy) | names[i].policy;
        }
    }
    return policy;
}

/* The variable wins over the program here, too. */
static bool wants_no_ctas(const ncclConfig_t *config)
{
    const char *text = lc_environment_get("NCCL_CTA_POLICY");
    int policy = text ? policy_of(text) : -1;

    if (policy < 0 && HAS(config, CTAPolicy) && config->CTAPolicy != NCCL_CONFIG_UNDEF_INT)
        policy = config->CTAPolicy;
    return policy >= 0 && (policy & NCCL_CTA_POLICY_ZERO);
}

/* Calls that may end later from a thread of NCCL's, or that use no kernels, are not ours to change. */
static bool stays_with_nccl(const ncclConfig_t *config)
{
    return (HAS(config, blocking) && config->blocking == 0) || wants_no_ctas(config) ||
           lc_environment_has("NCCL_COMM_BLOCKING");
}

struct lc_agree *lc_create_agree(const ncclUniqueId *id, int ranks, int rank, int device,
                                 const ncclConfig_t *config)
{
    struct lc_agree *agree;

    if (stays_with_nccl(config))
        return NULL;
    agree = lc_agree_init(id, ranks, rank, device);
    if (agree)
        lc_backend_load(device); /* no place for that on the path of an operation */
    return agree;
}

void lc_create_init(const ncclComm_t *newcomm, int ranks, int rank, int device,
                    const ncclConfig_t *config, struct lc_agree *agree)
{
    struct lc_comm_facts facts = { .ranks = ranks,
                                   .rank = rank,
                                   .device = device,
                                   .parent = LC_COMM_NO_PARENT,
                                   .origin = LC_COMM_INIT,
                                   .ctas = ctas_of(config) };

    copy_name(config, facts.name);
    lc_comm_add(__atomic_load_n(newcomm, __ATOMIC_ACQUIRE), &facts, agree);
}

struct lc_pending lc_create_prepare_child(ncclComm_t parent, ncclComm_t *newcomm,
                                          const ncclConfig_t *config, int colour,
                                          const struct lc_excluded *excluded)
{
    struct lc_pending child = { .where = newcomm,
                                .parent = LC_COMM_NO_PARENT,
                                .parent_handle = parent,
                                .colour = colour,
                                .origin = excluded ? LC_COMM_SHRINK : LC_COMM_SPLIT };
    struct lc_comm *comm = lc_comm_get(parent);

    child.ctas = ctas_of(config);
    if (comm) {
        child.parent = comm->number;
        if (!config) /* NCCL takes the parent's, too */
            child.ctas = comm->facts.ctas;
    }
    if (excluded)
        child.set = lc_agree_set(excluded->ranks, excluded->count);
    child.stays = stays_with_nccl(config);
    lc_comm_put(comm);
    copy_name(config, child.name);
    return child;
}

/* Unless it has ended in the same group. */
static struct lc_comm *get_parent(const struct lc_pending *child)
{
    struct lc_comm *parent = lc_comm_get(child->parent_handle);

    if (!parent || parent->number == child->parent)
        return parent;
    lc_comm_put(parent);
    return NULL;
}

static void add_child(const struct lc_pending *child, const struct lc_real *real)
{
    ncclComm_t handle = __atomic_load_n(child->where, __ATOMIC_ACQUIRE);
    struct lc_comm_facts facts = { .device = LC_DEVICE_UNASKED,
                                   .parent = child->parent,
                                   .origin = child->origin,
                                   .ctas = child->ctas };
    struct lc_agree *agree = NULL;
    struct lc_comm *parent;

    if (!handle || !real->ncclCommCount || !real->ncclCommUserRank ||
        real->ncclCommCount(handle, &facts.ranks) != ncclSuccess ||
        real->ncclCommUserRank(handle, &facts.rank) != ncclSuccess)
        return;
    memcpy(facts.name, child->name, sizeof(facts.name));
    parent = child->creation ? get_parent(child) : NULL;
    if (parent)
        agree = lc_agree_child(parent->agree, child->creation, child->colour, facts.ranks,
                               facts.rank,
                               atomic_load_explicit(&parent->device, memory_order_relaxed));
    lc_comm_put(parent);
    lc_comm_add(handle, &facts, agree);
}

/* Counted also if the child stays with NCCL at this rank, since it may not at others. */
static uint64_t count(const struct lc_pending *child)
{
    struct lc_comm *parent = get_parent(child);
    uint64_t creation = parent ? lc_agree_count_child(parent->agree, child->set) : 0;

    lc_comm_put(parent);
    return child->stays ? 0 : creation;
}

static void undo(const struct lc_pending *child, void (*how)(struct lc_agree *parent, uint64_t set))
{
    struct lc_comm *parent = get_parent(child);

    if (parent)
        how(parent->agree, child->set);
    lc_comm_put(parent);
}

/* NCCL looks at arguments before anything is under way: such a call is as if it had not been made. */
void lc_create_child(struct lc_pending *child, ncclResult_t result, const struct lc_real *real)
{
    struct lc_pending *later;

    if (!lc_accepted(result) && result != ncclInvalidArgument)
        undo(child, lc_agree_child_failed);
    if (!lc_accepted(result) || !child->where)
        return;
    child->creation = count(child);
    if (lc_thread.depth == 0) {
        if (result == ncclSuccess)
            add_child(child, real);
        return;
    }
    later = malloc(sizeof(*later));
    if (!later) { /* adopted at its first use; what becomes of it nobody tells */
        undo(child, lc_agree_child_failed);
        return;
    }
    *later = *child;
    later->next = lc_thread.pending;
    lc_thread.pending = later;
}

void lc_create_pending(ncclResult_t result, bool simulated, const struct lc_real *real)
{
    struct lc_pending *child = lc_thread.pending;

    lc_thread.pending = NULL;
    while (child) {
        struct lc_pending *next = child->next;

        if (simulated)
            undo(child, lc_agree_uncount_child);
        else if (!lc_accepted(result))
            undo(child, lc_agree_child_failed);
        else if (result == ncclSuccess)
            add_child(child, real);
        free(child);
        child = next;
    }
}
