/* SPDX-License-Identifier: Apache-2.0
 *
 * Which kernel serves aligned rows of up to so many columns. There are several forms of each, and the constants below
 * choose; the others are made with LK_COMPUTE_VARIANTS alone, to be measured (perf/kernels/compute_variants.py).
 */
#ifndef LK_COMPUTE_NORM_FORMS_CUH
#define LK_COMPUTE_NORM_FORMS_CUH

#include "kernels/compute_norm_ring.cuh"

/* Classes of rows by their longest. */
constexpr unsigned NORM_CLASSES[] = { 256, 512, 1024, 2048, 4096, 6144, 8192, 16384 };
constexpr unsigned NORM_CLASS_COUNT = 8;

/* Names of forms, by number: "rows" hold a row in registers (compute_norm_rows.cuh), "ring" is compute_norm_ring.cuh. */
constexpr const char *NORM_FORWARD_NAMES[] = {
    "rows", "rows, weights early", "ring", "ring, 2 blocks", "rows, more blocks", "rows, threads"
};
constexpr const char *NORM_BACKWARD_NAMES[] = { "rows", "ring", "ring, other teams",
                                                "ring, 768 threads", "ring, launched early" };
constexpr int NORM_FORWARD_FORMS = 6, NORM_BACKWARD_FORMS = 5;

/* The product's form of each class. */
constexpr int NORM_FORWARD_FORM[NORM_CLASS_COUNT] = { 0, 0, 0, 0, 0, 0, 0, 0 };
constexpr int NORM_BACKWARD_FORM[NORM_CLASS_COUNT] = { 0, 0, 0, 0, 0, 0, 0, 0 };

constexpr size_t NORM_RING_MOST = 200 * 1024; /* of a multiprocessor's shared memory */

using norm_function = void (*)(lk_norm_launch);

struct norm_kernel {
    uint64_t columns; /* the most */
    norm_function function;
    unsigned threads;
    unsigned rows;   /* of a block at a time */
    unsigned blocks; /* the most that there may be; 0: one for all rows */
    bool early;      /* the kernel behind it may be launched before it ends */
    size_t shared;
};

/* ---- forward ---- */

template <unsigned Lanes, unsigned Groups, bool Layer, unsigned Hold = 4,
          unsigned Blocks = 1024 / norm_team<Lanes>::threads, bool Early = false>
constexpr norm_kernel forward_rows()
{
    return { uint64_t{ 8 } * Lanes * Groups,
             norm_forward_rows<Lanes, Groups, Layer, Hold, Blocks, Early>,
             norm_team<Lanes>::threads,
             norm_team<Lanes>::count * Hold / Groups,
             0,
             false,
             0 };
}

template <class Shape, unsigned Blocks, bool Layer, bool Residual>
constexpr norm_kernel forward_ring()
{
    static_assert(Blocks * Shape::bytes(Residual ? 2 : 1) <= NORM_RING_MOST, "does not fit");
    return { Shape::columns,
             norm_forward_ring < Shape,
             Blocks,
             Residual ? 2 : 1,
             Layer >,
             Shape::threads,
             Shape::Teams * Shape::Rows,
             132 * Blocks,
             false,
             Shape::bytes(Residual ? 2 : 1) };
}

template <unsigned Columns, bool Layer, bool Early> constexpr norm_kernel choose_forward_rows()
{
    if constexpr (Columns == 256)
        return forward_rows<32, 1, Layer, 4, 4, Early>();
    else if constexpr (Columns == 512)
        return forward_rows<32, 2, Layer, 4, 4, Early>();
    else if constexpr (Columns == 1024)
        return forward_rows<32, 4, Layer, 4, 4, Early>();
    else if constexpr (Columns == 2048)
        return forward_rows<256, 1, Layer, 4, 4, Early>();
    else if constexpr (Columns == 4096)
        return forward_rows<256, 2, Layer, 4, 4, Early>();
    else if constexpr (Columns <= 8192)
        return forward_rows<256, 4, Layer, 4, 4, Early>();
    else
        return forward_rows<512, 4, Layer, 4, 2, Early>();
}

/* Forms that a class does not have are those of the rows. */
template <int Form, unsigned Columns, bool Layer, bool Residual>
constexpr norm_kernel choose_forward()
{
    if constexpr (Form == 2 && Columns == 2048)
        return forward_ring<norm_ring<128, 4, 2, 1, 6>, 1, Layer, Residual>();
    else if constexpr (Form == 2 && Columns == 1024)
        return forward_ring<norm_ring<32, 16, 4, 1, Residual ? 3 : 5>, 1, Layer, Residual>();
    else if constexpr (Form == 2 && Columns == 4096)
        return forward_ring<norm_ring<256, 2, 2, 1, 6>, 1, Layer, Residual>();
    else if constexpr (Form == 2 && Columns == 6144)
        return forward_ring<norm_ring<256, 2, 3, 1, 4>, 1, Layer, Residual>();
    else if constexpr (Form == 2 && Columns == 8192)
        return forward_ring<norm_ring<512, 1, 2, 1, 6>, 1, Layer, Residual>();
    else if constexpr (Form == 3 && Columns == 1024)
        return forward_ring<norm_ring<128, 3, 1, 4, Residual ? 2 : 3>, 2, Layer, Residual>();
    else if constexpr (Form == 3 && Columns == 4096)
        return forward_ring<norm_ring<256, 1, 2, 2, 3>, 2, Layer, Residual>();
    else if constexpr (Form == 3 && Columns == 6144)
        return forward_ring<norm_ring<384, 1, 2, 1, 4>, 2, Layer, Residual>();
    else if constexpr (Form == 3 && Columns == 8192)
        return forward_ring<norm_ring<512, 1, 2, 1, 3>, 2, Layer, Residual>();
    else if constexpr (Form == 4 && Columns == 1024)
        return forward_rows<32, 4, Layer, 4, 5, true>();
    else if constexpr (Form == 4 && Columns == 4096)
        return forward_rows<256, 2, Layer, 2, 6, true>();
    else if constexpr (Form == 4 && Columns == 6144)
        return forward_rows<256, 3, Layer, 3, 5, true>();
    else if constexpr (Form == 4 && Columns == 8192)
        return forward_rows<512, 2, Layer, 2, 3, true>();
    else if constexpr (Form == 5 && Columns == 4096)
        return forward_rows<512, 1, Layer, 2, 3, true>();
    else if constexpr (Form == 5 && Columns == 8192)
        return forward_rows<1024, 1, Layer, 1, 2, true>();
    else
        return choose_forward_rows<Columns, Layer, Form != 0>();
}

