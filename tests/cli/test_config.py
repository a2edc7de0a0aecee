# SPDX-License-Identifier: Apache-2.0
import os
import re
import shutil
import unittest

from cli import CLI, CliTest, call


class Config(CliTest):
    def settings(self, result):
        return {s["name"]: s for s in self.document(result)["settings"]}

    def test_json_names_every_setting_with_value_origin_and_help(self):
        conf = self.write("c.conf", "# mine\nREPORT = json\nLOG_LEVEL=info\n")
        result = call("config", "--json", LOONGCOMM_CONFIG=conf, LOONGCOMM_LOG_LEVEL="debug")
        self.assertEqual(result.returncode, 0, result.stderr)
        document = self.document(result)
        self.assertEqual(document["schema"], "loongcomm.settings/1")
        self.assertEqual(document["problems"], [])
        settings = self.settings(result)
        self.assertEqual(settings["LOONGCOMM_REPORT"]["value"], "json")
        self.assertEqual(settings["LOONGCOMM_REPORT"]["origin"], conf + ":2")
        self.assertEqual(settings["LOONGCOMM_REPORT"]["default"], "text")
        self.assertEqual(settings["LOONGCOMM_LOG_LEVEL"]["value"], "debug")
        self.assertEqual(settings["LOONGCOMM_LOG_LEVEL"]["origin"], "environment")
        self.assertEqual(settings["LOONGCOMM_ENABLE"]["origin"], "default")
        self.assertTrue(all(s["help"] for s in settings.values()))

    def test_text_has_the_same_settings_and_no_colour(self):
        names = list(self.settings(call("config", "--json")))
        text = call("config").stdout
        self.assertEqual(re.findall(r"^(\w+)=", text, re.M), names)
        self.assertNotIn("\033", text)

    def test_what_is_malformed_or_unknown_is_named_and_ends_with_1(self):
        result = call("config", LOONGCOMM_ENABLE="perhaps", LOONGCOMM_NO_SUCH="1")
        self.assertEqual(result.returncode, 1)
        self.assertIn("LOONGCOMM_ENABLE: 'perhaps'", result.stderr)
        self.assertIn("LOONGCOMM_NO_SUCH", result.stderr)
        self.assertIn("LOONGCOMM_ENABLE=yes", result.stdout)
        result = call("config", "--json", LOONGCOMM_ENABLE="perhaps")
        self.assertEqual(result.returncode, 1)
        self.assertEqual(len(self.document(result)["problems"]), 1)

    def test_what_is_no_file_is_said_at_once(self):
        for why in self.no_files("conf"):
            result = call("config", LOONGCOMM_CONFIG=self.path("conf"))
            self.assertEqual((result.returncode, result.stderr.count("\n")), (1, 1), result.stderr)
            self.assertIn("cannot use %s (%s): a text file of at most 64 KB" % (self.path("conf"), why), result.stderr)

    def test_more_problems_than_are_kept_still_end_with_1(self):
        many = {"LOONGCOMM_BAD_%d" % i: "1" for i in range(100)}
        result = call("config", "--json", **many)
        self.assertEqual(result.returncode, 1)
        self.assertLess(len(self.document(result)["problems"]), 100)

    def test_readme_has_the_same_table(self):
        table = call("config", "--markdown").stdout
        self.assertEqual(len(table.splitlines()), 2 + len(self.settings(call("config", "--json"))))
        readme = os.path.join(os.environ["LC_SOURCE"], "README.md")
        try:
            with open(readme, encoding="utf-8") as f:
                text = f.read()
        except FileNotFoundError:
            self.skipTest("no README.md")
        found = re.search(r"<!-- settings -->\n(.*?)<!-- /settings -->", text, re.S)
        if not found:
            self.skipTest("README.md has no table of settings")
        self.assertEqual(found.group(1).strip(), table.strip(),
                         "put the output of `loongcomm config --markdown` between the marks")

    def test_wrong_usage_ends_with_2_and_help_with_0(self):
        self.assertEqual(call().returncode, 2)
        self.assertEqual(call("no-such").returncode, 2)
        self.assertEqual(call("config", "--no-such").returncode, 2)
        for args in (("--help",), ("config", "--help"), ("run", "--help"), ("doctor", "--help"),
                     ("topo", "--help")):
            result = call(*args)
            self.assertEqual(result.returncode, 0)
            self.assertTrue(result.stdout.startswith("usage: loongcomm"), result.stdout)
            self.assertLessEqual(max(map(len, result.stdout.splitlines())), 100)
        self.assertRegex(call("--version").stdout, r"^loongcomm \d+\.\d+\.\d+\n$")

    def test_output_that_cannot_be_written_is_no_success(self):
        result = call("-c", '"$0" config > /dev/full', CLI, cli="/bin/sh")
        self.assertEqual(result.returncode, 1)
        self.assertIn("cannot write", result.stderr)

    @unittest.skipUnless(os.geteuid() == 0, "only root can make such a program")
    def test_program_with_more_rights_than_its_caller_ignores_the_environment(self):
        """LOONGCOMM_NCCL would load any code into it, LOONGCOMM_LOG_FILE write to any file."""
        command = self.path("loongcomm")
        shutil.copy(CLI, command)
        os.chmod(self.folder, 0o755)
        os.chown(command, 65534, -1)
        os.chmod(command, 0o4755)
        result = call("config", "--json", cli=command, LOONGCOMM_REPORT="off", LOONGCOMM_NO_SUCH="1")
        if not os.statvfs(self.folder).f_flag & os.ST_NOSUID:
            document = self.document(result)
            settings = {s["name"]: s for s in document["settings"]}
            self.assertEqual(settings["LOONGCOMM_REPORT"]["origin"], "default")
            self.assertEqual(len(document["problems"]), 1)
            self.assertIn("more rights", document["problems"][0])


if __name__ == "__main__":
    unittest.main()
