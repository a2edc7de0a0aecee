/* SPDX-License-Identifier: Apache-2.0
 *
 * Boxes in boxes: what lies in one box reaches each other without leaving it. GPUs above, NICs below, so that a pair
 * under one switch stands together; NVLink is a green foot of the GPU, told once at the top where all go through
 * switches and as a table where they go from GPU to GPU. */
#include "topology/print.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PAD        10.0
#define HEAD       22.0 /* the label of a box */
#define DEVICE     132.0
#define GPU_HEIGHT 78.0
#define LINE       15.0
#define PAGE       1700.0 /* boxes of NUMA nodes go on in a new row beyond it */
#define MAX_PORTS  4      /* drawn for each NIC */
#define MAX_TABLE  16     /* GPUs in the table of links */
#define MAX_NOTES  6

struct box {
    double x, y, w, h;
};

struct picture {
    const struct lc_topo *topo;
    FILE *out;
    struct box *boxes; /* of each node; w 0: not drawn */
    double width, height;
};

static void escaped(FILE *out, const char *text)
{
    for (; *text; text++) {
        switch (*text) {
        case '<': (void)fputs("&lt;", out); break;
        case '>': (void)fputs("&gt;", out); break;
        case '&': (void)fputs("&amp;", out); break;
        case '"': (void)fputs("&quot;", out); break;
        default: (void)fputc(*text, out);
        }
    }
}

static void text_at(const struct picture *picture, double x, double y, const char *class,
                    const char *text)
{
    (void)fprintf(picture->out, "<text x=\"%.0f\" y=\"%.0f\" class=\"%s\">", x, y, class);
    escaped(picture->out, text);
    (void)fputs("</text>\n", picture->out);
}

static void rect(const struct picture *picture, const struct box *box, const char *class)
{
    (void)fprintf(picture->out,
                  "<rect x=\"%.0f\" y=\"%.0f\" width=\"%.0f\" height=\"%.0f\" rx=\"5\" "
                  "class=\"%s\"/>\n",
                  box->x, box->y, box->w, box->h, class);
}

static int port_count(const struct lc_topo *topo, int nic)
{
    int count = 0;

    for (int at = nic < 0 ? -1 : topo->nodes[nic].child; at >= 0; at = topo->nodes[at].next)
        count++;
    return count;
}

static int nic_of(const struct lc_topo *topo, int index)
{
    if (topo->nodes[index].type == LC_TOPO_NIC)
        return index;
    return lc_topo_find_child(topo, index, LC_TOPO_NIC, NULL, NULL);
}

static bool is_container(const struct lc_topo_node *node)
{
    return node->type == LC_TOPO_SYSTEM || node->type == LC_TOPO_CPU ||
           (node->type == LC_TOPO_PCI && node->pci.kind == LC_TOPO_PCI_BRIDGE);
}

/* Rows of a box: GPUs, then boxes, then NICs and the rest. */
static int row_of(const struct lc_topo_node *node)
{
    if (node->type == LC_TOPO_PCI && node->pci.kind == LC_TOPO_PCI_GPU)
        return 0;
    return is_container(node) ? 1 : 2;
}

static bool is_drawn(const struct lc_topo_node *node)
{
    return node->type == LC_TOPO_CPU || node->type == LC_TOPO_PCI || node->type == LC_TOPO_NIC;
}

static void measure_device(struct picture *picture, int index)
{
    const struct lc_topo_node *node = &picture->topo->nodes[index];
    struct box *box = &picture->boxes[index];
    int nic = nic_of(picture->topo, index);
    int ports = port_count(picture->topo, nic);

    box->w = DEVICE;
    if (node->type == LC_TOPO_PCI && node->pci.kind == LC_TOPO_PCI_GPU)
        box->h = GPU_HEIGHT;
    else
        box->h = 10 +
                 LINE *
                     (nic < 0 ? 2 : 1 + (ports < MAX_PORTS ? (ports ? ports : 1) : MAX_PORTS + 1));
}

static void measure(struct picture *picture, int index);

/* Boxes of one line end alike. */
static void level(struct picture *picture, int first, int end, int row, double height)
{
    const struct lc_topo_node *nodes = picture->topo->nodes;

    for (int at = first; at != end; at = nodes[at].next) {
        if (is_drawn(&nodes[at]) && row_of(&nodes[at]) == row && is_container(&nodes[at]))
            picture->boxes[at].h = height;
    }
}

