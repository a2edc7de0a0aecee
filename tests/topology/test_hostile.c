/* SPDX-License-Identifier: Apache-2.0
 *
 * Texts that are no topology: each is refused with one line that names the file and, where it is known, the line. */
#include "tests/check.h"
#include "topology/loongtopo.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *read_file(const char *folder, const char *name, size_t *size)
{
    char path[PATH_MAX];
    char *text = malloc(1 << 20);
    FILE *file;

    (void)snprintf(path, sizeof(path), "%s/%s", folder, name);
    file = fopen(path, "re");
    CHECK(file && text);
    *size = fread(text, 1, 1 << 20, file);
    CHECK(*size > 0 && *size < 1 << 20);
    (void)fclose(file);
    return text;
}

/* `error` has room for 256 bytes. */
static bool loads(const char *text, size_t size, char *error)
{
    struct lc_topo *topo = NULL;
    int err = lc_topo_load_text(text, size, "given", &topo, error, 256);

    CHECK((err == 0) == (topo != NULL));
    lc_topo_free(topo);
    return err == 0;
}

static void refused(const char *text, const char *why)
{
    char error[256] = "";

    if (loads(text, strlen(text), error) || strcmp(error, why) != 0) {
        fprintf(stderr, "got:      %s\nexpected: %s\n", error, why);
        abort();
    }
}

#define CPU(inside) "<system version=\"1\">\n<cpu numaid=\"0\">\n" inside "\n</cpu></system>"
#define PCI(inside) CPU("<pci busid=\"0000:01:00.0\">\n" inside "\n</pci>")
#define GPU(more)   PCI("<gpu " more "/>")

static void contradictions_and_nonsense_are_named_with_their_line(void)
{
    refused("<graphs version=\"1\"/>",
            "given: an NCCL graph file (NCCL_GRAPH_FILE), not a topology");
    refused("<html/>", "given:1: <html> where <system> was expected");
    refused("<system/>", "given:1: <system> of version none; 1 (NCCL) and 2 (RCCL) are known");
    refused("\n<system version=\"3\"/>",
            "given:2: <system> of version 3; 1 (NCCL) and 2 (RCCL) are known");
    refused("<system version=\"1\">\n<gpu dev=\"0\"/></system>",
            "given:2: <gpu> cannot stand in <system>");
    refused(CPU("<cpu numaid=\"1\"/>"), "given:3: <cpu> cannot stand in <cpu>");
    refused(CPU("<pci bus=\"0000:01:00.0\"/>"), "given:3: <pci> without busid");
    refused(CPU("<pci busid=\"01:00.0\"/>"),
            "given:3: busid=\"01:00.0\" is no bus id (DDDD:BB:DD.F)");
    refused(PCI("<pci busid=\"0000:01:00.0\"/>"),
            "given:4: bus id 0000:01:00.0 is there twice (line 3)");
    refused("<system version=\"1\">\n<cpu numaid=\"0\"/>\n<cpu numaid=\"0\"/></system>",
            "given:3: NUMA node 0 is there twice (line 2)");
    refused("<system version=\"1\">\n<cpu/></system>", "given:2: <cpu> without numaid");
    refused("<system version=\"1\">\n<cpu numaid=\"0\" affinity=\"all\"/></system>",
            "given:2: affinity=\"all\" is no mask of processors");
    refused(GPU("dev=\"x\""), "given:4: dev=\"x\" is no whole number");
    refused(GPU("dev=\"99999999999999999999\""),
            "given:4: dev=\"99999999999999999999\" is no whole number");
    refused(GPU("dev=\"-2\""), "given:4: dev=\"-2\" is not between -1 and 65535");
    refused(PCI("<gpu><nvlink count=\"1\"/></gpu>"), "given:4: <nvlink> without target");
    refused(PCI("<gpu><nvlink target=\"0\" count=\"0\"/></gpu>"),
            "given:4: count=\"0\" is not between 1 and 1024");
    refused(CPU("<pci busid=\"0000:01:00.0\" link_speed=\"fast\"/>"),
            "given:3: link_speed=\"fast\" is no speed in GT/s");
    refused(CPU("<nic><net name=\"a\" guid=\"0xq\"/></nic>"),
            "given:3: guid=\"0xq\" is no hexadecimal number of 64 bits");
    refused(CPU("<pci busid=\"0000:01:00.0\"><gpu dev=\"1\"/></pci>\n"
                "<pci busid=\"0000:02:00.0\"><gpu dev=\"1\"/></pci>"),
            "given:4: two GPUs with dev 1 (line 3)");
    refused(CPU("<pci busid=\"0000:01:00.0\"><gpu rank=\"0\"/></pci>\n"
                "<pci busid=\"0000:02:00.0\"><gpu rank=\"0\"/></pci>"),
            "given:4: two GPUs with rank 0 (line 3)");
    refused("<!DOCTYPE system [<!ENTITY a \"b\">]>\n<system version=\"1\" name=\"&a;\"/>",
            "given: a document type declaration, which such a file has not");
}

