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

/* "Rows" hold a row in registers (compute_norm_rows.cuh), "ring" is compute_norm_ring.cuh. A class that does not have a form
 * has that of rows in its place. */
enum norm_forward_form {
    FORWARD_ROWS,
    FORWARD_RING,
    FORWARD_RING_TWICE,  /* two blocks of a multiprocessor */
    FORWARD_ROWS_MORE,   /* more blocks, which hold less */
    FORWARD_ROWS_WIDE,   /* more threads for a row */
    FORWARD_ROWS_HELD,   /* more rows of a block */
    FORWARD_ROWS_ALONE,  /* a warp for a row */
    FORWARD_RING_PAIRS,  /* two rows at a time, and little under way */
    FORWARD_ROWS_NARROW, /* fewer threads for a row, which hold more */
    FORWARD_ROWS_LONG,   /* as many rows as find room */
    FORWARD_RING_FOURS,  /* four rows at a time */
    NORM_FORWARD_FORMS
};

enum norm_backward_form {
    BACKWARD_ROWS,
    BACKWARD_RING,
    BACKWARD_PAIRS, /* two rows at a time */
    BACKWARD_OTHER_TEAMS,
    BACKWARD_SHORT, /* little under way */
    BACKWARD_LATE,
    NORM_BACKWARD_FORMS
};

constexpr const char *NORM_FORWARD_NAMES[] = { "rows",
                                               "ring",
                                               "ring, 2 blocks",
                                               "rows, more blocks",
                                               "rows, more threads",
                                               "rows, more of a block",
                                               "rows, a warp each",
                                               "ring, two rows",
                                               "rows, fewer threads",
                                               "rows, most of a block",
                                               "ring, four rows" };
constexpr const char *NORM_BACKWARD_NAMES[] = { "rows",
                                                "ring",
                                                "ring, two rows",
                                                "ring, other teams",
                                                "ring, fewer stages",
                                                "ring, written late" };

/* The product's form of each class: [with a mean][with a residual]. Measured on one H200, us by rows and by the form: RMSNorm of
 * 32768 x 2048 68.6, 67.6, of 4096 x 5120 26.5, 24.2; LayerNorm of 65536 x 1024 74.7, 71.7, of 32768 x 2048 82.5, 71.1, of 16384
 * x 4096 74.3, 71.7, of 8192 x 5120 58.0, 49.1, of 4096 x 8192 41.5, 39.4, with a residual 69.9, 68.5. Rows were the best or
 * within 1 % of it in the other cases of 1024 to 8192 columns. Classes of 256, 512 and 16384 have not been measured. */
constexpr norm_forward_form NORM_FORWARD_FORM[2][2][NORM_CLASS_COUNT] = {
    {{ FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS_HELD, FORWARD_ROWS, FORWARD_RING,
        FORWARD_ROWS, FORWARD_ROWS },
     { FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS, FORWARD_RING,
        FORWARD_ROWS, FORWARD_ROWS }     },
    { { FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS_MORE, FORWARD_ROWS_HELD, FORWARD_ROWS_HELD,
        FORWARD_RING_PAIRS, FORWARD_ROWS_HELD, FORWARD_ROWS },
     { FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS_MORE, FORWARD_RING, FORWARD_ROWS, FORWARD_RING,
        FORWARD_ROWS_MORE, FORWARD_ROWS }},
};

/* Of statistics alone, which are nobody's but their caller's: [with a mean]. LayerNorm of 16384 x 4096 takes 33.7 us by a warp for
 * each row, 41.6 by rows. */
constexpr norm_forward_form NORM_STATISTICS_FORM[2][NORM_CLASS_COUNT] = {
    {FORWARD_ROWS,  FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS,       FORWARD_ROWS,
     FORWARD_ROWS, FORWARD_ROWS},
    { FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS_ALONE, FORWARD_ROWS,
     FORWARD_ROWS, FORWARD_ROWS},
};

/* Measured on one H200, us by rows and by a ring, without and with a mean or dbeta: 131072 x 256 62.5, 58.9; 66, 60; 131072 x
 * 512 118, 115; 124, 117; 65536 x 1024 121, 104; 128, 103; 32768 x 2048 125, 103; 134, 103; 16384 x 4096 122, 100; 131, 105;
 * 8192 x 5120 with a mean 114, 69; 4096 x 8192 73, 55; 83, 60. Rows of 16384 columns have no other form. */
