/* SPDX-License-Identifier: Apache-2.0 */
#include "common/log.h"
#include "common/profile.h"
#include "tests/check.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HEAD "loongcomm.profile/1\ngpu NVIDIA H200\nnccl 2.28.9\n"

static char said[512];
static int warnings;

static void keep(enum lc_log_level level, const char *file, int line, const char *text)
{
    snprintf(said, sizeof(said), "%s", text);
    warnings++;
}

static struct lc_profile *parse(const char *text)
{
    said[0] = '\0';
    warnings = 0;
    return lc_profile_parse("p", text, strlen(text));
}

static uint64_t hash_of(const char *text)
{
    struct lc_profile *profile = parse(text);
    uint64_t hash;

    CHECK(profile);
    hash = profile->hash;
    free(profile);
    return hash;
}

static void rules_are_found_by_their_range(void)
{
    struct lc_profile *p = parse(HEAD "# what was measured\n"
                                      "nccl all-reduce 2 2 65536 0 ring simple 8 # to the end\n"
                                      "\n"
                                      "  nccl\tall-reduce 2 2 0 1024 tree ll 0\n"
                                      "nccl all-gather 4 2 100 200 pat simple 2\n"
                                      "rings all-reduce 2 bf16 4096 0 two-shot 32\n"
                                      "rings all-reduce 2 exact 1 8192 one-shot 4\n"
                                      "rings all-to-all 2 exact 1 8192 exchange 4\n"
                                      "rings send 2 exact 8192 0 exchange 16\n");
    const struct lc_profile_rule *rule;

    CHECK(p && warnings == 0 && p->n == 7);
    CHECK(strcmp(p->gpu, "NVIDIA H200") == 0 && p->nccl == 22809);
    rule = lc_profile_nccl(p, LC_PROFILE_ALL_REDUCE, 2, 2, 0);
    CHECK(rule && rule->algorithm == 0 && rule->protocol == 0 && rule->width == 0);
    CHECK(lc_profile_nccl(p, LC_PROFILE_ALL_REDUCE, 2, 2, 1023) == rule);
    CHECK(!lc_profile_nccl(p, LC_PROFILE_ALL_REDUCE, 2, 2, 1024));
    CHECK(!lc_profile_nccl(p, LC_PROFILE_ALL_REDUCE, 2, 2, 65535));
    rule = lc_profile_nccl(p, LC_PROFILE_ALL_REDUCE, 2, 2, 65536);
    CHECK(rule && rule->algorithm == 1 && rule->protocol == 2 && rule->width == 8);
    CHECK(lc_profile_nccl(p, LC_PROFILE_ALL_REDUCE, 2, 2, UINT64_MAX - 1) == rule);
    CHECK(!lc_profile_nccl(p, LC_PROFILE_ALL_REDUCE, 2, 1, 65536));
    CHECK(!lc_profile_nccl(p, LC_PROFILE_ALL_REDUCE, 3, 2, 65536));
    CHECK(!lc_profile_nccl(p, LC_PROFILE_REDUCE_SCATTER, 2, 2, 65536));
    CHECK(lc_profile_nccl(p, LC_PROFILE_ALL_GATHER, 4, 2, 100));
    CHECK(!lc_profile_nccl(p, LC_PROFILE_ALL_GATHER, 4, 2, 99) && !lc_profile_nccl(p, 9, 4, 2, 1));
    CHECK(!lc_profile_nccl(p, LC_PROFILE_ALL_GATHER, (uint64_t)1 << 32 | 4, 2, 100));
    rule = lc_profile_rings(p, LC_PROFILE_ALL_REDUCE, 2, 0, 4096);
    CHECK(rule && rule->algorithm == 0 && rule->width == 4);
    rule = lc_profile_rings(p, LC_PROFILE_ALL_REDUCE, 2, 1, 4096);
    CHECK(rule && rule->algorithm == 1 && rule->width == 32);
    CHECK(!lc_profile_rings(p, LC_PROFILE_ALL_REDUCE, 2, 1, 4095));
    CHECK(!lc_profile_rings(p, LC_PROFILE_ALL_REDUCE, 2, 0, 8192));
    CHECK(!lc_profile_rings(p, LC_PROFILE_ALL_REDUCE, 2, 2, 4096));
    rule = lc_profile_rings(p, LC_PROFILE_SEND, 2, 0, 8192);
    CHECK(rule && rule->algorithm == LC_PROFILE_EXCHANGE && rule->width == 16);
    CHECK(lc_profile_rings(p, LC_PROFILE_ALL_TO_ALL, 2, 0, 8191));
    CHECK(!lc_profile_rings(p, LC_PROFILE_ALL_TO_ALL, 2, 0, 8192));
    free(p);
}

