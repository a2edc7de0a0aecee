# SPDX-License-Identifier: Apache-2.0
"""Run by `loongcomm doctor` inside the Python to be examined, once plain and once preloaded.

Answers on descriptor 3, one "key<TAB>value" a line; anything printed elsewhere is not read. Needs
nothing but the standard library, and any Python 3.
"""
import os
import sys


def say(key, *values):
    text = " ".join(str(v) for v in values)
    # Bytes of a path that are not UTF-8 stay what they are.
    text = "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else " " for c in text)[:900]
    os.write(3, (key + "\t" + text + "\n").encode("utf-8", "surrogateescape"))


def describe(error):
    return "%s: %s" % (type(error).__name__, error)


def mapped():
    """Paths of the mapped libraries that matter here, in order of appearance."""
    prefixes = ("libnccl", "librccl", "libcudart", "libcuda.so", "libtorch", "libloongcomm")
    paths = []
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(None, 5)
            if len(fields) < 6 or not fields[5].startswith("/"):
                continue
            path = fields[5]
            if os.path.basename(path).startswith(prefixes) and path not in paths:
                paths.append(path)
    return paths


def import_torch():
    # A checkout of torch in the current folder is not what a job would import.
    sys.path[:] = [p for p in sys.path if p]
    try:
        import torch
    except ModuleNotFoundError as error:
        say("torch_absent" if error.name == "torch" else "torch_broken", describe(error))
        return None
    except BaseException as error:
        say("torch_broken", describe(error))
        return None
    say("torch", getattr(torch, "__version__", "of unknown version"))
    version = getattr(torch, "version", None)
    say("cuda", getattr(version, "cuda", None) or "none")
    say("hip", getattr(version, "hip", None) or "none")
    return torch


def call_nccl():
    """Makes torch call NCCL. version() is compiled into newer torches, unique_id() is a real call that
    needs no GPU; whether it succeeds is not the question."""
    try:
        import torch.cuda.nccl as nccl
    except BaseException as error:
        say("call_error", describe(error))
        return
    try:
        version = nccl.version()
        say("built_nccl", ".".join(str(v) for v in version) if isinstance(version, tuple) else version)
    except BaseException as error:
        say("call_error", describe(error))
    try:
        nccl.unique_id()
        say("called", 1)
    except BaseException as error:
        say("call_error", describe(error))


def ask_loongcomm():
    import ctypes

    try:
        everything = ctypes.CDLL(None)
        calls = everything.loongcommCallsSeen
        version = everything.loongcommVersion
        nccl = everything.loongcommNcclPath
    except AttributeError:
        return
    calls.restype = ctypes.c_ulonglong
    version.restype = nccl.restype = ctypes.c_char_p
    say("seen", calls())
    say("loongcomm", (version() or b"").decode("utf-8", "replace"))
    say("passed_to", os.fsdecode(nccl() or b""))


def ask_nccl(path):
    """The version of a loaded libnccl, asked past any preload."""
    import ctypes

    code = ctypes.c_int(0)
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
        if library.ncclGetVersion(ctypes.byref(code)) == 0:
            say("nccl_code", code.value, path)
    except (OSError, AttributeError):
        pass


def main():
    say("python", sys.version.split()[0], sys.executable)
    torch = import_torch()
    say("deepbind", int(bool(sys.getdlopenflags() & getattr(os, "RTLD_DEEPBIND", 0))))
    if torch is not None and getattr(getattr(torch, "version", None), "cuda", None):
        call_nccl()
    ask_loongcomm()
    for path in mapped()[:64]:
        say("map", path)
        if os.path.basename(path).startswith("libnccl.so"):
            ask_nccl(path)
    say("end", 1)
    os._exit(0)  # the doctor asks about loading, not about how torch takes itself down


main()