constexpr norm_backward_form NORM_BACKWARD_FORM[NORM_CLASS_COUNT] = {
    BACKWARD_RING, BACKWARD_RING, BACKWARD_RING, BACKWARD_RING,
    BACKWARD_RING, BACKWARD_RING, BACKWARD_RING, BACKWARD_ROWS
};

/* Blocks that stay and have fewer rounds than this do not pay: RMSNorm of 2048 x 1024, which is one, takes 5.5 us by rows and
 * 7.2 by a ring. */
constexpr uint64_t NORM_ROUNDS = 4;

/* Up to so many rows each has more threads: blocks for all of them find room at once, where fewer blocks, with several rows
 * for a thread, leave a part of every multiprocessor idle. 0: the class has no such form. Not measured. */
constexpr uint64_t NORM_FEW[NORM_CLASS_COUNT] = { 0, 0, 132 * 8 * 2, 132 * 6, 132 * 6, 0, 0, 0 };

/* The longest rows of which backward can make y anew: those of the last class with a ring. */
constexpr unsigned NORM_AGAIN_MOST = 8192;

constexpr size_t NORM_RING_MOST = 200 * 1024; /* of a multiprocessor's shared memory */

using norm_function = void (*)(lk_norm_launch);

struct norm_kernel {
    uint64_t columns; /* the most */
    norm_function function;
    unsigned threads;
    unsigned rows;   /* of a block at a time */
    unsigned blocks; /* the most that there may be; 0: one for all rows */
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
             Shape::bytes(Residual ? 2 : 1) };
}

template <unsigned Columns, bool Layer> constexpr norm_kernel choose_forward_rows()
{
    if constexpr (Columns == 256)
        return forward_rows<32, 1, Layer>();
    else if constexpr (Columns == 512)
        return forward_rows<32, 2, Layer>();
    else if constexpr (Columns == 1024)
        return forward_rows<32, 4, Layer>();
    else if constexpr (Columns == 2048)
        return forward_rows<256, 1, Layer>();
    else if constexpr (Columns == 4096)
        return forward_rows<256, 2, Layer>();
    else if constexpr (Columns <= 8192)
        return forward_rows<256, 4, Layer>();
    else
        return forward_rows<512, 4, Layer>();
}

template <unsigned Columns, bool Layer> constexpr norm_kernel choose_forward_held()
{
    if constexpr (Columns == 1024)
        return forward_rows<32, 4, Layer, 8, 3>();
    else if constexpr (Columns == 2048)
        return forward_rows<128, 2, Layer, 8, 5>();
    else if constexpr (Columns == 4096)
        return forward_rows<128, 4, Layer, 8, 5>();
    else if constexpr (Columns == 6144)
        return forward_rows<256, 3, Layer, 6, 3>();
    else if constexpr (Columns == 8192)
        return forward_rows<256, 4, Layer, 8, 3>();
    else
        return choose_forward_rows<Columns, Layer>();
}

template <unsigned Columns, bool Layer> constexpr norm_kernel choose_forward_alone()
{
    if constexpr (Columns == 2048)
        return forward_rows<32, 8, Layer, 8, 3>();
    else if constexpr (Columns == 4096)
        return forward_rows<32, 16, Layer, 16, 2>();
    else
        return choose_forward_rows<Columns, Layer>();
}

template <unsigned Columns, bool Layer, bool Residual> constexpr norm_kernel choose_forward_pairs()
{
    if constexpr (Columns == 1024)
        return forward_ring<norm_ring<32, 16, 4, 1, 2>, 1, Layer, Residual>();
    else if constexpr (Columns == 2048)
        return forward_ring<norm_ring<128, 4, 2, 2, 2>, 1, Layer, Residual>();
    else if constexpr (Columns == 4096)
        return forward_ring<norm_ring<256, 2, 2, 2, 2>, 1, Layer, Residual>();
    else if constexpr (Columns == 6144)
        return forward_ring<norm_ring<256, 2, 3, 2, 2>, 1, Layer, Residual>();
    else if constexpr (Columns == 8192)
        return forward_ring<norm_ring<512, 1, 2, 2, 2>, 1, Layer, Residual>();
    else
        return choose_forward_rows<Columns, Layer>();
}

