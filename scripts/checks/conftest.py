"""Options and fixtures for the checks against other programs; a check without its peer is skipped."""

import collections
import contextlib
import pathlib
import subprocess
import threading

import pytest
from paths import ROOT

OPTIONS = {
    "program": (pathlib.Path, ROOT / "target/release/gpt2", "the gpt2 program"),
    "llama-perplexity": (pathlib.Path, ROOT / "target/peers/llama.cpp/bin/llama-perplexity", "llama.cpp's llama-perplexity"),
    "model": (pathlib.Path, None, "checkpoint folder with a tokenizer, instead of the built-in model in f32"),
    "tokenizer": (pathlib.Path, None, "tokenizer for a --model without one"),
    "base-url": (str, None, "use this running server instead of starting one"),
    "key": (str, None, "API key for the server at --base-url, if it requires one"),
    "queue": (int, None, "queue capacity of the server at --base-url, in prompts"),
    "clients": (int, 32, "clients of the soak test"),
    "seconds": (float, 120, "duration of the soak test"),
    "tasks": (str, None, "your own task files for lm-evaluation-harness, separated by commas"),
    "items": (int, 8, "items in each generated task"),
    "protocol": (str, None, "evaluate this protocol on --data instead of all protocols on samples"),
    "data": (pathlib.Path, None, "data for --protocol, or training data of --trained"),
    "limit": (int, None, "maximum number of items from --data"),
    "context": (int, 64, "context of llama-perplexity, or training context of --trained, in tokens"),
    "tokens": (int, 2048, "length of the text for llama-perplexity, in tokens"),
    "trained": (pathlib.Path, None, "output folder of gpt2 train, instead of short trainings"),
    "task": (str, "text", "training task of --trained: text, classify or answer"),
    "base": (pathlib.Path, None, "base checkpoint of --trained, if it has adapters"),
}


def pytest_addoption(parser):
    for name, (kind, default, description) in OPTIONS.items():
        parser.addoption(f"--{name}", type=kind, default=default, help=f"{description} [default: {default}]")
    parser.addoption("--checkpoint", type=pathlib.Path, action="append", help="convert this checkpoint instead of the fixtures")
    parser.addoption("--other", action="append", help="command of a program for another system, such as 'scripts/wine.sh gpt2.exe'")
    parser.addoption("--all-ways", action="store_true", help="run the harness in all sixteen configurations instead of eight")


@pytest.fixture(scope="session")
def option(request):
    """Returns a function that looks up the value of an option by name."""
    return lambda name: request.config.getoption(name.replace("-", "_"))


class Program:
    def __init__(self, path):
        self.path = path

    def __call__(self, *arguments):
        """Runs the program and returns its output."""
        command = [str(self.path), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-2000:]}"
        return done.stdout

    @contextlib.contextmanager
    def serving(self, *options):
        """Starts the program's server and yields its address; `server` is its process."""
        process = subprocess.Popen([self.path, "serve", "--port", "0", *options], stdout=subprocess.PIPE, text=True)
        self.server = process
        try:
            line = process.stdout.readline().strip()
            assert line.startswith("http://"), f"expected the server's address, found {line!r}"
            # Drains the remaining output, so that the pipe never fills.
            threading.Thread(target=collections.deque, args=(process.stdout, 0), daemon=True).start()
            yield line
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="session")
def program(option):
    path = option("program").resolve()
    if not path.is_file():
        pytest.skip("the program is not built: cargo build --release, or --program FILE")
    return Program(path)


@pytest.fixture(scope="session")
def built_in(program, tmp_path_factory):
    """Folder with the built-in model in f32, which transformers loads."""
    folder = tmp_path_factory.mktemp("models") / "built-in"
    program("convert", "built-in", folder, "--dtype", "f32")
    return folder


@pytest.fixture(scope="session")
def checkpoint(option, request):
    """Folder from --model, or the built-in model."""
    return option("model") or request.getfixturevalue("built_in")
