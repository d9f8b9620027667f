"""Speed of `HookedTransformer` compared with TransformerLens: GPT-2 124M, f32, 64 tokens.

usage: python -m bench hooked [--peers DIR] [--rounds N] [--threads N] [--isa avx2] [--markdown]

`WITHOUT_LLAMA_CPP=1 scripts/bench/peers.sh` creates everything needed except transformer_lens, which must be
installed in its Python. The Python that runs this script needs our package. Both engines return all logits;
TransformerLens is a bridge in compatibility mode without gradients. In each round each engine is a separate
process that cycles through the cases and reports the median of 30 runs:

  cache      run_with_cache for every hook point
  no logits  the same with return_type=None (ours only: TransformerLens computes the logits anyway)
  one site   run_with_cache for blocks.5.hook_resid_post with stop_at_layer=6
  forward    model(tokens)
  hook       the same with a hook at blocks.5.attn.hook_z that reads and edits nothing

Prints the medians of the rounds in milliseconds, and the hook's overhead as the median ratio of paired
runs.
"""

import argparse
import json
import os
import statistics
import time

from bench import common

TOKENS, WARM_UP, RUNS = 64, 3, 30
SITE, HOOKED = "blocks.5.hook_resid_post", "blocks.5.attn.hook_z"
ENGINES = ("candle-gpt2", "TransformerLens")


def open_model(engine, folder, threads):
    """Returns the model, and the tokens in its input format."""
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
    """Returns the milliseconds for each case, and the hook's overhead."""
    model, tokens = open_model(engine, folder, threads)

    def read(value, hook):
        assert value.shape[1] == TOKENS

    cases = {
        "cache": lambda: model.run_with_cache(tokens),
        "no logits": lambda: model.run_with_cache(tokens, return_type=None),
        "one site": lambda: model.run_with_cache(tokens, names_filter=SITE, stop_at_layer=6),
        "forward": lambda: model(tokens),
        "hook": lambda: model.run_with_hooks(tokens, fwd_hooks=[(HOOKED, read)]),
    }
    if engine != "candle-gpt2":
        del cases["no logits"]
    samples = {case: [] for case in cases}
    for iteration in range(WARM_UP + RUNS):
        for case, run in cases.items():
            start = time.perf_counter()
            run()
            if iteration >= WARM_UP:
                samples[case].append((time.perf_counter() - start) * 1000)
    rows = {case: statistics.median(times) for case, times in samples.items()}
    pairs = zip(samples["hook"], samples["forward"], strict=True)
    return rows | {"hook / forward": statistics.median(hook / forward for hook, forward in pairs)}


def main():
    parser = common.parser(__doc__, "rounds", "threads", "isa", "peers", "markdown")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    peers = arguments.peers.resolve()
    folder = str(peers / "gpt2-124m")
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, folder, arguments.threads)))
        return
    common.restrict_to(arguments.isa)
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
    for row, by_engine in samples.items():
        medians = {engine: statistics.median(values) for engine, values in by_engine.items()}
        if arguments.markdown:
            cells = [f"{medians[engine]:.{2 if '/' in row else 0}f}" if engine in medians else "" for engine in ENGINES]
            print(f"| {row} | " + " | ".join(cells) + " |")
        else:
            print(json.dumps({"row": row, **medians}), flush=True)