#ifdef LK_COMPUTE_VARIANTS
template <norm_forward_form Form, unsigned Columns, bool Layer>
constexpr norm_kernel try_forward_rows()
{
    constexpr bool narrow = Form == FORWARD_ROWS_NARROW;

    if constexpr (narrow && Columns == 1024)
        return forward_rows<64, 2, Layer, 8, 10>();
    else if constexpr (narrow && Columns == 2048)
        return forward_rows<64, 4, Layer, 8, 10>();
    else if constexpr (narrow && Columns == 4096)
        return forward_rows<64, 8, Layer, 8, 10>();
    else if constexpr (narrow && Columns == 6144)
        return forward_rows<128, 6, Layer, 6, 6>();
    else if constexpr (narrow && Columns == 8192)
        return forward_rows<128, 8, Layer, 8, 6>();
    else if constexpr (Columns == 1024)
        return forward_rows<128, 1, Layer, 8, 5>();
    else if constexpr (Columns == 2048)
        return forward_rows<128, 2, Layer, 8, 6>();
    else if constexpr (Columns == 4096)
        return forward_rows<128, 4, Layer, 8, 6>();
    else if constexpr (Columns == 6144)
        return forward_rows<256, 3, Layer, 12, 2>();
    else if constexpr (Columns == 8192)
        return forward_rows<256, 4, Layer, 16, 2>();
    else
        return choose_forward_rows<Columns, Layer>();
}

template <unsigned Columns, bool Layer, bool Residual> constexpr norm_kernel try_forward_fours()
{
    if constexpr (Columns == 1024 && !Residual)
        return forward_ring<norm_ring<64, 8, 2, 4, 2>, 1, Layer, Residual>();
    else if constexpr (Columns == 2048 && !Residual)
        return forward_ring<norm_ring<128, 4, 2, 4, 2>, 1, Layer, Residual>();
    else if constexpr (Columns == 4096 && !Residual)
        return forward_ring<norm_ring<256, 2, 2, 4, 2>, 1, Layer, Residual>();
    else if constexpr (Columns == 6144 && !Residual)
        return forward_ring<norm_ring<256, 2, 3, 3, 2>, 1, Layer, Residual>();
    else if constexpr (Columns == 8192 && !Residual)
        return forward_ring<norm_ring<512, 1, 2, 4, 2>, 1, Layer, Residual>();
    else
        return choose_forward_rows<Columns, Layer>();
}
#endif

