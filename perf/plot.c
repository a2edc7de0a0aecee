/* SPDX-License-Identifier: Apache-2.0
 *
 * `plot FILE...`: a picture (SVG, standard output) of stored results. One row a case: the grey bar is NCCL's time, the
 * coloured one loongcomm's in the same run, drawn as a share of it, so that cases of any size stand side by side. */
#include "perf/bench.h"
#include "perf/results.h"

#include <errno.h>
#include <string.h>

enum {
    EXIT_DRAWN = 0,
    EXIT_REFUSED = 2,
};

#ifdef LC_HAVE_CJSON
enum {
    ROW = 30,
    LABEL = 300,  /* width of the words on the left */
    TRACK = 380,  /* NCCL's time */
    BEYOND = 260, /* room on the right: slower than NCCL, up to 1.5 of its time, or figures */
    TOP = 46,
};

/* SVG is XML, and texts of a file are anybody's. */
static void put_text(const char *text)
{
    for (; *text; text++) {
        switch (*text) {
        case '<': fputs("&lt;", stdout); break;
        case '>': fputs("&gt;", stdout); break;
        case '&': fputs("&amp;", stdout); break;
        default: putchar(*text);
        }
    }
}

static void put_size(double bytes)
{
    static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB" };
    size_t unit = 0;

    while (bytes >= 1024 && unit + 1 < sizeof(units) / sizeof(*units)) {
        bytes /= 1024;
        unit++;
    }
    printf("%.3g %s", bytes, units[unit]);
}

static void put_label(const struct lc_result *row)
{
    put_text(row->op);
    putchar(' ');
    put_text(row->dtype);
    putchar(' ');
    put_size(row->bytes);
    if (row->tensors > 1)
        printf(" in %.0f", row->tensors);
    if (row->live < 1)
        printf(", %.0f %% live", 100 * row->live);
    printf(", %.0f ranks", row->ranks);
}

static void put_time(double us)
{
    if (us >= 1e6)
        printf("%.3g s", us / 1e6);
    else if (us >= 1e3)
        printf("%.3g ms", us / 1e3);
    else
        printf("%.3g us", us);
}

/* Where a time, as a share of NCCL's, lies; a bar ends at 1.5 of it. */
static double place(double ratio)
{
    double share = 1 / ratio;

    return LABEL + TRACK * (share > 1.5 ? 1.5 : share);
}

static void put_row(const struct lc_result *row, int y)
{
    double end = place(row->median);

    printf("<text x=\"%d\" y=\"%d\" text-anchor=\"end\">", LABEL - 10, y + 16);
    put_label(row);
    printf("</text>\n<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"18\" class=\"nccl\"/>\n", LABEL,
           y + 2, TRACK);
    printf("<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"18\" class=\"%s\"/>\n", LABEL, y + 2,
           end - LABEL, row->median < 1 ? "slower" : "ours");
    printf("<path d=\"M%.1f %d V%d M%.1f %d V%d M%.1f %d H%.1f\" class=\"spread\"/>\n",
           place(row->p90), y + 7, y + 15, place(row->p10), y + 7, y + 15, place(row->p90), y + 11,
           place(row->p10));
    printf("<text x=\"%.1f\" y=\"%d\" class=\"figure\">%.2fx</text>",
           (end > LABEL + TRACK ? end : LABEL + TRACK) + 10, y + 16, row->median);
    if (row->us > 0 && row->median >= 1) {
        printf("<text x=\"%d\" y=\"%d\">", LABEL + TRACK + 66, y + 16);
        put_time(row->us * row->median);
        fputs(" to ", stdout);
        put_time(row->us);
        fputs("</text>", stdout);
    }
    putchar('\n');
}

static void put_head(const struct lc_results *first, int rows)
{
    int width = LABEL + TRACK + BEYOND, height = TOP + rows * ROW + 10;
    const char *gpu = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(first->machine, "gpu"));
    const char *nccl = cJSON_GetStringValue(
        cJSON_GetObjectItemCaseSensitive(first->machine, "nccl"));

    printf("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
           "viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" font-size=\"13\">\n"
           "<style>.nccl{fill:#d5d8dc}.ours{fill:#2874a6}.slower{fill:#c0392b}"
           ".spread{stroke:#17202a;fill:none}.figure{font-weight:bold}text{fill:#17202a}</style>\n"
           "<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n",
           width, height, width, height, width, height);
    printf("<text x=\"%d\" y=\"20\">time with loongcomm as a share of NCCL%s", LABEL,
           nccl ? " " : "");
    put_text(nccl ? nccl : "");
    fputs("'s; median, p10..p90 of rounds in turns", stdout);
    printf("</text>\n<text x=\"%d\" y=\"20\" text-anchor=\"end\" class=\"figure\">", LABEL - 10);
    put_text(gpu ? gpu : "no GPU: says nothing about speed");
    fputs("</text>\n", stdout);
}

static int draw(char **paths, int n)
{
    struct lc_results files[LC_BENCH_MAX_LIST] = { 0 };
    int loaded = 0, rows = 0, y = TOP;

    while (loaded < n && lc_results_load(paths[loaded], &files[loaded]) == 0)
        rows += files[loaded++].count;
    if (loaded == n) {
        put_head(&files[0], rows);
        for (int f = 0; f < n; f++) {
            for (int i = 0; i < files[f].count; i++, y += ROW)
                put_row(&files[f].records[i], y);
        }
        puts("</svg>");
    }
    for (int f = 0; f <= loaded && f < n; f++)
        lc_results_unload(&files[f]);
    return loaded == n && fflush(stdout) == 0 ? EXIT_DRAWN : EXIT_REFUSED;
}

int lc_bench_plot(int argc, char **argv)
{
    if (argc < 2 || argc - 1 > LC_BENCH_MAX_LIST || argv[1][0] == '-') {
        lc_bench_usage(stderr);
        return EXIT_REFUSED;
    }
    return draw(argv + 1, argc - 1);
}
#else
int lc_bench_plot(int argc, char **argv)
{
    fprintf(stderr, "loongcomm-bench: built without cJSON (libcjson-dev): no plot\n");
    return EXIT_REFUSED;
}
#endif
