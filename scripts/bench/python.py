"""Speed of the Python package beside the program, transformers (PyTorch) and CTranslate2: GPT-2 124M on one machine, in turns.

usage: python -m bench python [--peers DIR] [--program FILE] [--rounds N] [--threads N] [--isa avx2] [--markdown]

Of the peers what `WITHOUT_LLAMA_CPP=1 scripts/bench/peers.sh` makes is enough. The Python
that runs this has the package, built in release; the peers run in that folder's own. The program and the package are asked for the
same texts, always the most probable token, each time in a process of its own: a prompt of 128, 512 and 1,023 tokens up to the first
token, and 128 tokens after 8, and 64 after 896. The program tells its own times, the package's are taken around its calls: so what
Python adds is the difference. The peers' rows are those of `cpu`; `8 texts` counts the tokens of all.
"""

import argparse
import json
import os
import statistics
import time

from bench import common, cpu

PREFILL_TOKENS = (128, 512, 1023)  # the context of 1,024 has room for the one that follows
DECODE = cpu.DECODE
TEXTS, (TEXT_TOKENS, TEXT_NEW_TOKENS) = 8, cpu.BATCH_TOKENS


def measure(folder):
    """The package: seconds of calls of `generate` as tokens per second."""
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
        # As in a process of the program the first one counts.
        rows[f"prefill {tokens}"] = tokens / seconds(common.prompt(tokens), 1)
    for row, (tokens, new_tokens) in DECODE.items():
        rows[row] = decode(common.prompt(tokens), new_tokens, 1)
    rows[f"{TEXTS} texts"] = decode([common.prompt(TEXT_TOKENS)] * TEXTS, TEXT_NEW_TOKENS, TEXTS)
    return rows


def measure_program(program, folder, threads):
    """The same texts by the program: what it says of its own speed."""

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
    common.hold_to(arguments.isa)

    def of_peer(engine, folder):
        options = ("--worker", engine, peers / folder, "--threads", arguments.threads)
        rows = common.json_of(common.worker("cpu", *options, python=peers / "venv/bin/python"))
        rows["prefill 1023"] = rows["prefill 1024"]
        return rows

    engines = {
        "program": lambda: measure_program(arguments.program, folder, arguments.threads),
        "candle-gpt2": lambda: common.json_of(common.worker("python", "--worker", folder)),
        "transformers": lambda: of_peer("torch", "gpt2-124m"),
        "CTranslate2": lambda: of_peer("ctranslate2", "ctranslate2-float32"),
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
    words = common.parser(__doc__, "rounds", "threads", "isa", "program", "peers", "markdown")
    words.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = words.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.worker)))
    else:
        compare(arguments)
