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
    FORWARD_ROWS_MORE,   /* more blocks, which hold less */
    FORWARD_ROWS_WIDE,   /* more threads for a row */
    FORWARD_ROWS_HELD,   /* more of a row, or more rows, for each thread */
    FORWARD_ROWS_NARROW, /* fewer threads for a row, which hold more */
    NORM_FORWARD_FORMS
};

enum norm_backward_form {
    BACKWARD_ROWS,
    BACKWARD_RING,
    NORM_BACKWARD_FORMS
};

constexpr const char *NORM_FORWARD_NAMES[] = { "rows",
                                               "ring",
                                               "rows, more blocks",
                                               "rows, more threads",
                                               "rows, more of a thread",
                                               "rows, fewer threads" };
constexpr const char *NORM_BACKWARD_NAMES[] = { "rows", "ring" };

/* The product's form of each class: [with a mean][with a residual]. Measured on one H200, us by rows and by the form: RMSNorm of
 * 32768 x 2048 69.4, 68.4, with a residual 133.1, 131.2, of 8192 x 5120 50.3, 45.1; LayerNorm of 65536 x 1024 75.8, 72.3, with a
 * residual 135.7, 130.7, of 32768 x 2048 83.4, 69.9, of 16384 x 4096 74.8, 70.6, of 8192 x 5120 59.2, 49.3, of 4096 x 8192 42.0,
 * 39.8, with a residual 70.7, 69.0. Rows were the best or within 1 % of it in the other cases of 1024 to 8192 columns. Classes of
 * 256, 512 and 16384, and those of 1024 and 6144 with a residual of which nothing is said, have not been measured. A mean and
 * squares with one barrier, each warp's around its own mean, were slower: LayerNorm of 4096 x 8192 41.1, of 16384 x 4096 71.8. */
constexpr norm_forward_form NORM_FORWARD_FORM[2][2][NORM_CLASS_COUNT] = {
    {{ FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS_HELD, FORWARD_ROWS,
        FORWARD_ROWS_MORE, FORWARD_ROWS, FORWARD_ROWS },
     { FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS_WIDE, FORWARD_ROWS, FORWARD_RING,
        FORWARD_ROWS, FORWARD_ROWS }     },
    { { FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS_MORE, FORWARD_ROWS_HELD, FORWARD_ROWS_HELD,
        FORWARD_RING, FORWARD_ROWS_HELD, FORWARD_ROWS },
     { FORWARD_ROWS, FORWARD_ROWS, FORWARD_ROWS_WIDE, FORWARD_ROWS, FORWARD_ROWS, FORWARD_RING,
        FORWARD_ROWS_MORE, FORWARD_ROWS }},
};

/* Of statistics alone, which are nobody's but their caller's. Of LayerNorm, us by rows and by the form: 65536 x 1024
 * 34.7, 32.7, 32768 x 2048 55.2, 32.7, 16384 x 4096 41.5, 33.1, 4096 x 8192 19.8, 17.3. */
constexpr norm_forward_form statistics_form(bool layer, unsigned columns)
{
    return !layer                               ? FORWARD_ROWS
           : columns == 1024                    ? FORWARD_ROWS_MORE
           : columns == 4096                    ? FORWARD_ROWS_HELD
           : columns == 2048 || columns == 8192 ? FORWARD_ROWS_NARROW
                                                : FORWARD_ROWS;
}

/* Measured on one H200, us by rows and by a ring, without and with a mean or dbeta: 131072 x 256 59, 56; 63, 55; 131072 x 512
 * 111, 110; 118, 111; 65536 x 1024 122, 102; 130, 102; 32768 x 2048 126, 101; 135, 104; 16384 x 4096 122, 100; 132, 106; 8192 x
 * 5120 104, 67; 115, 69; 4096 x 8192 73, 55; 83, 60. Rows of 16384 columns have no other form. Two teams of 512 threads, with the
 * weights in shared memory, took 60 and 65 of 4096 x 8192, 101 and 128 of 16384 x 4096. */
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

