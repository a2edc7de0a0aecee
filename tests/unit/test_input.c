/* SPDX-License-Identifier: Apache-2.0
 *
 * Whatever may lie where a file is looked for. A test that hangs is one that failed. */
#include "tests/check.h"

#include "common/input.h"
#include "common/output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static char folder[] = "/tmp/lc-input-XXXXXX"; /* and the working directory */

static int read_file(const char *path, size_t most)
{
    char *text = NULL;
    size_t size = 0;
    int err = lc_input_read(AT_FDCWD, path, 0, most, &text, &size);
    int fd = lc_input_open(AT_FDCWD, path, 0);

    CHECK(err ? !text : text && size <= most && text[size] == '\0');
    CHECK(err == -EFBIG || err == -EAGAIN ? fd >= 0 : (err ? fd == err : fd >= 0));
    if (fd >= 0)
        close(fd);
    free(text);
    return err;
}

static void put(const char *path, const void *text, size_t size)
{
    FILE *file = fopen(path, "w");

    CHECK(file && fwrite(text, 1, size, file) == size && fclose(file) == 0);
}

static void files_come_whole_or_not_at_all(void)
{
    static char text[20000], *back;
    size_t size;

    memset(text, 'x', sizeof(text));
    for (size_t n = 0; n <= sizeof(text); n += n < 4090 || n > 4100 ? 409 : 1) {
        put("file", text, n);
        CHECK(lc_input_read(AT_FDCWD, "file", 0, n, &back, &size) == 0);
        CHECK(size == n && memcmp(back, text, n) == 0 && back[n] == '\0');
        free(back);
        back = NULL;
        CHECK(read_file("file", n + 1) == 0 && (n == 0 || read_file("file", n - 1) == -EFBIG));
    }
    put("file", "a\0b", 3);
    CHECK(lc_input_read(AT_FDCWD, "file", 0, 100, &back, &size) == 0);
    CHECK(size == 3 && memcmp(back, "a\0b", 4) == 0);
    free(back);
    CHECK(truncate("file", (off_t)1 << 40) == 0);
    CHECK(read_file("file", 1 << 20) == -EFBIG);
}

/* Which say that they are empty. */
static void files_of_the_kernel_are_read(void)
{
    char *text;
    size_t size;

    CHECK(lc_input_read(AT_FDCWD, "/proc/self/status", 0, 1 << 20, &text, &size) == 0);
    CHECK(size > 100 && strlen(text) == size && strstr(text, "Pid:"));
    free(text);
    CHECK(read_file("/proc/self/status", 100) == -EFBIG);
}

static void make_socket(const char *name)
{
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    (void)snprintf(at.sun_path, sizeof(at.sun_path), "%s", name);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof(at)) == 0);
    close(fd);
}

static void what_is_no_file_is_refused_without_waiting(void)
{
    int writer;

    CHECK(mkfifo("fifo", 0600) == 0 && symlink("fifo", "to-fifo") == 0);
    CHECK(read_file("fifo", 10) == -ENXIO && read_file("to-fifo", 10) == -ENXIO);
    writer = open("fifo", O_RDWR | O_CLOEXEC); /* who never writes */
    CHECK(writer >= 0 && read_file("fifo", 10) == -ENXIO);
    close(writer);
    make_socket("socket");
    CHECK(read_file("socket", 10) == -ENXIO);
    CHECK(read_file("/dev/zero", 10) == -ENXIO);
    CHECK(read_file("/dev/null", 0) == 0); /* an empty file */
    CHECK(read_file(".", 10) == -EISDIR);
    CHECK(symlink("loop", "loop") == 0 && read_file("loop", 10) == -ELOOP);
    CHECK(read_file("none", 10) == -ENOENT);
    put("closed", "x", 1);
    CHECK(chmod("closed", 0) == 0);
    CHECK(geteuid() == 0 || read_file("closed", 10) == -EACCES);
    CHECK(strcmp(lc_input_why(-EISDIR), "it is a folder") == 0);
    CHECK(strcmp(lc_input_why(-ENXIO), "it is no regular file") == 0);
    CHECK(strcmp(lc_input_why(-EFBIG), "it is too large") == 0);
    CHECK(strcmp(lc_input_why(-ENOENT), strerror(ENOENT)) == 0);
}

static void links_are_followed_unless_told_otherwise(void)
{
    char *text;
    size_t size;

    put("file", "x", 1);
    CHECK(symlink("file", "link") == 0 && read_file("link", 1) == 0);
    CHECK(lc_input_read(AT_FDCWD, "link", O_NOFOLLOW, 1, &text, &size) == -ELOOP);
}

static void only_what_may_be_a_library_is_loaded(void)
{
    CHECK(lc_input_is_loadable("libc.so.6") && lc_input_is_loadable("fifo"));
    CHECK(lc_input_is_loadable("./file") && lc_input_is_loadable("./none"));
    CHECK(!lc_input_is_loadable("./fifo") && !lc_input_is_loadable("./to-fifo"));
    CHECK(!lc_input_is_loadable("/dev/zero") && !lc_input_is_loadable(folder));
}

static bool holds(const char *path, const char *text)
{
    char *back = NULL;
    size_t size;
    bool same = lc_input_read(AT_FDCWD, path, 0, 100, &back, &size) == 0 && strcmp(back, text) == 0;

    free(back);
    return same;
}

static void put_whole(const char *path, const char *text)
{
    struct lc_output_file file = { 0 };

    CHECK(lc_output_open(&file, path) == 0 && fputs(text, file.out) >= 0);
    CHECK(lc_output_close(&file, true) == 0 && holds(path, text));
}