static void what_is_no_xml_is_said_with_its_line(void)
{
    static const char crossed[] = "<system version=\"1\">\n<cpu numaid=\"0\">\n</pci>";
    char error[256];

    CHECK(!loads(crossed, strlen(crossed), error));
    CHECK(strncmp(error, "given:3: no valid XML: ", 23) == 0);
    CHECK(!loads("", 0, error));
    CHECK(strncmp(error, "given:1: no valid XML", 21) == 0);
    CHECK(!loads("<system\0", 8, error));
    CHECK(strcmp(error, "given: no text (an archive of a machine has to be unpacked)") == 0);
    CHECK(!loads("<a b=\"\x1b[2J\xff\"/>", 14, error)); /* nothing that a terminal obeys */
    CHECK(!strpbrk(error, "\x1b\n\xff"));
}

/* Cut anywhere but behind its last tag a file is refused. */
static void every_truncation_is_refused(const char *data)
{
    static const char *const names[] = { "simllm/vastai_hgx_h200_8x/nccl_topo.xml",
                                         "rccl-topo_expl/topo_3p_pcie.xml" };

    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        size_t size;
        char *text = read_file(data, names[i], &size);
        char error[256];

        CHECK(loads(text, size, error));
        while (text[size - 1] != '>')
            size--;
        for (size_t cut = 0; cut < size; cut += 7) {
            CHECK(!loads(text, cut, error));
            CHECK(strncmp(error, "given", 5) == 0 && !strchr(error, '\n'));
        }
        free(text);
    }
}

/* `begin`, then `count` times a number between two texts, then `end`. */
static char *repeated(const char *begin, const char *before, const char *behind, int count,
                      const char *end)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);

    CHECK(out);
    (void)fputs(begin, out);
    for (int i = 0; i < count; i++)
        (void)fprintf(out, "%s%04x%s", before, (unsigned)i, behind);
    (void)fputs(end, out);
    CHECK(fclose(out) == 0);
    return text;
}

static void too_much(char *text, const char *why)
{
    refused(text, why);
    free(text);
}

static void sizes_are_bounded(void)
{
    static const char cpu[] = "<system version=\"1\"><cpu numaid=\"0\">";
    char error[256];
    char *text;

    too_much(repeated(cpu, "\n<pci busid=\"", ":00:00.0\"/>", 9000, "</cpu></system>"),
             "given:8192: more than 8192 elements");
    too_much(repeated(cpu, "<pci busid=\"", ":00:00.0\">", 60, ""), "given:1: more than 32 levels");
    too_much(repeated("<system version=\"1\" name=\"", "aaaaaaaaaa", "", 100, "\"/>"),
             "given:1: an attribute is longer than 254 bytes");
    too_much(repeated("<system version=\"1\"", " a", "=\"\"", 100, "/>"),
             "given:1: more than 32 attributes");
    text = calloc(1, LC_TOPO_MAX_FILE + 1);
    CHECK(text);
    memset(text, ' ', LC_TOPO_MAX_FILE + 1);
    CHECK(!loads(text, LC_TOPO_MAX_FILE + 1, error));
    CHECK(strcmp(error, "given: larger than 8 MiB") == 0);
    free(text);
}

/* What may be odd but contradicts nothing loads, with a remark. */
static void odd_things_are_remarked(void)
{
    static const char text[] = PCI("<gpu dev=\"0\"><nvlink target=\"0000:99:00.0\" count=\"4\" "
                                   "tclass=\"0x030200\"/></gpu><what><pci/></what>");
    struct lc_topo *topo = NULL;
    char error[256];

    CHECK(lc_topo_load_text(text, strlen(text), "given", &topo, error, sizeof(error)) == 0);
    CHECK(lc_topo_note_count(topo) == 3 && lc_topo_is_partial(topo));
    CHECK(strcmp(lc_topo_note(topo, 0), "given:4: <what> is unknown and left out") == 0);
    CHECK(strcmp(lc_topo_note(topo, 1),
                 "given:4: a link leads to GPU 0000:99:00.0, which is not in the topology") == 0);
    CHECK(strncmp(lc_topo_note(topo, 2), "given: partial: no network device", 33) == 0);
    lc_topo_free(topo);
}

static void bandwidth_is_that_of_nccl(void)
{
    static const struct {
        const char *speed;
        int width;
        double gbps;
    } rows[] = {
        {"32.0 GT/s PCIe",  16, 48    },
        { "16 GT/s",        16, 24    },
        { "32 GT/s PCIe/s", 16, 48    }, /* a template has that */
        { "16.0 GT/s",      16, 12    }, /* unknown to NCCL: as 8 GT/s */
        { "",               0,  12    },
        { "2.5 GT/s PCIe",  1,  0.1875},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct lc_topo_pci pci = { .speed = rows[i].speed, .width = rows[i].width };

        CHECK(lc_topo_pci_gbps(&pci) == rows[i].gbps);
    }
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    contradictions_and_nonsense_are_named_with_their_line();
    what_is_no_xml_is_said_with_its_line();
    every_truncation_is_refused(argv[1]);
    sizes_are_bounded();
    odd_things_are_remarked();
    bandwidth_is_that_of_nccl();
    return 0;
}
