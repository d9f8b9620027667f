"""`gpt2 eval` reports the figures of llama.cpp's llama-perplexity on the same weights and texts.

scripts/bench/peers.sh builds the tool. Both programs read GGUF files converted from --model: one with the original
weights and one with weights rounded to 4 bits but stored in f32, so that both compute in f32. The text is
sampled from the model. Figures are compared to the digits that the tool prints.

For divergences, the tool stores the base's log-probabilities in 16 bits, over a range of 16 below the
largest. The tolerance covers the rounding, and values below the range are computed from our log and accounted
for. The tool computes GELU with an f16 lookup table, even in f32 models. Single log-probabilities therefore
differ by 3e-4, and the largest of 25,000 by 3e-3; means are unaffected.
"""

import itertools
import json
import math
import os
import random
import re
import subprocess

import pytest

RELATIVE = 1e-5
# The tool's format for the base: log-probabilities down to `RANGE` below the largest, in steps of `STEP`.
RANGE = 16
STEP = RANGE / 65535
# The errors at many positions average out in means. The worst measured error was 9e-7, for a model compared with itself.
MEAN_ROUNDING = 5e-6
# Relative error that the GELU table causes in the largest and smallest values over all positions.
EXTREMES = 1e-2
# Two of the base's tokens less than a step apart may swap: at 1 in 10,000 positions for a model compared with itself.
TOP_ROUNDING = 1e-3
SEED = 7
HELLASWAG_ITEMS = 200


class Theirs:
    """llama.cpp's tool, with an f32 KV cache and without flash attention, as our `--dtype f32` computes."""

    def __init__(self, program, threads):
        self.command = [program, "-t", str(threads), "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-warmup"]

    def run(self, find, model, *options):
        """Returns the match that `find` finds in the output.

        Retries, because on a busy machine the tool may exit before it writes its last lines.
        """
        for _ in range(3):
            command = [*self.command, "-m", *map(str, (model, *options))]
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            assert done.returncode == 0, done.stderr[-2000:]
            output = done.stdout + done.stderr
            if found := find(output):
                return found
        pytest.fail(output)

    def perplexity(self, model, data, context, *options):
        final = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")
        return tuple(map(float, self.run(final.search, model, "-f", data, "-c", context, *options).groups()))

    def divergence(self, model, logits, context):
        """Returns the value and standard error of each figure, keyed by its name in the tool's output.

        The tool reports no figures for fewer than a hundred tokens.
        """
        line = re.compile(r"^ *(\S.*?) *: *(-?[\d.]+)%?(?: ± *([\d.]+))?(?: %)?$", re.MULTILINE)

        def figures(output):
            return "Same top p" in output and line.findall(output)

        found = self.run(figures, model, "-c", context, "--kl-divergence-base", logits, "--kl-divergence")
        return {re.sub(" +", " ", name): (float(value), float(error or "nan")) for name, value, error in found}

    def hellaswag(self, model, data, items):
        """Returns the fraction of correct decisions after the last task."""
        last = re.compile(rf"^{items}\t([\d.]+)%", re.MULTILINE)
        options = ("-f", data, "-c", 512, "--hellaswag", "--hellaswag-tasks", items)
        return float(self.run(last.search, model, *options)[1]) / 100


class Ours:
    """Our program, its two models, and a text sampled from the first model's full distribution."""

    def __init__(self, program, option, checkpoint, folder):
        self.program, self.folder = program, folder
        self.tokenizer = ["--tokenizer", option("tokenizer")] if option("tokenizer") else []
        self.model = self.convert(checkpoint, "f32.gguf", "f32", *self.tokenizer)
        self.coarse = self.convert(self.convert(self.model, "q4_0.gguf", "q4_0"), "coarse.gguf", "f32")
        tokens = option("tokens")
        text = program("generate", "", "--model", self.model, "--dtype", "f32", "--max-new-tokens", tokens, "--min-new-tokens", tokens,
                       "--slide", "--temperature", 1, "--top-k", 1_000_000, "--min-p", 0, "--seed", SEED)
        # The text ends with exactly one line break, which the tool drops.
        self.text = folder / "sampled.txt"
        self.text.write_text(text.rstrip("\n") + "\n", encoding="utf-8")

    def convert(self, model, name, dtype, *options):
        self.program("convert", model, self.folder / name, "--dtype", dtype, *options)
        return self.folder / name

    def evaluate(self, protocol, model, data, *options):
        report = json.loads(self.program("eval", protocol, "--model", model, "--data", data, "--dtype", "f32", "--json", *options))
        report = report[0] if isinstance(report, list) else report
        return {metric["name"]: metric for metric in report["metrics"]}


@pytest.fixture(scope="module")
def theirs(option):
    if not option("llama-perplexity").is_file():
        pytest.skip("llama-perplexity is not built: scripts/bench/peers.sh, or --llama-perplexity FILE")
    return Theirs(option("llama-perplexity"), os.cpu_count())


@pytest.fixture(scope="module")
def ours(theirs, program, option, checkpoint, tmp_path_factory):
    return Ours(program, option, checkpoint, tmp_path_factory.mktemp("llama"))


