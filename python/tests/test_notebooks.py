"""Notebooks in `examples/notebooks`: they run, and their pages in the book are up to date.

To regenerate the pages and pictures, run `WRITE_NOTEBOOKS=1 python -m pytest python/tests/test_notebooks.py`.
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
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
PAGES = ROOT / "docs" / "src" / "notebooks"
PICTURES = ROOT / "docs" / "src" / "pictures" / "notebooks"
RUNNER = Path(__file__).with_name("run_notebook.py")

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
COLOR = re.compile(r"#[0-9a-f]{6}\b")
TIMEOUT = 300


def run(notebook: Path, folder: Path, **environment: str) -> None:
    # numpy uses one thread, because more are slower on small arrays, especially next to other processes. The network is disabled.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", **environment}
    command = [sys.executable, RUNNER, notebook, folder]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT - 20)
    if done.returncode != 0:
        pytest.fail(f"{done.stdout}{done.stderr}", pytrace=False)


def assert_same(rendered: str, stored: str, name: str) -> None:
    """Compares pages. Numbers may differ by one unit in the last digit, and colors in any way.

    The order of summation differs between processors.
    """
    rendered, stored = (COLOR.sub("#", text) for text in (rendered, stored))
    advice = f"{name} is stale: WRITE_NOTEBOOKS=1 python -m pytest python/tests/test_notebooks.py"
    assert NUMBER.split(rendered) == NUMBER.split(stored), advice
    for one, other in zip(NUMBER.findall(rendered), NUMBER.findall(stored), strict=True):
        unit = 10.0 ** -len(one.partition(".")[2])
        assert abs(float(one) - float(other)) <= 1.01 * unit, f"{one} for {other}: {advice}"


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("notebook", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])
def test_notebooks_run_and_their_pages_are_current(notebook, tmp_path):
    if "import torch" in notebook.read_text(encoding="utf-8") and importlib.util.find_spec("torch") is None:
        pytest.skip("this notebook needs torch: pip install torch")
    run(notebook, tmp_path, GPT2_MODEL="")
    page = PAGES / f"{notebook.stem}.md"
    pictures = sorted(path.name for path in tmp_path.glob("*.svg"))
    if os.environ.get("WRITE_NOTEBOOKS"):
        for stale in PICTURES.glob(f"{notebook.stem}-*.svg"):
            stale.unlink()
        for name in pictures:
            shutil.copy(tmp_path / name, PICTURES)
        shutil.copy(tmp_path / page.name, page)
    assert_same((tmp_path / page.name).read_text(encoding="utf-8"), page.read_text(encoding="utf-8"), page.name)
    assert sorted(path.name for path in PICTURES.glob(f"{notebook.stem}-*.svg")) == pictures
    for name in pictures:
        assert_same((tmp_path / name).read_text(encoding="utf-8"), (PICTURES / name).read_text(encoding="utf-8"), name)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("name", ["ioi", "induction"])
def test_notebooks_run_on_gpt2(name, tmp_path):
    model = Path(os.environ.get("GPT2_CHECKPOINTS", "")) / "gpt2"
    if not (model / "config.json").is_file():
        pytest.skip("GPT2_CHECKPOINTS is not set to a folder with the published model gpt2")
    run(ROOT / "examples" / "notebooks" / f"{name}.ipynb", tmp_path, GPT2_MODEL=str(model))


def test_stale_pages_are_detected():
    assert_same("a 1.23 #aabbcc", "a 1.24 #aabbcd", "page")
    for other in ("a 1.25 #aabbcc", "b 1.23 #aabbcc", "a 1.23 1 #aabbcc"):
        with pytest.raises(AssertionError, match="stale"):
            assert_same("a 1.23 #aabbcc", other, "page")
