/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"

#include "common/config.h"

#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char path[] = "/tmp/lc-config-XXXXXX";

static void write_file(const char *text, size_t len)
{
    FILE *f = fopen(path, "w");

    CHECK(f && fwrite(text, 1, len, f) == len && fclose(f) == 0);
    setenv("LOONGCOMM_CONFIG", path, 1);
}

static int load_file(struct lc_config *cfg, const char *text)
{
    write_file(text, strlen(text));
    return lc_config_load(cfg);
}

static void defaults_when_unset(void)
{
    struct lc_config cfg;

    CHECK(lc_config_load(&cfg) == 0);
    CHECK(cfg.enable && cfg.log_level == LC_LOG_WARN && cfg.report == LC_REPORT_TEXT);
    CHECK(*cfg.nccl == '\0');
}

static void bad_and_unknown_values_fall_back_and_are_counted(void)
{
    struct lc_config cfg;

    setenv("LOONGCOMM_LOG_LEVEL", "loud", 1);
    setenv("LOONGCOMM_ENABEL", "0", 1);
    setenv("LOONGCOMM_", "0", 1);
    setenv("LOONGCOMM_ROUNDING", "random", 1);
    CHECK(lc_config_load(&cfg) == 4);
    CHECK(cfg.enable && cfg.log_level == LC_LOG_WARN && cfg.rounding == LC_ROUNDING_NEAREST);
    setenv("LOONGCOMM_ROUNDING", "stochastic", 1);
    CHECK(lc_config_load(&cfg) == 3 && cfg.rounding == LC_ROUNDING_STOCHASTIC);
    unsetenv("LOONGCOMM_ROUNDING");
    unsetenv("LOONGCOMM_LOG_LEVEL");
    unsetenv("LOONGCOMM_ENABEL");
    unsetenv("LOONGCOMM_");
}

/* Anything else would be a grid that there is no shape for. */
static void ctas_are_none_or_enough(void)
{
    static const char *const bad[] = { "7", "1", "129", "128k", "-8", "8.0", "many", "" };
    static const char *const good[] = { "0", "8", "96", "128" };
    struct lc_config cfg;
    uint64_t usual;

    CHECK(lc_config_load(&cfg) == 0 && cfg.max_ctas == 0);
    usual = lc_config_hash(&cfg);
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        setenv("LOONGCOMM_MAX_CTAS", bad[i], 1);
        CHECK(lc_config_load(&cfg) == 1 && cfg.max_ctas == 0);
    }
    for (size_t i = 0; i < sizeof(good) / sizeof(*good); i++) {
        setenv("LOONGCOMM_MAX_CTAS", good[i], 1);
        CHECK(lc_config_load(&cfg) == 0 && cfg.max_ctas == strtoul(good[i], NULL, 10));
        CHECK((lc_config_hash(&cfg) == usual) == (cfg.max_ctas == 0)); /* ranks must agree */
    }
    unsetenv("LOONGCOMM_MAX_CTAS");
}

static void the_file_is_read_and_variables_win(void)
{
    struct lc_config cfg;

    setenv("LOONGCOMM_REPORT", "json", 1);
    CHECK(load_file(&cfg,
                    "# a comment\n\n  ENABLE = no \r\nREPORT=off\nLOONGCOMM_LOG_LEVEL = info") ==
          0);
    CHECK(!cfg.enable && cfg.report == LC_REPORT_JSON && cfg.log_level == LC_LOG_INFO);
    unsetenv("LOONGCOMM_REPORT");
    CHECK(load_file(&cfg, "ENABLE=no\nENABLE=yes\n") == 0 && cfg.enable);
}

static void bad_lines_are_counted_and_skipped(void)
{
    struct lc_config cfg;

    CHECK(load_file(&cfg, "what\n=\nENABEL=no\nENABLE=maybe\nCONFIG=/etc/x\nREPORT=off\n") == 5);
    CHECK(cfg.enable && cfg.report == LC_REPORT_OFF);
}

static void what_is_no_small_text_file_is_refused(void)
{
    static char big[70000];
    struct lc_config cfg;

    write_file("REPORT=off\0\n", 12);
    CHECK(lc_config_load(&cfg) == 1 && cfg.report == LC_REPORT_TEXT);
    memset(big, '\n', sizeof(big));
    write_file(big, sizeof(big));
    CHECK(lc_config_load(&cfg) == 1);
    setenv("LOONGCOMM_CONFIG", "/nowhere/at/all", 1);
    CHECK(lc_config_load(&cfg) == 1);
    setenv("LOONGCOMM_CONFIG", "/dev/zero", 1);
    CHECK(lc_config_load(&cfg) == 1);
    unlink(path);
    CHECK(mkfifo(path, 0600) == 0); /* must not wait for a writer */
    setenv("LOONGCOMM_CONFIG", path, 1);
    CHECK(lc_config_load(&cfg) == 1);
    unlink(path);
    unsetenv("LOONGCOMM_CONFIG");
}

static void the_list_names_the_origin(void)
{
    struct lc_config_entry list[64];
    size_t count = lc_config_list(list, 64);
    int seen = 0;

    CHECK(count > 0 && count <= 64);
    write_file("\nLOG_LEVEL=debug\n", 17);
    setenv("LOONGCOMM_ENABLE", "0", 1);
    CHECK(lc_config_list(list, 64) == count);
    for (size_t i = 0; i < count; i++) {
        if (strcmp(list[i].name, "LOONGCOMM_ENABLE") == 0)
            seen += strcmp(list[i].origin, "environment") == 0 && strcmp(list[i].value, "0") == 0;
        if (strcmp(list[i].name, "LOONGCOMM_LOG_LEVEL") == 0)
            seen += strstr(list[i].origin, ":2") && strcmp(list[i].value, "debug") == 0;
        if (strcmp(list[i].name, "LOONGCOMM_REPORT") == 0)
            seen += strcmp(list[i].origin, "default") == 0 && strcmp(list[i].value, "text") == 0;
    }
    CHECK(seen == 3);
    unsetenv("LOONGCOMM_ENABLE");
    unsetenv("LOONGCOMM_CONFIG");
}

static void sizes_have_units_and_no_junk(void)
{
    static const char *const bad[] = {
        "", "k", "-1", " 1", "1kb", "1.5m", "0x10", "99999999999999999999", "18446744073709551615k"
    };
    size_t size = 7;

    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
        CHECK(lc_parse_size(bad[i], &size) != 0 && size == 7);
    CHECK(lc_parse_size("64k", &size) == 0 && size == 65536);
    CHECK(lc_parse_size("2G", &size) == 0 && size == (size_t)2 << 30);
    CHECK(lc_parse_size("0", &size) == 0 && size == 0);
}

int main(void)
{
    int fd = mkstemp(path);

    CHECK(fd >= 0);
    close(fd);
    defaults_when_unset();
    bad_and_unknown_values_fall_back_and_are_counted();
    ctas_are_none_or_enough();
    the_file_is_read_and_variables_win();
    bad_lines_are_counted_and_skipped();
    what_is_no_small_text_file_is_refused();
    fd = mkstemp(strcpy(path, "/tmp/lc-config-XXXXXX"));
    CHECK(fd >= 0);
    close(fd);
    the_list_names_the_origin();
    sizes_have_units_and_no_junk();
    unlink(path);
    return 0;
}
