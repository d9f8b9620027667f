"""What the tests share: models, the program, and processes of their own."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

import candle_gpt2
import pytest

from support import FIXTURES

# A shell lets what it runs in the background ignore Ctrl-C, and children inherit that: tests that press it would wait forever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model() -> candle_gpt2.Model:
    """The model inside the package."""
    return candle_gpt2.Model.from_pretrained()


@pytest.fixture(scope="session")
def tiny() -> candle_gpt2.Model:
    """A checkpoint of the fixtures, with a tokenizer."""
    return candle_gpt2.Model.from_pretrained(FIXTURES / "tiny-checkpoint")


@pytest.fixture(scope="session")
def program() -> Callable[..., bytes]:
    """Runs the program `gpt2` that the environment variable GPT2_PROGRAM names; gives what it prints."""
    path = os.environ.get("GPT2_PROGRAM", "")
    if shutil.which(path) is None:
        way = "cargo build -p candle-gpt2-cli, then GPT2_PROGRAM=$PWD/target/debug/gpt2"
        pytest.skip(f"GPT2_PROGRAM={path!r} names no program `gpt2` to compare with: {way}")

    def run(*arguments: str) -> bytes:
        return subprocess.run([path, *arguments], capture_output=True, check=True, stdin=subprocess.DEVNULL).stdout

    return run


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a process of its own."""

    def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, **environment},
        )

    return run
