/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/elf_symbol.h"
#include "interpose/cli/json_walk.h"
#include "tests/check.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char seen[8192];

static void note(const char *path, const char *value, void *arg)
{
    size_t len = strlen(seen);

    (void)snprintf(seen + len, sizeof(seen) - len, "%s=%s;", path, value);
}

static int walk(const char *text)
{
    seen[0] = '\0';
    return lc_cli_json_walk(text, note, NULL);
}

static void values_come_with_their_path(void)
{
    CHECK(walk(" {\"a\": 1, \"b\": {\"c\": [\"x\", {\"d\": true}, []]}, \"e\": -1.5e3} ") == 0);
    CHECK(strcmp(seen, "a=1;b.c=x;b.c.d=true;e=-1.5e3;") == 0);
    CHECK(walk("{}") == 0 && !*seen);
    CHECK(walk("null") == 0 && strcmp(seen, "=null;") == 0);
}

static void escapes_are_undone(void)
{
    CHECK(walk("[\"a\\n\\\"\\\\\\/\\u0041\\u00e9\\u20ac\"]") == 0);
    CHECK(strcmp(seen, "=a\n\"\\/A\xc3\xa9\xe2\x82\xac;") == 0);
    CHECK(walk("[\"\\ud83d\\ude00\\u0000\"]") == 0 && strcmp(seen, "=\?\?\?;") == 0);
}

static void what_is_no_json_is_refused(void)
{
    static const char *const bad[] = { "",         "{",          "}",           "{\"a\"}",
                                       "{\"a\":}", "{\"a\":1,}", "[1 2]",       "[1",
                                       "\"abc",    "\"\\x\"",    "\"\\u12g4\"", "\"\\u12",
                                       "\"\\",     "\"a\nb\"",   "1 2",         "{a:1}",
                                       "[,]",      "{\"a\":1]",  "#",           "{\"a\":1}x" };

    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
        CHECK(walk(bad[i]) == -EINVAL);
}

static void depth_and_length_are_bounded(void)
{
    char text[5000];

    CHECK(walk("[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]") == 0);
    CHECK(walk("[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]") == -EINVAL);
    memset(text, '[', sizeof(text));
    text[sizeof(text) - 1] = '\0';
    CHECK(walk(text) == -EINVAL);
    memset(text, 'x', sizeof(text));
    text[0] = text[sizeof(text) - 2] = '"';
    text[sizeof(text) - 1] = '\0';
    CHECK(walk(text) == 0 && strlen(seen) == 1 + 1023 + 1);
    memset(text, '1', sizeof(text) - 1);
    CHECK(walk(text) == -EINVAL);
    memset(text, 'k', sizeof(text));
    text[0] = '{';
    text[1] = '"';
    memcpy(text + sizeof(text) - 5, "\":1}", 5);
    CHECK(walk(text) == -EINVAL || strlen(seen) <= 1023 + 3);
}

static enum lc_cli_symbol symbol_of(const char *path)
{
    enum lc_cli_symbol symbol = 99;

    CHECK(lc_cli_elf_symbol(path, "ncclAllReduce", &symbol) == 0);
    return symbol;
}

/* Every cut and every flipped byte near the header, against a copy of a real library. */
static void damaged_library_is_an_error_and_no_crash(const char *library)
{
    static char image[1 << 20];
    char path[] = "/tmp/lc-elf-XXXXXX";
    int from = open(library, O_RDONLY | O_CLOEXEC);
    ssize_t size = read(from, image, sizeof(image));
    int fd = mkstemp(path);
    enum lc_cli_symbol symbol;

    CHECK(from >= 0 && fd >= 0 && size > 4096 && size < (ssize_t)sizeof(image));
    for (ssize_t cut = 0; cut < size; cut += cut < 256 ? 1 : 509) {
        CHECK(ftruncate(fd, 0) == 0 && pwrite(fd, image, (size_t)cut, 0) == cut);
        CHECK(lc_cli_elf_symbol(path, "ncclAllReduce", &symbol) < 0 || cut > size / 2);
    }
    for (ssize_t at = 0; at < size; at += at < 256 || at > size - 2048 ? 1 : 127) {
        image[at] ^= (char)0xff;
        CHECK(pwrite(fd, image, (size_t)size, 0) == size);
        (void)lc_cli_elf_symbol(path, "ncclAllReduce", &symbol);
        image[at] ^= (char)0xff;
    }
    close(from);
    close(fd);
    CHECK(unlink(path) == 0);
}

static void what_is_no_library_is_an_error(void)
{
    char folder[] = "/tmp/lc-elf-XXXXXX";
    char fifo[64];
    enum lc_cli_symbol symbol = 99;

    CHECK(mkdtemp(folder));
    (void)snprintf(fifo, sizeof(fifo), "%s/fifo", folder);
    CHECK(mkfifo(fifo, 0600) == 0);
    CHECK(lc_cli_elf_symbol(fifo, "x", &symbol) < 0);
    CHECK(lc_cli_elf_symbol(folder, "x", &symbol) < 0);
    CHECK(lc_cli_elf_symbol("/dev/zero", "x", &symbol) < 0);
    CHECK(lc_cli_elf_symbol("/etc/passwd", "x", &symbol) < 0);
    CHECK(lc_cli_elf_symbol("/nowhere/at/all", "x", &symbol) == -ENOENT);
    CHECK(symbol == 99);
    CHECK(unlink(fifo) == 0 && rmdir(folder) == 0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 4);
    values_come_with_their_path();
    escapes_are_undone();
    what_is_no_json_is_refused();
    depth_and_length_are_bounded();
    CHECK(symbol_of(argv[1]) == LC_CLI_SYMBOL_DEFINED);
    CHECK(symbol_of(argv[2]) == LC_CLI_SYMBOL_UNDEFINED);
    CHECK(symbol_of(argv[3]) == LC_CLI_SYMBOL_ABSENT);
    damaged_library_is_an_error_and_no_crash(argv[1]);
    what_is_no_library_is_an_error();
    return 0;
}
