/* SPDX-License-Identifier: Apache-2.0
 *
 * Any text as a configuration file. The source is included for its static parser: the entry points read
 * files, keep every accepted text for the life of the process and would hide a leak.
 * NOLINTNEXTLINE(bugprone-suspicious-include) */
#include "common/config.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct source src = { .file = "fuzz", .quiet = true };
    struct lc_config cfg;
    size_t ignored;

    read_lines(&src, (const char *)data, size);
    for (size_t i = 0; i < N_ENTRIES; i++) {
        if (src.text[i]) {
            (void)entries[i].parse(src.text[i], (char *)&cfg + entries[i].offset);
            (void)lc_parse_size(src.text[i], &ignored);
        }
        free((void *)src.text[i]);
    }
    return 0;
}