static void files_appear_whole_or_not_at_all(void)
{
    struct lc_output_file file = { 0 };
    mode_t before = umask(0027);
    struct stat st;

    CHECK(lc_output_close(&file, true) == 0);
    CHECK(lc_output_open(&file, "new") == 0 && fputs("whole", file.out) >= 0);
    CHECK(access("new", F_OK) != 0 && lc_output_close(&file, true) == 0 && !file.out);
    CHECK(holds("new", "whole") && stat("new", &st) == 0 && (st.st_mode & 07777) == 0640);
    CHECK(lc_output_open(&file, "new") == 0 && fputs("other words", file.out) >= 0);
    CHECK(lc_output_close(&file, false) == 0 && holds("new", "whole"));
    umask(before);
}

static void names_may_get_longer(void)
{
    struct lc_output_file file = { 0 };

    CHECK(mkdir("new.folder", 0700) == 0);
    CHECK(lc_output_open(&file, "new") == 0 && fputs("a part", file.out) >= 0);
    CHECK(lc_output_extend(&file, ".folder") == -EISDIR && rmdir("new.folder") == 0);
    CHECK(lc_output_extend(&file, ".part") == 0 && lc_output_close(&file, true) == 0);
    CHECK(holds("new.part", "a part") && holds("new", "whole") && unlink("new.part") == 0);
}

/* As of containers with a folder in common, in each of which a process has the same number. */
static void two_that_write_one_file_leave_one_of_both(void)
{
    struct lc_output_file first = { 0 }, second = { 0 };

    CHECK(lc_output_open(&first, "new") == 0 && lc_output_open(&second, "new") == 0);
    CHECK(fputs("first", first.out) >= 0 && fputs("second", second.out) >= 0);
    CHECK(lc_output_close(&first, true) == 0 && holds("new", "first"));
    CHECK(lc_output_close(&second, true) == 0 && holds("new", "second"));
}

static void links_stay_and_lead_to_what_is_written(void)
{
    struct stat st;

    put_whole("link", "linked");
    CHECK(holds("file", "linked") && lstat("link", &st) == 0 && S_ISLNK(st.st_mode));
    CHECK(symlink("none", "to-none") == 0);
    put_whole("to-none", "here");
    CHECK(lstat("to-none", &st) == 0 && S_ISREG(st.st_mode));
}

/* What is printed would be lost; /dev/stdout is such a link. */
static void own_output_is_not_replaced(void)
{
    struct lc_output_file file = { 0 };
    int saved = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 0);
    int fd = open("file", O_WRONLY | O_CLOEXEC);
    struct stat st;

    CHECK(saved >= 0 && fd >= 0 && dup2(fd, STDOUT_FILENO) == STDOUT_FILENO);
    CHECK(symlink("/proc/self/fd/1", "stdout") == 0);
    CHECK(lc_output_open(&file, "file") == -EADDRINUSE &&
          lc_output_open(&file, "stdout") == -EADDRINUSE);
    CHECK(lstat("stdout", &st) == 0 && S_ISLNK(st.st_mode));
    CHECK(dup2(saved, STDOUT_FILENO) == STDOUT_FILENO && close(saved) == 0 && close(fd) == 0);
}

static void what_is_no_file_is_not_replaced(void)
{
    struct lc_output_file file = { 0 };
    FILE *out = NULL;
    struct stat st;
    int reader;
    char byte;

    CHECK(lc_output_open(&file, "fifo") == -ENXIO && lc_output_open(&file, "to-fifo") == -ENXIO);
    CHECK(lc_output_open(&file, ".") == -EISDIR && lc_output_open(&file, "none/x") == -ENOENT);
    CHECK(!file.out && lstat("fifo", &st) == 0 && S_ISFIFO(st.st_mode));
    CHECK(lc_output_open_in_place("fifo", &out) == -ENXIO && !out); /* nobody reads */
    reader = open("fifo", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    CHECK(reader >= 0 && lc_output_open_in_place("fifo", &out) == 0);
    CHECK((fcntl(fileno(out), F_GETFL) & O_NONBLOCK) == 0); /* waits for a slow reader */
    CHECK(fputs("x", out) >= 0 && fclose(out) == 0 && read(reader, &byte, 1) == 1);
    close(reader);
    CHECK(lc_output_open_in_place("/dev/null", &out) == 0 && fclose(out) == 0);
    CHECK(lc_output_open_in_place("file", &out) == 0 && fclose(out) == 0);
    CHECK(read_file("file", 0) == 0);
    CHECK(lc_output_open_in_place(".", &out) == -EISDIR);
}

static void sweep(void)
{
    static const char *const names[] = { "file",   "fifo", "to-fifo", "socket",  "loop",
                                         "closed", "link", "new",     "to-none", "stdout" };

    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        CHECK(unlink(names[i]) == 0);
    CHECK(rmdir(folder) == 0); /* nothing else was left behind */
}

int main(void)
{
    CHECK(mkdtemp(folder) && chdir(folder) == 0);
    files_come_whole_or_not_at_all();
    files_of_the_kernel_are_read();
    what_is_no_file_is_refused_without_waiting();
    links_are_followed_unless_told_otherwise();
    only_what_may_be_a_library_is_loaded();
    files_appear_whole_or_not_at_all();
    names_may_get_longer();
    two_that_write_one_file_leave_one_of_both();
    links_stay_and_lead_to_what_is_written();
    own_output_is_not_replaced();
    what_is_no_file_is_not_replaced();
    sweep();
    return 0;
}