template <class Shape, bool Layer, bool Residual> constexpr norm_kernel forward_ring()
{
    static_assert(Shape::bytes(Residual ? 2 : 1) <= NORM_RING_MOST, "does not fit");
    return { Shape::columns,
             norm_forward_ring < Shape,
             Residual ? 2 : 1,
             Layer >,
             Shape::threads,
             Shape::Teams * Shape::Rows,
             132,
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

template <unsigned Columns, bool Layer> constexpr norm_kernel choose_forward_more()
{
    if constexpr (Columns == 1024)
        return forward_rows<32, 4, Layer, 4, 5, true>();
    else if constexpr (Columns == 6144)
        return forward_rows<256, 3, Layer, 3, 5, true>();
    else if constexpr (Columns == 8192)
        return forward_rows<512, 2, Layer, 2, 3, true>();
    else
        return choose_forward_rows<Columns, Layer>();
}

template <unsigned Columns, bool Layer> constexpr norm_kernel choose_forward_wide()
{
    if constexpr (Columns == 1024)
        return forward_rows<128, 1, Layer, 2, 8, true>();
    else if constexpr (Columns == 2048)
        return forward_rows<256, 1, Layer, 1, 6, true>();
    else if constexpr (Columns == 4096)
        return forward_rows<256, 2, Layer, 2, 6, true>();
    else
        return choose_forward_rows<Columns, Layer>();
}

template <unsigned Columns, bool Layer> constexpr norm_kernel choose_forward_held()
{
    if constexpr (Columns == 2048)
        return forward_rows<128, 2, Layer, 8, 6>();
    else if constexpr (Columns == 4096)
        return forward_rows<128, 4, Layer, 8, 6>();
    else if constexpr (Columns == 8192)
        return forward_rows<256, 4, Layer, 8, 3>();
    else
        return choose_forward_rows<Columns, Layer>();
}

template <unsigned Columns, bool Layer> constexpr norm_kernel choose_forward_narrow()
{
    if constexpr (Columns == 2048)
        return forward_rows<32, 8, Layer, 8, 3>();
    else if constexpr (Columns == 8192)
        return forward_rows<128, 8, Layer, 8, 6>();
    else
        return choose_forward_rows<Columns, Layer>();
}

/* Of 6144 columns alone: others were slower than rows. */
template <unsigned Columns, bool Layer, bool Residual> constexpr norm_kernel choose_forward_ring()
{
    if constexpr (Columns == 6144 && Layer && !Residual)
        return forward_ring<norm_ring<256, 2, 3, 2, 2>, Layer, Residual>();
    else if constexpr (Columns == 6144)
        return forward_ring<norm_ring<256, 2, 3, 1, 4>, Layer, Residual>();
    else
        return choose_forward_rows<Columns, Layer>();
}

template <norm_forward_form Form, unsigned Columns, bool Layer, bool Residual>
constexpr norm_kernel choose_forward()
{
    if constexpr (Form == FORWARD_RING)
        return choose_forward_ring<Columns, Layer, Residual>();
    else if constexpr (Form == FORWARD_ROWS_MORE)
        return choose_forward_more<Columns, Layer>();
    else if constexpr (Form == FORWARD_ROWS_WIDE)
        return choose_forward_wide<Columns, Layer>();
    else if constexpr (Form == FORWARD_ROWS_HELD)
        return choose_forward_held<Columns, Layer>();
    else if constexpr (Form == FORWARD_ROWS_NARROW)
        return choose_forward_narrow<Columns, Layer>();
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
        return backward_ring<norm_ring<32, 16, 1, 2, 3>, Full, false, Again>();
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

/* With a gradient of s beside. Two stages instead of four: 4 to 5 % less of 2048 and 4096 columns, 3 to 5 % of 8192. */
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
        return backward_ring<norm_ring<128, 4, 2, 1, 2>, Full, true, Again>();
    else if constexpr (Columns == 4096 && Full)
        return backward_ring<norm_ring<256, 2, 2, 1, 2>, Full, true, Again>();
    else if constexpr (Columns == 4096)
        return backward_ring<norm_ring<512, 1, 1, 2, 2>, Full, true, Again>();
    else if constexpr (Columns == 6144)
        return backward_ring<norm_ring<256, 2, 3, 1, 2>, Full, true, Again>();
    else if constexpr (Columns == 8192)
        return backward_ring<norm_ring<512, 1, 2, 1, 2>, Full, true, Again>();
    else
        return choose_backward_rows<Columns, Full>();
}

template <norm_backward_form Form, unsigned Columns, bool Full, bool Residual>
constexpr norm_kernel choose_backward()
{
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
