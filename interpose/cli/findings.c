/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/findings.h"

#include "common/json.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const names[LC_CLI_SEVERITIES] = { "ok", "info", "warning", "error" };

static void defuse(char *text)
{
    for (; *text; text++) {
        if ((unsigned char)*text < ' ' || *text == 0x7f)
            *text = *text == '\n' || *text == '\t' ? ' ' : '?';
    }
}

void lc_cli_find(struct lc_cli_findings *findings, enum lc_cli_severity severity, const char *id,
                 const char *fmt, ...)
{
    struct lc_cli_finding *finding;
    va_list ap;

    if (findings->count == LC_CLI_MAX_FINDINGS)
        return;
    finding = &findings->list[findings->count++];
    finding->id = id;
    finding->severity = severity;
    va_start(ap, fmt);
    (void)vsnprintf(finding->evidence, sizeof(finding->evidence), fmt, ap);
    va_end(ap);
    defuse(finding->evidence);
}

void lc_cli_remedy(struct lc_cli_findings *findings, const char *fmt, ...)
{
    struct lc_cli_finding *finding;
    va_list ap;

    if (!findings->count)
        return;
    finding = &findings->list[findings->count - 1];
    va_start(ap, fmt);
    (void)vsnprintf(finding->remedy, sizeof(finding->remedy), fmt, ap);
    va_end(ap);
    defuse(finding->remedy);
}

size_t lc_cli_findings_count(const struct lc_cli_findings *findings, enum lc_cli_severity severity)
{
    size_t count = 0;

    for (size_t i = 0; i < findings->count; i++)
        count += findings->list[i].severity == severity;
    return count;
}

bool lc_cli_findings_has(const struct lc_cli_findings *findings, const char *id)
{
    for (size_t i = 0; i < findings->count; i++) {
        if (strcmp(findings->list[i].id, id) == 0)
            return true;
    }
    return false;
}

static void each(const struct lc_cli_findings *findings,
                 void (*visit)(const struct lc_cli_finding *finding, void *arg), void *arg)
{
    for (int severity = LC_CLI_SEVERITIES - 1; severity >= 0; severity--) {
        for (size_t i = 0; i < findings->count; i++) {
            if ((int)findings->list[i].severity == severity)
                visit(&findings->list[i], arg);
        }
    }
}

static bool colours(void)
{
    const char *no = getenv("NO_COLOR");
    const char *term = getenv("TERM");

    return isatty(STDOUT_FILENO) && !(no && *no) && term && strcmp(term, "dumb") != 0;
}

static void visit_text(const struct lc_cli_finding *finding, void *arg)
{
    static const char *const colour[LC_CLI_SEVERITIES] = { "32", "36", "33", "31" };
    const bool *coloured = arg;
    const char *name = names[finding->severity];

    if (*coloured)
        (void)printf("\033[%sm%-7s\033[0m", colour[finding->severity], name);
    else
        (void)printf("%-7s", name);
    (void)printf("  %s: %s\n", finding->id, finding->evidence);
    if (*finding->remedy)
        (void)printf("         -> %s\n", finding->remedy);
}

void lc_cli_findings_text(const struct lc_cli_findings *findings, const char *verdict)
{
    bool coloured = colours();

    each(findings, visit_text, &coloured);
    (void)printf("\n%s\n", verdict);
}

static void visit_json(const struct lc_cli_finding *finding, void *arg)
{
    const char *const pairs[][2] = {
        {"id",        finding->id                              },
        { "severity", names[finding->severity]                 },
        { "evidence", finding->evidence                        },
        { "remedy",   *finding->remedy ? finding->remedy : NULL}
    };
    struct lc_json *json = arg;

    lc_json_object(json);
    for (size_t i = 0; i < sizeof(pairs) / sizeof(*pairs); i++) {
        lc_json_key(json, pairs[i][0]);
        lc_json_string(json, pairs[i][1]);
    }
    lc_json_end(json);
}

void lc_cli_findings_json(const struct lc_cli_findings *findings, const char *verdict)
{
    struct lc_json json;

    lc_json_init(&json, stdout);
    lc_json_object(&json);
    lc_json_key(&json, "schema");
    lc_json_string(&json, "loongcomm.findings/1");
    lc_json_key(&json, "verdict");
    lc_json_string(&json, verdict);
    lc_json_key(&json, "findings");
    lc_json_array(&json);
    each(findings, visit_json, &json);
    lc_json_end(&json);
    lc_json_end(&json);
    (void)lc_json_finish(&json); /* a failing stream is seen by main() */
}