/* Puts the children of one row side by side below *y, in lines no wider than `most`. */
static void flow(struct picture *picture, int parent, int row, double most, double *y)
{
    const struct lc_topo_node *nodes = picture->topo->nodes;
    struct box *boxes = picture->boxes;
    int first = nodes[parent].child;
    double tallest = 0;
    double x = PAD;

    for (int at = first; at >= 0; at = nodes[at].next) {
        if (!is_drawn(&nodes[at]) || row_of(&nodes[at]) != row)
            continue;
        measure(picture, at);
        if (x > PAD && x + boxes[at].w > most) {
            level(picture, first, at, row, tallest);
            first = at;
            *y += tallest + PAD;
            x = PAD;
            tallest = 0;
        }
        boxes[at].x = x;
        boxes[at].y = *y;
        x += boxes[at].w + PAD;
        if (boxes[at].h > tallest)
            tallest = boxes[at].h;
        if (x > boxes[parent].w)
            boxes[parent].w = x;
    }
    level(picture, first, -1, row, tallest);
    if (tallest > 0)
        *y += tallest + PAD;
}

static int devices_below(const struct lc_topo *topo, int index)
{
    int count = 0;

    for (int at = topo->nodes[index].child; at >= 0; at = topo->nodes[at].next)
        count += is_drawn(&topo->nodes[at]) && !is_container(&topo->nodes[at]);
    return count;
}

/* Positions are relative to the parent until place() adds them up. */
static void measure(struct picture *picture, int index)
{
    const struct lc_topo_node *node = &picture->topo->nodes[index];
    struct box *box = &picture->boxes[index];
    double line = 4 * (DEVICE + PAD) + PAD;
    double y = HEAD;

    if (!is_container(node)) {
        measure_device(picture, index);
        return;
    }
    box->w = DEVICE + 2 * PAD;
    if (devices_below(picture->topo, index) > 16)
        line = 8 * (DEVICE + PAD) + PAD;
    flow(picture, index, 0, line, &y);
    flow(picture, index, 1, node->type == LC_TOPO_SYSTEM ? PAGE : PAGE / 2 - PAD, &y);
    flow(picture, index, 2, line, &y);
    box->h = y;
    if (y == HEAD)
        box->h += LINE;
}

static void place(struct picture *picture, int index, double x, double y)
{
    const struct lc_topo_node *nodes = picture->topo->nodes;
    struct box *box = &picture->boxes[index];

    box->x += x;
    box->y += y;
    for (int at = nodes[index].child; at >= 0 && is_container(&nodes[index]); at = nodes[at].next) {
        if (is_drawn(&nodes[at]))
            place(picture, at, box->x, box->y);
    }
}

static void draw_gpu(const struct picture *picture, int index)
{
    const struct lc_topo *topo = picture->topo;
    struct box box = picture->boxes[index];
    int gpu = lc_topo_find_child(topo, index, LC_TOPO_GPU, NULL, NULL);
    struct lc_topo_text title = { .used = 0 };
    struct lc_topo_text link = { .used = 0 };
    int links[2] = { 0, 0 };

    rect(picture, &box, "gpu");
    lc_topo_say(&title, "GPU");
    if (gpu >= 0)
        lc_topo_say(&title, " %d", lc_topo_gpu_number(topo, gpu));
    text_at(picture, box.x + 8, box.y + 20, "name", title.s);
    text_at(picture, box.x + 8, box.y + 35, "small", topo->nodes[index].id);
    if (gpu >= 0 && topo->nodes[gpu].gpu.sm >= 0 && topo->format != LC_TOPO_RCCL)
        lc_topo_say(&link, "sm_%d  ", topo->nodes[gpu].gpu.sm);
    lc_topo_say_link(&link, &topo->nodes[index].pci);
    text_at(picture, box.x + 8, box.y + 49, "small", link.s);
    for (int at = gpu < 0 ? -1 : topo->nodes[gpu].child; at >= 0; at = topo->nodes[at].next) {
        if (topo->nodes[at].type == LC_TOPO_NVLINK || topo->nodes[at].type == LC_TOPO_XGMI)
            links[topo->nodes[at].type == LC_TOPO_XGMI] += topo->nodes[at].link.count;
    }
    if (links[0] + links[1]) {
        struct box foot = { box.x, box.y + box.h - 20, box.w, 20 };
        struct lc_topo_text text = { .used = 0 };

        rect(picture, &foot, links[0] ? "nvlink" : "xgmi");
        lc_topo_say(&text, "%s x%d", links[0] ? "NVLink" : "XGMI", links[0] ? links[0] : links[1]);
        text_at(picture, box.x + 8, box.y + box.h - 6, "foot", text.s);
    }
}