template <norm_forward_form Form, unsigned Columns, bool Layer, bool Residual>
constexpr norm_kernel choose_forward()
{
#ifdef LK_COMPUTE_VARIANTS
    if constexpr (Form == FORWARD_RING_FOURS)
        return try_forward_fours<Columns, Layer, Residual>();
    else if constexpr (Form > FORWARD_RING_PAIRS)
        return try_forward_rows<Form, Columns, Layer>();
#endif
    constexpr bool ring = Form == FORWARD_RING, twice = Form == FORWARD_RING_TWICE;
    constexpr bool more = Form == FORWARD_ROWS_MORE, wide = Form == FORWARD_ROWS_WIDE;

    if constexpr (Form == FORWARD_ROWS_HELD)
        return choose_forward_held<Columns, Layer>();
    else if constexpr (Form == FORWARD_ROWS_ALONE)
        return choose_forward_alone<Columns, Layer>();
    else if constexpr (Form == FORWARD_RING_PAIRS)
        return choose_forward_pairs<Columns, Layer, Residual>();
    else if constexpr (ring && Columns == 1024)
        return forward_ring<norm_ring<32, 16, 4, 1, Residual ? 3 : 5>, 1, Layer, Residual>();
    else if constexpr (ring && Columns == 2048)
        return forward_ring<norm_ring<128, 4, 2, 1, 6>, 1, Layer, Residual>();
    else if constexpr (ring && Columns == 4096)
        return forward_ring<norm_ring<256, 2, 2, 1, 6>, 1, Layer, Residual>();
    else if constexpr (ring && Columns == 6144)
        return forward_ring<norm_ring<256, 2, 3, 1, 4>, 1, Layer, Residual>();
    else if constexpr (ring && Columns == 8192)
        return forward_ring<norm_ring<512, 1, 2, 1, 6>, 1, Layer, Residual>();
    else if constexpr (twice && Columns == 1024)
        return forward_ring<norm_ring<128, 3, 1, 4, Residual ? 2 : 3>, 2, Layer, Residual>();
    else if constexpr (twice && Columns == 4096)
        return forward_ring<norm_ring<256, 1, 2, 2, 3>, 2, Layer, Residual>();
    else if constexpr (twice && Columns == 6144)
        return forward_ring<norm_ring<384, 1, 2, 1, 4>, 2, Layer, Residual>();
    else if constexpr (twice && Columns == 8192)
        return forward_ring<norm_ring<512, 1, 2, 1, 3>, 2, Layer, Residual>();
    else if constexpr (wide && Columns == 1024)
        return forward_rows<128, 1, Layer, 2, 8, true>();
    else if constexpr (wide && Columns == 2048)
        return forward_rows<256, 1, Layer, 1, 6, true>();
    else if constexpr (wide && Columns == 4096)
        return forward_rows<256, 2, Layer, 2, 6, true>();
    else if constexpr (more && Columns == 1024)
        return forward_rows<32, 4, Layer, 4, 5, true>();
    else if constexpr (more && Columns == 4096)
        return forward_rows<256, 2, Layer, 2, 6, true>();
    else if constexpr (more && Columns == 6144)
        return forward_rows<256, 3, Layer, 3, 5, true>();
    else if constexpr (more && Columns == 8192)
        return forward_rows<512, 2, Layer, 2, 3, true>();
    else
        return choose_forward_rows<Columns, Layer>();
}

/* ---- backward ---- */

template <unsigned Lanes, unsigned Groups, bool Full> constexpr norm_kernel backward_rows()
{
    return { uint64_t{ 8 } * Lanes * Groups,
             norm_backward_rows<Lanes, Groups, Full>,
             norm_team<Lanes>::threads,
             norm_team<Lanes>::count * 4 / Groups,
             LK_NORM_PARTIALS,
             0 };
}

