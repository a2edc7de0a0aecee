/* SPDX-License-Identifier: Apache-2.0
 *
 * Ways of payload and words that are measured beside slot_path. What turns out to be better becomes slot_path, the others
 * go.
 */
#ifndef LK_CUDA_RINGS_PATHS_CUH
#define LK_CUDA_RINGS_PATHS_CUH

#include "kernels/cuda_rings_pipeline.cuh"

namespace lk_rings_device
{

/* A hint on a store may travel with each packet over the link. */
struct plain_path : slot_path {
    static constexpr slot_store store = STORE_PLAIN;
};
struct streaming_path : slot_path {
    static constexpr slot_store store = STORE_STREAMING;
};
struct strong_path : slot_path {
    static constexpr slot_store store = STORE_STRONG;
};

/* Lanes that have a granule's packs in another order store half lines. */
struct in_order_path : plain_path {
    static constexpr bool in_order = true;
};

/* Credits need not wait for a fence before the words of other roles, and two fences may be under way. */
struct apart_path : plain_path {
    static constexpr bool publish_apart = true;
};

struct few_fences_path : plain_path {
    static constexpr uint32_t jobs_a_fence = 4;
};

/* Fences wait for stores to own memory, and readers for what comes over the link. */
struct pull_gather_path : plain_path {
    static constexpr bool pull_gather = true;
};
struct pull_path : pull_gather_path {
    static constexpr bool pull_scatter = true, pull_exchange = true;
};
struct pull_apart_path : pull_path {
    static constexpr bool publish_apart = true;
};

struct bulk_path : slot_path {
    static constexpr bool bulk = true;
};
struct bulk_apart_path : bulk_path {
    static constexpr bool publish_apart = true;
};

/* All of it between the two, for the emulation. */
struct pull_bulk_apart_path : pull_apart_path {
    static constexpr bool bulk = true, in_order = true;
};
struct pull_gather_few_fences_path : pull_gather_path {
    static constexpr uint32_t jobs_a_fence = 4;
};

} // namespace lk_rings_device

#endif