static void draw_device(const struct picture *picture, int index)
{
    const struct lc_topo *topo = picture->topo;
    const struct lc_topo_node *node = &topo->nodes[index];
    struct box box = picture->boxes[index];
    int nic = nic_of(topo, index);
    double y = box.y + 5 + LINE - 3;
    int drawn = 0;

    if (nic < 0) {
        rect(picture, &box, "other");
        text_at(picture, box.x + 8, y, "label",
                node->pci.kind == LC_TOPO_PCI_NIC        ? "NIC without driver"
                : node->pci.kind == LC_TOPO_PCI_NVSWITCH ? "NVSwitch"
                                                         : "PCI function");
        text_at(picture, box.x + 8, y + LINE, "small", node->id);
        return;
    }
    rect(picture, &box, "nic");
    for (int at = topo->nodes[nic].child; at >= 0 && drawn < MAX_PORTS; at = topo->nodes[at].next) {
        struct lc_topo_text text = { .used = 0 };

        lc_topo_say(&text, "%.10s", *topo->nodes[at].id ? topo->nodes[at].id : "(no name)");
        text_at(picture, box.x + 8, y, "port", text.s);
        text = (struct lc_topo_text){ .used = 0 };
        lc_topo_say_net(&text, topo, at);
        text_at(picture, box.x + box.w - 8, y, "right", text.s);
        y += LINE;
        drawn++;
    }
    if (port_count(topo, nic) != drawn || !drawn) {
        struct lc_topo_text text = { .used = 0 };

        lc_topo_say(&text, drawn ? "and %d more ports" : "NIC without port",
                    port_count(topo, nic) - drawn);
        text_at(picture, box.x + 8, y, "small", text.s);
        y += LINE;
    }
    text_at(picture, box.x + 8, y, "small",
            node->type == LC_TOPO_PCI ? node->id : "no PCI function");
}

static void draw_container(const struct picture *picture, int index)
{
    const struct lc_topo_node *node = &picture->topo->nodes[index];
    const struct box *box = &picture->boxes[index];
    struct lc_topo_text label = { .used = 0 };

    if (node->type == LC_TOPO_CPU) {
        if (node->cpu.numa < 0)
            lc_topo_say(&label, "NUMA node unknown");
        else
            lc_topo_say(&label, "NUMA %d", node->cpu.numa);
        if (node->cpu.cpus) {
            lc_topo_say(&label, "   CPUs ");
            lc_topo_say_cpus(&label, node->cpu.cpus);
        }
    } else {
        lc_topo_say(&label, "%s", node->id + (strncmp(node->id, "0000:", 5) == 0 ? 5 : 0));
        lc_topo_say(&label, "  ");
        lc_topo_say_link(&label, &node->pci);
    }
    if ((double)label.used > box->w / 6.6) /* the letters of a label are at most that wide */
        (void)snprintf(label.s + (size_t)(box->w / 6.6) - 2, 3, "..");
    rect(picture, box, node->type == LC_TOPO_CPU ? "numa" : "switch");
    text_at(picture, box->x + 8, box->y + 15, "label", label.s);
}

static void draw(const struct picture *picture, int index)
{
    const struct lc_topo_node *nodes = picture->topo->nodes;

    if (index == 0)
        (void)0;
    else if (is_container(&nodes[index]))
        draw_container(picture, index);
    else if (nodes[index].type == LC_TOPO_PCI && nodes[index].pci.kind == LC_TOPO_PCI_GPU)
        draw_gpu(picture, index);
    else
        draw_device(picture, index);
    for (int at = nodes[index].child; at >= 0 && is_container(&nodes[index]); at = nodes[at].next) {
        if (is_drawn(&nodes[at]))
            draw(picture, at);
    }
}

