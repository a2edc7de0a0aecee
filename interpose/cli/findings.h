/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_CLI_FINDINGS_H
#define LC_CLI_FINDINGS_H

#include <stdbool.h>
#include <stddef.h>

enum lc_cli_severity { /* by harm */
    LC_CLI_OK,
    LC_CLI_INFO,
    LC_CLI_WARNING,
    LC_CLI_ERROR,
};
#define LC_CLI_SEVERITIES 4

struct lc_cli_finding {
    const char *id; /* static */
    enum lc_cli_severity severity;
    char evidence[1024];
    char remedy[512]; /* "": nothing to do */
};

#define LC_CLI_MAX_FINDINGS 96

struct lc_cli_findings {
    size_t count;
    struct lc_cli_finding
        list[LC_CLI_MAX_FINDINGS]; /* in the order found; what does not fit is dropped */
};

/* Adds a finding; bytes that a terminal would obey are replaced, since the texts of children get here. */
__attribute__((format(printf, 4, 5))) void lc_cli_find(struct lc_cli_findings *findings,
                                                       enum lc_cli_severity severity,
                                                       const char *id, const char *fmt, ...);

/* What to do about the finding added last. */
__attribute__((format(printf, 2, 3))) void lc_cli_remedy(struct lc_cli_findings *findings,
                                                         const char *fmt, ...);

size_t lc_cli_findings_count(const struct lc_cli_findings *findings, enum lc_cli_severity severity);
bool lc_cli_findings_has(const struct lc_cli_findings *findings, const char *id);

/* Both print the worst first, to standard output. */
void lc_cli_findings_text(const struct lc_cli_findings *findings, const char *verdict);
void lc_cli_findings_json(const struct lc_cli_findings *findings, const char *verdict);

#endif
