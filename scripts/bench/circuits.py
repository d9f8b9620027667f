"""Speed of circuits, graphs and dictionaries on the CPU, in f32 on the same threads, beside the programs that others wrote for them.

usage: python -m bench circuits [--rounds N] [--threads N] [--isa avx2] [--only TEXT] [--batch PAIRS] [--eap FOLDER]

  eap         edge attribution patching: scores of the 32,491 edges of GPT-2 124M on 100 pairs of prompts of 16 tokens, beside the
              authors' EAP-IG (github.com/hannamw/EAP-IG; its folder `src` is FOLDER, unless it is installed) on TransformerLens
  graph       the attribution graph of 15 tokens of GPT-2 124M with the edges of 5,000 features, which are neurons; seconds and the peak
              of the process's memory, of ours alone
  dictionary  a step of a top-k dictionary, 768 wide, 6,144 latents, 32 active, 4,096 tokens whose values are at hand, beside SAELens

Runs the cases of `cargo bench` of candle-gpt2-interpret and candle-gpt2-training and the others in turns, each round in a process of
its own, and prints the medians, and the others' time over ours: above 1, ours is faster. All models have random weights: speed does not
depend on their values. The authors' scores are written to CUDA; here they are written to the CPU. SAELens' step is that of its trainer:
loss, gradient, clipping, Adam, activity of latents; as it comes, and with sparse activations, which on the CPU want activations that
are not scaled by the directions. Needs the packages of scripts/requirements-circuits.txt.
"""

import argparse
import json
import os
import statistics
import sys
import time

from bench import common

CASES = ("eap", "graph", "dictionary")
PAIRS, TOKENS = 100, 16
ANSWER, AGAINST = 5335, 1757
WIDTH, LATENTS, K, BATCH = 768, 6144, 32, 4096
WARM_UP_STEPS = 2
SHORTEST_STEPS, SHORTEST_S = 5, 5.0


def their_edges(batch, folder):
    """Seconds of the authors' EAP."""
    import torch
    import transformer_lens

    sys.path[:0] = [folder] if folder else []
    import eap.attribute
    from eap.graph import Graph

    class Words:
        """Pairs are given as ids: what stands for a tokenizer is only asked for its padding."""

        bos_token_id = eos_token_id = pad_token_id = 50256
        padding_side = "right"

    class OnCpu:
        def __getattr__(self, name):
            return getattr(torch, name)

        def zeros(self, *sizes, device=None, **options):
            return torch.zeros(*sizes, **options)

    eap.attribute.torch = OnCpu()
    config = transformer_lens.HookedTransformerConfig(
        n_layers=12, d_model=768, n_ctx=1024, d_head=64, n_heads=12, d_mlp=3072, d_vocab=50257, act_fn="gelu_new", normalization_type="LN",
        device="cpu", seed=1, use_attn_result=True, use_split_qkv_input=True, use_hook_mlp_in=True,
    )
    model = transformer_lens.HookedTransformer(config)
    model.tokenizer = Words()
    clean = torch.arange(PAIRS * TOKENS).reshape(PAIRS, TOKENS) * 37 % 50_000
    corrupted = clean.clone()
    corrupted[:, 10] += 1
    # Every prompt has as many tokens: nothing is padded.
    mask = torch.ones(batch, TOKENS, dtype=torch.int64)
    eap.attribute.tokenize_plus = lambda _, ids: (ids, mask[: len(ids)], mask[: len(ids)].sum(1), TOKENS)

    def metric(logits, *_):
        return (logits[:, -1, ANSWER] - logits[:, -1, AGAINST]).mean()

    batches = [(clean[first : first + batch], corrupted[first : first + batch], None) for first in range(0, PAIRS, batch)]
    graph = Graph.from_model(model)
    with torch.no_grad():
        model(clean[:1])
    start = time.perf_counter()
    eap.attribute.attribute(model, graph, batches, metric, method="EAP", quiet=True)
    seconds = time.perf_counter() - start
    assert len(graph.edges) == 32_491 and graph.scores.abs().max() > 0
    return {"seconds": seconds, "peak_MB": common.peak_mib() * 2**20 / 1e6}


