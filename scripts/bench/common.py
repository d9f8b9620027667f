"""What the tables share: options by one name each, instruction sets, processes that measure."""

import argparse
import json
import os
import pathlib
import shlex
import subprocess
import sys

SCRIPTS = pathlib.Path(__file__).resolve().parents[1]
ROOT = SCRIPTS.parent
END_OF_TEXT = "<|endoftext|>"
# Holds ours, oneDNN, MKL, PyTorch and CTranslate2 to AVX2; llama.cpp is compiled for it.
ONLY_AVX2 = {
    "GPT2_INSTRUCTION_SET": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "CT2_FORCE_CPU_ISA": "AVX2",
}
OPTIONS = {
    "rounds": dict(type=int, default=3),
    "threads": dict(type=int, default=2),
    "isa": dict(choices=["avx2"], help="hold every engine to it"),
    "only": dict(default="", help="cases whose names hold this text"),
    "program": dict(type=pathlib.Path, default=ROOT / "target/release/gpt2", help="the built gpt2"),
    "peers": dict(type=pathlib.Path, default=ROOT / "target/peers", help="folder that peers.sh has filled"),
    "model": dict(type=pathlib.Path, help="checkpoint folder"),
    "json": dict(action="store_true", help="print each figure as a JSON line"),
    "markdown": dict(action="store_true", help="print a table for a page"),
}


def parser(text, *names):
    """A parser of these of the common options."""
    words = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in names:
        words.add_argument(f"--{name}", **OPTIONS[name])
    return words


def hold_to(isa):
    """Holds every engine that is started from here to an instruction set, where one is given."""
    os.environ.update(ONLY_AVX2 if isa else {})


def worker(table, *arguments, python=sys.executable):
    """The command of a process that measures a part of a table."""
    return [python, "-m", "bench", table, *arguments]


def cargo_bench(package, name, isa):
    """The command of a bench of a crate; what is added are its arguments."""
    instructions = ["--instructions", isa] if isa else []
    return ["cargo", "bench", "--quiet", "-p", package, "--bench", name, "--", *instructions]


def output_of(command):
    command = list(map(str, command))
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{shlex.join(command)}: {run.stderr[-2000:]}")
    return run.stdout


def json_of(command):
    """The last line of what a process prints; libraries may print before."""
    return json.loads(output_of(command).splitlines()[-1])


def prompt(tokens):
    return [place * 37 % 50000 for place in range(tokens)]


def peak_mib(process="self"):
    """The peak of a process's resident memory."""
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) >> 10
