/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/cli.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char help[] =
    "usage: loongcomm COMMAND [OPTIONS]\n"
    "\n"
    "Makes the communication of an unmodified NCCL job cheaper.\n"
    "\n"
    "commands:\n"
    "  run -- CMD ARGS   start a job with libloongcomm.so preloaded\n"
    "  config            list every setting with its value and where the value comes from\n"
    "  report DIR        merge the reports of a job: who hung or differed, calls and bytes of all ranks\n"
    "  topo              show what is connected to what: GPUs, NICs, switches, NUMA nodes, NVLinks\n"
    "  tune              measure what is fastest here, or say what would become of a call and why\n"
    "  doctor            find out whether a job on this machine would be served, and if not, why\n"
    "\n"
    "  loongcomm COMMAND --help tells more about each.\n"
    "  loongcomm --version prints the version.\n"
    "\n"
    "exit codes: 0 all is fine (no GPU is fine too), 1 an error was found, 2 wrong usage;\n"
    "`run` ends as CMD does, or with 127 if CMD is not found and 126 if it cannot be executed.\n";

__attribute__((format(printf, 1, 0))) static void write_line(const char *fmt, va_list ap)
{
    char text[2 * PATH_MAX];

    (void)vsnprintf(text, sizeof(text), fmt, ap);
    (void)fprintf(stderr, "loongcomm: %s\n", text);
}

void lc_cli_say(const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    write_line(fmt, ap);
    va_end(ap);
}

int lc_cli_usage(const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    write_line(fmt, ap);
    va_end(ap);
    return LC_CLI_USAGE;
}

/* Output that did not arrive must not look like success. */
static int flushed(int code)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return code;
    lc_cli_say("cannot write to standard output");
    return code ? code : LC_CLI_FINDING;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(int argc, char **argv);
    } commands[] = {
        {"run",     lc_cli_run   },
        { "config", lc_cli_config},
        { "report", lc_cli_report},
        { "doctor", lc_cli_doctor},
        { "topo",   lc_cli_topo  },
        { "tune",   lc_cli_tune  },
    };

    if (argc < 2) {
        (void)fputs(help, stderr);
        return LC_CLI_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        (void)fputs(help, stdout);
        return flushed(LC_CLI_FINE);
    }
    if (strcmp(argv[1], "--version") == 0) {
        (void)puts("loongcomm " LC_VERSION);
        return flushed(LC_CLI_FINE);
    }
    for (size_t i = 0; i < sizeof(commands) / sizeof(*commands); i++) {
        if (strcmp(argv[1], commands[i].name) == 0)
            return flushed(commands[i].run(argc - 1, argv + 1));
    }
    return lc_cli_usage("unknown command '%s'; `loongcomm --help` lists the commands", argv[1]);
}
