"""`gpt2 eval` measures what lm-evaluation-harness' `hf` model does, and what the other protocols' scripts would, on --model.

Every protocol is run on samples, or --protocol on --data of yours, such as LAMBADA's. `hf` reads one text at a time, in float32 with
logarithms in float64; what is no task of the harness is asked of the oracle. A figure may be off by 1e-5 of it; every decision must be
the same.
"""

import json

import pytest

pytest.importorskip("lm_eval")

from reference import evaluation, harness, oracle  # noqa: E402

FIGURE_TOLERANCE = 1e-5
# Divergences near 0 are differences of what float32 rounds to about 1e-7.
SMALL_FIGURE_TOLERANCE = 1e-6


def pytest_generate_tests(metafunc):
    option = metafunc.config.getoption
    config = json.loads((option("model") / "config.json").read_text())
    cases = [(option("protocol"), option("data"), None)] if option("protocol") else evaluation.cases(config["n_positions"])
    metafunc.parametrize("protocol, data, context", cases, ids=[f"{case[0]} {case[1]} {case[2] or ''}".strip() for case in cases])


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    evaluation.write_samples(folder)
    return folder


@pytest.fixture(scope="module")
def hf(option):
    return harness.model(option("model"))


@pytest.fixture(scope="module")
def model(option):
    return oracle.Model(option("model"))


def evaluate(program, folder, protocol, data, log, **options):
    """What the program reports, and the lines of its log."""
    [tokenizer] = folder.glob("*tokenizer.json")
    given = [f"--{name}={value}" for name, value in options.items() if value]
    given += [] if tokenizer.name == "tokenizer.json" else ["--tokenizer", tokenizer]
    fixed = ("--dtype", "f32", "--device", "cpu", "--json")
    report = program("eval", "--model", folder, *fixed, protocol, "--data", data, "--items", log, *given)
    return json.loads(report), harness.read_jsonl(log)


def other_decisions(theirs, ours):
    """Items that are judged otherwise."""
    different = []
    for index, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        if "words" in their:
            different += [index] if their["words"] != our["words"] else []
            continue
        choices = list(zip(their["choices"], our["choices"], strict=True))
        judged = {}
        if "predicted" in our:
            judged = {name: our["predicted"][key] == our["gold"] for name, key in (("acc", "sum"), ("acc_norm", "per_character"))}
            judged |= our["predicted"]
        elif "acc" in their:
            judged = {"acc": our["choices"][0]["is_greedy"]}
        told = {name: their[name] for name in ("acc", "acc_norm", "sum", "per_token") if name in their}
        greedy = [(a["is_greedy"], b["is_greedy"]) for a, b in choices if "is_greedy" in a]
        if any(judged[name] != value for name, value in told.items()) or any(a != b for a, b in greedy):
            different.append(index)
    return different


def test_figures_and_decisions(program, option, tmp_path, samples, hf, model, protocol, data, context):
    folder, base, limit = option("model"), None, option("limit")
    if option("protocol") is None:
        data = samples / data
    if protocol in harness.TASKS:
        theirs = harness.evaluate(hf, protocol, data, limit)
    else:
        asked = model
        if protocol == "kl":
            folder, base = tmp_path / "changed", folder
            folder.mkdir()
            evaluation.with_other_config(base, folder)
            asked = oracle.Model(folder)
        theirs = oracle.evaluate(protocol, asked, data, context, limit, base=base and model)
    report, log = evaluate(program, folder, protocol, data, tmp_path / "items.jsonl", context=context, limit=limit, base=base)
    ours = {}
    for metric in report["metrics"]:
        ours[metric["name"]], ours[f"{metric['name']}_stderr"] = metric["value"], metric["stderr"]
    expected = theirs["metrics"] | {f"{metric}_stderr": value for metric, value in theirs.get("stderr", {}).items()}
    for metric, value in expected.items():
        scale = expected["base_perplexity"] if "difference" in metric else abs(value)
        near = pytest.approx(value, rel=0, abs=max(FIGURE_TOLERANCE * scale, SMALL_FIGURE_TOLERANCE))
        assert ours.get(metric) == near, metric
    # Of windows there are no items to compare.
    assert not theirs["items"] or not other_decisions(theirs["items"], log)
