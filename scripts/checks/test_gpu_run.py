"""Checks gpu_run.py without a GPU: time limits, killed processes, and the fields of its report.

Programs are stubs. usage: python scripts/checks/test_gpu_run.py, or with pytest like the other checks
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

SCRIPTS = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SCRIPTS))

import gpu_run  # noqa: E402
from bench import batches, cards, cuda  # noqa: E402

STEPS = {"environment": 2, "commands": 2}
# Stub for every program that the script runs. Its output reports passing tests.
PROGRAM = """#!/bin/sh
echo "test result: ok. 3 passed; 0 failed"
"""
DRIVER = """#!/bin/sh
case "$*" in *driver_version*) echo "NVIDIA H200, 580.1, 143771 MiB" ;; *) echo "NVIDIA H200" ;; esac
"""
SANITIZER = """#!/bin/sh
echo "========= ERROR SUMMARY: 0 errors"
while [ "$1" != --exact ]; do shift; done
shift 3
echo "running $# tests: test result: ok. $# passed"
"""


def arguments(folder, device="cpu", limit=450.0, only=None):
    return argparse.Namespace(device=device, out=pathlib.Path(folder, "report"), limit=limit, only=only)


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)


class Limits(Folder):
    def test_the_steps_fit_into_the_default_limit(self):
        self.assertLessEqual(gpu_run.LIMIT, 450)
        self.assertLessEqual(sum(gpu_run.SECONDS.values()), gpu_run.LIMIT)

    def test_the_last_step_ends_at_the_limit(self):
        for device in ("cpu", "cuda:0"):
            for only in (None, ["environment", "speed"], ["texts"]):
                run = gpu_run.Run(arguments(self.folder, device, 200.0, only))
                self.addCleanup(shutil.rmtree, run.folder)
                deadlines = list(run.deadlines.values())
                self.assertEqual(deadlines, sorted(deadlines))
                self.assertAlmostEqual(deadlines[-1], 200.0)
        self.assertNotIn("parity f16", gpu_run.Run(arguments(self.folder)).deadlines)

    def test_every_step_has_seconds(self):
        names = []
        run = gpu_run.Run(arguments(self.folder, "cuda:0"))
        run.has_torch, run.step = False, lambda name, *_: names.append(name)
        gpu_run.steps(run)
        self.assertEqual(names, list(gpu_run.SECONDS))

    def test_the_tables_have_the_same_limit(self):
        for table in (cuda, batches):
            with mock.patch.object(sys, "argv", ["bench", "--help"]), mock.patch("sys.stdout") as output:
                self.assertRaises(SystemExit, table.main)
            text = "".join(call.args[0] for call in output.write.call_args_list)
            self.assertIn(f"[default: {gpu_run.LIMIT}]", text)


class Hangs(Folder):
    def test_a_hanging_step_is_killed_and_the_next_one_runs(self):
        with mock.patch.object(gpu_run, "SECONDS", STEPS):
            run = gpu_run.Run(arguments(self.folder, limit=5.0))
        self.addCleanup(shutil.rmtree, run.folder)
        pid_file = self.folder / "pid"
        # `set -m` starts the child in its own process group, like the workers of `bench`.
        command = ["bash", "-c", f"set -m; sleep 60 & echo $! >{pid_file}; wait"]
        run.step("environment", lambda: run.call(command))
        run.step("commands", lambda: {"summary": run.call(["echo", "done"]).strip()})
        first, second = run.steps
        self.assertEqual(first["status"], "failed")
        self.assertIn("stopped after", first["reason"])
        self.assertLess(first["seconds"], 4.0)
        self.assertEqual((second["status"], second["summary"]), ("passed", "done"))
        self.assertFalse(is_running(int(pid_file.read_text())))

    def test_a_step_may_use_the_time_that_earlier_steps_left(self):
        with mock.patch.object(gpu_run, "SECONDS", STEPS):
            run = gpu_run.Run(arguments(self.folder, limit=5.0))
        self.addCleanup(shutil.rmtree, run.folder)
        run.step("environment", lambda: None)
        left = []
        run.step("commands", lambda: left.append(run.left()))
        self.assertGreater(left[0], 4.0)

    def test_background_processes_are_stopped(self):
        run = gpu_run.Run(arguments(self.folder))
        self.addCleanup(shutil.rmtree, run.folder)
        process = run.start(["sleep", "60"], self.folder / "output.txt")
        run.stop_background()
        self.assertIsNotNone(process.poll())

    def test_figures_before_a_kill_count(self):
        run = gpu_run.Run(arguments(self.folder, limit=5.0))
        self.addCleanup(shutil.rmtree, run.folder)
        late = subprocess.TimeoutExpired(["bench"], 3.0)
        late.output = '{"engine": "ours", "x": 1}\n{"engine": "our'
        with mock.patch.object(run, "outcome", side_effect=late):
            self.assertEqual(gpu_run.figures_of(run, "training"), [{"engine": "ours", "x": 1}])
        late.output = ""
        with mock.patch.object(run, "outcome", side_effect=late), self.assertRaisesRegex(gpu_run.Failed, "stopped after 3 s"):
            gpu_run.figures_of(run, "training")
        lines = "missing, compiled in f16: stopped after 20 s\n"
        with mock.patch.object(run, "outcome", return_value=(1, lines, "")), self.assertRaises(gpu_run.Skipped):
            gpu_run.figures_of(run, "cuda")


class Report(Folder):
    def report(self, *options, sanitizer=None):
        """Runs the script next to stub programs and returns its exit code and report."""
        bundle, programs = self.folder / "bundle", self.folder / "programs"
        bundle.mkdir()
        shutil.copy(SCRIPTS / "gpu_run.py", bundle)
        shutil.copytree(SCRIPTS / "bench", bundle / "bench")
        (bundle / "build.txt").write_text("stub build\n")
        for name in ("gpt2", "bench-step", "test-kernels", "test-gpt2", "test-generation", "test-training"):
            write_program(bundle / "bin" / name, PROGRAM)
        write_program(programs / "nvidia-smi", DRIVER)
        write_program(programs / "ldd", "#!/bin/sh\n")
        if sanitizer:
            write_program(programs / "compute-sanitizer", sanitizer)
        # Without PyTorch, the steps that need it are skipped.
        (programs / "torch.py").write_text("raise ImportError('stub')\n")
        environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(programs)}
        command = [sys.executable, bundle / "gpu_run.py", "--out", self.folder / "report", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        report = json.loads((self.folder / "report" / "report.json").read_text())
        report["text"] = (self.folder / "report" / "report.txt").read_text()
        return done.returncode, report

    def test_the_report_has_date_command_card_and_limit(self):
        start = time.time()
        code, report = self.report("--only", "environment,parity,sanitizer,batches,training,speed")
        self.assertEqual(code, 0, report)
        self.assertEqual(report["date"][:4], time.strftime("%Y", time.gmtime(start)))
        self.assertTrue(report["date"].endswith("+00:00"))
        self.assertEqual((report["card"], report["device"], report["limit_s"]), ("NVIDIA H200", "cuda:0", gpu_run.LIMIT))
        self.assertIn("--only environment,parity", report["command"])
        for value in (report["date"], report["command"], report["card"]):
            self.assertIn(value, report["text"])
        steps = {step["name"]: step for step in report["steps"]}
        self.assertEqual(steps["parity bf16"]["passed"], 9)
        self.assertIn("H200", steps["environment"]["gpu"])
        self.assertEqual(steps["sanitizer"]["status"], "skipped")
        self.assertIn("compute-sanitizer", steps["sanitizer"]["reason"])
        for name in ("batches", "training f32", "training bf16", "speed gpt2", "speed gpt2-xl", "speed compiled"):
            self.assertEqual((steps[name]["status"], steps[name]["reason"]), ("skipped", "PyTorch is not installed"))
        self.assertTrue(all("seconds" in step for step in report["steps"]))

    def test_both_sanitizers_run_on_the_selected_tests(self):
        code, report = self.report("--only", "sanitizer", sanitizer=SANITIZER)
        self.assertEqual(code, 0, report)
        (step,) = report["steps"]
        self.assertEqual(step["sanitizer"], dict.fromkeys(gpu_run.SANITIZERS, "ERROR SUMMARY: 0 errors"))

    def test_an_error_of_the_sanitizer_is_a_failure(self):
        code, report = self.report("--only", "sanitizer", sanitizer=SANITIZER.replace("0 errors", "2 errors") + "exit 99\n")
        self.assertEqual((code, report["steps"][0]["status"]), (1, "failed"))
        self.assertIn("racecheck (exit code 99): ERROR SUMMARY: 2 errors", report["steps"][0]["reason"])


class Figures(unittest.TestCase):
    def test_rows_have_the_extremes_of_the_rounds(self):
        figures = [{"engine": "ours", "row": "decode", "speed": speed} for speed in (3.0, 1.0)]
        (row,) = gpu_run.rows_of(figures, "speed", "row", "engine")
        self.assertEqual(row, {"row": "decode", "engine": "ours", "median": 2.0, "min": 1.0, "max": 3.0, "rounds": 2})
        text = gpu_run.summary([row | {"percent": 10.7, "limit": cards.MEMORY}], lambda row: row["row"], "tokens/s")
        self.assertEqual(text, "decode 2 tokens/s (1-3, 11% of the memory bandwidth)")

    def test_percentages_of_known_cards_only(self):
        shape, card = cards.Shape(768, 12, 50257), "NVIDIA H200"
        percent, limit = cuda.limit_percent(card, shape, "f16", "decode", 4000)
        self.assertEqual((round(percent), limit), (21, cards.MEMORY))
        percent, limit = cuda.limit_percent(card, cards.Shape(1600, 48, 50257), "bf16", "prefill 1024", 57_800)
        self.assertEqual((round(percent), limit), (18, cards.ARITHMETIC))
        self.assertIsNone(cuda.limit_percent(card, shape, "f32", "prefill 1024", 136_000))
        for unknown in ("", "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-80GB"):
            self.assertIsNone(cuda.limit_percent(unknown, shape, "f16", "decode", 4000))
            self.assertIsNone(cards.arithmetic_percent(unknown, "bf16", 1e9, 1000))


if __name__ == "__main__":
    unittest.main()