static void the_hash_is_of_what_is_meant(void)
{
    uint64_t hash = hash_of(HEAD
                            "nccl all-reduce 2 2 0 8 tree ll 0\nnccl reduce 2 2 0 8 ring ll 1\n");

    CHECK(hash ==
          hash_of("\n# x\nloongcomm.profile/1\nnccl 2.28.9\nnccl reduce 2 2 0 8 ring ll 1 # y\n"
                  "gpu   NVIDIA H200\t\nnccl  all-reduce 2 2 0 8 tree ll 0"));
    CHECK(hash !=
          hash_of(HEAD "nccl all-reduce 2 2 0 8 tree ll 0\nnccl reduce 2 2 0 9 ring ll 1\n"));
    CHECK(hash !=
          hash_of(HEAD "nccl all-reduce 2 2 0 8 tree ll 1\nnccl reduce 2 2 0 8 ring ll 1\n"));
    CHECK(hash != hash_of(HEAD "nccl all-reduce 2 2 0 8 tree ll 0\n"));
    CHECK(hash_of(HEAD) != hash_of("loongcomm.profile/1\ngpu NVIDIA H100\nnccl 2.28.9\n"));
    CHECK(hash_of(HEAD) != hash_of("loongcomm.profile/1\ngpu NVIDIA H200\nnccl 2.28.7\n"));
}

static void refused(const char *text, const char *line, const char *accepted)
{
    struct lc_profile *profile = parse(text);

    if (!profile && warnings == 1 && strstr(said, line) && strstr(said, accepted))
        return;
    fprintf(stderr, "\"%s\": %s, %d warnings: %s\n", text, profile ? "accepted" : "refused",
            warnings, said);
    CHECK(!"refused as it should be");
}

static void what_is_wrong_is_named(void)
{
    static const char *const rules[] = {
        "nccl all-reduce 2 2 0 8 tree ll",
        "nccl all-reduce 2 2 0 8 tree ll 0 0",
        "nccl all-to-all 2 2 0 8 tree ll 0",
        "nccl send 2 2 0 8 tree ll 0",
        "nccl all-reduce 1 1 0 8 tree ll 0",
        "nccl all-reduce 2 3 0 8 tree ll 0",
        "nccl all-reduce 2 0 0 8 tree ll 0",
        "nccl all-reduce 2 2 8 8 tree ll 0",
        "nccl all-reduce 2 2 9 8 tree ll 0",
        "nccl all-reduce 2 2 -1 8 tree ll 0",
        "nccl all-reduce 2 2 0 8 Tree ll 0",
        "nccl all-reduce 2 2 0 8 tree ll 65",
        "nccl all-reduce 2 2 0 8 tree ll256 0",
        "nccl all-reduce 2 2 0 99999999999999999999 tree ll 0",
    };
    static const char *const rings[] = {
        "rings all-gather 2 exact 0 8 one-shot 4",  "rings all-reduce 2 fp8 0 8 one-shot 4",
        "rings all-reduce 65 exact 0 8 one-shot 4", "rings all-reduce 2 exact 0 8 one-shot 0",
        "rings all-reduce 2 exact 0 8 one-shot",    "rings all-reduce 2 exact 0 8 three-shot 4",
        "rings all-reduce 2 exact 0 8 exchange 4",  "rings all-to-all 2 exact 0 8 two-shot 4",
        "rings all-to-all 2 bf16 0 8 exchange 4",   "rings receive 2 exact 0 8 exchange 4",
    };
    char text[512];

    for (size_t i = 0; i < sizeof(rules) / sizeof(*rules); i++) {
        snprintf(text, sizeof(text), HEAD "%s\n", rules[i]);
        refused(text, "line 4", "nccl OPERATION RANKS NODES");
    }
    for (size_t i = 0; i < sizeof(rings) / sizeof(*rings); i++) {
        snprintf(text, sizeof(text), HEAD "%s\n", rings[i]);
        refused(text, "line 4", "rings all-reduce|reduce-scatter");
    }
    refused("", "line 0", "as the first line");
    refused("gpu x\n", "line 1", "as the first line");
    refused("loongcomm.profile/2\n", "line 1", "as the first line");
    refused("loongcomm.profile/1\ngpu x\n", "line 2", "a line each of");
    refused("loongcomm.profile/1\nnccl 2.28.9\n", "line 2", "a line each of");
    refused(HEAD "gpu y\n", "line 4", "one line `gpu NAME`");
    refused(HEAD "nccl 2.28.9\n", "line 4", "one line `nccl VERSION`");
    refused("loongcomm.profile/1\nnccl 2.28\n", "line 2", "one line `nccl VERSION`");
    refused("loongcomm.profile/1\nnccl 3.1.1\n", "line 2", "one line `nccl VERSION`");
    refused(HEAD "tune x\n", "line 4", "gpu, nccl or rings");
    refused(HEAD "a b c d e f g h i j\n", "line 4", "gpu, nccl or rings");
    refused(HEAD "gpu \033[2J\n", "line 4", "printable");
    refused(HEAD "nccl all-reduce 2 2 0 8 tree ll 0\nnccl all-reduce 2 2 7 0 ring ll 0\n", "line 5",
            "do not overlap");
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    refused(text, "line 1", "255 bytes");
    CHECK(!lc_profile_parse("p", HEAD "\0", sizeof(HEAD)));
}

