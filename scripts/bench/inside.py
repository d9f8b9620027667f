"""Speed of interpretability compared with TransformerLens: grids for GPT-2 124M, f32, same threads.

usage: python -m bench inside [--rounds N] [--threads N] [--isa avx2] [--only TEXT] [--program FILE --model FOLDER]

Alternates between `cargo bench -p candle-gpt2-interpret --bench inside` and the same grids with
TransformerLens, each round in a separate process. Prints the medians in seconds, and the ratio of
TransformerLens's time to ours for the medians and for the fastest rounds; above 1, ours is faster. On a busy
machine the fastest rounds are more reliable. The grids, of 15 tokens:

  ablation   z of each of the 144 heads set to zero at all positions; metric: logit difference at the last position
  patching   residual stream before each block patched at each position: 180 cells plus the clean and corrupted runs

TransformerLens is a bridge in compatibility mode without gradients. Its ablation is one `run_with_hooks` per
head, its patching `transformer_lens.patching.get_act_patch_resid_pre`. Both models have random weights: speed
does not depend on their values. Then prints the memory of a record of 512 tokens, ours only. With MODEL, a
checkpoint folder of the 124M model, also prints the total time of `gpt2 look attention` with 64 tokens and an
HTML page, with warm file caches. `--isa avx2` restricts both to AVX2 on processors with AVX-512. Needs the
packages in scripts/requirements.txt.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

from bench import common

GRIDS = ("ablation", "patching")
MEMORY = "memory"
ATTENTION = "look attention"
GRID_TOKENS, ATTENTION_TOKENS = 15, 64
ANSWER, AGAINST = 5335, 1757
LAYERS = HEADS = 12


def lens_grid(case, threads):
    """Measures one grid with TransformerLens in this process and prints a JSON line."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import tokenizers
    import torch
    import transformers
    from transformer_lens import patching
    from transformer_lens.model_bridge import TransformerBridge

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    # TransformerLens needs a tokenizer. With a bos_token it would try to reload the tokenizer by name.
    word_level = tokenizers.models.WordLevel({f"t{index}": index for index in range(model.config.vocab_size)}, unk_token="t0")
    backend = tokenizers.Tokenizer(word_level)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="t0", pad_token="t0")
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer, device="cpu", dtype=torch.float32)
    bridge.enable_compatibility_mode()

    clean = torch.tensor([common.prompt(GRID_TOKENS)])
    corrupted = clean.clone()
    corrupted[0, 4] += 1

    def metric(logits):
        return logits[0, -1, ANSWER] - logits[0, -1, AGAINST]

    def ablation():
        grid = torch.zeros(LAYERS, HEADS)
        for layer in range(LAYERS):
            for head in range(HEADS):

                def zero(z, hook, head=head):
                    z[:, :, head] = 0
                    return z

                logits = bridge.run_with_hooks(clean, return_type="logits", fwd_hooks=[(f"blocks.{layer}.attn.hook_z", zero)])
                grid[layer, head] = metric(logits)
        return grid

    def patched():
        clean_logits, cache = bridge.run_with_cache(clean)
        low, high = metric(bridge(corrupted)), metric(clean_logits)
        return patching.get_act_patch_resid_pre(bridge, corrupted, cache, lambda logits: (metric(logits) - low) / (high - low))

    run, shape = {"ablation": (ablation, (LAYERS, HEADS)), "patching": (patched, (LAYERS, GRID_TOKENS))}[case]
    with torch.no_grad():
        for _ in range(3):
            bridge.run_with_cache(clean)
        start = time.perf_counter()
        grid = run()
        seconds = time.perf_counter() - start
    # If the hooks had no effect, all cells would be equal.
    assert grid.shape == shape and len(grid.unique()) > grid.numel() / 4
    print(json.dumps({"case": case, "cells": grid.numel(), "tokens": GRID_TOKENS, "seconds": seconds}))


def look_attention(program, model, threads):
    """Returns the duration of the whole process in seconds, and the size of the page in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        page = pathlib.Path(folder, "attention.html")
        ids = ",".join(map(str, common.prompt(ATTENTION_TOKENS)))
        command = [program, "look", "attention", "--ids", ids, "--model", model, "--threads", str(threads), "--html", page]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start, page.stat().st_size


def main():
    parser = common.parser(__doc__, "rounds", "threads", "isa", "only", "program", "model")
    parser.add_argument("--worker", choices=GRIDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        lens_grid(arguments.worker, arguments.threads)
        return
    common.restrict_to(arguments.isa)
    bench = common.cargo_bench("candle-gpt2-interpret", "inside", None)
    options = ["--threads", str(arguments.threads)]
    instructions = ["--instructions", arguments.isa] if arguments.isa else []

    def ours(case):
        return common.json_of([*bench, case, *options, *instructions])

    def is_selected(case):
        return arguments.only in case

    print(f"{'':16} {'ours':>9} {'TransformerLens':>16} {'theirs/ours':>12} {'of fastest':>11}")
    for case in filter(is_selected, GRIDS):
        theirs = common.worker("inside", "--worker", case, *options)
        rounds = [(ours(case)["seconds"], common.json_of(theirs)["seconds"]) for _ in range(arguments.rounds)]
        our_median, their_median = (statistics.median(seconds) for seconds in zip(*rounds))
        fastest, their_fastest = (min(seconds) for seconds in zip(*rounds))
        print(f"{case:16} {our_median:9.3f} {their_median:16.3f} {their_median / our_median:12.2f} {their_fastest / fastest:11.2f}", flush=True)
    if is_selected(MEMORY):
        found = ours(MEMORY)
        print(f"{MEMORY:16} kept {found['kept_MB']:.1f} MB, at most {found['more_MB']:.1f} MB more", flush=True)
    if arguments.model and is_selected(ATTENTION):
        rounds = [look_attention(arguments.program, arguments.model, arguments.threads) for _ in range(arguments.rounds + 1)][1:]
        seconds, size = (statistics.median(values) for values in zip(*rounds))
        print(f"{ATTENTION:16} {seconds:.3f} s from start to end, a page of {size / 1e6:.2f} MB")
