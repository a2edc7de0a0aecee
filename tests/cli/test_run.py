# SPDX-License-Identifier: Apache-2.0
import os
import re
import stat
import sys
import unittest

from cli import LIBRARY, CliTest, call

PRINT = ("sh", "-c", 'printf "%s\\n" "$LD_PRELOAD" "$LD_LIBRARY_PATH"')


class Run(CliTest):
    def preload(self, *options, cli=None, **changes):
        extra = {"cli": cli} if cli else {}
        result = call("run", *options, "--", *PRINT, **extra, **changes)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout.split("\n")[0]

    def test_library_of_the_build_tree_is_preloaded_by_absolute_path(self):
        self.assertEqual(self.preload(cwd="/"), os.path.realpath(LIBRARY))

    def test_installed_library_is_found_in_each_usual_folder(self):
        for number, libdir in enumerate(("lib", "lib64", os.environ["LC_LIBDIR"], "bin")):
            command, library = self.install("p%d" % number, libdir)
            self.assertEqual(self.preload(cli=command), library)

    def test_command_called_through_a_link_finds_its_library(self):
        command, library = self.install("p")
        os.symlink(command, self.path("link"))
        self.assertEqual(self.preload(cli=self.path("link")), library)

    def test_what_ld_preload_held_stays_behind(self):
        own = os.path.realpath(LIBRARY)
        self.assertEqual(self.preload(LD_PRELOAD="libm.so.6 libdl.so.2"),
                         own + ":libm.so.6 libdl.so.2")
        self.assertEqual(self.preload(LD_PRELOAD=""), own)

    def test_library_already_preloaded_is_not_added_again(self):
        own = os.path.realpath(LIBRARY)
        for old in (own, "libdl.so.2:" + own, own + " libm.so.6"):
            self.assertEqual(self.preload(LD_PRELOAD=old), old)
        os.symlink(own, self.path("again.so"))
        self.assertEqual(self.preload(LD_PRELOAD=self.path("again.so")), self.path("again.so"))

    def test_path_that_the_loader_would_split_is_one_clear_error(self):
        for prefix, what in (("a b", "a space"), ("a:b", "a colon"), ("a$LIB", "a dollar sign")):
            command, library = self.install(prefix)
            result = call("run", "--", "true", cli=command)
            self.assertEqual(result.returncode, 1)
            self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
            self.assertIn(library, result.stderr)
            self.assertIn(what, result.stderr)
            self.assertIn("symbolic link", result.stderr)

    def test_missing_library_is_an_error(self):
        command, library = self.install("p")
        os.unlink(library)
        result = call("run", "--", "true", cli=command)
        self.assertEqual(result.returncode, 1)
        self.assertIn("libloongcomm.so", result.stderr)

    def test_command_ends_as_it_would_alone(self):
        self.assertEqual(call("run", "--", "sh", "-c", "exit 37").returncode, 37)
        self.assertEqual(call("run", "--", "sh", "-c", "kill -9 $$").returncode, -9)
        result = call("run", "--", "printf", "%s|", "a b", "", "--", "--help")
        self.assertEqual(result.stdout, "a b||--|--help|")

    def test_command_that_cannot_run_ends_as_env_does(self):
        self.assertEqual(call("run", "--", "no-such-command").returncode, 127)
        self.assertEqual(call("run", "--", "/no/such/command").returncode, 127)
        self.assertEqual(call("run", "--", self.write("data", "x", 0o600)).returncode, 126)
        self.assertEqual(call("run", "--", self.folder).returncode, 126)

    def test_wrong_usage_ends_with_2_and_runs_nothing(self):
        marker = self.path("marker")
        for args in ((), ("touch", marker), ("--", ), ("--no-such", "--", "touch", marker),
                     ("--report", "--", "touch", marker), ("--report", "loud", "--", "touch", marker),
                     ("--set", "REPORT", "--", "touch", marker), ("--set",),
                     ("--set", "=1", "--", "touch", marker),
                     ("--set", "NO_SUCH=1", "--", "touch", marker),
                     ("--set", "ENABLE=perhaps", "--", "touch", marker)):
            result = call("run", *args)
            self.assertEqual(result.returncode, 2, args)
            self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        self.assertFalse(os.path.exists(marker))

    def test_options_become_settings_of_the_command(self):
        reports = self.path("reports")
        result = call("run", "--report", "json", "--dir", "reports", "--set", "LOG_LEVEL=debug",
                      "--set", "LOONGCOMM_ENABLE=no", "--", "env", cwd=self.folder)
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.splitlines()
        for line in ("LOONGCOMM_REPORT=json", "LOONGCOMM_DIR=" + os.path.realpath(reports),
                     "LOONGCOMM_LOG_LEVEL=debug", "LOONGCOMM_ENABLE=no"):
            self.assertIn(line, lines)
        self.assertEqual(stat.S_IMODE(os.stat(reports).st_mode), 0o700)

    def test_a_setting_of_the_user_is_kept_when_no_option_changes_it(self):
        lines = call("run", "--", "env", LOONGCOMM_REPORT="off").stdout.splitlines()
        self.assertIn("LOONGCOMM_REPORT=off", lines)

    TORCH2 = {"NCCL_NET_PLUGIN": "loongcomm", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    MPI2 = {"NCCL_NET_PLUGIN": "loongcomm", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}

    def channels(self, *command, **changes):
        """The variables about channels that a command gets, and what was said."""
        result = call("run", "--", *(command or ["env"]), **changes)
        self.assertEqual(result.returncode, 0, result.stderr)
        got = dict(line.split("=", 1) for line in result.stdout.splitlines()
                   if re.match(r"NCCL_(MIN_CTAS|\w*CHANNELS\w*)=", line))
        return {k: v for k, v in got.items() if k not in changes}, result.stderr.splitlines()

    def mark(self, **changes):
        """By which the network's tuner knows that the channels are not the user's."""
        lines = call("run", "--", "env", **changes).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line).get("LOONGCOMM_NET_CTAS")

    def test_small_jobs_over_the_network_plugin_get_more_channels(self):
        job = self.TORCH2
        for changes, number in ((job, "8"), (dict(job, WORLD_SIZE="4", GROUP_WORLD_SIZE="4"), "4"),
                                (dict(job, WORLD_SIZE="3", GROUP_WORLD_SIZE="3"), "4"),
                                (dict(job, NCCL_NET_PLUGIN="a,/x/libnccl-net-loongcomm.so"), "8"),
                                (dict(job, NCCL_NET="LoongComm", LOONGCOMM_ENABLE="no"), "8"),
                                ({"NCCL_NET_PLUGIN": "loongcomm", "LOONGCOMM_NET_CHANNELS": "force"}, "8"),
                                (self.MPI2, "8"), (dict(self.MPI2, WORLD_SIZE="5"), "8"), (dict(self.MPI2, **job), "8")):
            got, said = self.channels(**changes)
            self.assertEqual(got, {"NCCL_MIN_CTAS": number, "NCCL_NCHANNELS_PER_NET_PEER": number}, changes)
            self.assertEqual(len(said), 2, said)
            self.assertEqual(self.mark(**changes), number)
            self.assertIn("LOONGCOMM_NET_CHANNELS", said[0])

    def test_other_jobs_keep_nccls_channels(self):
        job = self.TORCH2
        for changes in (dict(job, NCCL_NET_PLUGIN="other"), dict(job, NCCL_NET_PLUGIN=None),
                        dict(job, NCCL_NET="Socket"), dict(job, LOONGCOMM_NET_CHANNELS="off"),
                        dict(job, WORLD_SIZE="8", GROUP_WORLD_SIZE="8"), dict(job, LOCAL_WORLD_SIZE="2"),
                        dict(job, LOCAL_WORLD_SIZE=None), dict(job, WORLD_SIZE="2x"),
                        dict(job, WORLD_SIZE="1")):
            self.assertEqual(self.channels(**changes), ({}, []), changes)

    def test_rank_that_is_alone_on_its_node_does_not_take_the_others_for_that(self):
        for changes in (dict(self.TORCH2, WORLD_SIZE="3"), dict(self.TORCH2, WORLD_SIZE="4", GROUP_WORLD_SIZE=None),
                        dict(self.TORCH2, GROUP_WORLD_SIZE=None), dict(self.TORCH2, GROUP_WORLD_SIZE="3"),
                        dict(self.MPI2, OMPI_COMM_WORLD_SIZE="3"), dict(self.MPI2, OMPI_COMM_WORLD_SIZE="4")):
            self.assertEqual(self.channels(**changes), ({}, []), changes)

    def test_launcher_that_has_started_another_says_nothing_of_the_ranks(self):
        for changes in (dict(self.MPI2, WORLD_SIZE="16", LOCAL_WORLD_SIZE="8", GROUP_WORLD_SIZE="2"),
                        dict(self.TORCH2, OMPI_COMM_WORLD_SIZE="16", OMPI_COMM_WORLD_LOCAL_SIZE="8"),
                        dict(self.TORCH2, OMPI_COMM_WORLD_SIZE="3", OMPI_COMM_WORLD_LOCAL_SIZE="1",
                             WORLD_SIZE="3", GROUP_WORLD_SIZE="3")):
            self.assertEqual(self.channels(**changes), ({}, []), changes)

    def test_command_that_is_a_launcher_gets_no_channels(self):
        launcher = self.write("torchrun", "#!/bin/sh\nexec env\n", 0o700)
        for command in ((launcher,), ("sh", launcher), ("sh", "-c", "env", "python3", "-m", "torch.distributed.run"),
                        ("sh", "-c", "env", "python3", "-mtorch.distributed.run")):
            self.assertEqual(self.channels(*command, **self.MPI2), ({}, []), command)
        got, _ = self.channels("sh", "-c", "env", "train.py", "--backend", "ray", **self.MPI2)
        self.assertEqual(len(got), 2)

    def test_channels_stay_where_no_tuner_of_ours_is_asked(self):
        for name in ("none", "loongcomm-measure", "/x/libnccl-tuner-other.so"):
            got, said = self.channels(**self.TORCH2, NCCL_TUNER_PLUGIN=name)
            self.assertEqual(got, {}, name)
            self.assertIn("NCCL_TUNER_PLUGIN=%s: NCCL's channels stay" % name, said[0])
        for name in ("", "loongcomm", "libnccl-tuner-loongcomm.so", "/x/libnccl-tuner-loongcomm.so"):
            self.assertEqual(len(self.channels(**self.TORCH2, NCCL_TUNER_PLUGIN=name)[0]), 2, name)

    def test_channels_that_the_user_has_set_stay(self):
        job = self.TORCH2
        for name in ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"):
            got, said = self.channels(**job, **{name: "3"})
            self.assertEqual(got, {"NCCL_NCHANNELS_PER_NET_PEER": "8"})
            self.assertIsNone(self.mark(**job, **{name: "3"}))
            self.assertIn("run: %s is set already and stays" % name, said[0])
        got, said = self.channels(**job, NCCL_MAX_P2P_NCHANNELS="2")
        self.assertEqual(got, {"NCCL_MIN_CTAS": "8"})
        self.assertIn("run: NCCL_MAX_P2P_NCHANNELS is set already and stays", said[1])
        conf = self.write("nccl.conf", "NCCL_MAX_CTAS=4\n")
        self.assertEqual(list(self.channels(**job, NCCL_CONF_FILE=conf)[0]), ["NCCL_NCHANNELS_PER_NET_PEER"])

    def test_nccls_settings_that_are_no_file_are_said_at_once(self):
        for why in self.no_files("nccl.conf"):
            got, said = self.channels(**self.TORCH2, NCCL_CONF_FILE=self.path("nccl.conf"))
            self.assertIn("settings for NCCL in %s are left out: %s" % (self.path("nccl.conf"), why), "\n".join(said))
            self.assertEqual(len(got), 2)

    def test_no_settings_of_nccls_are_no_news(self):
        for changes in ({"NCCL_CONF_FILE": "/dev/null"}, {"HOME": "/dev/null"}):
            got, said = self.channels(**self.TORCH2, **changes)
            self.assertNotIn("left out", "\n".join(said))
            self.assertEqual(len(got), 2)

    def test_folder_that_cannot_be_made_is_an_error(self):
        result = call("run", "--dir", self.path("no", "such"), "--", "true")
        self.assertEqual(result.returncode, 1)
        self.assertIn(self.path("no", "such"), result.stderr)

    def test_proxy_stands_first_in_the_library_path_and_nothing_is_preloaded(self):
        command, library = self.install("p")
        folder = os.path.join(os.path.dirname(library), "loongcomm")
        result = call("run", "--proxy", "--", "true", cli=command)
        self.assertEqual(result.returncode, 1)
        self.assertIn("libnccl.so.2", result.stderr)
        os.mkdir(folder)
        with open(os.path.join(folder, "libnccl.so.2"), "w"):
            pass
        for old, new in ((None, folder), ("/a b:/c", folder + ":/a b:/c"),
                         (folder + ":/a", folder + ":/a"),
                         ("/a:" + folder, folder + ":/a:" + folder)):
            result = call("run", "--proxy", "--", *PRINT, cli=command, LD_LIBRARY_PATH=old)
            self.assertEqual(result.stdout.split("\n")[:2], ["", new])

    def test_proxy_serves_a_program_that_opens_nccl_itself(self):
        nccl = os.environ["LC_FAKE_NCCL"]
        script = """
import ctypes, os, sys
opener = ctypes.CDLL(sys.argv[1])
assert opener.fake_unique_id(ctypes.create_string_buffer(128)) == 0
try:
    calls = ctypes.CDLL(sys.argv[2], mode=os.RTLD_LAZY | os.RTLD_NOLOAD).loongcommCallsSeen
    calls.restype = ctypes.c_ulonglong
    print(calls())
except OSError:
    print("not loaded")
"""
        for option, seen in ((("--proxy", "--set", "NCCL=" + nccl), "1"), ((), "0")):
            result = call("run", *option, "--", sys.executable, "-c", script,
                          os.environ["LC_FAKE_TORCH_DLOPEN"], os.path.realpath(LIBRARY))
            self.assertEqual((result.stdout.strip(), result.returncode), (seen, 0), result.stderr)


if __name__ == "__main__":
    unittest.main()
