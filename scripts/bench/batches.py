"""Throughput of `gpt2 serve` with many clients compared with batched PyTorch, interleaved.

usage: python -m bench batches --model DIR [--program target/release/gpt2] [--tokenizer DIR] [--dtype f16]
         [--device cuda:0] [--clients 1,16,64,256] [--rounds N] [--limit SECONDS] [--lines]

Each client sends requests for 64 greedy tokens after 32 prompt tokens, one after another. PyTorch runs
transformers' model, not compiled, with one batch of the same number of sequences. A row has the new tokens
per second of all sequences, including prefill. Responses are not streamed, because this script would parse
the events of 256 clients more slowly than a GPU produces them. The server's chunk size lets 64 prompts start
in one step, so that all clients run together.

Every round starts the server and PyTorch anew, and the table shows medians and extremes. `--lines` prints
each figure as a JSON line as soon as it is measured. Figures cut off by the limit are named below the table.
Needs torch and transformers, and a tokenizer in DIR or in `--tokenizer`.
"""

import argparse
import json
import statistics
import time

from bench import cards, common
from bench.clients import NEW_TOKENS, start_ours
from bench.cuda import Stopped, lines_of
from bench.serving import measure

PROMPT = 32
PREFILL_CHUNK = 64 * PROMPT
# One client alone finishes quickly, so it sends more requests.
REQUESTS = {1: 8}
# Fields for a request whose response is not streamed.
WHOLE = {"stream": False, "stream_options": None}
RUNS = 3


def measure_torch(model_path, dtype, device, clients):
    """Yields each number of sequences with its speed."""
    import torch
    from transformers import DynamicCache, GPT2LMHeadModel

    torch.backends.cuda.matmul.allow_tf32 = False
    torch_dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    model = GPT2LMHeadModel.from_pretrained(model_path, dtype=torch_dtype).eval().to(device)

    def generate(ids):
        cache, tokens = DynamicCache(config=model.config), ids
        start = time.perf_counter()
        for _ in range(NEW_TOKENS):
            logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)
        tokens.cpu()  # waits for the GPU
        return time.perf_counter() - start

    with torch.inference_mode():
        for count in clients:
            ids = torch.arange(count * PROMPT, device=device).mul(7919).add(3).remainder(model.config.vocab_size)
            ids = ids.view(count, PROMPT)
            generate(ids)
            yield count, count * NEW_TOKENS / statistics.median(generate(ids) for _ in range(RUNS))


def measure_ours(arguments, left):
    """Yields each number of clients with its speed."""
    with start_ours(arguments) as server:
        measure(server, 1, PROMPT, 1, **WHOLE)
        for count in arguments.clients:
            if left() <= 0:
                raise Stopped("no time was left")
            cell = measure(server, count, PROMPT, REQUESTS.get(count, 2), **WHOLE)
            if cell["refusals"]:
                raise Stopped(f"{cell['refusals']} requests from {count} clients were refused")
            yield count, cell["tokens_per_s"]


def measured(engine, arguments, left):
    """Yields each number of sequences with an engine's speed."""
    if engine == "ours":
        yield from measure_ours(arguments, left)
        return
    command = common.worker("batches", "--worker", "--model", arguments.model, "--dtype", arguments.dtype)
    command += ["--device", arguments.device, "--clients", ",".join(map(str, arguments.clients))]
    for line in lines_of(command, max(1, left())):
        if line.startswith("{"):
            figure = json.loads(line)
            yield figure["clients"], figure["tokens_per_s"]


def print_table(samples):
    """Prints `samples`, a nested dict keyed by number of clients and engine."""
    print(f"{'clients':>7} {'ours':>10} {'PyTorch':>10} {'/ PyTorch':>10}  minimum-maximum")
    for count, engines in samples.items():
        spreads = {engine: cards.spread(values) for engine, values in engines.items()}
        ours, theirs = (spreads.get(engine, {}).get("median", float("nan")) for engine in ("ours", "PyTorch"))
        extremes = ", ".join(f"{engine} {found['min']:.0f}-{found['max']:.0f}" for engine, found in spreads.items())
        print(f"{count:>7} {ours:>10.0f} {theirs:>10.0f} {ours / theirs:>10.2f}  {extremes}")


def main():
    parser = common.parser(__doc__, "rounds", "program")
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--tokenizer", help="its tokenizer, if the folder has none")
    parser.add_argument("--dtype", default="f16")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--clients", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16, 64, 256])
    parser.add_argument("--limit", type=float, default=450, help="seconds for everything [default: 450]")
    parser.add_argument("--lines", action="store_true", help="print every figure as a JSON line")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        for count, speed in measure_torch(arguments.model, arguments.dtype, arguments.device, arguments.clients):
            print(json.dumps({"clients": count, "tokens_per_s": speed}), flush=True)
        return 0
    arguments.isa, arguments.parallel = None, max(arguments.clients)
    arguments.options = f"--device {arguments.device} --prefill-chunk {PREFILL_CHUNK} --queue {2 * max(arguments.clients)}"
    if arguments.tokenizer:
        arguments.options += f" --tokenizer {arguments.tokenizer}"
    end = time.monotonic() + arguments.limit
    samples, missing = {}, []
    for _ in range(arguments.rounds):
        for engine in ("ours", "PyTorch"):
            left = end - time.monotonic()
            if left < 1:
                missing.append((engine, "no time was left"))
                continue
            try:
                for count, speed in measured(engine, arguments, lambda: end - time.monotonic()):
                    samples.setdefault(count, {}).setdefault(engine, []).append(speed)
                    if arguments.lines:
                        figure = {"engine": engine, "clients": count, "dtype": arguments.dtype, "tokens_per_s": speed}
                        print(json.dumps(figure), flush=True)
            except Stopped as reason:
                missing.append((engine, reason))
    print_table(samples)
    for engine, reason in missing:
        print(f"missing, {engine}: {reason}")
    return 1 if missing else 0
