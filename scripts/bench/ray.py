"""Overhead of a bulk job on Ray compared with the program's prompts file, by actors and threads.

usage: python -m bench ray [--program target/release/gpt2] [--model DIR] [--rows 512] [--new-tokens 32]
         [--shapes 1x2,2x1] [--threads 2] [--rounds 3] [--rows-per-block N] [--json]

A shape is actors x threads, all on this machine; the program uses --threads. Rounds alternate between all of
them, and the report shows medians. `job` is the time from the first block to the written output, including
the start of the actors and their models. `program` is the total time of `gpt2 generate --prompts-file`,
startup included. Ray itself is started beforehand and not counted, because a cluster already runs it. Both
outputs are compared: each row samples with the same seed. Needs `pip install '.[ray]'` in a clone, built in
release mode.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
from candle_gpt2.ray import generate_dataset

from bench import common

SEED, TEMPERATURE = 7, 0.8


def program_seconds(arguments, prompts, output):
    model = ["--model", arguments.model] if arguments.model else []
    command = [
        arguments.program, "generate", *model, "--prompts-file", prompts, "--output", output,
        "--threads", str(arguments.threads), "--max-new-tokens", str(arguments.new_tokens),
        "--temperature", str(TEMPERATURE), "--seed", str(SEED),
    ]  # fmt: skip
    start = time.monotonic()
    subprocess.run(list(map(str, command)), check=True, stderr=subprocess.DEVNULL)
    return time.monotonic() - start


def job_seconds(arguments, prompts, output, actors, threads):
    summary = generate_dataset(
        prompts, output, arguments.model, actors=actors, threads=threads, rows_per_block=arguments.rows_per_block,
        overwrite=True, id_column=None, seed=SEED, temperature=TEMPERATURE, max_new_tokens=arguments.new_tokens,
    )  # fmt: skip
    return summary.seconds


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def main():
    parser = common.parser(__doc__, "program", "model", "threads", "rounds", "json")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--shapes", default="1x2,2x1")
    parser.add_argument("--rows-per-block", type=int)
    arguments = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")]
    seconds = {"program": []} | {f"{actors} x {threads}": [] for actors, threads in shapes}
    # As in `candle_gpt2.ray`, workers have the same priority as the program.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        prompts = folder / "prompts.jsonl"
        rows = [{"prompt": f"Act {row}, scene {row % 7}. Enter the king and"} for row in range(arguments.rows)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for _ in range(arguments.rounds):
            expected = folder / "program.jsonl"
            expected.unlink(missing_ok=True)
            seconds["program"].append(program_seconds(arguments, prompts, expected))
            for actors, threads in shapes:
                output = folder / "job.jsonl"
                seconds[f"{actors} x {threads}"].append(job_seconds(arguments, prompts, output, actors, threads))
                if texts(output) != texts(expected):
                    sys.exit(f"error: {actors} actors with {threads} threads each and the program write different texts")
    ray.shutdown()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        over = 100 * (median / medians["program"] - 1)
        cell = {"what": name, "seconds": round(median, 2), "over_program_percent": round(over, 1)}
        cell["tokens_per_s"] = round(arguments.rows * arguments.new_tokens / median, 1)
        if arguments.json:
            print(json.dumps(cell))
        else:
            print(f"{name:>10} {median:9.2f} s {cell['tokens_per_s']:10.1f} tokens/s {over:+7.1f} %")