/* ---- backward ---- */

template <unsigned Lanes, unsigned Groups, bool Full> constexpr norm_kernel backward_rows()
{
    return { uint64_t{ 8 } * Lanes * Groups,
             norm_backward_rows<Lanes, Groups, Full>,
             norm_team<Lanes>::threads,
             norm_team<Lanes>::count * 4 / Groups,
             LK_NORM_PARTIALS,
             false,
             0 };
}

template <class Shape, bool Full, bool Residual, bool Early> constexpr norm_kernel backward_ring()
{
    static_assert(Shape::bytes(Residual ? 3 : 2) <= NORM_RING_MOST, "does not fit");
    return { Shape::columns,
             norm_backward_ring < Shape,
             1,
             Residual ? 3 : 2,
             Full >,
             Shape::threads,
             Shape::Teams * Shape::Rows,
             132,
             Early,
             Shape::bytes(Residual ? 3 : 2) };
}

template <unsigned Columns, bool Full> constexpr norm_kernel choose_backward_rows()
{
    if constexpr (Columns == 256)
        return backward_rows<32, 1, Full>();
    else if constexpr (Columns == 512)
        return backward_rows<32, 2, Full>();
    else if constexpr (Columns == 1024)
        return backward_rows<32, 4, Full>();
    else if constexpr (Columns == 2048)
        return backward_rows<256, 1, Full>();
    else if constexpr (Columns == 4096)
        return backward_rows<256, 2, Full>();
    else if constexpr (Columns <= 8192)
        return backward_rows<256, 4, Full>();
    else
        return backward_rows<512, 4, Full>();
}

/* Residual: with a gradient of s beside. */
template <int Form, unsigned Columns, bool Full, bool Residual>
constexpr norm_kernel choose_backward()
{
    constexpr bool early = Form == 4;

    if constexpr ((Form == 1 || early) && Columns == 256)
        return backward_ring<norm_ring<32, 16, 1, 2, Residual ? 4 : 6>, Full, Residual, early>();
    else if constexpr ((Form == 1 || early) && Columns == 512)
        return backward_ring<norm_ring<32, 16, 2, 1, Residual ? 4 : 6>, Full, Residual, early>();
    else if constexpr ((Form == 1 || early) && Columns == 2048)
        return backward_ring<norm_ring<128, 4, 2, 1, Residual ? 4 : 6>, Full, Residual, early>();
    else if constexpr ((Form == 1 || early) && Columns == 6144)
        return backward_ring<norm_ring<256, 2, 3, 1, Residual ? 2 : 4>, Full, Residual, early>();
    else if constexpr ((Form == 1 || early) && Columns == 1024)
        return backward_ring<norm_ring<32, 16, 4, 1, Residual ? 2 : 3>, Full, Residual, early>();
    else if constexpr ((Form == 1 || early) && Columns == 4096)
        return backward_ring<norm_ring<256, 2, 2, 1, Residual ? 4 : 6>, Full, Residual, early>();
    else if constexpr ((Form == 1 || early) && Columns == 8192)
        return backward_ring<norm_ring<512, 1, 2, 1, Residual ? 4 : 6>, Full, Residual, early>();
    else if constexpr (Form == 2 && Columns == 1024)
        return backward_ring<norm_ring<128, 4, 1, 4, Residual ? 2 : 3>, Full, Residual, true>();
    else if constexpr (Form == 2 && Columns == 4096)
        return backward_ring<norm_ring<512, 1, 1, 2, Residual ? 4 : 6>, Full, Residual, true>();
    else if constexpr (Form == 2 && Columns == 8192)
        return backward_ring<norm_ring<256, 2, 4, 1, Residual ? 2 : 3>, Full, Residual, true>();
    else if constexpr (Form == 3 && Columns == 1024)
        return backward_ring<norm_ring<64, 12, 2, 1, Residual ? 2 : 4>, Full, Residual, true>();
    else if constexpr (Form == 3 && Columns == 4096)
        return backward_ring<norm_ring<256, 3, 2, 1, Residual ? 2 : 4>, Full, Residual, true>();
    else
        return choose_backward_rows<Columns, Full>();
}

#endif
