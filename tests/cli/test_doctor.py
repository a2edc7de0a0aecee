# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import signal
import subprocess
import sys
import time
import unittest

from cli import CLI, LIBRARY, CliTest, call, environment

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

    # Torch and its NCCL.

    def test_dynamic_nccl_is_seen(self):
        site = self.torch()
        findings = self.doctor(code=0, PYTHONPATH=site)
        self.assert_finding(findings, "library", "ok", os.path.realpath(LIBRARY))
        self.assert_finding(findings, "torch", "ok", "9.8.7+fake", "13.0")
        self.assert_finding(findings, "nccl", "ok", "2.28.9", site + "/torch/lib/libnccl.so.2",
                            "dynamically")
        self.assert_finding(findings, "interposition", "ok", site + "/torch/lib/libnccl.so.2")
        self.assertNotIn("nccl-two", findings)
        self.assertNotIn("deepbind", findings)
        self.assertIn("calls of NCCL reach loongcomm", self.verdict)

    def test_static_visible_nccl_is_seen(self):
        site = self.torch("visible")
        findings = self.doctor(code=0, PYTHONPATH=site)
        self.assert_finding(findings, "nccl", "info", "statically", site + "/torch/lib/libtorch_cuda.so")
        self.assert_finding(findings, "interposition", "ok", "libtorch_cuda.so")

    def test_static_nccl_bound_inside_is_not_seen(self):
        findings = self.doctor(code=1, PYTHONPATH=self.torch("symbolic"))
        self.assert_finding(findings, "interposition-none", "error", "statically", "-Bsymbolic")
        self.assertIn("do not reach", self.verdict)

    def test_static_hidden_nccl_is_not_seen(self):
        findings = self.doctor(code=1, PYTHONPATH=self.torch("hidden"))
        self.assert_finding(findings, "nccl", "info", "no libnccl.so", "2.28.9")
        self.assert_finding(findings, "interposition-none", "error", "statically", "hidden")

    def test_nccl_opened_by_dlopen_is_not_seen(self):
        findings = self.doctor(code=1, PYTHONPATH=self.torch("dlopen"))
        self.assert_finding(findings, "interposition-none", "error", "dlopen")
        self.assertIn("--proxy", findings["interposition-none"]["remedy"])

    @unittest.skipUnless(os.environ["LC_SANITIZE"] == "none", "sanitizers refuse RTLD_DEEPBIND")
    def test_deepbind_is_named(self):
        site = self.torch(before="sys.setdlopenflags(sys.getdlopenflags() | os.RTLD_DEEPBIND)")
        findings = self.doctor(code=1, PYTHONPATH=site)
        self.assert_finding(findings, "deepbind", "warning", "RTLD_DEEPBIND")
        self.assert_finding(findings, "interposition-none", "error", "RTLD_DEEPBIND")

    def test_two_nccls_are_named(self):
        other = self.path("other", "libnccl.so.2")
        os.makedirs(os.path.dirname(other))
        shutil.copy(os.environ["LC_FAKE_NCCL"], other)
        site = self.torch(after="ctypes.CDLL(%r)" % other)
        findings = self.doctor(code=0, PYTHONPATH=site)
        self.assert_finding(findings, "nccl-two", "warning", other, site)
        site = self.torch("visible", after="ctypes.CDLL(%r)" % other)
        findings = self.doctor(PYTHONPATH=site)
        self.assert_finding(findings, "nccl-two", "warning", other, "inside", site)

    def test_two_cuda_runtimes_are_named(self):
        paths = [self.path(folder, "libcudart.so.13") for folder in ("one", "two")]
        for path in paths:
            os.makedirs(os.path.dirname(path))
            shutil.copy(os.environ["LC_FAKE_NCCL"], path)
        site = self.torch(after="".join("ctypes.CDLL(%r)\n" % path for path in paths))
        self.assert_finding(self.doctor(code=0, PYTHONPATH=site), "cudart-two", "warning", *paths)

    def test_old_nccl_is_named(self):
        findings = self.doctor(code=0, PYTHONPATH=self.torch(), LC_FAKE_NCCL_VERSION="21705")
        self.assert_finding(findings, "nccl-old", "warning", "21705", "2.18")

    def test_torch_that_cannot_call_nccl_proves_nothing(self):
        site = self.torch("hidden", nccl_after="def unique_id(): raise RuntimeError('no NCCL')")
        findings = self.doctor(code=0, PYTHONPATH=site)
        self.assert_finding(findings, "interposition-unknown", "warning", "RuntimeError: no NCCL")

    def test_torch_without_nvidia_is_told_from_a_broken_one(self):
        findings = self.doctor(code=0, PYTHONPATH=self.torch(cuda=None))
        self.assert_finding(findings, "torch-cpu", "info", "9.8.7+fake")
        findings = self.doctor(code=0, PYTHONPATH=self.torch(cuda=None, hip="6.4"))
        self.assert_finding(findings, "torch-rocm", "info", "6.4")
        findings = self.doctor(code=1, PYTHONPATH=self.torch(before="import no_such_module"))
        self.assert_finding(findings, "torch-broken", "error", "no_such_module")

    def test_torch_in_the_current_folder_is_not_imported(self):
        self.torch(before="raise RuntimeError('imported')")
        findings = self.doctor(cwd=self.path("site"))
        self.assertNotIn("torch-broken", findings)

    # Children that misbehave.

    def test_no_torch_is_no_error(self):
        site = self.path("site")
        self.write("site/torch.py", "raise ModuleNotFoundError('no torch', name='torch')")
        findings = self.doctor(code=0, PYTHONPATH=site)
        self.assert_finding(findings, "torch-absent", "info")
        self.assert_finding(findings, "nccl-system", "info", "libnccl.so.2")

    def test_system_nccl_is_the_one_the_loader_finds(self):
        self.write("site/torch.py", "raise ModuleNotFoundError('no torch', name='torch')")
        other = self.path("other", "libnccl.so.2")
        os.makedirs(os.path.dirname(other))
        shutil.copy(os.environ["LC_FAKE_NCCL"], other)
        findings = self.doctor(code=0, PYTHONPATH=self.path("site"),
                               LD_LIBRARY_PATH=os.path.dirname(other))
        self.assert_finding(findings, "nccl-system", "info", other, "2.28.9")

    def test_import_that_hangs_is_killed_at_the_deadline_with_its_children(self):
        pids = self.path("pids")
        site = self.torch(before="""
import subprocess, time
child = subprocess.Popen(["sleep", "300"], close_fds=False)
with open(%r, "w") as f:
    f.write("%%d %%d" %% (os.getpid(), child.pid))
time.sleep(300)""" % pids)
        for limit in ("3", "30"):  # a busy machine may need more until the import hangs
            begin = time.monotonic()
            findings = self.doctor("--timeout", limit, code=1, PYTHONPATH=site)
            self.assertLess(time.monotonic() - begin, 100)
            self.assert_finding(findings, "python-timeout", "error", "import torch", limit + ".0 s")
            if os.path.exists(pids):
                break
        with open(pids) as f:
            for pid in map(int, f.read().split()):
                self.assertTrue(self.gone(pid), pid)

    def gone(self, pid):
        for _ in range(100):
            try:
                with open("/proc/%d/stat" % pid) as f:
                    if f.read().rsplit(")", 1)[1].split()[0] == "Z":
                        return True
            except FileNotFoundError:
                return True
            time.sleep(0.05)
        return False

    def test_grandchild_that_keeps_the_pipes_does_not_hold_the_doctor(self):
        site = self.torch(before="import subprocess; subprocess.Popen(['sleep', '200'], "
                                 "close_fds=False, start_new_session=True)")
        begin = time.monotonic()
        self.doctor(code=0, PYTHONPATH=site)
        self.assertLess(time.monotonic() - begin, 100)

    def test_import_that_crashes_is_told(self):
        site = self.torch(before="os.kill(os.getpid(), 11)")
        findings = self.doctor(code=1, PYTHONPATH=site)
        self.assert_finding(findings, "torch-crash", "error", "signal 11")
        site = self.torch(before="os._exit(3)")
        self.assert_finding(self.doctor(code=1, PYTHONPATH=site), "torch-crash", "error", "exit code 3")

    def test_what_breaks_only_with_the_preload_is_laid_to_loongcomm(self):
        site = self.torch(before="'libloongcomm' in os.environ.get('LD_PRELOAD', '') and os._exit(5)")
        findings = self.doctor(code=1, PYTHONPATH=site)
        self.assert_finding(findings, "preload-breaks-python", "error", "exit code 5")

    def test_python_that_clears_the_preload_is_told(self):
        wrapper = self.write("python", "#!/bin/sh\nunset LD_PRELOAD\nexec %s \"$@\"\n" % sys.executable,
                             0o700)
        findings = self.doctor(code=1, python=wrapper, PYTHONPATH=self.torch())
        self.assert_finding(findings, "preload-ineffective", "error", wrapper)

    def test_python_that_is_none_is_an_error(self):
        findings = self.doctor(code=1, python=self.path("no-python"))
        self.assert_finding(findings, "python-missing", "error", "No such file")
        findings = self.doctor(code=1, python="false")
        self.assert_finding(findings, "python-failed", "error", "exit code 1")
        self.assertEqual(self.doctor(code=1, python="true")["python-failed"]["severity"], "error")

    def test_flood_and_terminal_codes_are_contained(self):
        site = self.torch(before="""
junk = b"key\\t" + b"\\x1b[31m\\xff" * 1000 + b"\\n"
for _ in range(2000):
    os.write(2, junk)
    os.write(1, junk)
for _ in range(2000):
    os.write(3, junk)
raise ImportError("\\x1b[2J" + "x" * 100000)""")
        findings = self.doctor(code=1, PYTHONPATH=site)
        self.assertTrue({"torch-broken", "torch-crash", "python-failed"} & set(findings), findings)
        text = call("doctor", "--python", sys.executable, PYTHONPATH=site)
        self.assertNotIn("\033", text.stdout)
        self.assertLess(len(text.stdout), 20000)

    # The environment.

    def test_bad_settings_are_warnings(self):
        findings = self.doctor(code=0, PYTHONPATH=self.torch(), LOONGCOMM_ENABLE="perhaps")
        self.assert_finding(findings, "setting-bad", "warning", "LOONGCOMM_ENABLE")
        findings = self.doctor(code=0, PYTHONPATH=self.torch(), LOONGCOMM_ENABLE="no",
                               LOONGCOMM_DIR="/no/such", LOONGCOMM_NCCL="/no/such")
        self.assert_finding(findings, "disabled", "warning")
        self.assert_finding(findings, "setting-dir", "warning", "/no/such")
        self.assert_finding(findings, "setting-nccl", "warning", "/no/such")
        self.assert_finding(findings, "interposition", "ok")

    def test_entries_of_ld_preload_are_looked_at(self):
        site = self.torch()
        findings = self.doctor(LD_PRELOAD="./relative.so:/no/such.so", PYTHONPATH=site)
        self.assert_finding(findings, "preload-relative", "warning", "./relative.so")
        self.assert_finding(findings, "preload-missing", "warning", "/no/such.so")
        _, other = self.install("other")
        findings = self.doctor(code=1, LD_PRELOAD=other, PYTHONPATH=site)
        self.assert_finding(findings, "preload-other-loongcomm", "error", other)
        findings = self.doctor(code=0, LD_PRELOAD=os.path.realpath(LIBRARY), PYTHONPATH=site)
        self.assert_finding(findings, "interposition", "ok")

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

    def test_files_that_are_none_are_named_at_once(self):
        site = self.torch()
        os.mkfifo(self.path("fifo"))
        findings = self.doctor(code=0, PYTHONPATH=site, NCCL_TOPO_FILE=self.path("fifo"), LOONGCOMM_NCCL=self.path("fifo"),
                               NCCL_CONF_FILE=self.folder)
        self.assert_finding(findings, "setting-nccl", "warning", self.path("fifo"), "it is no regular file")
        self.assert_finding(findings, "nccl-file-missing", "warning", "it is no regular file; NCCL may wait for it for ever")
        findings = self.doctor(code=0, PYTHONPATH=site, NCCL_CONF_FILE=self.folder)
        self.assert_finding(findings, "nccl-file-missing", "warning", "it is a folder; NCCL goes on without it")
        findings = self.doctor(code=0, PYTHONPATH=site, NCCL_CONF_FILE="/dev/null", LOONGCOMM_NCCL="/dev/null")
        self.assertNotIn("nccl-file-missing", findings)
        self.assert_finding(findings, "setting-nccl", "warning", "/dev/null", "it is no regular file")

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

    def test_machine_without_any_other_program_is_no_error(self):
        result = call("doctor", PATH=self.folder)
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertRegex(result.stdout, r"\nok +library: .* can be preloaded\n")
        self.assertRegex(result.stdout, r"\ninfo +python-missing: ")
        self.assertIn("(0 errors, ", result.stdout)

    def test_machine_without_gpu_is_no_error(self):
        findings = self.doctor(code=0, PYTHONPATH=self.torch())
        if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/proc/driver/nvidia/version"):
            self.assert_finding(findings, "gpu-none", "info")
        else:
            self.assertNotIn("gpu-none", findings)

    # The command behind --.

    def test_command_that_uses_nccl_is_seen(self):
        program = os.environ["LC_FAKE_PROGRAM"]
        temporary = self.path("tmp")
        os.mkdir(temporary)
        findings = self.doctor("--", "sh", "-c", "%s 5; %s 2" % (program, program), code=0,
                               PYTHONPATH=self.torch(), TMPDIR=temporary, LOONGCOMM_ENABLE="no")
        self.assert_finding(findings, "command", "ok", "7 operations on 2 communicators in 2 processes",
                            os.path.realpath(os.environ["LC_FAKE_NCCL"]))
        self.assertIn("this goes to standard error of the doctor", self.stderr)
        self.assertEqual(os.listdir(temporary), [])

    def test_command_without_nccl_is_an_error(self):
        findings = self.doctor("--", "true", code=1, PYTHONPATH=self.torch())
        self.assert_finding(findings, "command-no-calls", "error", "true")

    def test_command_needs_a_folder_for_its_reports(self):
        findings = self.doctor("--", "true", code=1, PYTHONPATH=self.torch(), TMPDIR="/no/such")
        self.assert_finding(findings, "command-folder", "error", "/no/such")

    def test_command_that_fails_is_told(self):
        site = self.torch()
        for command, text in ((("sh", "-c", "exit 9"), "exit code 9"), (("/no/such",), "No such file"),
                              (("sh", "-c", "kill -6 $$"), "signal 6")):
            findings = self.doctor("--", *command, code=1, PYTHONPATH=site)
            self.assert_finding(findings, "command-failed", "error", text)
        findings = self.doctor("--timeout", "3", "--", "sleep", "300", code=1, PYTHONPATH=site)
        self.assert_finding(findings, "command-failed", "error", "3.0 s")

    def test_ends_of_children_are_told_where_the_caller_ignores_them(self):
        """Who ignores SIGCHLD hands that on, and the kernel then keeps no exit codes."""
        command = ("import signal, os, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
                   "os.execv(sys.argv[1], sys.argv[1:])")
        result = call("-c", command, CLI, "doctor", "--json", "--", "false", cli=sys.executable)
        findings = {f["id"]: f for f in self.document(result)["findings"]}
        self.assert_finding(findings, "command-failed", "error", "exit code 1")

    def test_interrupted_doctor_takes_the_command_with_it(self):
        """All of its processes: a launcher's workers would keep the GPUs."""
        script = 'sleep 300 & echo $! > "$0.new"; mv "$0.new" "$0"; wait'
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            marker = self.path(str(int(number)))
            doctor = subprocess.Popen([CLI, "doctor", "--python", "/bin/false", "--", "sh", "-c", script, marker],
                                      env=environment(TMPDIR=self.folder), stdin=subprocess.DEVNULL,
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                      # under nohup the doctor would rightly go on
                                      preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
            deadline = time.monotonic() + 100
            while not os.path.exists(marker) and time.monotonic() < deadline:
                time.sleep(0.02)
            with open(marker) as f:
                worker = "/proc/%s/stat" % f.read().strip()
            doctor.send_signal(number)
            self.assertEqual(doctor.wait(100), -number)
            while time.monotonic() < deadline:
                try:
                    with open(worker) as f:
                        if f.read().rsplit(")", 1)[1].split()[0] == "Z":
                            break
                except FileNotFoundError:
                    break
                time.sleep(0.02)
            else:
                self.fail("the worker lives on")

    def test_forged_reports_are_contained(self):
        script = self.write("forge", """#!/bin/sh
cd "$LOONGCOMM_DIR" || exit 1
echo '{"schema": "loongcomm.report/1", "communicators": [{"number":' > cut.json
echo '{"schema": "other/1", "communicators": [{"number": 1}]}' > other.json
head -c 3000000 /dev/zero > large.json
mkfifo pipe.json
ln -s /etc/passwd link.json
mkdir folder.json
exit 0
""", 0o700)
        findings = self.doctor("--", script, code=1, PYTHONPATH=self.torch(), TMPDIR=self.folder)
        self.assert_finding(findings, "command-reports", "warning", "6 of the files")
        self.assert_finding(findings, "command-no-calls", "error")
        self.assertFalse([f for f in os.listdir(self.folder) if f.startswith("loongcomm-doctor")])

    def test_wrong_usage_ends_with_2(self):
        for args in (("--no-such",), ("--python",), ("--python", ""), ("--timeout", "soon"),
                     ("--timeout", "-1"), ("--timeout", "nan"), ("true",), ("--",)):
            self.assertEqual(call("doctor", *args).returncode, 2, args)


if __name__ == "__main__":
    unittest.main()
