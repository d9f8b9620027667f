"""Speed of `gpt2 eval` compared with lm-evaluation-harness (`hf` model, PyTorch) in float32.

usage: python -m bench evaluation --model MODEL --data DIR [--tokenizer DIR] [--only NAME,…] [--rounds N] [--share X] [--isa avx2]

MODEL is a checkpoint folder, such as the one with random weights from peers.sh. Speed does not depend on the
weights' values, but it does depend on the number of tokens, so --tokenizer may name a folder with GPT-2's
vocab.json and merges.txt to use instead of the checkpoint's tokenizer. DIR holds the data:
lambada_openai.jsonl (or lambada_test.jsonl), hellaswag_val.jsonl (or 1,000 prepared items,
hellaswag_val_olmes1000.jsonl) and wiki.test.raw. Protocols without a file are skipped.

First finds the harness's best batch size on fewer items. Then alternates between both programs, each in a
separate process, and compares the medians of --rounds. --share sets the fraction of the items, for a quick
run. Loading the model and reading the data are excluded: the harness counts its model calls including
tokenization, ours reports `seconds`. `--isa avx2` restricts both to AVX2 on processors with AVX-512. Prints a
JSON line for each protocol. Needs lm_eval, torch and transformers (scripts/requirements.txt); downloads
nothing.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import tempfile
import time

from bench.common import END_OF_TEXT, json_of, parser, restrict_to, worker

# Candidate files (the first that exists), items per round, items for the batch size search, and batch sizes.
# A WikiText page is split into many windows of the full context, and the logits of each take 200 MB.
BENCHMARKS = {
    "hellaswag:lm-eval": (("hellaswag_val.jsonl", "hellaswag_val_olmes1000.jsonl"), 100, 24, (1, 8, 32)),
    "lambada:lm-eval": (("lambada_openai.jsonl", "lambada_test.jsonl"), 256, 64, (1, 8, 32)),
    "wikitext:lm-eval": (("wiki.test.raw",), 6, 2, (1, 4, 8)),
}


def measure_harness(model, protocol, path, limit, batch, threads):
    """Returns the seconds that the harness's model calls take."""
    import torch

    from reference import harness

    torch.set_num_threads(threads)
    hf = harness.model(model, batch_size=batch, softmax_dtype=None)
    seconds = []

    def timed(call):
        def run(requests, *arguments, **options):
            start = time.perf_counter()
            answers = call(requests, *arguments, **options)
            seconds.append(time.perf_counter() - start)
            return answers

        return run

    hf.loglikelihood, hf.loglikelihood_rolling = timed(hf.loglikelihood), timed(hf.loglikelihood_rolling)
    found = harness.evaluate(hf, protocol, path, limit)
    return {"seconds": sum(seconds), "items": len(found["items"]), "metrics": found["metrics"]}


@contextlib.contextmanager
def with_tokenizer(model, tokenizer):
    """Yields a folder with links to the checkpoint's files, and with another tokenizer."""
    if not tokenizer:
        yield model.resolve()
        return
    import tokenizers

    bpe = tokenizers.models.BPE.from_file(str(tokenizer / "vocab.json"), str(tokenizer / "merges.txt"))
    byte_level = tokenizers.Tokenizer(bpe)
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = tokenizers.decoders.ByteLevel()
    byte_level.add_special_tokens([END_OF_TEXT])
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name in ("config.json", "model.safetensors"):
            (folder / name).symlink_to((model / name).resolve())
        byte_level.save(str(folder / "tokenizer.json"))
        yield folder


def compare_protocol(arguments, model, protocol):
    names, items, search_items, batches = BENCHMARKS[protocol]
    found = [arguments.data / name for name in names if (arguments.data / name).is_file()]
    if not found:
        print(f"{protocol} is left out: {arguments.data} has no {' or '.join(names)}", file=sys.stderr)
        return
    data, threads = found[0], str(arguments.threads)
    items, search_items = (max(1, round(count * arguments.share)) for count in (items, search_items))

    def theirs(limit, batch):
        return json_of(worker("evaluation", "--worker", protocol, limit, batch, "--model", model, "--data", data, "--threads", threads))

    def ours():
        command = [arguments.program, "eval", protocol, "--model", model, "--data", data, "--limit", items, "--json"]
        return json_of([*command, "--dtype", "f32", "--device", "cpu", "--threads", threads])

    searched = {batch: search_items / theirs(search_items, batch)["seconds"] for batch in batches}
    batch = max(searched, key=searched.get)
    speeds, rounds = {"ours": [], "harness": []}, []
    for _ in range(arguments.rounds):
        our, their = ours(), theirs(items, batch)
        assert our["dataset"]["items"] == their["items"] == items, (our["dataset"], their["items"])
        speeds["ours"].append(items / our["seconds"])
        speeds["harness"].append(items / their["seconds"])
        rounds.append(speeds["ours"][-1] / speeds["harness"][-1])
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    figures = {metric["name"]: metric["value"] for metric in our["metrics"]}
    line = {
        "protocol": protocol,
        "items": items,
        "tokens_read": our["tokens_read"],
        "batch": batch,
        "batches_items_per_s": {size: round(speed, 3) for size, speed in searched.items()},
        "items_per_s": {name: round(speed, 3) for name, speed in medians.items()},
        "tokens_read_per_s": round(medians["ours"] / items * our["tokens_read"], 1),
        "ratio": round(medians["ours"] / medians["harness"], 2),
        "ratios": [round(ratio, 2) for ratio in rounds],
        # Both programs' metrics, to show that they measured the same thing.
        "figures": {name: [figures.get(name), value] for name, value in their["metrics"].items()},
    }
    print(json.dumps(line), flush=True)


def compare(arguments):
    restrict_to(arguments.isa)
    with with_tokenizer(arguments.model, arguments.tokenizer) as model:
        for protocol in arguments.only.split(",") if arguments.only else BENCHMARKS:
            compare_protocol(arguments, model, protocol)


def main():
    argument_parser = parser(__doc__, "rounds", "threads", "isa", "program", "model")
    argument_parser.add_argument("--data", type=pathlib.Path, required=True, help="the folder with the data")
    argument_parser.add_argument("--tokenizer", type=pathlib.Path, help="folder with vocab.json and merges.txt")
    argument_parser.add_argument("--only", help=f"protocols, by commas: {', '.join(BENCHMARKS)}")
    argument_parser.add_argument("--share", type=float, default=1.0)
    argument_parser.add_argument("--worker", nargs=3, metavar=("PROTOCOL", "LIMIT", "BATCH"), help=argparse.SUPPRESS)
    arguments = argument_parser.parse_args()
    if not arguments.model:
        argument_parser.error("--model is missing")
    if arguments.worker:
        protocol, limit, batch = arguments.worker
        print(json.dumps(measure_harness(arguments.model, protocol, arguments.data, int(limit), int(batch), arguments.threads)))
    else:
        compare(arguments)
