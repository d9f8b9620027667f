"""Bulk generation and scoring on Ray: ready-made jobs, and `Rows` in a custom pipeline.

usage: python examples/bulk_on_ray.py [MODEL] [--address HOST:PORT]

Needs `pip install '.[ray]'` in a clone. Without an address, Ray starts on this machine.
"""

import argparse
import json
import tempfile
from pathlib import Path

import ray
from candle_gpt2 import Rows
from candle_gpt2.ray import generate_dataset, score_dataset


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--address")
    arguments = parser.parse_args()
    ray.init(address=arguments.address, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        jobs(Path(folder), arguments.model)
    pipeline(arguments.model)


def jobs(folder, model):
    """Runs jobs that read and write files. On a cluster, all machines must share `folder`."""
    prompts = folder / "prompts.jsonl"
    names = ["Mia", "Tom", "Ann", "Ben"]
    rows = [{"id": f"{name}-{take}", "prompt": f"One day, {name}"} for name in names for take in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    # After an interruption, the same call resumes from the checkpoint. The equivalent command:
    #   gpt2-ray generate prompts.jsonl texts.jsonl --checkpoint kept --max-new-tokens 24 --temperature 0.8 --seed 7
    made = generate_dataset(
        prompts, folder / "texts.jsonl", model, checkpoint=folder / "kept", max_new_tokens=24, temperature=0.8, seed=7
    )
    print(f"{made.rows} rows, {made.errors} with errors, {made.actors} actors with {made.threads} threads, {made.seconds:.1f} s")
    for line in (folder / "texts.jsonl").read_text().splitlines()[:2]:
        print(line)

    scored = score_dataset(folder / "texts.jsonl", folder / "scores.parquet", model, prompt_column="prompt")
    print(f"{scored.rows} rows scored: {scored.output}")


def pipeline(model):
    """Uses `Rows` with Ray Data to add columns to batches. Spark and Dask can use it too."""
    dataset = ray.data.from_items([{"id": row, "prompt": f"Day {row}."} for row in range(16)])
    dataset = dataset.map_batches(
        Rows,
        fn_constructor_kwargs={"model": model, "max_new_tokens": 8, "seed": 7},
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=1),
        # Also sets the number of threads. The other CPUs remain free for reading and writing.
        num_cpus=1,
    )
    for row in dataset.take(2):
        print(row)


if __name__ == "__main__":
    main()
