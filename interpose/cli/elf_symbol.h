/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_CLI_ELF_SYMBOL_H
#define LC_CLI_ELF_SYMBOL_H

enum lc_cli_symbol {
    LC_CLI_SYMBOL_ABSENT,
    LC_CLI_SYMBOL_UNDEFINED, /* used, and defined by another library */
    LC_CLI_SYMBOL_DEFINED,
};

/* How a shared library's dynamic symbol table knows a name. 0 or -errno; the file may be anything. */
int lc_cli_elf_symbol(const char *path, const char *name, enum lc_cli_symbol *out);

#endif