/* GPUs with links to switches, and how many links each has if that is the same for all (else 0). */
static int switched_gpus(const struct lc_topo *topo, int *out_each)
{
    int gpus = 0;

    *out_each = -1;
    for (int i = lc_topo_next(topo, LC_TOPO_GPU, -1); i >= 0;
         i = lc_topo_next(topo, LC_TOPO_GPU, i)) {
        int links = 0;

        for (int at = topo->nodes[i].child; at >= 0; at = topo->nodes[at].next) {
            if (topo->nodes[at].type == LC_TOPO_NVLINK &&
                topo->nodes[at].link.target_class == 0x068000)
                links += topo->nodes[at].link.count;
        }
        gpus += links > 0;
        if (links)
            *out_each = *out_each < 0 || *out_each == links ? links : 0;
    }
    return gpus;
}

static void draw_fabric(const struct picture *picture, int gpus, int each, double y)
{
    struct box bar = { PAD, y, picture->width - 2 * PAD, 24 };
    struct lc_topo_text text = { .used = 0 };

    lc_topo_say(&text, "NVSwitch fabric: %d GPUs reach each other at full speed", gpus);
    if (each > 0)
        lc_topo_say(&text, ", NVLink x%d each", each);
    rect(picture, &bar, "nvlink");
    text_at(picture, PAD + 10, y + 17, "foot", text.s);
}

/* Links from GPU to GPU; out[row][column] of the GPUs in the order of the file. Returns the number of GPUs, 0 if
 * there is no such link. */
static int direct_links(const struct lc_topo *topo, int *gpus, int out[MAX_TABLE][MAX_TABLE])
{
    int count = 0;
    bool any = false;

    memset(out, 0, sizeof(int[MAX_TABLE][MAX_TABLE]));
    for (int i = lc_topo_next(topo, LC_TOPO_GPU, -1); i >= 0 && count < MAX_TABLE;
         i = lc_topo_next(topo, LC_TOPO_GPU, i))
        gpus[count++] = i;
    for (int row = 0; row < count; row++) {
        for (int at = topo->nodes[gpus[row]].child; at >= 0; at = topo->nodes[at].next) {
            int peer = topo->nodes[at].type >= LC_TOPO_NVLINK
                           ? lc_topo_gpu_of(topo, &topo->nodes[at].link)
                           : -1;

            for (int column = 0; column < count && peer >= 0; column++) {
                if (gpus[column] == peer && column != row) {
                    out[row][column] += topo->nodes[at].link.count;
                    any = true;
                }
            }
        }
    }
    return any ? count : 0;
}

static void draw_table(const struct picture *picture, const int *gpus, int count,
                       int links[MAX_TABLE][MAX_TABLE], double y)
{
    const char *linked = lc_topo_next(picture->topo, LC_TOPO_NVLINK, -1) >= 0 ? "cell nvlink"
                                                                              : "cell xgmi";
    struct lc_topo_text text;

    text_at(picture, PAD, y + 14, "label", "Links from GPU to GPU");
    for (int row = -1; row < count; row++) {
        for (int column = -1; column < count; column++) {
            struct box cell = { PAD + 60 + 34 * (double)column, y + 44 + 20 * (double)row, 34, 20 };

            text = (struct lc_topo_text){ .used = 0 };
            if (row < 0 && column < 0)
                continue;
            if (row < 0 || column < 0)
                lc_topo_say(&text, column < 0 ? "GPU %d" : "%d",
                            lc_topo_gpu_number(picture->topo, gpus[row < 0 ? column : row]));
            else if (links[row][column])
                lc_topo_say(&text, "x%d", links[row][column]);
            if (row >= 0 && column >= 0)
                rect(picture, &cell,
                     links[row][column] ? linked
                     : row == column    ? "cell self"
                                        : "cell");
            if (column < 0)
                cell.x -= 22;
            text_at(picture, cell.x + 17 + 11 * (column < 0), cell.y + 14,
                    row >= 0 && column >= 0 ? "middle foot" : "middle label", text.s);
        }
    }
}

