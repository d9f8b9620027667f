"""CPU speed of circuits, graphs and dictionaries compared with their authors' code: f32, same threads.

usage: python -m bench circuits [--rounds N] [--threads N] [--isa avx2] [--only TEXT] [--batch PAIRS] [--eap FOLDER]

  eap         edge attribution patching: scores of the 32,491 edges of GPT-2 124M on 100 pairs of 16-token prompts, compared
              with the authors' EAP-IG on TransformerLens (github.com/hannamw/EAP-IG; FOLDER is its `src`, unless installed)
  graph       attribution graph of 15 tokens of GPT-2 124M with the edges of 5,000 features (neurons): seconds and peak
              memory of the process, ours only
  dictionary  training step of a top-k dictionary with input size 768, 6,144 latents, 32 active, on 4,096 precomputed
              activations, compared with SAELens

Alternates between the `cargo bench` cases of candle-gpt2-interpret and candle-gpt2-training and the other
programs, each round in a separate process. Prints the medians and the ratio of the others' time to ours;
above 1, ours is faster. All models have random weights, because speed does not depend on their values.

The authors' code puts scores on CUDA; here they are redirected to the CPU. The SAELens step is its trainer's:
loss, gradient, clipping, Adam, activity of latents. It runs with the default settings, and with sparse
activations, which on the CPU require `rescale_acts_by_decoder_norm=False`. Needs the packages in
scripts/requirements-circuits.txt.
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
MIN_STEPS, MIN_SECONDS = 5, 5.0


def their_edges(batch, folder):
    """Returns the seconds that the authors' EAP takes, and its peak memory."""
    import torch
    import transformer_lens

    sys.path[:0] = [folder] if folder else []
    import eap.attribute
    from eap.graph import Graph

    class TokenizerStub:
        """Stand-in for a tokenizer; prompts are token ids, so only its padding attributes are read."""

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
    model.tokenizer = TokenizerStub()
    clean = torch.arange(PAIRS * TOKENS).reshape(PAIRS, TOKENS) * 37 % 50_000
    corrupted = clean.clone()
    corrupted[:, 10] += 1
    # All prompts have the same length, so nothing is padded.
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
    """Returns the seconds that a SAELens training step takes, and its peak memory."""
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
    while len(seconds) < MIN_STEPS or sum(seconds) < MIN_SECONDS:
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds), "peak_MB": common.peak_mib() * 2**20 / 1e6}


def measure(arguments):
    """Measures another program in this process and prints a JSON line."""
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
    common.restrict_to(arguments.isa)
    inside, step = ("candle-gpt2-interpret", "inside"), ("candle-gpt2-training", "step")
    benches = {"eap": inside, "graph": inside, "dictionary": step}
    options = ["--threads", str(arguments.threads)]
    instructions = ["--instructions", arguments.isa] if arguments.isa else []
    others = ["--batch", str(arguments.batch), *(["--eap", arguments.eap] if arguments.eap else []), *options]
    compiled = dict(zip(("inside", "step"), ([program] for program in arguments.ours)))

    def ours(case):
        crate, bench = benches[case]
        found = common.json_of([*compiled.get(bench, common.cargo_bench(crate, bench, None)), case, *options, *instructions])
        # A training step reports `seconds_per_step`, and its memory in MiB.
        return {"peak_MB": found.get("peak_mib", 0) * 2**20 / 1e6, "seconds": found.get("seconds_per_step")} | found

    def report(name, case, rounds):
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
        medians = {name: report(name, case, found) for name, found in rounds.items()}
        if workers:
            fastest = min(medians[name] for name in workers)
            print(f"{case:10} theirs over ours {fastest / medians['ours']:8.2f}")
