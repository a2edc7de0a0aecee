/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/kernels/peers.h"

#include <stdio.h>
#include <stdlib.h>

#define PRODUCTS 8 /* of a graph: about 12 ms */
#define MOST     9 /* samples */

static cudaGraphExec_t products[RANKS_MAX];

struct times {
    double sum_us, product_us; /* of one */
};

static void make_products(void)
{
    for (uint32_t r = 0; r < bench.ranks; r++) {
        cudaGraph_t graph;

        library_gemm(r); /* chooses its method outside of captures */
        CUDA(cudaStreamSynchronize(bench.of[r].other));
        CUDA(cudaStreamBeginCapture(bench.of[r].other, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < PRODUCTS; i++)
            library_gemm(r);
        CUDA(cudaStreamEndCapture(bench.of[r].other, &graph));
        CUDA(cudaGraphInstantiate(&products[r], graph, 0));
        CUDA(cudaGraphDestroy(graph));
    }
}

static double longest(bool of_products)
{
    double worst = 0;

    for (uint32_t r = 0; r < bench.ranks; r++) {
        const struct rank *k = &bench.of[r];
        float ms;

        CUDA(cudaEventSynchronize(of_products ? k->other_end : k->end));
        CUDA(cudaEventElapsedTime(&ms, of_products ? k->other_begin : k->begin,
                                  of_products ? k->other_end : k->end));
        worst = (double)ms * 1000 > worst ? (double)ms * 1000 : worst;
    }
    return worst;
}

/* So many graphs of each, at once. What there are fewer of ends while the other one goes on. */
static struct times run(const struct row *row, int sums, int of_products)
{
    struct times t = { 0, 0 };

    for (uint32_t r = 0; r < bench.ranks; r++) {
        const struct rank *k = &bench.of[r];

        bench_use(r);
        CUDA(cudaEventRecord(k->other_begin, k->other));
        CUDA(cudaEventRecord(k->begin, k->stream));
        for (int i = 0; i < of_products; i++)
            CUDA(cudaGraphLaunch(products[r], k->other));
        CUDA(cudaEventRecord(k->other_end, k->other));
    }
    for (uint32_t r = 0; r < bench.ranks; r++) {
        const struct rank *k = &bench.of[r];

        bench_use(r);
        for (int i = 0; i < sums; i++)
            CUDA(cudaGraphLaunch(row->graphs[r], k->stream));
        CUDA(cudaEventRecord(k->end, k->stream));
    }
    if (sums)
        t.sum_us = longest(false) / sums / row->calls;
    if (of_products)
        t.product_us = longest(true) / of_products / PRODUCTS;
    for (uint32_t r = 0; r < bench.ranks; r++) {
        bench_use(r);
        CUDA(cudaDeviceSynchronize());
    }
    return t;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static struct times median(const struct row *row, int sums, int of_products)
{
    double sum[MOST], product[MOST];

    run(row, sums, of_products);
    for (int i = 0; i < MOST; i++) {
        struct times t = run(row, sums, of_products);

        sum[i] = t.sum_us;
        product[i] = t.product_us;
    }
    qsort(sum, MOST, sizeof(*sum), by_value);
    qsort(product, MOST, sizeof(*product), by_value);
    return (struct times){ sum[MOST / 2], product[MOST / 2] };
}

void beside_measure(struct row *row)
{
    static bool made;
    struct times alone, many_sums, many_products;

    if (!made)
        make_products();
    made = true;
    alone.sum_us = median(row, 2, 0).sum_us;
    alone.product_us = median(row, 0, 2).product_us;
    /* Of each what it takes while the other one runs all the time. */
    many_sums = median(row,
                       (int)(3 * PRODUCTS * alone.product_us / (alone.sum_us * row->calls)) + 2, 1);
    many_products = median(
        row, 1, (int)(4 * alone.sum_us * row->calls / (PRODUCTS * alone.product_us)) + 2);
    printf(
        "beside: %-28s %-32s %3u CTAs: product %8.1f us alone, %8.1f beside (%.3f); sum %8.1f alone, "
        "%8.1f beside (%.3f)  %s\n",
        row->c->what, row->name, row->ctas, alone.product_us, many_sums.product_us,
        many_sums.product_us / alone.product_us, alone.sum_us, many_products.sum_us,
        many_products.sum_us / alone.sum_us, row->verified ? "right" : "WRONG");
    printf("{\"schema\":\"loongcomm.beside/1\",\"case\":\"%s\",\"name\":\"%s\",\"ctas\":%u,"
           "\"product_alone_us\":%.2f,\"product_beside_us\":%.2f,\"sum_alone_us\":%.2f,"
           "\"sum_beside_us\":%.2f,\"verified\":%s}\n",
           row->c->what, row->name, row->ctas, alone.product_us, many_sums.product_us, alone.sum_us,
           many_products.sum_us, row->verified ? "true" : "false");
    fflush(stdout);
}