class Checks:
    """Compares figures and collects the differences."""

    def __init__(self):
        self.different = []

    def compare(self, label, ours, theirs, tolerance):
        if abs(ours - theirs) > tolerance:
            self.different.append(f"{label.strip()}: {ours:.7f} and {theirs:.7f}, within {tolerance:.1e}")


@pytest.fixture
def checks():
    return Checks()


def test_perplexity(checks, ours, theirs, option):
    model, text, context = ours.model, ours.text, option("context")
    mine = ours.evaluate("wikitext:llama.cpp", model, text, "--context", context)["perplexity"]
    value, error = theirs.perplexity(model, text, context)
    checks.compare("perplexity", mine["value"], value, RELATIVE * value + 5e-5)
    checks.compare("  its standard error", mine["stderr"], error, RELATIVE * error + 5e-6)
    assert not checks.different


def clipping_errors(log):
    """Returns upper bounds for the clipping error in the base's mean loss and in its standard error."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    below = [max(0.0, -RANGE - logprob) for line in lines for logprob in line["base_logprob"]]
    squares = sum(excess * excess for excess in below) / len(below)
    return sum(below) / len(below), math.sqrt(squares / (len(below) - 1))


def test_divergence(checks, ours, theirs, option):
    base, other, text, context = ours.model, ours.coarse, ours.text, option("context")
    log = ours.folder / "kl.jsonl"
    metrics = ours.evaluate("kl", other, text, "--context", context, "--base", base, "--items", log)
    theirs.perplexity(base, text, context, "--kl-divergence-base", ours.folder / "logits")
    figures = theirs.divergence(other, ours.folder / "logits", context)
    mean_cut, spread_cut = clipping_errors(log)

    def compare(name, label, tolerance, cut=0.0, percent=False, decimals=6):
        """Compares one figure.

        `cut` is the figure's sensitivity to the base's mean loss. `decimals` counts the printed digits of a
        percentage.
        """
        scale = 100 if percent else 1
        value, error = (number / scale for number in figures[label])
        printed = 0.5 * 10.0**-decimals / scale
        mine = metrics[name]
        checks.compare(name, mine["value"], value, tolerance + cut * mean_cut + printed)
        if mine["stderr"] is not None:
            checks.compare("  its standard error", mine["stderr"], error, tolerance + cut * spread_cut + printed)

    perplexity = metrics["perplexity"]["value"]
    loss = RELATIVE + MEAN_ROUNDING
    compare("perplexity", "Mean PPL(Q)", RELATIVE * perplexity)
    compare("base_perplexity", "Mean PPL(base)", loss * perplexity, cut=perplexity)
    compare("ln_perplexity_ratio", "Mean ln(PPL(Q)/PPL(base))", loss, cut=1)
    compare("perplexity_ratio", "Mean PPL(Q)/PPL(base)", loss, cut=1.5)
    compare("perplexity_difference", "Mean PPL(Q)-PPL(base)", 2 * loss * perplexity, cut=1.5 * perplexity)
    relative_cut = 2 * spread_cut / (metrics["base_perplexity"]["stderr"] / metrics["base_perplexity"]["value"])
    compare("perplexity_correlation", "Cor(ln(PPL(Q)), ln(PPL(base)))", relative_cut, percent=True, decimals=2)
    compare("kl", "Mean KLD", MEAN_ROUNDING)
    compare("dp", "Mean Δp", MEAN_ROUNDING, percent=True, decimals=3)
    compare("dp_rms", "RMS Δp", MEAN_ROUNDING, percent=True, decimals=3)
    compare("same_top", "Same top p", TOP_ROUNDING, percent=True, decimals=3)
    labels = {"max": "Maximum", "min": "Minimum", "median": "Median"}
    for name, metric in metrics.items():
        kind, _, place = name.partition("_")
        if kind in ("kl", "dp") and place and place != "rms":
            label = f"{labels.get(place) or f'{float(place):.1f}%'} {'KLD' if kind == 'kl' else 'Δp'}"
            compare(name, label, EXTREMES * abs(metric["value"]) + STEP, percent=kind == "dp", decimals=3 if kind == "dp" else 6)
    assert not checks.different


def test_hellaswag(checks, ours, theirs):
    model, count = ours.model, HELLASWAG_ITEMS
    words = itertools.cycle(ours.text.read_text(encoding="utf-8").split())
    draw = random.Random(SEED)

    # The format has six lines per item, so passages contain no line breaks.
    def passage(shortest, longest):
        return " ".join(next(words) for _ in range(draw.randint(shortest, longest)))

    items = [[passage(6, 14), draw.randrange(4), *(passage(2, 9) for _ in range(4))] for _ in range(count)]

    def write(name, labels):
        lines = [str(field) for item, label in zip(items, labels) for field in (item[0], label, *item[2:])]
        (ours.folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return ours.folder / name

    data = write("hellaswag.txt", [item[1] for item in items])
    log = ours.folder / "hellaswag.jsonl"
    accuracy = ours.evaluate("hellaswag:llama.cpp", model, data, "--items", log)["acc_norm"]["value"]
    checks.compare("hellaswag acc_norm", accuracy, theirs.hellaswag(model, data, count), 1e-9)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    decisions = write("decisions.txt", [line["predicted"]["per_token"] for line in lines])
    checks.compare("hellaswag equal decisions", 1.0, theirs.hellaswag(model, decisions, count), 1e-9)
    assert not checks.different