def their_step(is_sparse):
    """Seconds of a step of SAELens."""
    import sae_lens
    import torch
    from sae_lens.saes.sae import TrainStepInput

    config = sae_lens.TopKTrainingSAEConfig(
        d_in=WIDTH, d_sae=LATENTS, k=K, normalize_activations="none", use_sparse_activations=is_sparse,
        rescale_acts_by_decoder_norm=not is_sparse,
    )
    sae = sae_lens.TopKTrainingSAE(config).train()
    optimizer = torch.optim.Adam(sae.parameters(), lr=3e-4, betas=(0.9, 0.999))
    values = torch.randn(BATCH, WIDTH)
    dead = torch.zeros(LATENTS, dtype=torch.bool)
    since = torch.zeros(LATENTS)
    frequencies = torch.zeros(LATENTS)

    def step():
        found = sae.training_forward_pass(
            TrainStepInput(sae_in=values, dead_neuron_mask=dead, coefficients={}, n_training_steps=10, is_logging_step=False)
        )
        with torch.no_grad():
            fired = found.feature_acts.bool().float()
            did_fire = fired.sum(-2).bool()
            since.add_(1)
            since[did_fire.to_dense() if did_fire.is_sparse else did_fire] = 0
            frequencies.add_(fired.sum(0))
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(sae.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP_STEPS):
        step()
    seconds = []
    while len(seconds) < SHORTEST_STEPS or sum(seconds) < SHORTEST_S:
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds), "peak_MB": common.peak_mib() * 2**20 / 1e6}


def measure(arguments):
    """One process's measurement of a program that is not ours, as a JSON line."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import torch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    found = their_edges(arguments.batch, arguments.eap) if arguments.worker == "eap" else their_step(arguments.worker == "sparse")
    print(json.dumps(found))


def main():
    parser = common.parser(__doc__, "rounds", "threads", "isa", "only")
    parser.add_argument("--batch", type=int, default=20, help="pairs that the authors' code takes at once [default: 20]")
    parser.add_argument("--eap", help="folder with the authors' package")
    parser.add_argument("--ours", action="append", default=[], metavar="PROGRAM",
                        help="the compiled benches, inside and step [default: cargo bench]")
    parser.add_argument("--worker", choices=["eap", "dense", "sparse"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments)
        return
    common.hold_to(arguments.isa)
    inside, step = ("candle-gpt2-interpret", "inside"), ("candle-gpt2-training", "step")
    benches = {"eap": inside, "graph": inside, "dictionary": step}
    options = ["--threads", str(arguments.threads)]
    instructions = ["--instructions", arguments.isa] if arguments.isa else []
    others = ["--batch", str(arguments.batch), *(["--eap", arguments.eap] if arguments.eap else []), *options]
    compiled = dict(zip(("inside", "step"), ([program] for program in arguments.ours)))

    def ours(case):
        crate, bench = benches[case]
        found = common.json_of([*compiled.get(bench, common.cargo_bench(crate, bench, None)), case, *options, *instructions])
        # A step has its tokens; its memory is told in other units.
        return {"peak_MB": found.get("peak_mib", 0) * 2**20 / 1e6, "seconds": found.get("seconds_per_step")} | found

    def told(name, case, rounds):
        seconds = statistics.median(found["seconds"] for found in rounds)
        rate = {"eap": f"{PAIRS / seconds:8.1f} pairs/s", "dictionary": f"{BATCH / seconds:8.0f} tokens/s"}.get(case, "")
        print(f"{case:10} {name:16} {seconds:9.3f} s {max(found['peak_MB'] for found in rounds):8.0f} MB {rate}", flush=True)
        return seconds

    for case in (case for case in CASES if arguments.only in case):
        workers = {"eap": {"EAP-IG": "eap"}, "dictionary": {"SAELens": "dense", "SAELens, sparse": "sparse"}}.get(case, {})
        rounds = {"ours": []} | {name: [] for name in workers}
        for _ in range(arguments.rounds):
            rounds["ours"].append(ours(case))
            for name, worker in workers.items():
                rounds[name].append(common.json_of(common.worker("circuits", "--worker", worker, *others)))
        medians = {name: told(name, case, found) for name, found in rounds.items()}
        if workers:
            fastest = min(medians[name] for name in workers)
            print(f"{case:10} theirs over ours {fastest / medians['ours']:8.2f}")
