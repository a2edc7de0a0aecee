/* SPDX-License-Identifier: Apache-2.0
 *
 * Inputs that are hard for the blocks of loongblocks.h. Included by a file of tests behind its shapes, make_case(), drop_case(),
 * backward_of(), forward(), backward() and check_case(), with the types of a case (x, dout, out, dx, call) and of the
 * arguments of backward: BLOCK_CASE and BLOCK_BACKWARD.
 */

/* Outliers, rows of one value, values far from 0: of rows, and of what reaches them from behind. */
static void hard_inputs_follow_the_formula(const struct compute_target *t, struct lk_blas *blas)
{
    uint64_t state = 223;

    for (unsigned int i = 0; i < 3 * FILLINGS; i++) {
        BLOCK_CASE c = make_case(t, &shapes[1 + i / FILLINGS], i % TRAITS, &state);

        typed_refill(&c.x, (enum filling)(i % FILLINGS), &state);
        typed_refill(&c.dout, i % 2 ? FILL_LARGE : FILL_EQUAL, &state);
        check_case(t, blas, &c);
        drop_case(&c);
    }
}

/* What is not finite in a row of x makes that row of the result NaN; in one of dout, that row of dx: others keep their bits. */
static void what_is_not_finite_stays_in_its_row(const struct compute_target *t,
                                                struct lk_blas *blas)
{
    static const double bad[] = { NAN, INFINITY, -INFINITY };

    for (unsigned int i = 0; i < 2 * sizeof(bad) / sizeof(*bad); i++) {
        uint64_t state = 227;
        BLOCK_CASE good = make_case(t, &shapes[1], i % 2, &state), c;
        BLOCK_BACKWARD b = backward_of(&good);

        CHECK(forward(t, blas, &good) == 0 && backward(t, blas, &good, &b) == 0);
        state = 227;
        c = make_case(t, &shapes[1], i % 2, &state);
        typed_set(&c.x, 2, 5, bad[i / 2]);
        CHECK(forward(t, blas, &c) == 0);
        for (uint64_t r = 0; r < c.call.rows; r++) {
            CHECK(r == 2 || typed_same(&c.out, &good.out, r));
            for (uint64_t k = 0; r == 2 && k < c.out.columns; k++)
                CHECK(isnan(typed_get(&c.out, r, k)));
        }
        drop_case(&c);
        state = 227;
        c = make_case(t, &shapes[1], i % 2, &state);
        typed_set(&c.dout, 4, 5, bad[i / 2]);
        b = backward_of(&c);
        CHECK(forward(t, blas, &c) == 0 && backward(t, blas, &c, &b) == 0);
        for (uint64_t r = 0; r < c.call.rows; r++) {
            CHECK(r == 4 || typed_same(&c.dx, &good.dx, r));
            for (uint64_t k = 0; r == 4 && k < c.dx.columns; k++)
                CHECK(!isfinite(typed_get(&c.dx, r, k)));
        }
        drop_case(&c);
        drop_case(&good);
    }
}
