/* SPDX-License-Identifier: Apache-2.0 */
#include "common/config.h"

#include "common/json.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/settings.h"

#include <stdio.h>
#include <string.h>

static const char help[] =
    "usage: loongcomm config [--json | --markdown]\n"
    "\n"
    "Lists every setting with its value, where the value comes from, and what it means. A setting is\n"
    "the environment variable of that name, else the line NAME = value of the file that\n"
    "LOONGCOMM_CONFIG names, else the default. What is malformed or unknown is named on standard\n"
    "error, as the library would, and the exit code is then 1.\n"
    "\n"
    "  --json       one JSON document, \"schema\": \"loongcomm.settings/1\"\n"
    "  --markdown   the table of names, defaults and meanings, as in the README\n";

static void print_text(const struct lc_cli_settings *settings)
{
    for (size_t i = 0; i < settings->count; i++) {
        const struct lc_config_entry *e = &settings->entry[i];

        (void)printf("%s=%s  (%s)\n    %s\n", e->name, e->value, e->origin, e->help);
    }
}

static void print_json(const struct lc_cli_settings *settings)
{
    struct lc_json json;

    lc_json_init(&json, stdout);
    lc_json_object(&json);
    lc_json_key(&json, "schema");
    lc_json_string(&json, "loongcomm.settings/1");
    lc_json_key(&json, "settings");
    lc_json_array(&json);
    for (size_t i = 0; i < settings->count; i++) {
        const struct lc_config_entry *e = &settings->entry[i];
        const char *const pairs[][2] = {
            {"name",     e->name  },
            { "value",   e->value },
            { "default", e->dflt  },
            { "origin",  e->origin},
            { "help",    e->help  }
        };

        lc_json_object(&json);
        for (size_t k = 0; k < sizeof(pairs) / sizeof(*pairs); k++) {
            lc_json_key(&json, pairs[k][0]);
            lc_json_string(&json, pairs[k][1]);
        }
        lc_json_end(&json);
    }
    lc_json_end(&json);
    lc_json_key(&json, "problems");
    lc_json_array(&json);
    for (size_t i = 0; i < settings->problem_count; i++)
        lc_json_string(&json, settings->problem[i]);
    lc_json_end(&json);
    lc_json_end(&json);
    (void)lc_json_finish(&json); /* a failing stream is seen by main() */
}

/* A bar would end the cell. */
static void print_cell(const char *text)
{
    for (; *text; text++) {
        if (*text == '|')
            (void)putchar('\\');
        (void)putchar(*text);
    }
}

static void print_markdown(const struct lc_cli_settings *settings)
{
    (void)puts("| setting | default | meaning |\n|---|---|---|");
    for (size_t i = 0; i < settings->count; i++) {
        const struct lc_config_entry *e = &settings->entry[i];

        (void)printf(*e->dflt ? "| `%s` | `%s` | " : "| `%s` |%s | ", e->name, e->dflt);
        print_cell(e->help);
        (void)puts(" |");
    }
}

int lc_cli_config(int argc, char **argv)
{
    static struct lc_cli_settings settings;
    void (*print)(const struct lc_cli_settings *) = print_text;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            (void)fputs(help, stdout);
            return LC_CLI_FINE;
        }
        if (strcmp(argv[i], "--json") == 0)
            print = print_json;
        else if (strcmp(argv[i], "--markdown") == 0)
            print = print_markdown;
        else
            return lc_cli_usage("config: unexpected '%s'; see `loongcomm config --help`", argv[i]);
    }
    lc_cli_settings_load(&settings);
    print(&settings);
    for (size_t i = 0; i < settings.problem_count; i++)
        lc_cli_say("%s", settings.problem[i]);
    return settings.problem_total ? LC_CLI_FINDING : LC_CLI_FINE;
}
