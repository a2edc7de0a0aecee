# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import sys
import unittest

from cli import LIBRARY, CliTest, call

SEVERITIES = ("error", "warning", "info", "ok")

TORCH = """
import ctypes, os, sys
{before}
here = os.path.dirname(os.path.abspath(__file__))
__version__ = "9.8.7+fake"
class version:
    cuda = {cuda!r}
    hip = {hip!r}
_lib = ctypes.CDLL(os.path.join(here, "lib", "libtorch_cuda.so"), mode=sys.getdlopenflags())
{after}
"""

NCCL = """
import ctypes
from torch import _lib
def version():
    return (2, 28, 9)
def unique_id():
    if _lib.fake_unique_id(ctypes.create_string_buffer(128)) != 0:
        raise RuntimeError("NCCL error")
{after}
"""


class Doctor(CliTest):
    def torch(self, variant="dynamic", before="", after="", nccl_after="", cuda="13.0", hip=None):
        """A folder for PYTHONPATH whose torch gets its NCCL as the variant says."""
        root = self.path("site")
        self.write("site/torch/__init__.py",
                   TORCH.format(before=before, after=after, cuda=cuda, hip=hip))
        self.write("site/torch/cuda/__init__.py", "")
        self.write("site/torch/cuda/nccl.py", NCCL.format(after=nccl_after))
        lib = os.path.join(root, "torch", "lib")
        os.makedirs(lib, exist_ok=True)
        shutil.copy(os.environ["LC_FAKE_TORCH_" + variant.upper()], os.path.join(lib, "libtorch_cuda.so"))
        if variant in ("dynamic", "dlopen"):
            shutil.copy(os.environ["LC_FAKE_NCCL"], os.path.join(lib, "libnccl.so.2"))
        return os.path.realpath(root)

    def doctor(self, *args, code=None, python=sys.executable, **changes):
        """The findings by id; of several with one id the last."""
        result = call("doctor", "--json", "--python", python, *args, **changes)
        self.stderr = result.stderr
        document = self.document(result)
        self.assertEqual(document["schema"], "loongcomm.findings/1")
        findings = document["findings"]
        self.verdict = document["verdict"]
        worst = [SEVERITIES.index(f["severity"]) for f in findings]
        self.assertEqual(worst, sorted(worst))
        for finding in findings:
            self.assertEqual(sorted(finding), ["evidence", "id", "remedy", "severity"])
            self.assertTrue(finding["evidence"])
            if finding["severity"] in ("error", "warning"):
                self.assertTrue(finding["remedy"], finding)
        errors = [f for f in findings if f["severity"] == "error"]
        self.assertEqual(result.returncode, 1 if errors else 0, findings)
        if code is not None:
            self.assertEqual(result.returncode, code, findings)
        return {f["id"]: f for f in findings}

    def assert_finding(self, findings, name, severity, *texts):
        self.assertIn(name, findings)
        self.assertEqual(findings[name]["severity"], severity, findings[name])
        for text in texts:
            self.assertIn(text, findings[name]["evidence"])

    # The environment.

    def test_bad_settings_are_warnings(self):
        findings = self.doctor(code=0, PYTHONPATH=self.torch(), LOONGCOMM_ENABLE="perhaps")
        self.assert_finding(findings, "setting-bad", "warning", "LOONGCOMM_ENABLE")
        findings = self.doctor(code=0, PYTHONPATH=self.torch(), LOONGCOMM_ENABLE="no",
                               LOONGCOMM_DIR="/no/such", LOONGCOMM_NCCL="/no/such")
        self.assert_finding(findings, "disabled", "warning")
        self.assert_finding(findings, "setting-dir", "warning", "/no/such")
        self.assert_finding(findings, "setting-nccl", "warning", "/no/such")

    def test_entries_of_ld_preload_are_looked_at(self):
        site = self.torch()
        findings = self.doctor(LD_PRELOAD="./relative.so:/no/such.so", PYTHONPATH=site)
        self.assert_finding(findings, "preload-relative", "warning", "./relative.so")
        self.assert_finding(findings, "preload-missing", "warning", "/no/such.so")
        _, other = self.install("other")
        findings = self.doctor(code=1, LD_PRELOAD=other, PYTHONPATH=site)
        self.assert_finding(findings, "preload-other-loongcomm", "error", other)
        findings = self.doctor(code=0, LD_PRELOAD=os.path.realpath(LIBRARY), PYTHONPATH=site)

    def test_plugin_values_are_tried_as_nccl_does(self):
        site = self.torch()
        folder = self.path("plugins")
        os.makedirs(folder)
        for name in ("libnccl-net-mine.so", "libnccl-tuner-mine.so", "odd.so"):
            shutil.copy(os.environ["LC_FAKE_NCCL"], os.path.join(folder, name))
        for variable, value, found in (
                ("NCCL_NET_PLUGIN", "mine", "libnccl-net-mine.so"),
                ("NCCL_NET_PLUGIN", "none,mine", "libnccl-net-mine.so"),
                ("NCCL_TUNER_PLUGIN", "mine", "libnccl-tuner-mine.so"),
                ("NCCL_PROFILER_PLUGIN", "odd.so", "odd.so"),
                ("NCCL_NET_PLUGIN", folder + "/odd.so", "odd.so")):
            findings = self.doctor(code=0, PYTHONPATH=site, LD_LIBRARY_PATH=folder, **{variable: value})
            self.assert_finding(findings, "plugin", "ok", variable, os.path.join(folder, found))
            self.assertNotIn("plugin-missing", findings)
        for variable, value in (("NCCL_NET_PLUGIN", "mine,other"), ("NCCL_PROFILER_PLUGIN", "mine"),
                                ("NCCL_TUNER_PLUGIN", "/no/such.so")):
            findings = self.doctor(code=0, PYTHONPATH=site, LD_LIBRARY_PATH=folder, **{variable: value})
            self.assert_finding(findings, "plugin-missing", "warning", variable)
        findings = self.doctor(code=0, PYTHONPATH=site, NCCL_NET_PLUGIN="none",
                               NCCL_TUNER_PLUGIN="STATIC_PLUGIN")
        self.assertNotIn("plugin-missing", findings)

    def test_files_that_nccl_would_miss_are_named(self):
        findings = self.doctor(code=0, PYTHONPATH=self.torch(), NCCL_CONF_FILE="/no/such.conf",
                               VLLM_NCCL_SO_PATH="/x/libnccl.so.2")
        self.assert_finding(findings, "nccl-file-missing", "warning", "NCCL_CONF_FILE", "/no/such.conf")
        self.assert_finding(findings, "nccl-by-path", "info", "/x/libnccl.so.2")

    def test_library_that_cannot_be_preloaded_is_an_error(self):
        command, library = self.install("p")
        with open(library, "w") as f:
            f.write("no library")
        self.assertEqual(call("doctor", cli=command).returncode, 1)
        self.assertIn("library-not-loadable", call("doctor", cli=command).stdout)
        shutil.copy(os.environ["LC_FAKE_TORCH_NOISY"], library)
        self.assertRegex(call("doctor", cli=command).stdout,
                         "library-not-preloadable: .*cannot be preloaded")
        os.unlink(library)
        self.assertIn("library-missing", call("doctor", cli=command).stdout)
        command, _ = self.install("a b")
        self.assertIn("library-path: ", call("doctor", cli=command).stdout)

    def test_machine_without_gpu_is_no_error(self):
        findings = self.doctor(code=0, PYTHONPATH=self.torch())
        if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/proc/driver/nvidia/version"):
            self.assert_finding(findings, "gpu-none", "info")
        else:
            self.assertNotIn("gpu-none", findings)

    def test_wrong_usage_ends_with_2(self):
        for args in (("--no-such",), ("--python",), ("--python", ""), ("--timeout", "soon"),
                     ("--timeout", "-1"), ("--timeout", "nan"), ("true",), ("--",)):
            self.assertEqual(call("doctor", *args).returncode, 2, args)


if __name__ == "__main__":
    unittest.main()
