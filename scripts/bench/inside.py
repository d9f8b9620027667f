"""Speed of looking inside beside TransformerLens on PyTorch: grids of GPT-2 124M in f32 on the same threads.

usage: python -m bench inside [--rounds N] [--threads N] [--isa avx2] [--only TEXT] [--program FILE --model FOLDER]

Runs `cargo bench -p candle-gpt2-interpret --bench inside` and the same grids with TransformerLens in turns, each round in a process of its
own, and prints the medians in seconds, and TransformerLens' time over ours, of the medians and of the fastest rounds: above 1, ours is
faster. Where other programs run besides, the fastest say more. The grids, of 15 tokens:

  ablation   z of each of the 144 heads set to zero at every position, the logit difference at the last one
  patching   the residual stream before each block at each position as in another text: 180 cells, with both texts' own runs

TransformerLens is a bridge in compatibility mode without gradients; its ablation is a `run_with_hooks` for each head, its patching
`transformer_lens.patching.get_act_patch_resid_pre`. Both models have random weights: speed does not depend on their values.
Then the memory of a record of 512 tokens, of ours alone. With MODEL, the folder of a checkpoint of 124M,
also the time from start to end of `gpt2 look attention` with 64 tokens and a page, of which files are read once before.
`--isa avx2` holds both to AVX2 where the processor has AVX-512. Needs the packages of scripts/requirements.txt.
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
    """Seconds of one grid with TransformerLens, in this process, as a JSON line."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import tokenizers
    import torch
    import transformers
    from transformer_lens import patching
    from transformer_lens.model_bridge import TransformerBridge

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    # TransformerLens asks for a tokenizer; without a bos_token, for with one it tries to load it again by its name.
    words = tokenizers.models.WordLevel({f"t{index}": index for index in range(model.config.vocab_size)}, unk_token="t0")
    backend = tokenizers.Tokenizer(words)
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
    # A grid whose cells are alike would not have been changed by its hooks.
    assert grid.shape == shape and len(grid.unique()) > grid.numel() / 4
    print(json.dumps({"case": case, "cells": grid.numel(), "tokens": GRID_TOKENS, "seconds": seconds}))


def look_attention(program, model, threads):
    """Seconds of the whole process, and the bytes of the page."""
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
    common.hold_to(arguments.isa)
    bench = common.cargo_bench("candle-gpt2-interpret", "inside", None)
    options = ["--threads", str(arguments.threads)]
    instructions = ["--instructions", arguments.isa] if arguments.isa else []

    def ours(case):
        return common.json_of([*bench, case, *options, *instructions])

    def is_wanted(case):
        return arguments.only in case

    print(f"{'':16} {'ours':>9} {'TransformerLens':>16} {'theirs/ours':>12} {'of fastest':>11}")
    for case in filter(is_wanted, GRIDS):
        theirs = common.worker("inside", "--worker", case, *options)
        rounds = [(ours(case)["seconds"], common.json_of(theirs)["seconds"]) for _ in range(arguments.rounds)]
        mine, its = (statistics.median(seconds) for seconds in zip(*rounds))
        fastest, their_fastest = (min(seconds) for seconds in zip(*rounds))
        print(f"{case:16} {mine:9.3f} {its:16.3f} {its / mine:12.2f} {their_fastest / fastest:11.2f}", flush=True)
    if is_wanted(MEMORY):
        found = ours(MEMORY)
        print(f"{MEMORY:16} kept {found['kept_MB']:.1f} MB, at most {found['more_MB']:.1f} MB more", flush=True)
    if arguments.model and is_wanted(ATTENTION):
        rounds = [look_attention(arguments.program, arguments.model, arguments.threads) for _ in range(arguments.rounds + 1)][1:]
        seconds, size = (statistics.median(values) for values in zip(*rounds))
        print(f"{ATTENTION:16} {seconds:.3f} s from start to end, a page of {size / 1e6:.2f} MB")