static void draw_style(FILE *out)
{
    (void)fputs(
        "<style>"
        "text{font-family:DejaVu Sans,Verdana,sans-serif;fill:#1a1a1a}"
        ".title{font-size:17px;font-weight:bold}.label{font-size:11px}.small{font-size:10px;fill:#444}"
        ".name{font-size:15px;font-weight:bold}.port{font-size:11px;font-weight:bold}"
        ".right{font-size:11px;text-anchor:end}.foot{font-size:11px;font-weight:bold;fill:#fff}"
        ".middle{text-anchor:middle}"
        "rect{stroke-width:1}.numa{fill:#faf6ea;stroke:#b9a86b}.switch{fill:#efeff2;stroke:#8a8a96}"
        ".gpu{fill:#e6f4d7;stroke:#4d7d12}.nic{fill:#d9e8fb;stroke:#2f65a8}"
        ".other{fill:#fff;stroke:#999;stroke-dasharray:3 2}.nvlink{fill:#4d8a10;stroke:#3c6d0b}"
        ".xgmi{fill:#b8402f;stroke:#8d2c1e}.cell{rx:0;fill:#fff;stroke:#bbb}.self{fill:#e4e4e4}"
        ".cell.nvlink{fill:#4d8a10}.cell.xgmi{fill:#b8402f}"
        "</style>\n",
        out);
}

static void draw_page(const struct picture *picture, double height)
{
    const struct lc_topo *topo = picture->topo;
    struct lc_topo_text counts = { .used = 0 };
    struct lc_topo_text name = { .used = 0 };
    struct box page = { 0, 0, picture->width, height };

    (void)fprintf(picture->out,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" "
                  "viewBox=\"0 0 %.0f %.0f\">\n",
                  page.w, page.h, page.w, page.h);
    draw_style(picture->out);
    (void)fprintf(picture->out, "<rect width=\"%.0f\" height=\"%.0f\" fill=\"#fff\"/>\n", page.w,
                  page.h);
    lc_topo_say(&name, "%s", topo->name);
    lc_topo_say_counts(&counts, topo);
    text_at(picture, PAD, 24, "title", name.s);
    lc_topo_say(&counts,
                "   (yellow: NUMA node, grey: PCIe switch with its uplink, green: GPU, blue: NIC)");
    text_at(picture, PAD, 42, "label", counts.s);
}

static void draw_notes(const struct picture *picture, double y)
{
    for (int i = 0; i < picture->topo->note_count && i < MAX_NOTES; i++) {
        struct lc_topo_text text = { .used = 0 };

        lc_topo_say(&text,
                    i == MAX_NOTES - 1 && picture->topo->note_count > MAX_NOTES ? "and more"
                                                                                : "note: %s",
                    picture->topo->notes[i]);
        text_at(picture, PAD, y + LINE * (i + 1), "small", text.s);
    }
}

static void draw_all(struct picture *picture)
{
    const struct lc_topo *topo = picture->topo;
    int notes = topo->note_count < MAX_NOTES ? topo->note_count : MAX_NOTES;
    int links[MAX_TABLE][MAX_TABLE];
    int gpus[MAX_TABLE];
    int each;
    int switched = switched_gpus(topo, &each);
    int table = direct_links(topo, gpus, links);
    double top = 50;
    double height;

    measure(picture, 0);
    picture->width = picture->boxes[0].w;
    if (picture->width < PAD + 110 + 34 * (double)table)
        picture->width = PAD + 110 + 34 * (double)table;
    if (picture->width < 640)
        picture->width = 640;
    place(picture, 0, 0, top + (switched ? 34 : 0) - HEAD);
    height = picture->boxes[0].y + picture->boxes[0].h;
    draw_page(picture, height + (table ? 54 + 20 * (double)table : 0) + LINE * (double)notes + PAD);
    if (switched)
        draw_fabric(picture, switched, each, top);
    draw(picture, 0);
    if (table)
        draw_table(picture, gpus, table, links, height);
    draw_notes(picture, height + (table ? 54 + 20 * (double)table : 0) - 5);
    (void)fputs("</svg>\n", picture->out);
}

int lc_topo_print_svg(const struct lc_topo *topo, FILE *out)
{
    struct picture picture = { .topo = topo, .out = out };

    picture.boxes = calloc((size_t)topo->count, sizeof(*picture.boxes));
    if (!picture.boxes)
        return -ENOMEM;
    draw_all(&picture);
    free(picture.boxes);
    return fflush(out) != 0 || ferror(out) ? -EIO : 0;
}
