"""Speed of the Python package compared with the program, transformers and CTranslate2: GPT-2 124M.

usage: python -m bench python [--peers DIR] [--program FILE] [--rounds N] [--threads N] [--isa avx2] [--markdown]

`WITHOUT_LLAMA_CPP=1 scripts/bench/peers.sh` creates all peers needed. The Python that runs this script needs
our package, built in release mode; the peers run in the Python of that folder. All engines run interleaved on
one machine. The program and the package get the same prompts and decode greedily, each time in a separate
process: time to first token for prompts of 128, 512 and 1,023 tokens, 128 tokens after 8, and 64 after 896.
The program reports its own times, and the package's calls are timed from outside, so the difference is
Python's overhead. The peers' rows are those of `cpu`; `8 texts` counts the tokens of the whole batch.
"""

import argparse
import json
import os
import statistics
import time

from bench import common, cpu

PREFILL_TOKENS = (128, 512, 1023)  # the context of 1,024 must also hold the next token
DECODE = cpu.DECODE
TEXTS, (TEXT_TOKENS, TEXT_NEW_TOKENS) = 8, cpu.BATCH_TOKENS


def measure(folder):
    """Times the package's `generate` calls; returns tokens per second."""
    import candle_gpt2

    model = candle_gpt2.Model.from_pretrained(folder, dtype="f32")

    def seconds(prompts, new_tokens):
        start = time.perf_counter()
        model.generate(prompts, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
        return time.perf_counter() - start

    def decode(prompts, new_tokens, count):
        alone = min(seconds(prompts, 1) for _ in range(2))
        return count * new_tokens / (seconds(prompts, new_tokens + 1) - alone)

    rows = {}
    for tokens in PREFILL_TOKENS:
        # The first call is included, as it is for the program.
        rows[f"prefill {tokens}"] = tokens / seconds(common.prompt(tokens), 1)
    for row, (tokens, new_tokens) in DECODE.items():
        rows[row] = decode(common.prompt(tokens), new_tokens, 1)
    rows[f"{TEXTS} texts"] = decode([common.prompt(TEXT_TOKENS)] * TEXTS, TEXT_NEW_TOKENS, TEXTS)
    return rows


def measure_program(program, folder, threads):
    """Runs the same prompts with the program; returns the speeds it reports."""

    def seconds(tokens, new_tokens):
        ids = ",".join(map(str, common.prompt(tokens)))
        numbers = ["--max-new-tokens", str(new_tokens), "--min-new-tokens", str(new_tokens), "--threads", str(threads)]
        command = [program, "generate", "--model", folder, "--dtype", "f32", "--ids", ids, *numbers, "--greedy", "--json"]
        report = common.json_of(command)
        first = report["time_to_first_token_s"]
        return first, new_tokens / report["tokens_per_s"] - first

    rows = {}
    for tokens in PREFILL_TOKENS:
        rows[f"prefill {tokens}"] = tokens / seconds(tokens, 1)[0]
    for row, (tokens, new_tokens) in DECODE.items():
        rows[row] = new_tokens / seconds(tokens, new_tokens + 1)[1]
    return rows


def compare(arguments):
    peers = arguments.peers.resolve()
    folder = peers / "gpt2-124m"
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    common.restrict_to(arguments.isa)

    def peer_rows(engine, folder):
        options = ("--worker", engine, peers / folder, "--threads", arguments.threads)
        rows = common.json_of(common.worker("cpu", *options, python=peers / "venv/bin/python"))
        rows["prefill 1023"] = rows["prefill 1024"]
        return rows

    engines = {
        "program": lambda: measure_program(arguments.program, folder, arguments.threads),
        "candle-gpt2": lambda: common.json_of(common.worker("python", "--worker", folder)),
        "transformers": lambda: peer_rows("torch", "gpt2-124m"),
        "CTranslate2": lambda: peer_rows("ctranslate2", "ctranslate2-float32"),
    }
    samples = {}
    for _ in range(arguments.rounds):
        for engine, rows_of in engines.items():
            for row, speed in rows_of().items():
                samples.setdefault(row, {}).setdefault(engine, []).append(speed)
    rows = [f"prefill {tokens}" for tokens in PREFILL_TOKENS] + list(DECODE) + [f"{TEXTS} texts"]
    if arguments.markdown:
        print("| | candle-gpt2 | / program | / transformers | / CTranslate2 |\n|---|---|---|---|---|")
    for row in rows:
        medians = {engine: statistics.median(speeds) for engine, speeds in samples[row].items()}
        ratios = {engine: medians["candle-gpt2"] / speed for engine, speed in medians.items() if engine != "candle-gpt2"}
        if arguments.markdown:
            cells = [f"{ratios[engine]:.2f}" if engine in ratios else "" for engine in list(engines) if engine != "candle-gpt2"]
            print(f"| {row} | {medians['candle-gpt2']:.1f} | " + " | ".join(cells) + " |")
        else:
            print(json.dumps({"row": row, "tokens_per_s": medians, "candle-gpt2 over": ratios}), flush=True)


def main():
    parser = common.parser(__doc__, "rounds", "threads", "isa", "program", "peers", "markdown")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.worker)))
    else:
        compare(arguments)
