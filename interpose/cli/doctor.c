/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/doctor.h"

#include "interpose/cli/cli.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PYTHON_MS  INT64_C(60000)
#define COMMAND_MS INT64_C(600000)

static const char help[] =
    "usage: loongcomm doctor [--json] [--python PYTHON] [--timeout SECONDS] [-- CMD [ARGS]]\n"
    "       loongcomm doctor [--json] --input FILE-OR-FOLDER\n"
    "\n"
    "Says whether a job on this machine would be served by loongcomm, and what stands in the way:\n"
    "which NCCL and CUDA runtime the Python's torch loads and how, whether torch's calls reach a\n"
    "preloaded libloongcomm.so, the settings, LD_PRELOAD, NCCL's plugin and file variables, the\n"
    "driver; and what is wrong with the machine: GPUs far from any NIC, ports that stay unused or\n"
    "differ in speed, cards a container hides, PCIe links below their speed, missing peer access or\n"
    "GPUDirect, ACS, processor binding, NCCL_ variables that contradict the machine. Needs no GPU,\n"
    "changes nothing. Findings are listed worst first: error, warning, info, ok.\n"
    "\n"
    "  --python PYTHON     the interpreter of the job (default: the first python3, else python, in\n"
    "                      PATH); it is started twice and imports torch, if it has one\n"
    "  -- CMD ARGS         also run this command preloaded, and say whether calls were seen and which\n"
    "                      NCCL they went to; what it prints goes to standard error\n"
    "  --input PATH        only what is wrong with another machine: its topology file of NCCL or RCCL,\n"
    "                      XML of lstopo, or a folder with its /sys and /proc; NCCL_ variables set\n"
    "                      here count\n"
    "  --timeout SECONDS   for each Python (default 60) and for CMD (default 600)\n"
    "  --json              one JSON document, \"schema\": \"loongcomm.findings/1\"\n"
    "\n"
    "exit code: 0 if there is no error (a machine without a GPU is none), 1 if there is, 2 for wrong\n"
    "usage.\n";

struct options {
    bool json;
    bool help;
};

static int parse_seconds(const char *text, int64_t *out_ms)
{
    char *end;
    double seconds;

    errno = 0;
    seconds = strtod(text, &end);
    if (errno || end == text || *end || !(seconds > 0) || seconds > 1e6)
        return lc_cli_usage("doctor: --timeout takes a number of seconds, not '%s'", text);
    *out_ms = (int64_t)(seconds * 1000) + 1;
    return LC_CLI_FINE;
}

static int parse(int argc, char **argv, struct options *options, struct lc_cli_doctor *doctor)
{
    for (int i = 1; i < argc; i++) {
        bool python = strcmp(argv[i], "--python") == 0;
        bool timeout = strcmp(argv[i], "--timeout") == 0;
        bool input = strcmp(argv[i], "--input") == 0;

        if (strcmp(argv[i], "--") == 0) {
            doctor->command = argv + i + 1;
            if (!*doctor->command)
                return lc_cli_usage("doctor: no command behind --");
            break;
        }
        if (strcmp(argv[i], "--json") == 0) {
            options->json = true;
        } else if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            options->help = true;
            return LC_CLI_FINE;
        } else if (!python && !timeout && !input) {
            return lc_cli_usage("doctor: unexpected '%s'; a command stands behind --", argv[i]);
        } else if (i + 1 == argc || !*argv[i + 1]) {
            return lc_cli_usage("doctor: %s needs a value", argv[i]);
        } else if (python || input) {
            *(python ? &doctor->python : &doctor->input) = argv[++i];
        } else {
            int code = parse_seconds(argv[++i], &doctor->python_ms);

            if (code)
                return code;
            doctor->command_ms = doctor->python_ms;
        }
    }
    if (doctor->input && (doctor->command || doctor->python))
        return lc_cli_usage("doctor: --input is about a machine alone, without a command");
    return LC_CLI_FINE;
}

static void conclude(const struct lc_cli_doctor *doctor, char *out, size_t size)
{
    const struct lc_cli_findings *findings = &doctor->findings;
    size_t errors = lc_cli_findings_count(findings, LC_CLI_ERROR);
    size_t warnings = lc_cli_findings_count(findings, LC_CLI_WARNING);
    const char *what = "nothing wrong was found, but no call of NCCL was tried";

    if (doctor->input)
        what = errors + warnings ? "the machine could serve a job better" : "no fault was found";
    if (lc_cli_findings_has(findings, "interposition") || lc_cli_findings_has(findings, "command"))
        what = "calls of NCCL reach loongcomm";
    if (lc_cli_findings_has(findings, "interposition-none") ||
        lc_cli_findings_has(findings, "command-no-calls"))
        what = "calls of NCCL do not reach loongcomm";
    else if (errors && !doctor->input)
        what = "a job would not be served as it is";
    (void)snprintf(out, size, "%s (%zu error%s, %zu warning%s)", what, errors,
                   errors == 1 ? "" : "s", warnings, warnings == 1 ? "" : "s");
}

int lc_cli_doctor(int argc, char **argv)
{
    static struct lc_cli_doctor doctor = { .python_ms = PYTHON_MS, .command_ms = COMMAND_MS };
    struct options options = { 0 };
    int code = parse(argc, argv, &options, &doctor);
    char verdict[256];

    if (code)
        return code;
    if (options.help) {
        (void)fputs(help, stdout);
        return LC_CLI_FINE;
    }
    if (!doctor.input) {
        lc_cli_settings_load(&doctor.settings);
        lc_cli_check_library(&doctor);
        lc_cli_check_gpu(&doctor);
        lc_cli_check_environment(&doctor);
        lc_cli_check_python(&doctor);
        lc_cli_check_command(&doctor);
    }
    lc_cli_check_machine(&doctor);
    conclude(&doctor, verdict, sizeof(verdict));
    if (options.json)
        lc_cli_findings_json(&doctor.findings, verdict);
    else
        lc_cli_findings_text(&doctor.findings, verdict);
    free(doctor.preload);
    return lc_cli_findings_count(&doctor.findings, LC_CLI_ERROR) ? LC_CLI_FINDING : LC_CLI_FINE;
}
