#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""installed.py MESON BUILD CC EXAMPLE: the example in C as a caller builds it: against what is installed for
loongkernels-host and nothing else, with what pkg-config says. Ends with 77 without pkg-config."""
import json
import os
import shutil
import subprocess
import sys
import tempfile


def output(*command, **more):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **more).stdout


def install(meson, build, root):
    """Headers, library and pkg-config file into a folder; the prefix they have there."""
    prefixes = []
    for source, target in json.loads(output(meson, "introspect", build, "--installed")).items():
        name = os.path.basename(target)
        if not ("/include/kernels/" in target or name == "libloongkernels-host.so" or name == "loongkernels-host.pc"):
            continue
        os.makedirs(os.path.dirname(root + target), exist_ok=True)
        shutil.copy(source, root + target)
        if "/include/kernels/" in target:
            prefixes.append(target[:target.index("/include/kernels/")])
    return prefixes[0]


def main():
    meson, build, cc, example = sys.argv[1:]
    if not shutil.which("pkg-config"):
        print("skipped: no pkg-config")
        return 77
    with tempfile.TemporaryDirectory() as root:
        prefix = root + install(meson, build, root)
        found = [os.path.dirname(os.path.join(folder, name)) for folder, _, names in os.walk(root) for name in names
                 if name == "loongkernels-host.pc"]
        environment = dict(os.environ, PKG_CONFIG_PATH=found[0])
        flags = output("pkg-config", "--define-variable=prefix=" + prefix, "--cflags", "--libs", "loongkernels-host",
                       env=environment).split()
        assert any(flag.startswith(prefix) for flag in (f[2:] for f in flags)), flags
        program = os.path.join(root, "example")
        output(cc, example, "-o", program, *flags, "-lm")
        library = next(flag[2:] for flag in flags if flag.startswith("-L"))
        print(output(program, env=dict(os.environ, LD_LIBRARY_PATH=library)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
