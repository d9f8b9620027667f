"""GPU speed of `gpt2 bench` compared with transformers on PyTorch, eager and compiled, interleaved.

usage: python -m bench cuda --model DIR [--ours "target/release/gpt2 bench --device cuda --json"]
           [--dtype f32,f16,bf16] [--engines ours,eager,compiled] [--device cuda] [--rounds 3] [--tokens-scale 1]
           [--limit SECONDS] [--engine-limit SECONDS] [--lines]

Rows, in tokens per second, as in `gpt2 bench`: prefill of 128, 512 and 1024 tokens with the logits of the
last position only; greedy decoding of 128 tokens after 8, and of 64 after 896. Compiled means torch.compile
with a static cache and, on a GPU, CUDA graphs (mode "reduce-overhead"); compilation time is excluded. f32 is
strict f32 on both sides.

Every engine runs in a separate process. Rounds alternate between engines. The table shows medians, ratios,
and the minimum and maximum of several rounds. For cards in bench/cards.py it also shows our percentage of the
memory bandwidth (decoding) or of the 16-bit arithmetic (prefill). `--lines` prints each figure as a JSON line
as soon as it is measured. Figures cut off by the limits are missing from the table and named below it. Needs
torch and transformers.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import threading
import time

from bench import cards, common

DECODES = {"decode": (8, 128), "decode_at_896": (896, 64)}
PREFILLS = (128, 512, 1024)
ENGINES = ("ours", "eager", "compiled")
RUNS = 3


def measure_torch(model_path, dtype, device, is_compiled, scale):
    """Yields the rows with their speeds."""
    import torch
    from transformers import DynamicCache, GPT2LMHeadModel, StaticCache

    torch.backends.cuda.matmul.allow_tf32 = False
    torch_dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    model = GPT2LMHeadModel.from_pretrained(model_path, dtype=torch_dtype).eval().to(device)
    mode = "reduce-overhead" if device.startswith("cuda") else "default"

    def synchronize():
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    def tokens(count):
        return torch.arange(count, device=device).mul(7919).add(3).remainder(model.config.vocab_size)[None]

    def next_token(ids, positions, cache):
        logits = model(ids, position_ids=positions, past_key_values=cache, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    # One compiled function for prompts and one for single tokens.
    prefill = torch.compile(next_token, mode="default", dynamic=False) if is_compiled else next_token
    step = torch.compile(next_token, mode=mode, dynamic=False) if is_compiled else next_token

    def cache(capacity):
        return StaticCache(model.config, capacity) if is_compiled else DynamicCache(config=model.config)

    def timed_prefill(count, kv_cache):
        kv_cache.reset()
        positions = torch.arange(count, device=device)[None]
        synchronize()
        start = time.perf_counter()
        prefill(tokens(count), positions, kv_cache).item()
        return time.perf_counter() - start

    def timed_decode(prompt, new, kv_cache):
        kv_cache.reset()
        token = prefill(tokens(prompt), torch.arange(prompt, device=device)[None], kv_cache).clone()
        positions = torch.arange(prompt, prompt + new, device=device)
        synchronize()
        start = time.perf_counter()
        for index in range(new):
            if is_compiled and mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            token = step(token, positions[None, index : index + 1], kv_cache).clone()
        token.item()
        return time.perf_counter() - start

    def best(measure, capacity):
        kv_cache = cache(capacity)
        seconds = []
        for run in range(RUNS + 2):  # two extra runs to compile, capture and warm up
            if not is_compiled:
                kv_cache = cache(capacity)
                kv_cache.reset = lambda: None
            elapsed = measure(kv_cache)
            if run >= 2:
                seconds.append(elapsed)
        return statistics.median(seconds)

    with torch.inference_mode():
        for name, (prompt, new) in DECODES.items():
            prompt, new = max(2, int(prompt * scale)), max(2, int(new * scale))
            yield name, new / best(lambda kv_cache: timed_decode(prompt, new, kv_cache), prompt + new)
        for count in PREFILLS:
            count = max(2, int(count * scale))
            yield f"prefill {count}", count / best(lambda kv_cache: timed_prefill(count, kv_cache), count)


def rows_of_ours(line):
    """Returns the rows in a `gpt2 bench` report."""
    report = json.loads(line)
    rows = {name: report[name] for name in DECODES if report.get(name)}
    return rows | {f"prefill {count}": speed for count, speed in report["prefill"].items()}


class Stopped(Exception):
    """A process failed or exceeded its time limit."""


def lines_of(command, limit):
    """Yields a process's output lines; raises `Stopped` if it fails or exceeds `limit` seconds."""
    # The process has its own group, so that its child processes end with it, but stays in this session, so that
    # gpu_run.py can end it too.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=os.setpgrp)
    errors, is_late = [], threading.Event()

    def stop():
        is_late.set()
        os.killpg(process.pid, signal.SIGKILL)

    reader = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)
    timer = threading.Timer(limit if limit is not None else threading.TIMEOUT_MAX, stop)
    timer.daemon = True
    reader.start()
    timer.start()
    for line in process.stdout:
        yield line.strip()
    code = process.wait()
    timer.cancel()
    reader.join(1)
    if is_late.is_set():
        raise Stopped(f"stopped after {limit:.0f} s")
    if code:
        raise Stopped(f"exit code {code}: {''.join(errors)[-1500:].strip()}")


