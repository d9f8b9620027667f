"""`gpt2 bench` against transformers on PyTorch, eager and compiled, in turn on the same GPU; prints the ratios.

usage: python scripts/bench_cuda.py --model DIR [--ours "target/release/gpt2 bench --device cuda --json"]
           [--dtype f32,f16,bf16] [--device cuda] [--rounds 3] [--tokens-scale 1] [--json]

Rows, in tokens per second, as `gpt2 bench` measures them: prefill of 128, 512 and 1024 tokens with the logits of the last
position only; greedy decoding of 128 tokens after 8, and of 64 after 896. Compiled is torch.compile with a static cache
and, on a GPU, CUDA graphs (mode "reduce-overhead"); compiling is not counted. f32 is strict f32 on both sides. Every
engine runs in a process of its own; rounds alternate, and medians count. Needs torch and transformers.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time

PREFILLS = (128, 512, 1024)
DECODES = {"decode": (8, 128), "decode_at_896": (896, 64)}
RUNS = 3


def measure_torch(model_path, dtype, device, is_compiled, scale):
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

    # One compiled function for each shape: prompts, and single tokens.
    prefill = torch.compile(next_token, mode="default", dynamic=False) if is_compiled else next_token
    step = torch.compile(next_token, mode=mode, dynamic=False) if is_compiled else next_token

    def cache(capacity):
        return StaticCache(model.config, capacity) if is_compiled else DynamicCache(config=model.config)

    def timed_prefill(count, kept):
        kept.reset()
        positions = torch.arange(count, device=device)[None]
        synchronize()
        start = time.perf_counter()
        prefill(tokens(count), positions, kept).item()
        return time.perf_counter() - start

    def timed_decode(prompt, new, kept):
        kept.reset()
        token = prefill(tokens(prompt), torch.arange(prompt, device=device)[None], kept).clone()
        places = torch.arange(prompt, prompt + new, device=device)
        synchronize()
        start = time.perf_counter()
        for place in range(new):
            if is_compiled and mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            token = step(token, places[None, place : place + 1], kept).clone()
        token.item()
        return time.perf_counter() - start

    def best(measure, capacity):
        kept = cache(capacity)
        seconds = []
        for run in range(RUNS + 2):  # two runs to compile, to capture, and to warm up
            if not is_compiled:
                kept = cache(capacity)
                kept.reset = lambda: None
            elapsed = measure(kept)
            if run >= 2:
                seconds.append(elapsed)
        return statistics.median(seconds)

    rows = {}
    with torch.inference_mode():
        for count in PREFILLS:
            count = max(2, int(count * scale))
            rows[f"prefill {count}"] = count / best(lambda kept: timed_prefill(count, kept), count)
        for name, (prompt, new) in DECODES.items():
            prompt, new = max(2, int(prompt * scale)), max(2, int(new * scale))
            rows[name] = new / best(lambda kept: timed_decode(prompt, new, kept), prompt + new)
    return rows


def measure_ours(command, model_path, dtype):
    command = shlex.split(command) + ["--model", model_path, "--dtype", dtype]
    result = json.loads(run(command))
    rows = {f"prefill {count}": speed for count, speed in result["prefill"].items()}
    return rows | {name: result[name] for name in DECODES}


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"failed: {shlex.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--ours", default="target/release/gpt2 bench --device cuda --json")
    parser.add_argument("--dtype", default="f32,f16,bf16")
    parser.add_argument("--device", default="cuda", help="PyTorch's device")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens-scale", type=float, default=1.0, help="for a trial: shorter texts, in PyTorch only")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", choices=["eager", "compiled"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        is_compiled = args.engine == "compiled"
        rows = measure_torch(args.model, args.dtype, args.device, is_compiled, args.tokens_scale)
        print(json.dumps(rows))
        return

    report = {}
    for dtype in args.dtype.split(","):
        samples = {}
        for _ in range(args.rounds):
            measured = {"ours": measure_ours(args.ours, args.model, dtype)}
            for engine in ("eager", "compiled"):
                command = [sys.executable, __file__, "--model", args.model, "--dtype", dtype, "--device", args.device]
                command += ["--engine", engine, "--tokens-scale", str(args.tokens_scale)]
                measured[engine] = json.loads(run(command))
            for engine, rows in measured.items():
                for row, speed in rows.items():
                    samples.setdefault(row, {}).setdefault(engine, []).append(speed)
        report[dtype] = {
            row: {engine: statistics.median(speeds) for engine, speeds in engines.items()}
            for row, engines in samples.items()
        }
    if args.json:
        print(json.dumps(report))
        return
    for dtype, rows in report.items():
        print(f"{dtype:<14} {'ours':>10} {'eager':>10} {'compiled':>10} {'/ eager':>9} {'/ compiled':>11}")
        for row, speeds in rows.items():
            ours, eager, compiled = (speeds.get(engine, float("nan")) for engine in ("ours", "eager", "compiled"))
            print(f"{row:<14} {ours:>10.1f} {eager:>10.1f} {compiled:>10.1f} {ours / eager:>9.2f} {ours / compiled:>11.2f}")


if __name__ == "__main__":
    main()
