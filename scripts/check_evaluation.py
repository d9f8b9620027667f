"""Shows that `gpt2 eval` measures what lm-evaluation-harness' `hf` model does, and what the other protocols' scripts would.

usage: python scripts/check_evaluation.py PROGRAM MODEL [--protocol NAME --data FILE] [--limit N] [--only TEXT]

PROGRAM is the built gpt2, MODEL a checkpoint folder with its tokenizer. Without --protocol every protocol is run on the samples of
scripts/export_evaluation.py; with it that one on a file of yours, such as LAMBADA's. --limit takes the first so many items, --only
the protocols with this text in their name. `hf` reads one text at a time, in float32 with logarithms in float64; what is no task of
the harness is asked of scripts/oracle_evaluation.py. Needs what those need (scripts/requirements.txt); nothing is fetched. Prints a
line for each figure: theirs, ours, and how far the log-probabilities are apart at most; exit code 1 if a figure is off by more than
1e-5 of it, or a decision differs.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile

import export_evaluation as export
import harness
import oracle_evaluation as oracle

FIGURE_TOLERANCE = 1e-5
# Divergences near 0 are differences of what float32 rounds to about 1e-7.
SMALL_FIGURE_TOLERANCE = 1e-6


class Ours:
    def __init__(self, program, folder):
        self.command = [program, "eval", "--model", folder, "--dtype", "f32", "--device", "cpu", "--json"]
        [tokenizer] = folder.glob("*tokenizer.json")
        if tokenizer.name != "tokenizer.json":
            self.command += ["--tokenizer", tokenizer]

    def evaluate(self, protocol, data, **options):
        """What the program reports, and the lines of its log."""
        with tempfile.TemporaryDirectory() as scratch:
            log = pathlib.Path(scratch, "items.jsonl")
            given = [f"--{name}={value}" for name, value in options.items() if value]
            command = [str(part) for part in [*self.command, protocol, "--data", data, "--items", log, *given]]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                sys.exit(f"{' '.join(command)}: {run.stderr[-2000:]}")
            return json.loads(run.stdout), harness.read_jsonl(log)


def same_decisions(theirs, ours):
    """Items that are judged otherwise, and the largest difference of a log-probability; of windows there are no items to compare."""
    different, largest = [], 0.0
    for index, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        if "words" in their:
            different += [index] if their["words"] != our["words"] else []
            continue
        choices = list(zip(their["choices"], our["choices"], strict=True))
        largest = max([largest, *(abs(a["logprob"] - b["logprob"]) for a, b in choices)])
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
    return different, largest


def compare(name, theirs, report, log):
    """Prints a line for each figure; whether all is the same."""
    ours = {}
    for metric in report["metrics"]:
        ours[metric["name"]], ours[f"{metric['name']}_stderr"] = metric["value"], metric["stderr"]
    expected = theirs["metrics"] | {f"{metric}_stderr": value for metric, value in theirs.get("stderr", {}).items()}
    different, largest = same_decisions(theirs["items"], log) if theirs["items"] else ([], math.nan)
    same = not different
    for metric, value in expected.items():
        scale = expected["base_perplexity"] if "difference" in metric else abs(value)
        found = ours.get(metric)
        near = isinstance(found, (int, float)) and abs(found - value) <= max(FIGURE_TOLERANCE * scale, SMALL_FIGURE_TOLERANCE)
        same &= near
        print(f"{name:48} {metric:28} {value:<18.10g} {found if found is None else format(found, '<18.10g')} {'' if near else 'DIFFERENT'}")
    verdict = f"items judged otherwise: {different[:20]}" if different else "every item is judged the same"
    print(f"{name:48} {verdict}; log-probabilities at most {largest:.1e} apart", flush=True)
    return same


def main():
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("program")
    words.add_argument("model", type=pathlib.Path)
    words.add_argument("--protocol")
    words.add_argument("--data", type=pathlib.Path)
    words.add_argument("--limit", type=int)
    words.add_argument("--only", default="")
    arguments = words.parse_args()
    if bool(arguments.protocol) != bool(arguments.data):
        words.error("--protocol and --data go together")
    ours, hf, model = Ours(arguments.program, arguments.model), harness.model(arguments.model), oracle.Model(arguments.model)
    same = True
    with tempfile.TemporaryDirectory() as scratch:
        samples, changed = pathlib.Path(scratch, "samples"), pathlib.Path(scratch, "changed")
        changed.mkdir()
        cases = [(arguments.protocol, arguments.data, None)]
        if not arguments.protocol:
            export.write_samples(samples)
            cases = [(protocol, samples / data, context) for protocol, data, context in export.cases(model.context)]
        for protocol, data, context in cases:
            if arguments.only not in protocol:
                continue
            name = f"{protocol} {data.name}"
            if protocol in harness.TASKS:
                theirs = harness.evaluate(hf, protocol, data, arguments.limit)
                report, log = ours.evaluate(protocol, data, limit=arguments.limit)
            elif protocol == "kl":
                export.with_other_config(arguments.model, changed)
                theirs = oracle.evaluate(protocol, oracle.Model(changed), data, context, base=model)
                report, log = Ours(arguments.program, changed).evaluate(protocol, data, context=context, base=arguments.model)
            else:
                theirs = oracle.evaluate(protocol, model, data, context, arguments.limit)
                report, log = ours.evaluate(protocol, data, context=context, limit=arguments.limit)
            same &= compare(name, theirs, report, log)
    print("the same" if same else "DIFFERENT")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
