"""The Python and JavaScript blocks of the book and of both READMEs run, each page's in order, in a process and an empty folder
of their own; so do the scripts of `examples/` that no other test runs.

Blocks of commands are run by `cargo test -p candle-gpt2-cli --test book`, Rust blocks by `cargo test --doc`. What the one makes
is not there for the other. A traceback names file and line of the page.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import FIXTURES

ROOT = FIXTURES.parents[2]
# Pages of notebooks are made by running them.
BOOK = [path for path in sorted((ROOT / "docs" / "src").rglob("*.md")) if path.parent.name != "notebooks"]
PAGES = [*BOOK, ROOT / "README.md", ROOT / "python" / "README.md"]
PACKAGE = ROOT / "web" / "dist" / "npm"
STORIES = ROOT / "models" / "stories"

RUN = "import sys; exec(compile(open(sys.argv[1]).read(), sys.argv[2], 'exec'))"
REASON = re.compile(r"<!-- not run: .+ -->")
FENCE = re.compile(r"(`{3,})(.*)")
# Other spellings would be neither run nor missed.
KINDS = {"python", "python,no_run", "js", "js,no_run"}
LOOKS_LIKE = re.compile(r"(i?py|i?python)[\d.]*\b|(js|mjs|javascript|node)\b", re.IGNORECASE)
RAY = re.compile(r"^\s*(import|from) (ray|candle_gpt2\.ray)\b", re.MULTILINE)

EXAMPLES = ["generate.py", "look_inside.py", "bulk_on_ray.py"]
JOBS_TIMEOUT = 300


def blocks(page: Path) -> list[tuple[str, int, str]]:
    """Kind, number of the line that opens it, and text of each block of Python or JavaScript."""
    found = []
    lines = page.read_text(encoding="utf-8").split("\n")
    fence, begin = "", 0
    for number, line in enumerate(lines, start=1):
        match = FENCE.fullmatch(line.strip())
        if fence and line.strip() == fence:
            kind = lines[begin - 1].strip()[len(fence) :].strip()
            if LOOKS_LIKE.match(kind):
                found.append((kind, begin, "\n".join(lines[begin : number - 1])))
            fence = ""
        elif not fence and match:
            fence, begin = match[1], number
    return found


def of_kind(page: Path, kind: str) -> str:
    """The blocks of one kind as one script, whose lines have the numbers that they have on the page."""
    script: list[str] = []
    for block_kind, begin, text in blocks(page):
        if block_kind == kind:
            script += [""] * (begin - len(script)) + text.split("\n")
    return "\n".join(script)


def pages_with(kind: str) -> list:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if page.is_file() and of_kind(page, kind)]


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if page.is_file()])
def test_a_block_is_run_or_says_why_not(page):
    lines = page.read_text(encoding="utf-8").split("\n")
    for kind, begin, _ in blocks(page):
        assert kind in KINDS, f"line {begin}: a block is one of {', '.join(sorted(KINDS))}, not `{kind}`"
        if kind.endswith(",no_run"):
            before = lines[begin - 2].strip()
            assert REASON.fullmatch(before), f"line {begin}: say why in the line before: <!-- not run: REASON -->"


@pytest.mark.timeout(JOBS_TIMEOUT)
@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs(page, tmp_path):
    script = of_kind(page, "python")
    skip_without_ray(script)
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "script").write_text(script, encoding="utf-8")
    run([sys.executable, "-c", RUN, tmp_path / "script", page], work)


@pytest.mark.parametrize("page", pages_with("js"))
def test_javascript_runs(page, tmp_path):
    if shutil.which("node") is None:
        pytest.skip("node is not on the path: https://nodejs.org")
    if not (PACKAGE / "gpt2_bg.wasm").is_file():
        pytest.skip("web/dist/npm is not built: scripts/build_web.sh")
    (tmp_path / "script.mjs").write_text(of_kind(page, "js"), encoding="utf-8")
    shutil.copytree(PACKAGE, tmp_path / "node_modules" / "candle-gpt2")
    (tmp_path / "stories").symlink_to(STORIES)
    run(["node", "script.mjs"], tmp_path)


@pytest.mark.timeout(JOBS_TIMEOUT)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, tmp_path):
    script = ROOT / "examples" / name
    skip_without_ray(script.read_text(encoding="utf-8"))
    run([sys.executable, script], tmp_path)


def skip_without_ray(script: str) -> None:
    if RAY.search(script) and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install '.[ray]' in a clone")


def run(command: list, folder: Path) -> None:
    # Pages use the package that is tested, and no network.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=JOBS_TIMEOUT - 20,
    )
    if done.returncode != 0:
        pytest.fail(f"{done.stdout}{done.stderr}", pytrace=False)