template <class Shape, bool Full, bool Residual, bool Again = false>
constexpr norm_kernel backward_ring()
{
    static_assert(Shape::bytes(Residual ? 3 : 2) <= NORM_RING_MOST, "does not fit");
    return { Shape::columns,
             norm_backward_ring < Shape,
             1,
             Residual ? 3 : 2,
             Full,
             Again >,
             Shape::threads,
             Shape::Teams * Shape::Rows,
             132,
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

/* A ring's shape. Little under way is best: more read at a time leaves the writes behind. On one H200 three stages instead of
 * six took 7 % less of RMSNorm of 65536 x 1024 and 32768 x 2048, two instead of three 3 % of 4096 x 8192. Where barriers come
 * often rows are written late: 3 to 6 %. */
template <unsigned Columns, bool Full, bool Again = false>
constexpr norm_kernel choose_backward_ring()
{
    if constexpr (Columns == 256)
        return backward_ring<norm_ring<32, 16, 1, 2, 6>, Full, false, Again>();
    else if constexpr (Columns == 512)
        return backward_ring<norm_ring<32, 16, 2, 1, 6>, Full, false, Again>();
    else if constexpr (Columns == 1024 && Full)
        return backward_ring<norm_ring<64, 8, 2, 1, 3>, Full, false, Again>();
    else if constexpr (Columns == 1024)
        return backward_ring<norm_ring<128, 4, 1, 2, 3, true>, Full, false, Again>();
    else if constexpr (Columns == 2048 && Full)
        return backward_ring<norm_ring<128, 4, 2, 1, 2>, Full, false, Again>();
    else if constexpr (Columns == 2048)
        return backward_ring<norm_ring<256, 2, 1, 2, 3, true>, Full, false, Again>();
    else if constexpr (Columns == 4096 && Full)
        return backward_ring<norm_ring<256, 2, 2, 1, 3>, Full, false, Again>();
    else if constexpr (Columns == 4096)
        return backward_ring<norm_ring<512, 1, 1, 2, 3>, Full, false, Again>();
    else if constexpr (Columns == 6144)
        return backward_ring<norm_ring<256, 2, 3, 1, 2>, Full, false, Again>();
    else if constexpr (Columns == 8192 && Full)
        return backward_ring<norm_ring<512, 1, 2, 2, 2>, Full, false, Again>();
    else if constexpr (Columns == 8192)
        return backward_ring<norm_ring<512, 1, 2, 1, 2>, Full, false, Again>();
    else
        return choose_backward_rows<Columns, Full>();
}

/* With a gradient of s beside. */
template <unsigned Columns, bool Full, bool Again = false>
constexpr norm_kernel choose_backward_residual()
{
    if constexpr (Columns == 256)
        return backward_ring<norm_ring<32, 16, 1, 2, 4>, Full, true, Again>();
    else if constexpr (Columns == 512)
        return backward_ring<norm_ring<32, 16, 2, 1, 4>, Full, true, Again>();
    else if constexpr (Columns == 1024)
        return backward_ring<norm_ring<128, 4, 1, 4, 2>, Full, true, Again>();
    else if constexpr (Columns == 2048)
        return backward_ring<norm_ring<128, 4, 2, 1, 4>, Full, true, Again>();
    else if constexpr (Columns == 4096 && Full)
        return backward_ring<norm_ring<256, 2, 2, 1, 4>, Full, true, Again>();
    else if constexpr (Columns == 4096)
        return backward_ring<norm_ring<512, 1, 1, 2, 4>, Full, true, Again>();
    else if constexpr (Columns == 6144)
        return backward_ring<norm_ring<256, 2, 3, 1, 2>, Full, true, Again>();
    else if constexpr (Columns == 8192)
        return backward_ring<norm_ring<512, 1, 2, 1, 4>, Full, true, Again>();
    else
        return choose_backward_rows<Columns, Full>();
}

#ifdef LK_COMPUTE_VARIANTS
template <unsigned Columns, bool Full> constexpr norm_kernel try_pairs()
{
    if constexpr (Columns == 256)
        return backward_ring<norm_ring<32, 16, 1, 4, 2>, Full, false>();
    else if constexpr (Columns == 512)
        return backward_ring<norm_ring<32, 16, 2, 2, 2>, Full, false>();
    else if constexpr (Columns == 1024)
        return backward_ring<norm_ring<64, 8, 2, 2, 2>, Full, false>();
    else if constexpr (Columns == 2048)
        return backward_ring<norm_ring<128, 4, 2, 2, 2>, Full, false>();
    else if constexpr (Columns == 4096)
        return backward_ring<norm_ring<256, 2, 2, 2, 2>, Full, false>();
    else if constexpr (Columns == 8192)
        return backward_ring<norm_ring<512, 1, 2, 3, 2>, Full, false>();
    else
        return choose_backward_ring<Columns, Full>();
}

template <unsigned Columns, bool Full> constexpr norm_kernel try_other_teams()
{
    if constexpr (Columns == 512)
        return backward_ring<norm_ring<64, 8, 1, 2, 3>, Full, false>();
    else if constexpr (Columns == 1024)
        return backward_ring<norm_ring<64, Full ? 6 : 8, 2, 1, 3>, Full, false>();
    else if constexpr (Columns == 2048)
        return backward_ring<norm_ring<128, Full ? 3 : 4, 2, 1, 3>, Full, false>();
    else if constexpr (Columns == 4096)
        return backward_ring<norm_ring<256, 2, 2, 1, Full ? 4 : 3>, Full, false>();
    else if constexpr (Columns == 6144)
        return backward_ring<norm_ring<384, 1, 2, 2, 2>, Full, false>();
    else if constexpr (Columns == 8192)
        return backward_ring<norm_ring<256, 2, 4, 1, 2>, Full, false>();
    else
        return choose_backward_ring<Columns, Full>();
}

template <unsigned Columns, bool Full, bool Residual> constexpr norm_kernel try_short()
{
    if constexpr (Columns == 256)
        return backward_ring<norm_ring<32, 16, 1, 2, 3>, Full, Residual>();
    else if constexpr (Columns == 512)
        return backward_ring<norm_ring<32, 16, 2, 1, 3>, Full, Residual>();
    else if constexpr (Columns == 1024 && Residual)
        return backward_ring<norm_ring<64, 8, 2, 1, 3>, Full, Residual>();
    else if constexpr (Columns == 1024 && Full)
        return backward_ring<norm_ring<64, 8, 2, 1, 2>, Full, Residual>();
    else if constexpr (Columns == 1024)
        return backward_ring<norm_ring<128, 4, 1, 2, 2, true>, Full, Residual>();
    else if constexpr (Columns == 2048 && !Full && !Residual)
        return backward_ring<norm_ring<256, 2, 1, 2, 2, true>, Full, Residual>();
    else if constexpr (Columns == 2048)
        return backward_ring<norm_ring<128, 4, 2, 1, 2>, Full, Residual>();
    else if constexpr (Columns == 4096 && Full)
        return backward_ring<norm_ring<256, 2, 2, 1, 2>, Full, Residual>();
    else if constexpr (Columns == 4096)
        return backward_ring<norm_ring<512, 1, 1, 2, 2>, Full, Residual>();
    else if constexpr (Columns == 8192)
        return backward_ring<norm_ring<512, 1, 2, 1, Residual || Full ? 2 : 3>, Full, Residual>();
    else if constexpr (Residual)
        return choose_backward_residual<Columns, Full>();
    else
        return choose_backward_ring<Columns, Full>();
}

template <unsigned Columns, bool Full> constexpr norm_kernel try_late()
{
    if constexpr (Columns == 1024 && Full)
        return backward_ring<norm_ring<64, 8, 2, 1, 3, true>, Full, false>();
    else if constexpr (Columns == 1024)
        return backward_ring<norm_ring<128, 4, 1, 2, 3>, Full, false>();
    else if constexpr (Columns == 2048 && Full)
        return backward_ring<norm_ring<128, 4, 2, 1, 3, true>, Full, false>();
    else if constexpr (Columns == 2048)
        return backward_ring<norm_ring<256, 2, 1, 2, 3>, Full, false>();
    else if constexpr (Columns == 4096 && Full)
        return backward_ring<norm_ring<256, 2, 2, 1, 3, true>, Full, false>();
    else if constexpr (Columns == 4096)
        return backward_ring<norm_ring<512, 1, 1, 2, 3, true>, Full, false>();
    else if constexpr (Columns == 6144)
        return backward_ring<norm_ring<256, 2, 3, 1, 3, true>, Full, false>();
    else if constexpr (Columns == 8192)
        return backward_ring<norm_ring<512, 1, 2, 1, 3, true>, Full, false>();
    else
        return choose_backward_ring<Columns, Full>();
}

template <norm_backward_form Form, unsigned Columns, bool Full, bool Residual>
constexpr norm_kernel try_backward()
{
    if constexpr (Residual)
        return try_short<Columns, Full, true>();
    else if constexpr (Form == BACKWARD_PAIRS)
        return try_pairs<Columns, Full>();
    else if constexpr (Form == BACKWARD_OTHER_TEAMS)
        return try_other_teams<Columns, Full>();
    else if constexpr (Form == BACKWARD_SHORT)
        return try_short<Columns, Full, false>();
    else
        return try_late<Columns, Full>();
}
#endif

template <norm_backward_form Form, unsigned Columns, bool Full, bool Residual>
constexpr norm_kernel choose_backward()
{
#ifdef LK_COMPUTE_VARIANTS
    if constexpr (Form > BACKWARD_RING)
        return try_backward<Form, Columns, Full, Residual>();
#endif
    if constexpr (Form == BACKWARD_ROWS)
        return choose_backward_rows<Columns, Full>();
    else if constexpr (Residual)
        return choose_backward_residual<Columns, Full>();
    else
        return choose_backward_ring<Columns, Full>();
}

/* The same rows as the product's form, and y made anew beside dx; for classes that have a ring. */
template <unsigned Columns, bool Full, bool Residual> constexpr norm_kernel choose_backward_again()
{
    if constexpr (Columns > NORM_AGAIN_MOST)
        return norm_kernel{};
    else if constexpr (Residual)
        return choose_backward_residual<Columns, Full, true>();
    else
        return choose_backward_ring<Columns, Full, true>();
}

#endif
