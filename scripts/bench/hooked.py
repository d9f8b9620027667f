"""Speed of `HookedTransformer` beside TransformerLens on PyTorch: GPT-2 124M in f32, 64 tokens, on the same threads.

usage: python -m bench hooked [--peers DIR] [--rounds N] [--threads N] [--isa avx2] [--markdown]

Of the peers what `WITHOUT_LLAMA_CPP=1 scripts/bench/peers.sh` makes is enough, with transformer_lens in its Python. The Python that
runs this has the package. Both give every logit; TransformerLens is a bridge in compatibility mode without gradients. In each of the
rounds each engine is a process of its own, which takes every case in turns and tells the median of 30 turns:

  cache      run_with_cache of every hook point
  no logits  the same with return_type=None (ours alone: TransformerLens computes the logits all the same)
  one site   run_with_cache of blocks.5.hook_resid_post with stop_at_layer=6
  forward    model(tokens)
  hook       the same with a hook at blocks.5.attn.hook_z that looks and edits nothing

Printed are the medians of the rounds in milliseconds, and what the hook adds to a pass as the median over the turns of both beside each other.
"""

import argparse
import json
import os
import statistics
import time

from bench import common

TOKENS, WARM_UP, TURNS = 64, 3, 30
SITE, HOOKED = "blocks.5.hook_resid_post", "blocks.5.attn.hook_z"
ENGINES = ("candle-gpt2", "TransformerLens")


def open_model(engine, folder, threads):
    """The model, and the tokens as it takes them."""
    ids = [common.prompt(TOKENS)]
    if engine == "candle-gpt2":
        import numpy as np
        from candle_gpt2 import HookedTransformer

        return HookedTransformer.from_pretrained(folder, tensors="numpy"), np.array(ids)
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)
    model.enable_compatibility_mode(disable_warnings=True)
    return model, torch.tensor(ids)


def measure(engine, folder, threads):
    """Milliseconds of each case, and what the hook adds to a pass."""
    model, tokens = open_model(engine, folder, threads)

    def look(value, hook):
        assert value.shape[1] == TOKENS

    cases = {
        "cache": lambda: model.run_with_cache(tokens),
        "no logits": lambda: model.run_with_cache(tokens, return_type=None),
        "one site": lambda: model.run_with_cache(tokens, names_filter=SITE, stop_at_layer=6),
        "forward": lambda: model(tokens),
        "hook": lambda: model.run_with_hooks(tokens, fwd_hooks=[(HOOKED, look)]),
    }
    if engine != "candle-gpt2":
        del cases["no logits"]
    samples = {case: [] for case in cases}
    for turn in range(WARM_UP + TURNS):
        for case, run in cases.items():
            start = time.perf_counter()
            run()
            if turn >= WARM_UP:
                samples[case].append((time.perf_counter() - start) * 1000)
    rows = {case: statistics.median(times) for case, times in samples.items()}
    pairs = zip(samples["hook"], samples["forward"], strict=True)
    return rows | {"hook / forward": statistics.median(hook / forward for hook, forward in pairs)}


def main():
    words = common.parser(__doc__, "rounds", "threads", "isa", "peers", "markdown")
    words.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = words.parse_args()
    peers = arguments.peers.resolve()
    folder = str(peers / "gpt2-124m")
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, folder, arguments.threads)))
        return
    common.hold_to(arguments.isa)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(arguments.threads)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    pythons = {"candle-gpt2": {}, "TransformerLens": {"python": peers / "venv/bin/python"}}
    samples = {}
    for _ in range(arguments.rounds):
        for engine, python in pythons.items():
            options = ("--worker", engine, "--peers", peers, "--threads", arguments.threads)
            for row, value in common.json_of(common.worker("hooked", *options, **python)).items():
                samples.setdefault(row, {}).setdefault(engine, []).append(value)
    if arguments.markdown:
        print("| | candle-gpt2 | TransformerLens |\n|---|---|---|")
    for row, of_row in samples.items():
        medians = {engine: statistics.median(values) for engine, values in of_row.items()}
        if arguments.markdown:
            cells = [f"{medians[engine]:.{2 if '/' in row else 0}f}" if engine in medians else "" for engine in ENGINES]
            print(f"| {row} | " + " | ".join(cells) + " |")
        else:
            print(json.dumps({"row": row, **medians}), flush=True)

