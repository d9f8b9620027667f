"""The types that editors and checkers see are those of the module."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("mypy", reason="mypy is not installed, which checks the stubs: pip install mypy")

OPTIONAL = {"_blocks": "pyarrow", "distributed": "torch", "ray": "ray"}

USE = """
import candle_gpt2
import numpy as np

model = candle_gpt2.Model.from_pretrained("gpt2", dtype="q8")
model.generate("a", max_new_tokens=3, stop=["b"], seed=[1], logit_bias={1: 2.0})
model.generate(["a", "b"], batch_size=2)
model.generate(np.array([1, 2]), details=True)
model.generate("a", temprature=0.5)
text: str = next(model.stream("a"))
index, piece = next(model.stream_batch(["a"]))
cache = model.cache().fork()
logits = model.logits([1, 2], cache=cache)
model.run_with_cache("a", hooks=[("embed", lambda array, name: array * 2)])
number: int = piece
"""


def checked(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_types_are_those_of_the_package(tmp_path):
    # Modules that cannot be imported where Ray and what comes with it are not installed.
    optional = [name for name, needed in OPTIONAL.items() if find_spec(needed) is None]
    (tmp_path / "left_out").write_text("".join(f"candle_gpt2.{name}\n" for name in optional))
    done = checked("mypy.stubtest", "candle_gpt2", "--allowlist", "left_out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checker_finds_what_is_wrong_and_nothing_else(tmp_path):
    file = tmp_path / "use.py"
    file.write_text(USE)
    done = checked("mypy", "--strict", "--no-error-summary", str(file), cwd=tmp_path)
    found = [line.split("error: ")[1] for line in done.stdout.splitlines() if "error: " in line]
    assert len(found) == 2, done.stdout + done.stderr
    assert 'Unexpected keyword argument "temprature"' in found[0]
    assert "incompatible type" in found[1].lower()
