"""Speed of `gpt2 eval` beside lm-evaluation-harness with its `hf` model on PyTorch: one machine, both in turns, float32.

usage: python -m bench evaluation --model MODEL --data DIR [--tokenizer DIR] [--only NAME,…] [--rounds N] [--share X] [--isa avx2]

MODEL is a checkpoint folder, such as the one of random weights that peers.sh makes: speed does not
depend on their values, but on how long the texts are in tokens, so --tokenizer may name a folder with GPT-2's vocab.json and
merges.txt in place of the checkpoint's own. DIR holds the data: lambada_openai.jsonl (or lambada_test.jsonl), hellaswag_val.jsonl
(or 1,000 prepared items, hellaswag_val_olmes1000.jsonl) and wiki.test.raw; a protocol whose file is not there is left out.

The harness gets the batch size that is its best on a smaller number of items, found first. Then both are timed in turns, each in a
process of its own, and the medians of --rounds are compared. --share takes as much of the items, for a quick look. Neither
loading nor reading the data counts: of the harness its calls of the model, tokenization included, of ours `seconds` of the report.
`--isa avx2` holds both to AVX2 where the processor has AVX-512. Prints a JSON line for each protocol.
Needs lm_eval, torch and transformers (scripts/requirements.txt); nothing is fetched.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import tempfile
import time

from bench.common import END_OF_TEXT, hold_to, json_of, parser, worker

# Files, the first that is there; items of a round and of the search for a batch size; sizes. Pages of WikiText are many windows of the
# whole context, whose logits take 200 MB each.
BENCHMARKS = {
    "hellaswag:lm-eval": (("hellaswag_val.jsonl", "hellaswag_val_olmes1000.jsonl"), 100, 24, (1, 8, 32)),
    "lambada:lm-eval": (("lambada_openai.jsonl", "lambada_test.jsonl"), 256, 64, (1, 8, 32)),
    "wikitext:lm-eval": (("wiki.test.raw",), 6, 2, (1, 4, 8)),
}


def measure_harness(model, protocol, path, limit, batch, threads):
    """Seconds that the harness' calls of the model take."""
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
    """The checkpoint with another tokenizer, in a folder of links."""
    if not tokenizer:
        yield model.resolve()
        return
    import tokenizers

    bpe = tokenizers.models.BPE.from_file(str(tokenizer / "vocab.json"), str(tokenizer / "merges.txt"))
    made = tokenizers.Tokenizer(bpe)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([END_OF_TEXT])
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name in ("config.json", "model.safetensors"):
            (folder / name).symlink_to((model / name).resolve())
        made.save(str(folder / "tokenizer.json"))
        yield folder


def compare_protocol(arguments, model, protocol):
    names, items, few, batches = BENCHMARKS[protocol]
    found = [arguments.data / name for name in names if (arguments.data / name).is_file()]
    if not found:
        print(f"{protocol} is left out: {arguments.data} has no {' or '.join(names)}", file=sys.stderr)
        return
    data, threads = found[0], str(arguments.threads)
    items, few = (max(1, round(count * arguments.share)) for count in (items, few))

    def theirs(limit, batch):
        return json_of(worker("evaluation", "--worker", protocol, limit, batch, "--model", model, "--data", data, "--threads", threads))

    def ours():
        command = [arguments.program, "eval", protocol, "--model", model, "--data", data, "--limit", items, "--json"]
        return json_of([*command, "--dtype", "f32", "--device", "cpu", "--threads", threads])

    searched = {batch: few / theirs(few, batch)["seconds"] for batch in batches}
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
        # Both measured the same.
        "figures": {name: [figures.get(name), value] for name, value in their["metrics"].items()},
    }
    print(json.dumps(line), flush=True)


def compare(arguments):
    hold_to(arguments.isa)
    with with_tokenizer(arguments.model, arguments.tokenizer) as model:
        for protocol in arguments.only.split(",") if arguments.only else BENCHMARKS:
            compare_protocol(arguments, model, protocol)


def main():
    words = parser(__doc__, "rounds", "threads", "isa", "program", "model")
    words.add_argument("--data", type=pathlib.Path, required=True, help="the folder with the data")
    words.add_argument("--tokenizer", type=pathlib.Path, help="folder with vocab.json and merges.txt")
    words.add_argument("--only", help=f"protocols, by commas: {', '.join(BENCHMARKS)}")
    words.add_argument("--share", type=float, default=1.0)
    words.add_argument("--worker", nargs=3, metavar=("PROTOCOL", "LIMIT", "BATCH"), help=argparse.SUPPRESS)
    arguments = words.parse_args()
    if not arguments.model:
        words.error("--model is missing")
    if arguments.worker:
        protocol, limit, batch = arguments.worker
        print(json.dumps(measure_harness(arguments.model, protocol, arguments.data, int(limit), int(batch), arguments.threads)))
    else:
        compare(arguments)
