"""Fixtures shared by the tests: models, the program, and separate processes."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

import candle_gpt2
import pytest

from support import FIXTURES

# Shells make background processes ignore Ctrl-C, and child processes inherit this. Tests that send Ctrl-C would wait forever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model() -> candle_gpt2.Model:
    """Built-in model."""
    return candle_gpt2.Model.from_pretrained()


@pytest.fixture(scope="session")
def exact() -> candle_gpt2.Model:
    """Built-in model in f32. Its results do not depend on the number of rows, apart from the rounding of sums."""
    return candle_gpt2.Model.from_pretrained(dtype="f32")


@pytest.fixture(scope="session")
def tiny() -> candle_gpt2.Model:
    """Fixture checkpoint with a tokenizer."""
    return candle_gpt2.Model.from_pretrained(FIXTURES / "tiny-checkpoint")


@pytest.fixture(scope="session")
def program() -> Callable[..., bytes]:
    """Runs the program `gpt2` at the path in GPT2_PROGRAM, and returns its output."""
    path = os.environ.get("GPT2_PROGRAM", "")
    if shutil.which(path) is None:
        build = "cargo build -p candle-gpt2-cli, then GPT2_PROGRAM=$PWD/target/debug/gpt2"
        pytest.skip(f"GPT2_PROGRAM={path!r} is not a `gpt2` program to compare with: {build}")

    def run(*arguments: str) -> bytes:
        return subprocess.run([path, *arguments], capture_output=True, check=True, stdin=subprocess.DEVNULL).stdout

    return run


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a separate process."""

    def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, **environment},
        )

    return run
