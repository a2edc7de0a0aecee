# SPDX-License-Identifier: Apache-2.0
"""What the tests of the `loongcomm` command share."""
import json
import os
import shutil
import subprocess
import tempfile
import unittest

CLI = os.environ["LC_CLI"]
LIBRARY = os.environ["LC_LIBRARY"]


def environment(**changes):
    """Ours without what would change the answers, then the changes; None removes."""
    env = {k: v for k, v in os.environ.items()
           if not k.startswith(("LOONGCOMM_", "NCCL_", "LC_", "VLLM_", "OMPI_", "WORLD_", "LOCAL_WORLD_", "GROUP_WORLD_"))}
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH"):
        env.pop(name, None)
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def call(*args, cli=CLI, cwd=None, **changes):
    return subprocess.run([cli, *args], env=environment(**changes), cwd=cwd, timeout=120,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          encoding="utf-8", errors="surrogateescape")


class CliTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lc-cli-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def write(self, name, text, mode=0o600):
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(text)
        os.chmod(path, mode)
        return path

    def no_files(self, name):
        """Puts one thing after the other there that is no file of a sensible size, and tells what is to be said of it."""
        path = self.path(name)
        if os.path.lexists(path):
            os.unlink(path)
        os.mkfifo(path)
        yield "it is no regular file"
        os.unlink(path)
        os.mkdir(path)
        yield "it is a folder"
        os.rmdir(path)
        for target, why in (("/dev/zero", "it is no regular file"), (path, "Too many levels of symbolic links")):
            os.symlink(target, path)
            yield why
            os.unlink(path)
        with open(path, "w") as f:
            os.truncate(f.fileno(), 1 << 40)
        yield "it is too large"
        os.chmod(path, 0)
        if not os.access(path, os.R_OK):
            yield "Permission denied"
        os.unlink(path)

    def install(self, prefix, libdir="lib"):
        """A copy in an installed layout; returns the command and the library."""
        command = self.path(prefix, "bin", "loongcomm")
        library = self.path(prefix, libdir, "libloongcomm.so")
        for source, target in ((CLI, command), (LIBRARY, library)):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(source, target)
        return command, os.path.realpath(library)

    def document(self, result):
        try:
            return json.loads(result.stdout)
        except ValueError:
            self.fail("no JSON: %r; stderr: %s" % (result.stdout, result.stderr))
