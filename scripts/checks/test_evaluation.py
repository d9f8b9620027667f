"""`gpt2 eval` reports the same figures as lm-evaluation-harness's `hf` model and our oracle.

Runs every protocol on samples with --model, or --protocol on your --data, such as LAMBADA's. `hf` scores one
sequence at a time, in float32 with float64 log-softmax. The oracle computes the protocols that the harness
lacks. Figures may differ by 1e-5 relative; every decision must be the same.
"""

import json

import pytest
from paths import BUILT_IN

pytest.importorskip("lm_eval")

from reference import evaluation, harness, oracle  # noqa: E402

FIGURE_TOLERANCE = 1e-5
# Divergences near 0 are differences between float32 values with rounding errors of about 1e-7.
SMALL_FIGURE_TOLERANCE = 1e-6


def pytest_generate_tests(metafunc):
    option = metafunc.config.getoption
    config = json.loads(((option("model") or BUILT_IN) / "config.json").read_text())
    cases = [(option("protocol"), option("data"), None)] if option("protocol") else evaluation.cases(config["n_positions"])
    metafunc.parametrize("protocol, data, context", cases, ids=[f"{case[0]} {case[1]} {case[2] or ''}".strip() for case in cases])


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    evaluation.write_samples(folder)
    return folder


@pytest.fixture(scope="module")
def hf(checkpoint):
    return harness.model(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint):
    return oracle.Model(checkpoint)


def evaluate(program, folder, protocol, data, log, **options):
    """Returns the program's report and the lines of its log."""
    [tokenizer] = folder.glob("*tokenizer.json")
    flags = [f"--{name}={value}" for name, value in options.items() if value]
    flags += [] if tokenizer.name == "tokenizer.json" else ["--tokenizer", tokenizer]
    common = ("--dtype", "f32", "--device", "cpu", "--json")
    report = program("eval", "--model", folder, *common, protocol, "--data", data, "--items", log, *flags)
    return json.loads(report), harness.read_jsonl(log)


def differing_items(theirs, ours):
    """Returns the items for which the programs decide differently."""
    different = []
    for index, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        if "words" in their:
            different += [index] if their["words"] != our["words"] else []
            continue
        choices = list(zip(their["choices"], our["choices"], strict=True))
        decided = {}
        if "predicted" in our:
            decided = {name: our["predicted"][key] == our["gold"] for name, key in (("acc", "sum"), ("acc_norm", "per_character"))}
            decided |= our["predicted"]
        elif "acc" in their:
            decided = {"acc": our["choices"][0]["is_greedy"]}
        reported = {name: their[name] for name in ("acc", "acc_norm", "sum", "per_token") if name in their}
        greedy = [(a["is_greedy"], b["is_greedy"]) for a, b in choices if "is_greedy" in a]
        if any(decided[name] != value for name, value in reported.items()) or any(a != b for a, b in greedy):
            different.append(index)
    return different


def test_figures_and_decisions_match_the_reference(program, option, checkpoint, tmp_path, samples, hf, model, protocol, data, context):
    folder, base, limit = checkpoint, None, option("limit")
    if option("protocol") is None:
        data = samples / data
    if protocol in harness.TASKS:
        theirs = harness.evaluate(hf, protocol, data, limit)
    else:
        evaluated = model
        if protocol == "kl":
            folder, base = tmp_path / "changed", folder
            folder.mkdir()
            evaluation.with_other_config(base, folder)
            evaluated = oracle.Model(folder)
        theirs = oracle.evaluate(protocol, evaluated, data, context, limit, base=base and model)
    report, log = evaluate(program, folder, protocol, data, tmp_path / "items.jsonl", context=context, limit=limit, base=base)
    ours = {}
    for metric in report["metrics"]:
        ours[metric["name"]], ours[f"{metric['name']}_stderr"] = metric["value"], metric["stderr"]
    expected = theirs["metrics"] | {f"{metric}_stderr": value for metric, value in theirs.get("stderr", {}).items()}
    for metric, value in expected.items():
        scale = expected["base_perplexity"] if "difference" in metric else abs(value)
        near = pytest.approx(value, rel=0, abs=max(FIGURE_TOLERANCE * scale, SMALL_FIGURE_TOLERANCE))
        assert ours.get(metric) == near, metric
    # Protocols over windows have no items to compare.
    assert not theirs["items"] or not differing_items(theirs["items"], log)
