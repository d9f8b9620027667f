"""Speed and memory of a training step compared with PyTorch: forward, backward, clipping, AdamW, f32.

usage: python -m bench training [--case small|gpt2|gpt2-1024]... [--rounds N] [--threads N] [--dropout RATE] [--isa avx2]
           [--device cpu|cuda:N] [--compute-dtype f32|bf16] [--ours PROGRAM] [--lines]

Alternates between `cargo bench -p candle-gpt2-training --bench step` and transformers' GPT2LMHeadModel with
torch's AdamW on the same threads, each round in a separate process. Prints the median, minimum and maximum of
the rounds and the peak resident memory of each process (VmHWM). `--isa avx2` restricts both to AVX2 on processors with AVX-512. On a GPU, f32
is strict f32 on both sides, and bf16 is PyTorch's autocast with f32 weights. `--ours` names the compiled
benchmark, and `--lines` prints each figure as a JSON line. Needs the packages in scripts/requirements.txt.
"""

import argparse
import json
import statistics
import time

from bench import common

CASES = {
    "small": {"vocab_size": 2048, "n_positions": 256, "n_embd": 256, "n_layer": 6, "n_head": 8, "batch": 8, "context": 256},
    "gpt2": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "batch": 4, "context": 64},
    "gpt2-1024": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "batch": 8, "context": 1024},
}
WARM_UP_STEPS = 2
MIN_STEPS, MIN_SECONDS = 5, 5.0


def torch_step(case, threads, dropout, device, compute_dtype):
    """Measures PyTorch in this process and prints a JSON line."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)
    sizes = dict(CASES[case])
    batch, context = sizes.pop("batch"), sizes.pop("context")
    config = transformers.GPT2Config(**sizes, embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train().to(device)
    decay = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))

    def step():
        ids = torch.randint(0, config.vocab_size, (batch, context + 1), device=device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=compute_dtype == "bf16"):
            logits = model(ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # Both engines read the loss after each step, which synchronizes with the GPU.
        return loss.item()

    for _ in range(WARM_UP_STEPS):
        step()
    seconds = []
    while len(seconds) < MIN_STEPS or sum(seconds) < MIN_SECONDS:
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    print(json.dumps({"case": case, "seconds_per_step": median, "tokens_per_s": batch * context / median, "peak_mib": common.peak_mib()}))


def main():
    parser = common.parser(__doc__, "rounds", "threads", "isa")
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compute-dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--ours", help="the compiled bench [default: cargo bench]")
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = arguments.case or ["small", "gpt2"]
    options = ["--threads", str(arguments.threads), "--dropout", str(arguments.dropout)]
    options += ["--device", arguments.device, "--compute-dtype", arguments.compute_dtype]
    if arguments.worker:
        torch_step(cases[0], arguments.threads, arguments.dropout, arguments.device, arguments.compute_dtype)
        return
    ours = [arguments.ours] if arguments.ours else common.cargo_bench("candle-gpt2-training", "step", None)
    theirs = common.worker("training", "--worker", "--case")
    instructions = ["--instructions", arguments.isa] if arguments.isa else []
    common.restrict_to(arguments.isa)
    for case in cases:
        results = {"ours": [], "PyTorch": []}
        for _ in range(arguments.rounds):
            results["ours"].append(common.json_of(ours + [case] + options + instructions))
            results["PyTorch"].append(common.json_of(theirs + [case] + options))
            if arguments.lines:
                for name, found in results.items():
                    print(json.dumps({"engine": name} | found[-1] | {"compute_dtype": arguments.compute_dtype}), flush=True)
        medians = {}
        for name, rounds in results.items():
            seconds = [result["seconds_per_step"] for result in rounds]
            medians[name] = statistics.median(seconds)
            peak = max(result["peak_mib"] for result in rounds)
            tokens = statistics.median(result["tokens_per_s"] for result in rounds)
            extremes = f"{min(seconds):.3f}-{max(seconds):.3f} s"
            print(f"{case:6} {name:8} {medians[name]:8.3f} s a step ({extremes}) {tokens:8.0f} tokens/s {peak:6} MiB")
        print(f"{case:6} PyTorch's seconds over ours: {medians['PyTorch'] / medians['ours']:.2f}")
