"""Options and fixtures of the checks beside other programs. A check whose peer is missing is skipped, and says so in a line."""

import collections
import contextlib
import pathlib
import subprocess
import threading

import pytest
from paths import BUILT_IN, ROOT

OPTIONS = {
    "program": (pathlib.Path, ROOT / "target/release/gpt2", "the built gpt2"),
    "llama-perplexity": (pathlib.Path, ROOT / "target/peers/llama.cpp/bin/llama-perplexity", "llama.cpp's tool"),
    "model": (pathlib.Path, BUILT_IN, "checkpoint folder with its tokenizer, for evaluations, servers and llama.cpp's tool"),
    "tokenizer": (pathlib.Path, None, "tokenizer of --model, where it has none"),
    "base-url": (str, None, "a server that runs, in place of one that is started"),
    "key": (str, None, "a key that the server of --base-url takes, where it asks for one"),
    "queue": (int, None, "prompts that the queue of the server of --base-url holds"),
    "clients": (int, 32, "clients of the soak"),
    "seconds": (float, 120, "length of the soak"),
    "tasks": (str, None, "lm-evaluation-harness' task files of your own, by commas"),
    "items": (int, 8, "items of each of the harness' tasks that are made here"),
    "protocol": (str, None, "evaluate this protocol on --data, in place of all on samples"),
    "data": (pathlib.Path, None, "data of --protocol, or of the training in --trained"),
    "limit": (int, None, "items of --data"),
    "context": (int, 64, "tokens of a window of llama.cpp's tool, or of the training in --trained"),
    "tokens": (int, 2048, "tokens of the text for llama.cpp's tool"),
    "trained": (pathlib.Path, None, "folder that gpt2 train wrote, in place of trainings that are made here"),
    "task": (str, "text", "what was taught in --trained: text, classify or answer"),
    "base": (pathlib.Path, None, "what --trained was trained from, where it has adapters"),
}


def pytest_addoption(parser):
    for name, (kind, default, told) in OPTIONS.items():
        parser.addoption(f"--{name}", type=kind, default=default, help=f"{told} [default: {default}]")
    parser.addoption("--checkpoint", type=pathlib.Path, action="append", help="convert this one, in place of the repository's")
    parser.addoption("--other", action="append", help="command of a program for another system, such as 'scripts/wine.sh gpt2.exe'")
    parser.addoption("--all-ways", action="store_true", help="ask the server in all sixteen ways, not in eight of them")


@pytest.fixture(scope="session")
def option(request):
    """The value of an option by its name."""
    return lambda name: request.config.getoption(name.replace("-", "_"))


class Program:
    def __init__(self, path):
        self.path = path

    def __call__(self, *arguments):
        """What it prints."""
        command = [str(self.path), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-2000:]}"
        return done.stdout

    @contextlib.contextmanager
    def serving(self, *options):
        """A server of the program; yields its address. `server` is its process."""
        process = subprocess.Popen([self.path, "serve", "--port", "0", *options], stdout=subprocess.PIPE, text=True)
        self.server = process
        try:
            line = process.stdout.readline().strip()
            assert line.startswith("http://"), f"expected the server's address, found {line!r}"
            # Its later lines must not fill the pipe.
            threading.Thread(target=collections.deque, args=(process.stdout, 0), daemon=True).start()
            yield line
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="session")
def program(option):
    path = option("program").resolve()
    if not path.is_file():
        pytest.skip("there is no program: cargo build --release, or --program FILE")
    return Program(path)