static void files_are_read_whole_or_not_at_all(void)
{
    char path[] = "/tmp/lc-profile-XXXXXX", line[] = "# and so on\n";
    int fd = mkstemp(path);
    struct lc_profile *profile;

    CHECK(fd >= 0 && write(fd, HEAD, sizeof(HEAD) - 1) == (ssize_t)sizeof(HEAD) - 1);
    profile = lc_profile_load(path);
    CHECK(profile && profile->n == 0);
    free(profile);
    for (size_t i = 0; i <= LC_PROFILE_FILE_MAX / (sizeof(line) - 1); i++)
        CHECK(write(fd, line, sizeof(line) - 1) == (ssize_t)sizeof(line) - 1);
    CHECK(!lc_profile_load(path) && strstr(said, "1 MiB"));
    close(fd);
    unlink(path);
    CHECK(!lc_profile_load(path) && strstr(said, "No such file"));
    CHECK(!lc_profile_load("/tmp") && strstr(said, "is a folder"));
    CHECK(!lc_profile_load("/dev/zero") && strstr(said, "is no regular file"));
}

static void rules_are_printed_as_they_are_read(void)
{
    static const char *const lines[] = { "nccl all-gather 4 2 8 4096 nvls-tree ll128 3",
                                         "nccl broadcast 2 1 0 0 pat simple 0",
                                         "rings reduce-scatter 8 bf16 1 0 two-shot 32" };
    char text[512], line[192], gpu[96] = "";

    for (size_t i = 0; i < sizeof(lines) / sizeof(*lines); i++) {
        struct lc_profile *profile;

        snprintf(text, sizeof(text), HEAD "%s\n", lines[i]);
        profile = lc_profile_parse("p", text, strlen(text));
        CHECK(profile && profile->n == 1);
        CHECK(lc_profile_print_rule(&profile->rules[0], line, sizeof(line)) ==
              (int)strlen(lines[i]));
        CHECK(strcmp(line, lines[i]) == 0);
        free(profile);
    }
    lc_profile_gpu_here(gpu, sizeof(gpu));
    CHECK(gpu[0]);
}

int main(void)
{
    lc_log_set_sink(keep);
    rules_are_found_by_their_range();
    the_hash_is_of_what_is_meant();
    what_is_wrong_is_named();
    files_are_read_whole_or_not_at_all();
    rules_are_printed_as_they_are_read();
    return 0;
}
