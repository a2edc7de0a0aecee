/* SPDX-License-Identifier: Apache-2.0
 *
 * Nodes of 8 GPUs behind NVSwitches, on two sockets, that differ in their ports. */
#include "topology/topo_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define GPUS 8
#define LINK " link_speed=\"32.0 GT/s PCIe\" link_width=\"16\""

static const struct sample {
    const char *name;
    int a_switch;      /* GPUs that share a PCIe switch */
    int ports;         /* below each switch */
    int gbits, others; /* Gb/s of the ports below the first two switches, and below the rest */
    int last;          /* ports below the last switch */
} samples[] = {
    {"a-port-each",          1, 1, 400, 400, 1},
    { "missing-rail",        1, 1, 400, 400, 0},
    { "uneven-ports",        1, 1, 400, 200, 1},
    { "two-ports-a-switch",  2, 2, 400, 400, 2},
    { "three-ports-for-two", 2, 3, 200, 200, 3},
    { "a-port-for-two",      2, 1, 400, 400, 1},
};

static void write_switch(FILE *out, const struct sample *sample, int number, int *net)
{
    int switches = GPUS / sample->a_switch;
    int ports = number == switches - 1 ? sample->last : sample->ports;
    int bus = 0x10 * (number + 1);

    (void)fprintf(out, "<pci busid=\"0000:%02x:00.0\" class=\"0x060400\"" LINK ">", bus);
    for (int i = 0; i < sample->a_switch; i++)
        (void)fprintf(out,
                      "<pci busid=\"0000:%02x:00.0\" class=\"0x030200\"" LINK
                      "><gpu dev=\"%d\" sm=\"90\" gdr=\"1\"><nvlink target=\"0000:fe:00.0\" "
                      "count=\"18\" tclass=\"0x068000\"/></gpu></pci>",
                      bus + 1 + i, number * sample->a_switch + i);
    for (int i = 0; i < ports; i++, (*net)++)
        (void)fprintf(out,
                      "<pci busid=\"0000:%02x:00.0\" class=\"0x020700\"" LINK
                      "><nic><net name=\"mlx5_%d\" dev=\"%d\" speed=\"%d\" port=\"1\" "
                      "guid=\"0x%x\" gdr=\"1\"/></nic></pci>",
                      bus + 9 + i, *net, *net, 1000 * (number < 2 ? sample->gbits : sample->others),
                      *net + 1);
    (void)fprintf(out, "</pci>");
}

static void write_sample(FILE *out, const struct sample *sample)
{
    int switches = GPUS / sample->a_switch;
    int net = 0;

    (void)fprintf(out, "<system version=\"1\">");
    for (int numa = 0; numa < 2; numa++) {
        (void)fprintf(out,
                      "<cpu numaid=\"%d\" arch=\"x86_64\" vendor=\"GenuineIntel\" "
                      "familyid=\"6\" modelid=\"143\">",
                      numa);
        for (int i = 0; i < switches / 2; i++)
            write_switch(out, sample, numa * switches / 2 + i, &net);
        (void)fprintf(out, "</cpu>");
    }
    (void)fprintf(out, "</system>");
}

const char *lc_topo_sample_name(int number)
{
    return number >= 0 && (size_t)number < sizeof(samples) / sizeof(*samples) ? samples[number].name
                                                                              : NULL;
}

int lc_topo_sample(const char *name, struct lc_topo **out)
{
    for (size_t i = 0; i < sizeof(samples) / sizeof(*samples); i++) {
        char error[256];
        char *text = NULL;
        size_t size = 0;
        FILE *file;
        int err;

        if (strcmp(samples[i].name, name) != 0)
            continue;
        file = open_memstream(&text, &size);
        if (!file)
            return -ENOMEM;
        write_sample(file, &samples[i]);
        err = fclose(file) == 0 ? lc_topo_load_text(text, size, name, out, error, sizeof(error))
                                : -ENOMEM;
        free(text);
        return err;
    }
    return -ENOENT;
}
