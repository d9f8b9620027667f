"""Checks that the type stubs match the module."""

import ast
import re
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import candle_gpt2
import numpy as np
import pytest

from support import FIXTURES

pytest.importorskip("mypy", reason="mypy is not installed: pip install mypy")

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
texts: list[str] = model.generate(["a", "b"]) + [model.generate("a"), model.generate([1, 2])]
stop_reason: str = model.generate("a", details=True)["stop_reason"]
loss: float = model.score("a")["loss"] + model.score(["a"])[0]["loss"] + model.score_continuations("a", ["b"])[0]["sum"]
results: list[str | Exception] = model.generate(["a"], return_exceptions=True)
labels = candle_gpt2.Classifier.from_pretrained("a").classify("a")["labels"]
score: float = labels[0]["score"]
is_sound: bool = model.verify()["sound"]
reveal_type(model.generate(np.array([1, 2])))
number: int = piece
"""

OPEN = """
from pathlib import Path
import candle_gpt2
import numpy as np

model = candle_gpt2.Model.from_pretrained()
classifier = candle_gpt2.Classifier.from_pretrained(Path("heads") / "sequence")
text = Path("text.txt")
pairs = model.task_data("ioi", count=4)
clean, corrupt = pairs[0]["clean"], pairs[0]["corrupt"]
"""
# Expressions with dict results, and the names of their types in the stub.
RESULTS = {
    "model.config": "_Config",
    "classifier.config": "_Config",
    "model.generation_config": "_GenerationConfig",
    "model.generate('One day', max_new_tokens=2, details=True)": "_Generated",
    "model.score('One day', top=2)": "_Score",
    "model.score_continuations('One day', [' he'])[0]": "_ContinuationScore",
    "classifier.classify('One day')": "_Classification",
    "model.complete('One day', max_tokens=2, seed=1, logprobs=2, echo=True, activations=[['embed']], return_token_ids=True)": "_Completion",
    "model.inspect(tensors=True)": "_Inspection",
    "candle_gpt2.inspect(preset='gpt2-xl')": "_Inspection",
    "model.inspect(diff='built-in')": "_CheckpointDifference",
    "candle_gpt2.inspect(diff=Path('heads') / 'sequence')": "_CheckpointDifference",
    "model.verify()": "_Verification",
    "model.convert('converted')": "_Conversion",
    "model.evaluate('text:bits', text, items='items')": "_Evaluation",
    "model.evaluate(['text:bits'], text, against='items')[0]": "_Evaluation",
    "candle_gpt2.protocols()[0]": "_Protocol",
    "candle_gpt2.protocols()[-1]": "_Protocol",
    "candle_gpt2.tokenize(text, 'tokens', model='built-in')": "_TokenFiles",
    "model.train(text, 'trained', steps=1, context=16, batch_size=1)": "_TrainReport",
    "model.train('rows.tsv', 'labeled', task='classify', steps=1, context=16, batch_size=1)": "_TrainReport",
    "model.train(text, 'dictionary', task='dictionary', site='blocks.1.hook_resid_pre', latents=64, k=4, steps=1, context=16)": "_TrainReport",
    "model.task_data('ioi', count=4)[0]": "_PromptPair",
    "model.logit_lens('One day', watch=[' he']).details": "_LensDetails",
    "model.attention('One day').details": "_NoDetails",
    "model.attribute('One day').details": "_AttributeDetails",
    "model.attribute('One day', answer=' he', against=' she').details": "_AttributeDetails",
    "model.ablate('One day').details": "_NoDetails",
    "model.patch(clean, corrupt).details": "_PatchDetails",
    "model.estimate(clean, corrupt).details": "_PatchDetails",
    "model.path(clean, corrupt, from_='0.0').details": "_PathDetails",
    "model.saliency('One day', steps=2).details": "_SaliencyDetails",
    "model.neurons('One day', '3.17').details": "_NeuronsDetails",
    "model.features('One day').details": "_FeaturesDetails",
    "model.features(None, prompts_file=text, features=[1]).details": "_FeaturesDetails",
    "model.attribution_graph('One day', max_feature_nodes=32).details": "_GraphDetails",
    "model.circuit(pairs, pairs=2, edges=4).details": "_CircuitDetails",
    "model.heads('One day One day').details": "_NoDetails",
}
# Other results from the main API.
OTHERS = [
    "model.generate('a')", "model.generate(['a'])", "model.generate(['a'], return_exceptions=True)", "model.stream('a')",
    "next(model.stream('a'))", "next(model.stream_batch(['a']))", "next(model.stream_batch(['a'], return_exceptions=True))",
    "model.stream_batch(['a']).stop_reasons", "model.encode('a')", "model.decode([1])", "model.vocab()", "model.str_tokens('a')",
    "model.hook_names", "model.logits('a')", "model.run_with_cache('a')", "model.cache()", "model.parameters()",
    "model.steering('a', layer=1)", "model.dictionary('built-in')", "model.attention('a')", "model.attention('a').values",
    "model.attention('a').axes", "model.attention('a').to_dict()", "candle_gpt2.Picture('a', [1.0], {'x': ['b']}).details",
    "candle_gpt2.Trainer(text, 'out').apply(np.zeros(1), 1.0)", "candle_gpt2.Trainer(text, 'out').loss_and_gradients()",
    "candle_gpt2.compress(b'a')", "classifier.labels", "classifier.classify(['a'])",
]  # fmt: skip


def stub_types() -> dict[str, Any]:
    """Evaluates the names in the stub, except statements that need later or external names."""
    stub = Path(candle_gpt2.__file__).with_name("_native.pyi")
    names: dict[str, Any] = {"__name__": "stub"}
    for statement in ast.parse(stub.read_text()).body:
        with suppress(NameError, ImportError):
            exec(compile(ast.Module([statement], []), str(stub), "exec"), names)
    return names


def mismatches(value: Any, kind: Any, path: str) -> list[str]:
    """Returns the paths at which a value does not match its type."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return min((mismatches(value, part, path) for part in parts), key=len)
    wrong = [f"{path}: {value!r:.80} is not {kind}"]
    if is_typeddict(kind):
        kinds = get_type_hints(kind)
        if not isinstance(value, dict):
            return wrong
        keys = [f"{path}: {key}" for key in (value.keys() - kinds.keys()) | (kind.__required_keys__ - value.keys())]
        return keys + [one for key in value.keys() & kinds.keys() for one in mismatches(value[key], kinds[key], f"{path}.{key}")]
    if origin is dict and isinstance(value, dict):
        return [one for key, item in value.items() for one in mismatches(key, parts[0], path) + mismatches(item, parts[1], f"{path}.{key}")]
    if origin is tuple and isinstance(value, tuple) and len(value) == len(parts):
        return [one for item, part in zip(value, parts, strict=True) for one in mismatches(item, part, f"{path}()")]
    if origin is np.ndarray:
        return [] if isinstance(value, np.ndarray) and value.dtype == get_args(parts[1])[0] else wrong
    if origin is Literal:
        return [] if value in parts else wrong
    if isinstance(value, list) and origin is not None and issubclass(list, origin):
        return [one for item in value for one in mismatches(item, parts[0], f"{path}[]")]
    return [] if kind is object or (origin is None and type(value) is kind) else wrong


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_results_match_the_stub_types(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("heads").symlink_to(FIXTURES / "heads")
    Path("text.txt").write_text("One day a boy had a red ball. " * 200)
    Path("rows.tsv").write_text("red\ta ball\nblue\ta cup\n" * 20)
    names: dict[str, Any] = {}
    exec(OPEN, names)
    types = stub_types()
    found = [one for expression, kind in RESULTS.items() for one in mismatches(eval(expression, names), types[kind], expression)]
    assert found == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_result_is_any(tmp_path):
    expressions = [*RESULTS, *OTHERS]
    (tmp_path / "use.py").write_text(OPEN + "".join(f"reveal_type({one})\n" for one in expressions))
    done = run_module("mypy", "--strict", "--no-error-summary", "use.py", cwd=tmp_path)
    found = re.findall(r'^use\.py:\d+: note: Revealed type is "(.*)"$', done.stdout, re.MULTILINE)
    assert len(found) == len(expressions) == len(done.stdout.splitlines()), done.stdout + done.stderr
    for expression, kind in zip(expressions, found, strict=True):
        # These types have no parameter for an array's shape.
        assert "Any" not in kind.replace("ndarray[tuple[Any, ...],", "ndarray["), (expression, kind)
        assert f"._native.{RESULTS.get(expression, '')}" in kind or expression in OTHERS, (expression, kind)


def run_module(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stubs_match_the_package(tmp_path):
    # Modules that need Ray or its dependencies.
    optional = [name for name, needed in OPTIONAL.items() if find_spec(needed) is None]
    (tmp_path / "left_out").write_text("".join(f"candle_gpt2.{name}\n" for name in optional))
    done = run_module("mypy.stubtest", "candle_gpt2", "--allowlist", "left_out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mypy_reports_exactly_the_errors(tmp_path):
    file = tmp_path / "use.py"
    file.write_text(USE)
    done = run_module("mypy", "--strict", "--no-error-summary", str(file), cwd=tmp_path)
    found = [line.split("error: ")[1] for line in done.stdout.splitlines() if "error: " in line]
    # A wrong keyword is also an error for all overloads.
    assert len(found) == 3, done.stdout + done.stderr
    assert 'Unexpected keyword argument "temprature"' in found[0]
    assert "No overload variant" in found[1]
    assert "incompatible type" in found[2].lower()
    assert 'Revealed type is "str"' in done.stdout
