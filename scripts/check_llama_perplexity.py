"""Shows that `gpt2 eval` measures what llama.cpp's llama-perplexity does, on the same weights and texts, both in f32.

usage: python scripts/check_llama_perplexity.py PROGRAM LLAMA_PERPLEXITY MODEL [--tokenizer FILE] [--context N] [--tokens N] [--items N]

PROGRAM is the built gpt2, LLAMA_PERPLEXITY llama.cpp's tool (scripts/peers.sh builds it), MODEL whatever `gpt2 convert` reads, with
its tokenizer; `built-in` is the model inside the program. The script writes GGUF files of it, one with the numbers as they are and one
with numbers that were rounded to 4 bits and stored in f32, so that both programs compute in f32 and only the weights are
coarse. The text is drawn from the model itself. Then it compares

- `wikitext:llama.cpp` with the plain mode: perplexity and its standard error, to 1e-5 and the tool's four decimals;
- `kl` with --kl-divergence: the perplexities, their ratio, the mean and the percentiles of the divergence and of dp, and how often
  the top token is the same. The tool keeps the base's log-probabilities in 16 bits, over a range of 16 below the largest: what that can
  change is the tolerance, and what is below the range is computed from our log and allowed for;
- `hellaswag:llama.cpp` with --hellaswag: the accuracy, and every decision: a file whose labels are our decisions must be all right.

llama.cpp looks its GELU up in a table of f16, in f32 models too. Single log-probabilities therefore differ by 3e-4, and the largest of
25,000 by 3e-3; means are not touched. Needs Python alone. Prints a line for each figure; exit code 1 if one differs.
"""

import argparse
import json
import math
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

RELATIVE = 1e-5
# What the tool stores of the base: log-probabilities down to so far below the largest, in so many steps.
RANGE = 16
STEP = RANGE / 65535
# The errors of many places cancel out in means: 9e-7 was the worst of models beside themselves, whose divergence is 0.
MEAN_ROUNDING = 5e-6
# What the table of GELU may change in the largest and smallest of all places, as a share of them.
EXTREMES = 1e-2
# Two tokens of the base that are closer than a step change places: 1 of 10,000 places of models beside themselves.
TOP_ROUNDING = 1e-3
SEED = 7


def run(*command):
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout, done.stderr


class Checks:
    """What was compared, and whether it was equal."""

    def __init__(self):
        self.failed = 0

    def compare(self, what, ours, theirs, tolerance):
        equal = abs(ours - theirs) <= tolerance
        self.failed += not equal
        print(f"{'same     ' if equal else 'DIFFERENT'} {what:<32} {ours:>14.7f} {theirs:>14.7f}   within {tolerance:.1e}")


