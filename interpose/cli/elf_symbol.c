/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/elf_symbol.h"

#include "common/cleanup.h"
#include "common/input.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TABLE_MAX ((uint64_t)64 << 20) /* libtorch_cuda.so has 5 MB of names */

/* Exactly `size` bytes at `offset`, or an error. */
static int read_at(int fd, void *out, uint64_t size, uint64_t offset)
{
    char *to = out;

    if (offset > INT64_MAX - size)
        return -EINVAL;
    while (size) {
        ssize_t got = pread(fd, to, size, (off_t)offset);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? -errno : -EINVAL;
        to += got;
        size -= (uint64_t)got;
        offset += (uint64_t)got;
    }
    return 0;
}

static int read_header(int fd, Elf64_Ehdr *out)
{
    int err = read_at(fd, out, sizeof(*out), 0);

    if (err)
        return err;
    if (memcmp(out->e_ident, ELFMAG, SELFMAG) != 0 || out->e_ident[EI_CLASS] != ELFCLASS64 ||
        out->e_ident[EI_DATA] != ELFDATA2LSB || out->e_shentsize != sizeof(Elf64_Shdr) ||
        !out->e_shnum)
        return -ENOEXEC;
    return 0;
}

static int read_table(int fd, const Elf64_Shdr *section, void **out)
{
    int err;

    if (section->sh_size > TABLE_MAX)
        return -EFBIG;
    *out = malloc(section->sh_size + 1);
    if (!*out)
        return -ENOMEM;
    err = read_at(fd, *out, section->sh_size, section->sh_offset);
    ((char *)*out)[section->sh_size] = '\0'; /* a name may run to the end, never beyond */
    return err;
}

static int search(int fd, const Elf64_Shdr *symbols, const Elf64_Shdr *strings, const char *name,
                  enum lc_cli_symbol *out)
{
    lc_autofree void *table = NULL;
    lc_autofree void *names = NULL;
    enum lc_cli_symbol found = LC_CLI_SYMBOL_ABSENT;
    const Elf64_Sym *symbol;
    int err = read_table(fd, symbols, &table);

    if (!err)
        err = read_table(fd, strings, &names);
    if (err)
        return err;
    symbol = table;
    for (size_t i = 0; i < symbols->sh_size / sizeof(*symbol); i++) {
        if (symbol[i].st_name >= strings->sh_size ||
            strcmp((const char *)names + symbol[i].st_name, name) != 0)
            continue;
        found = symbol[i].st_shndx == SHN_UNDEF ? LC_CLI_SYMBOL_UNDEFINED : LC_CLI_SYMBOL_DEFINED;
        if (found == LC_CLI_SYMBOL_DEFINED)
            break;
    }
    *out = found;
    return 0;
}

static int search_file(int fd, const char *name, enum lc_cli_symbol *out)
{
    lc_autofree Elf64_Shdr *sections = NULL;
    Elf64_Ehdr header;
    int err = read_header(fd, &header);

    if (err)
        return err;
    sections = calloc(header.e_shnum, sizeof(*sections));
    if (!sections)
        return -ENOMEM;
    err = read_at(fd, sections, header.e_shnum * sizeof(*sections), header.e_shoff);
    for (size_t i = 0; !err && i < header.e_shnum; i++) {
        if (sections[i].sh_type == SHT_DYNSYM && sections[i].sh_link < header.e_shnum)
            return search(fd, &sections[i], &sections[sections[i].sh_link], name, out);
    }
    return err ? err : -ENOENT;
}

int lc_cli_elf_symbol(const char *path, const char *name, enum lc_cli_symbol *out)
{
    int fd = lc_input_open(AT_FDCWD, path, 0);
    int err;

    if (fd < 0)
        return fd;
    err = search_file(fd, name, out);
    close(fd);
    return err;
}
