/* SPDX-License-Identifier: Apache-2.0
 *
 * usage: plugin --library FILE [--version N] [--only NAME]... [--not NAME]... [--part I/N] [--soak] [--list]
 * Runs the rows that the version has, each in a process of its own. `--part 1/4` takes the first of every four. */
#include "tests/plugin/rows.h"

#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define ROW_SECONDS 300 /* after which a row is stopped: it hangs */

enum versions {
    ALL,
    NEW
};

static const struct row {
    int number;
    const char *name;
    void (*run)(void);
    enum versions versions;
    const char *story;
} rows[] = {
#define ROW(number, function, versions, story) { number, #function, function, versions, story },
#include "tests/plugin/rows.def"
#undef ROW
};
#define COUNT (sizeof(rows) / sizeof(rows[0]))

static struct {
    const char *only[COUNT], *without[COUNT];
    size_t only_count, without_count;
    size_t part, parts;
    bool list, quiet;
} options = { .parts = 1 };

void skip(const char *fmt, ...)
{
    va_list ap;

    fprintf(stderr, "skipped: ");
    va_start(ap, fmt);
    (void)vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    fflush(NULL);
    _exit(LC_SKIP);
}

size_t times(size_t quick, size_t soak)
{
    return plugin_soak ? soak : quick;
}

static bool among(const char *name, const char *const *list, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(name, list[i]) == 0)
            return true;
    }
    return false;
}

static bool wanted(size_t index)
{
    const struct row *row = &rows[index];

    if (row->versions == NEW && plugin_version != NEWEST)
        return false;
    if (options.only_count)
        return among(row->name, options.only, options.only_count);
    return !among(row->name, options.without, options.without_count) &&
           index % options.parts == options.part;
}

/* Its exit code, 128 + signal, or -1: it was stopped. The whole group ends with it: peers that a row left behind. */
static int run_row(const struct row *row)
{
    static const struct rlimit no_core = { 0, 0 };
    long begun = now_ms();
    int status;
    pid_t pid;

    fflush(NULL);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        CHECK(setpgid(0, 0) == 0 && setrlimit(RLIMIT_CORE, &no_core) == 0);
        row->run();
        fflush(NULL);
        _exit(0);
    }
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (now_ms() - begun > 1000L * ROW_SECONDS * (long)times(GUARD_SANITIZED ? 3 : 1, 30)) {
            (void)kill(-pid, SIGABRT);
            (void)waitpid(pid, &status, 0);
            return -1;
        }
        pause_ms(2);
    }
    (void)kill(-pid, SIGKILL);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int parse(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;

        if (strcmp(argv[i], "--soak") == 0) {
            plugin_soak = true;
            continue;
        }
        if (strcmp(argv[i], "--quiet") == 0) {
            options.quiet = true;
            continue;
        }
        if (strcmp(argv[i], "--list") == 0) {
            options.list = true;
            continue;
        }
        if (!value)
            return 2;
        i++;
        if (strcmp(argv[i - 1], "--library") == 0)
            plugin_path = value;
        else if (strcmp(argv[i - 1], "--version") == 0)
            plugin_version = atoi(value);
        else if (strcmp(argv[i - 1], "--only") == 0 && options.only_count < COUNT)
            options.only[options.only_count++] = value;
        else if (strcmp(argv[i - 1], "--not") == 0 && options.without_count < COUNT)
            options.without[options.without_count++] = value;
        else if (strcmp(argv[i - 1], "--part") == 0 &&
                 sscanf(value, "%zu/%zu", &options.part, &options.parts) == 2 && options.part)
            options.part--;
        else
            return 2;
    }
    return plugin_path || options.list ? 0 : 2;
}

static void list_rows(void)
{
    for (size_t i = 0; i < COUNT; i++) {
        if (wanted(i))
            printf("%3d %s%s%s\n", rows[i].number, rows[i].name, rows[i].story[0] ? ": " : "",
                   rows[i].story);
    }
}

int main(int argc, char **argv)
{
    int passed = 0, failed = 0, skipped = 0;

    if (parse(argc, argv)) {
        fprintf(stderr,
                "usage: %s --library FILE [--version N] [--only NAME]... [--not NAME]..."
                " [--part I/N] [--soak] [--list]\n",
                argv[0]);
        return 2;
    }
    /* What this program was started with is not the plugin's. */
    (void)close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
    if (getenv("LCTEST_SOAK"))
        plugin_soak = true;
    if (options.list) {
        list_rows();
        return 0;
    }
    (void)setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    for (size_t i = 0; i < COUNT; i++) {
        long begun = now_ms();
        int code;

        if (!wanted(i))
            continue;
        code = run_row(&rows[i]);
        passed += code == 0;
        skipped += code == LC_SKIP;
        failed += code != 0 && code != LC_SKIP;
        if (options.quiet)
            continue;
        printf("%s v%d %3d %s (%ld ms)",
               code == 0         ? "ok  "
               : code == LC_SKIP ? "SKIP"
                                 : "FAIL",
               plugin_version, rows[i].number, rows[i].name, now_ms() - begun);
        printf(code > 0 && code != LC_SKIP ? ": code %d\n"
               : code < 0                  ? ": it hangs\n"
                                           : "\n",
               code);
    }
    if (!options.quiet)
        printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed || !(passed + skipped) ? 1 : passed ? 0 : LC_SKIP;
}