class Ours:
    """The program."""

    def __init__(self, program, folder):
        self.program, self.folder = program, folder

    def convert(self, model, name, dtype, *options):
        run(self.program, "convert", model, self.folder / name, "--dtype", dtype, *options)
        return self.folder / name

    def draw(self, model, name, tokens):
        """A text of so many tokens that the model draws from its whole distribution; none of them ends it."""
        text, _ = run(self.program, "generate", "", "--model", model, "--dtype", "f32", "--max-new-tokens", tokens,
                      "--min-new-tokens", tokens, "--slide", "--top-k", 1_000_000, "--seed", SEED)
        # A line break inside an item of the six-line format would be another line.
        (self.folder / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        return self.folder / name

    def evaluate(self, protocol, model, data, *options):
        output, _ = run(self.program, "eval", protocol, "--model", model, "--data", data, "--dtype", "f32", "--json", *options)
        report = json.loads(output)
        report = report[0] if isinstance(report, list) else report
        return {metric["name"]: metric for metric in report["metrics"]}


class Theirs:
    """llama.cpp's tool, with keys and values in f32 and attention as plain products: what `--dtype f32` is here."""

    def __init__(self, program, threads):
        self.command = [program, "-t", threads, "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-warmup"]

    def run(self, find, model, *options):
        """What `find` finds in the output. On a busy machine the tool may end before its last lines are written: once more, then."""
        for _ in range(3):
            output = "".join(run(*self.command, "-m", model, *options))
            if found := find(output):
                return found
        sys.exit(output)

    def perplexity(self, model, data, context, *options):
        final = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")
        return tuple(map(float, self.run(final.search, model, "-f", data, "-c", context, *options).groups()))

    def divergence(self, model, logits, context):
        """Value and standard error of each figure by its name in the tool's output; there are none of fewer than a hundred tokens."""
        line = re.compile(r"^ *(\S.*?) *: *(-?[\d.]+)%?(?: ± *([\d.]+))?(?: %)?$", re.MULTILINE)

        def figures(output):
            return "Same top p" in output and line.findall(output)

        found = self.run(figures, model, "-c", context, "--kl-divergence-base", logits, "--kl-divergence")
        return {re.sub(" +", " ", name): (float(value), float(error or "nan")) for name, value, error in found}

    def hellaswag(self, model, data, items):
        """The share of right decisions after the last task."""
        last = re.compile(rf"^{items}\t([\d.]+)%", re.MULTILINE)
        options = ("-f", data, "-c", 512, "--hellaswag", "--hellaswag-tasks", items)
        return float(self.run(last.search, model, *options)[1]) / 100


def check_perplexity(checks, ours, theirs, model, text, context):
    mine = ours.evaluate("wikitext:llama.cpp", model, text, "--context", context)["perplexity"]
    value, error = theirs.perplexity(model, text, context)
    checks.compare("perplexity", mine["value"], value, RELATIVE * value + 5e-5)
    checks.compare("  its standard error", mine["stderr"], error, RELATIVE * error + 5e-6)


def cut_off(log):
    """What the tool's range cuts off from the base's losses: at most so much of their mean, and of its standard error."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    below = [max(0.0, -RANGE - logprob) for line in lines for logprob in line["base_logprob"]]
    squares = sum(excess * excess for excess in below) / len(below)
    return sum(below) / len(below), math.sqrt(squares / (len(below) - 1))


def check_divergence(checks, ours, theirs, models, text, context):
    base, other = models
    log = ours.folder / "kl.jsonl"
    metrics = ours.evaluate("kl", other, text, "--context", context, "--base", base, "--items", log)
    theirs.perplexity(base, text, context, "--kl-divergence-base", ours.folder / "logits")
    figures = theirs.divergence(other, ours.folder / "logits", context)
    mean_cut, spread_cut = cut_off(log)

    def compare(name, label, tolerance, cut=0.0, percent=False, decimals=6):
        """`cut` is what the figure changes by where the base's mean loss does; percentages have so many decimals."""
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


def check_hellaswag(checks, ours, theirs, model, text, count):
    words = iter(text.read_text(encoding="utf-8").split())
    draw = random.Random(SEED)

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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", help="the built gpt2")
    parser.add_argument("llama_perplexity", help="llama.cpp's tool")
    parser.add_argument("model", help="what gpt2 convert reads")
    parser.add_argument("--tokenizer", help="tokenizer of the model, where it has none")
    parser.add_argument("--context", type=int, default=64, help="tokens of a window")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the drawn text")
    parser.add_argument("--items", type=int, default=200, help="made-up items of hellaswag")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    checks = Checks()
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(arguments.program, pathlib.Path(folder))
        theirs = Theirs(arguments.llama_perplexity, arguments.threads)
        tokenizer = ("--tokenizer", arguments.tokenizer) if arguments.tokenizer else ()
        model = ours.convert(arguments.model, "f32.gguf", "f32", *tokenizer)
        coarse = ours.convert(ours.convert(model, "q4_0.gguf", "q4_0"), "coarse.gguf", "f32")
        text = ours.draw(model, "drawn.txt", arguments.tokens)
        print(f"{'':<42} {'gpt2 eval':>14} {'llama.cpp':>14}")
        check_perplexity(checks, ours, theirs, model, text, arguments.context)
        check_divergence(checks, ours, theirs, (model, coarse), text, arguments.context)
        check_hellaswag(checks, ours, theirs, model, text, arguments.items)
    if checks.failed:
        sys.exit(f"{checks.failed} figures differ")


if __name__ == "__main__":
    main()
