/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/cli.h"
#include "interpose/cli/doctor.h"
#include "interpose/cli/elf_symbol.h"
#include "interpose/cli/probe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OLDEST_NCCL 21800

/* How torch got its NCCL. */
enum linkage {
    LINKAGE_UNKNOWN,
    LINKAGE_DYNAMIC, /* an undefined symbol, from libnccl.so.2 */
    LINKAGE_STATIC,  /* defined in one of torch's libraries and visible */
    LINKAGE_NONE,    /* torch's libraries do not name it: static and hidden, or dlopen */
};

struct subject {
    struct lc_cli_doctor *doctor;
    struct lc_cli_findings *findings;
    const char *python;
    enum linkage linkage;
    const char *linked_by; /* the library of torch that says so */
};

static const char *base_of(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

static bool begins(const char *text, const char *start)
{
    return strncmp(text, start, strlen(start)) == 0;
}

/* A mapped library that is no proxy of ours and begins with `start`: the nth of them, or NULL. */
static const char *mapped(const struct lc_cli_probe *probe, const char *start, size_t nth)
{
    char proxy[PATH_MAX];

    if (lc_cli_find_proxy(proxy) != 0)
        *proxy = '\0';
    for (size_t i = 0; i < probe->count; i++) {
        const char *path = probe->line[i].value;
        const char *base = base_of(path);
        size_t folder = base > path ? (size_t)(base - path - 1) : 0;

        if (strcmp(probe->line[i].key, "map") != 0 || !begins(base, start))
            continue;
        if (*proxy && strlen(proxy) == folder && memcmp(proxy, path, folder) == 0)
            continue;
        if (nth-- == 0)
            return path;
    }
    return NULL;
}

static void find_linkage(struct subject *subject, const struct lc_cli_probe *probe)
{
    const char *path;

    subject->linkage = LINKAGE_UNKNOWN;
    for (size_t i = 0; (path = mapped(probe, "libtorch", i)); i++) {
        enum lc_cli_symbol symbol;

        if (lc_cli_elf_symbol(path, "ncclAllReduce", &symbol) != 0)
            continue;
        if (subject->linkage == LINKAGE_UNKNOWN)
            subject->linkage = LINKAGE_NONE;
        if (symbol == LC_CLI_SYMBOL_ABSENT)
            continue;
        subject->linked_by = path;
        subject->linkage = symbol == LC_CLI_SYMBOL_DEFINED ? LINKAGE_STATIC : LINKAGE_DYNAMIC;
        if (subject->linkage == LINKAGE_STATIC)
            return;
    }
}

static void check_nccl_age(struct subject *subject, int code, const char *what)
{
    if (!code || code >= OLDEST_NCCL)
        return;
    lc_cli_find(subject->findings, LC_CLI_WARNING, "nccl-old",
                "%s has version code %d; loongcomm is made for NCCL 2.18 and later", what, code);
    lc_cli_remedy(subject->findings, "use a torch with a newer NCCL");
}

/* "2.28.9" of 22809; NCCL older than 2.9 counted otherwise. */
static const char *version_text(int code)
{
    static char text[32];

    (void)snprintf(text, sizeof(text), "%d.%d.%d", code / 10000, code / 100 % 100, code % 100);
    return code >= 10000 ? text : "of unknown version";
}

static int nccl_code_of(const struct lc_cli_probe *probe, const char *path)
{
    for (size_t i = 0; i < probe->count; i++) {
        char *end;
        long code;

        if (strcmp(probe->line[i].key, "nccl_code") != 0)
            continue;
        code = strtol(probe->line[i].value, &end, 10);
        if (*end == ' ' && strcmp(end + 1, path) == 0 && code > 0 && code < 1000000)
            return (int)code;
    }
    return 0;
}

static void check_two(struct subject *subject, const struct lc_cli_probe *probe)
{
    const char *first = mapped(probe, "libnccl.so", 0);
    const char *second = mapped(probe, "libnccl.so", 1);

    if (!first)
        return;
    if (second)
        lc_cli_find(subject->findings, LC_CLI_WARNING, "nccl-two",
                    "two copies of NCCL are loaded: %s and %s", first, second);
    else if (subject->linkage == LINKAGE_STATIC)
        lc_cli_find(subject->findings, LC_CLI_WARNING, "nccl-two",
                    "two copies of NCCL are loaded: one inside %s, and %s", subject->linked_by,
                    first);
    else
        return;
    lc_cli_remedy(
        subject->findings,
        "keep one: look for a second one in LD_LIBRARY_PATH, LD_PRELOAD and the packages; "
        "LOONGCOMM_NCCL says which one calls are passed to");
}

static void check_nccl(struct subject *subject, const struct lc_cli_probe *probe)
{
    const char *path = mapped(probe, "libnccl.so", 0);
    const char *built = lc_cli_probe_get(probe, "built_nccl");
    int code = path ? nccl_code_of(probe, path) : 0;

    find_linkage(subject, probe);
    if (subject->linkage == LINKAGE_STATIC)
        lc_cli_find(subject->findings, LC_CLI_INFO, "nccl", "NCCL %s is linked statically into %s",
                    built ? built : "of unknown version", subject->linked_by);
    else if (path && subject->linkage == LINKAGE_DYNAMIC)
        lc_cli_find(subject->findings, LC_CLI_OK, "nccl",
                    "NCCL %s, %s, linked dynamically by %s%s%s", version_text(code), path,
                    base_of(subject->linked_by), built ? ", built with " : "", built ? built : "");
    else if (path)
        lc_cli_find(subject->findings, LC_CLI_INFO, "nccl",
                    "NCCL %s, %s, is loaded but none of torch's libraries is linked with it",
                    version_text(code), path);
    else
        lc_cli_find(
            subject->findings, LC_CLI_INFO, "nccl",
            "no libnccl.so is loaded%s%s; NCCL is inside torch and hidden, or loaded later, or "
            "not there",
            built ? ", torch was built with NCCL " : "", built ? built : "");
    if (path)
        check_nccl_age(subject, code, path);
    check_two(subject, probe);
}

static void check_cudart(struct subject *subject, const struct lc_cli_probe *probe)
{
    const char *path = mapped(probe, "libcudart.so", 0);
    const char *second = mapped(probe, "libcudart.so", 1);

    if (!path) {
        lc_cli_find(subject->findings, LC_CLI_INFO, "cudart",
                    "no libcudart.so is loaded: the CUDA runtime is linked statically");
        return;
    }
    if (!second) {
        lc_cli_find(subject->findings, LC_CLI_OK, "cudart", "CUDA runtime %s", path);
        return;
    }
    lc_cli_find(subject->findings, LC_CLI_WARNING, "cudart-two",
                "two CUDA runtimes are loaded: %s and %s", path, second);
    lc_cli_remedy(subject->findings, "keep the one that torch was built with");
}

static void check_deepbind(struct subject *subject, const struct lc_cli_probe *probe)
{
    const char *deepbind = lc_cli_probe_get(probe, "deepbind");

    if (!deepbind || strcmp(deepbind, "1") != 0)
        return;
    lc_cli_find(
        subject->findings, LC_CLI_WARNING, "deepbind",
        "this Python opens its extensions with RTLD_DEEPBIND (sys.getdlopenflags()), so they "
        "prefer their own libraries to a preloaded one");
    lc_cli_remedy(subject->findings,
                  "find who calls sys.setdlopenflags (sitecustomize, a .pth file) and take "
                  "RTLD_DEEPBIND out; else use `loongcomm run --proxy`");
}

/* Without torch there is still the system's NCCL to speak of. */
static void check_system_nccl(struct subject *subject)
{
    struct lc_cli_loaded nccl;

    lc_cli_try_load("libnccl.so.2", &nccl);
    if (*nccl.path)
        lc_cli_find(subject->findings, LC_CLI_INFO, "nccl-system",
                    "a program that asks the loader for libnccl.so.2 gets %s, version %s",
                    nccl.path, version_text(nccl.nccl_code));
    else
        lc_cli_find(subject->findings, LC_CLI_INFO, "nccl-system",
                    "the loader finds no libnccl.so.2: %s", nccl.why);
    check_nccl_age(subject, nccl.nccl_code, nccl.path);
}

/* Torch as it loads by itself. True if it is one whose calls of NCCL are worth looking at. */
static bool check_torch(struct subject *subject, const struct lc_cli_probe *probe)
{
    const char *torch = lc_cli_probe_get(probe, "torch");
    const char *broken = lc_cli_probe_get(probe, "torch_broken");
    const char *cuda = lc_cli_probe_get(probe, "cuda");
    const char *hip = lc_cli_probe_get(probe, "hip");

    check_deepbind(subject, probe);
    if (broken) {
        lc_cli_find(subject->findings, LC_CLI_ERROR, "torch-broken", "`import torch` fails: %s",
                    broken);
        lc_cli_remedy(subject->findings, "repair this first: it fails without loongcomm too");
        return false;
    }
    if (!torch) {
        lc_cli_find(subject->findings, LC_CLI_INFO, "torch-absent",
                    "this Python has no torch; --python names another one");
        check_system_nccl(subject);
        return false;
    }
    if (hip && strcmp(hip, "none") != 0) {
        lc_cli_find(subject->findings, LC_CLI_INFO, "torch-rocm",
                    "torch %s is for ROCm %s: loongcomm serves NVIDIA's NCCL only", torch, hip);
        return false;
    }
    if (!cuda || strcmp(cuda, "none") == 0) {
        lc_cli_find(subject->findings, LC_CLI_INFO, "torch-cpu",
                    "torch %s is built without CUDA and uses no NCCL", torch);
        return false;
    }
    lc_cli_find(subject->findings, LC_CLI_OK, "torch", "torch %s for CUDA %s", torch, cuda);
    check_nccl(subject, probe);
    check_cudart(subject, probe);
    return true;
}

static void blame(struct subject *subject, const struct lc_cli_probe *plain)
{
    static const char proxy[] = "`loongcomm run --proxy` serves programs that load NCCL themselves";
    static const char rebuilt[] =
        "use a torch that is linked with libnccl.so.2, as those from PyPI are";
    const char *deepbind = lc_cli_probe_get(plain, "deepbind");
    const char *cause = "the cause is not known";
    const char *remedy = proxy;

    if (deepbind && strcmp(deepbind, "1") == 0) {
        cause = "RTLD_DEEPBIND makes its libraries prefer their own NCCL";
        remedy = "take RTLD_DEEPBIND out of sys.setdlopenflags; else `loongcomm run --proxy`";
    } else if (subject->linkage == LINKAGE_DYNAMIC) {
        cause = "its libraries are linked with libnccl.so.2 but do not bind to a preloaded one";
    } else if (subject->linkage == LINKAGE_STATIC) {
        cause = "NCCL is linked statically into it, and bound there (-Bsymbolic)";
        remedy = rebuilt;
    } else if (mapped(plain, "libnccl.so", 0)) {
        cause = "it opens libnccl.so itself (dlopen and dlsym)";
    } else if (subject->linkage == LINKAGE_NONE) {
        cause = "NCCL is linked statically into it, and hidden";
        remedy = rebuilt;
    }
    lc_cli_find(subject->findings, LC_CLI_ERROR, "interposition-none",
                "torch called NCCL and loongcomm, preloaded, did not see it: %s", cause);
    lc_cli_remedy(subject->findings, "%s", remedy);
}

static void judge(struct subject *subject, const struct lc_cli_probe *plain,
                  const struct lc_cli_probe *preloaded)
{
    const char *seen = lc_cli_probe_get(preloaded, "seen");
    const char *to = lc_cli_probe_get(preloaded, "passed_to");
    const char *error = lc_cli_probe_get(preloaded, "call_error");

    if (strtoull(seen, NULL, 10) > 0 && to && *to) {
        lc_cli_find(subject->findings, LC_CLI_OK, "interposition",
                    "preloaded, loongcomm saw torch call NCCL and passed the call on to %s", to);
    } else if (strtoull(seen, NULL, 10) > 0) {
        lc_cli_find(subject->findings, LC_CLI_ERROR, "interposition-nowhere",
                    "preloaded, loongcomm saw torch call NCCL and found no NCCL to pass it on to");
        lc_cli_remedy(subject->findings, "set LOONGCOMM_NCCL to the path of the real libnccl.so.2");
    } else if (lc_cli_probe_get(preloaded, "called")) {
        blame(subject, plain);
    } else {
        lc_cli_find(subject->findings, LC_CLI_WARNING, "interposition-unknown",
                    "torch could not be made to call NCCL, so nothing was there to see: %s",
                    error ? error : "no reason given");
        lc_cli_remedy(subject->findings, "try with a program that does: loongcomm doctor -- CMD");
    }
}

static void check_preloaded(struct subject *subject, const struct lc_cli_probe *plain,
                            bool has_nccl)
{
    static struct lc_cli_probe preloaded;

    if (!subject->doctor->preload)
        return;
    lc_cli_probe_run(subject->python, subject->doctor->preload, subject->doctor->python_ms,
                     &preloaded);
    if (!lc_cli_probe_done(&preloaded)) {
        lc_cli_find(subject->findings, LC_CLI_ERROR, "preload-breaks-python",
                    "%s works alone, but not with LD_PRELOAD=%s: %s; %s", subject->python,
                    subject->doctor->preload,
                    lc_cli_child_end(&preloaded.child, &preloaded.outcome),
                    lc_cli_child_last_line(&preloaded.outcome));
        lc_cli_remedy(subject->findings, "please report this with the versions above");
    } else if (!lc_cli_probe_get(&preloaded, "seen")) {
        lc_cli_find(subject->findings, LC_CLI_ERROR, "preload-ineffective",
                    "LD_PRELOAD does not reach %s", subject->python);
        lc_cli_remedy(subject->findings,
                      "if that is a script, it clears LD_PRELOAD: name the interpreter itself with "
                      "--python; a set-user-id or statically linked program cannot be served");
    } else if (has_nccl) {
        judge(subject, plain, &preloaded);
    }
}

static void explain_failure(struct subject *subject, struct lc_cli_probe *probe)
{
    const char *end = lc_cli_child_end(&probe->child, &probe->outcome);
    const char *python = lc_cli_probe_get(probe, "python");
    const char *line = lc_cli_child_last_line(&probe->outcome);

    if (probe->outcome.end == LC_CLI_TIMED_OUT) {
        lc_cli_find(subject->findings, LC_CLI_ERROR, "python-timeout",
                    "%s %s, %s; loongcomm was not preloaded", subject->python,
                    python ? "started `import torch`" : "was started", end);
        lc_cli_remedy(subject->findings, "if its disk is slow, give --timeout more seconds");
        return;
    }
    lc_cli_find(subject->findings, LC_CLI_ERROR, python ? "torch-crash" : "python-failed",
                "%s%s: %s%s%s; loongcomm was not preloaded", subject->python,
                python ? ", importing torch or asking it" : "", end, *line ? ": " : "", line);
    lc_cli_remedy(subject->findings, "repair this first: it fails without loongcomm too");
}

void lc_cli_check_python(struct lc_cli_doctor *doctor)
{
    static struct lc_cli_probe plain;
    static const char *const usual[] = { "python3", "python" };
    struct subject subject = { .doctor = doctor, .findings = &doctor->findings };
    const char *version;

    for (size_t i = 0; i < sizeof(usual) / sizeof(*usual); i++) {
        subject.python = doctor->python ? doctor->python : usual[i];
        lc_cli_probe_run(subject.python, NULL, doctor->python_ms, &plain);
        if (doctor->python || plain.outcome.end != LC_CLI_NOT_STARTED)
            break;
    }
    if (plain.outcome.end == LC_CLI_NOT_STARTED) {
        lc_cli_find(&doctor->findings, doctor->python ? LC_CLI_ERROR : LC_CLI_INFO,
                    "python-missing", "%s: %s", subject.python,
                    lc_cli_child_end(&plain.child, &plain.outcome));
        lc_cli_remedy(&doctor->findings, "name the job's interpreter with --python");
        check_system_nccl(&subject);
        return;
    }
    version = lc_cli_probe_get(&plain, "python");
    if (version)
        lc_cli_find(&doctor->findings, LC_CLI_OK, "python", "Python %s", version);
    if (!lc_cli_probe_done(&plain)) {
        explain_failure(&subject, &plain);
        return;
    }
    check_preloaded(&subject, &plain, check_torch(&subject, &plain));
}