def measured(engine, dtype, args, limit):
    """Yields an engine's rows with their speeds."""
    if engine == "ours":
        command = [*shlex.split(args.ours), "--model", args.model, "--dtype", dtype]
    else:
        command = common.worker("cuda", "--model", args.model, "--dtype", dtype, "--device", args.device)
        command += ["--engine", engine, "--tokens-scale", str(args.tokens_scale)]
    for line in lines_of(command, limit):
        if line.startswith("{"):
            yield from (rows_of_ours(line) if engine == "ours" else json.loads(line)).items()


def limit_percent(card, shape, dtype, row, tokens_per_s):
    """Returns the percentage of the limit that bounds a row and the limit's name, or `None` if it is unknown."""
    if row in DECODES:
        prompt, new = DECODES[row]
        percent, limit = cards.decode_percent(card, shape, dtype, prompt + new / 2, tokens_per_s), cards.MEMORY
    else:
        operations = shape.forward_operations(int(row.split()[1]), 1)
        percent, limit = cards.arithmetic_percent(card, dtype, operations, tokens_per_s), cards.ARITHMETIC
    return None if percent is None else (percent, limit)


def print_table(samples, card, shape):
    """Prints `samples`, a nested dict keyed by dtype, row and engine."""
    for dtype, rows in samples.items():
        print(f"{dtype:<14} {'ours':>10} {'eager':>10} {'compiled':>10} {'/ eager':>9} {'/ compiled':>11}")
        for row, engines in rows.items():
            spreads = {engine: cards.spread(values) for engine, values in engines.items()}
            ours, eager, compiled = (spreads.get(engine, {}).get("median", float("nan")) for engine in ENGINES)
            notes = [f"{engine} {found['min']:.1f}-{found['max']:.1f}" for engine, found in spreads.items() if found["rounds"] > 1]
            if "ours" in spreads and (percent := limit_percent(card, shape, dtype, row, ours)):
                notes.insert(0, "%.0f%% %s" % percent)
            line = f"{row:<14} {ours:>10.1f} {eager:>10.1f} {compiled:>10.1f} {ours / eager:>9.2f} {ours / compiled:>11.2f}"
            print(f"{line}  {', '.join(notes)}".rstrip())


def main():
    parser = common.parser(__doc__, "rounds")
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--ours", default=f"{common.ROOT}/target/release/gpt2 bench --device cuda --json")
    parser.add_argument("--dtype", default="f32,f16,bf16")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--device", default="cuda", help="PyTorch's device")
    parser.add_argument("--tokens-scale", type=float, default=1.0, help="for a trial: shorter texts, in PyTorch only")
    parser.add_argument("--limit", type=float, default=450, help="seconds for everything [default: 450]; 0 for none")
    parser.add_argument("--engine-limit", type=float, help="seconds for one process")
    parser.add_argument("--lines", action="store_true", help="print every figure as a JSON line")
    parser.add_argument("--engine", choices=ENGINES[1:], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        for row, speed in measure_torch(args.model, args.dtype, args.device, args.engine == "compiled", args.tokens_scale):
            print(json.dumps({row: speed}), flush=True)
        return 0

    end = time.monotonic() + args.limit if args.limit else None
    samples, missing = {}, []
    for _ in range(args.rounds):
        for engine in args.engines.split(","):
            for dtype in args.dtype.split(","):
                limits = [args.engine_limit, end and end - time.monotonic()]
                limit = min((limit for limit in limits if limit is not None), default=None)
                if limit is not None and limit < 1:
                    missing.append((engine, dtype, "no time was left"))
                    continue
                try:
                    for row, speed in measured(engine, dtype, args, limit):
                        samples.setdefault(dtype, {}).setdefault(row, {}).setdefault(engine, []).append(speed)
                        if args.lines:
                            figure = {"dtype": dtype, "engine": engine, "row": row, "tokens_per_s": speed}
                            print(json.dumps(figure), flush=True)
                except Stopped as reason:
                    missing.append((engine, dtype, reason))
    is_known = args.device.startswith("cuda") and os.path.exists(os.path.join(args.model, "config.json"))
    card = cards.card_name(cards.index_of(args.device)) if is_known else ""
    print_table(samples, card, cards.Shape.of(args.model) if is_known else None)
    for engine, dtype, reason in missing:
        print(f"missing, {engine} in {dtype}: {reason}")
    return 1 if missing else 0
