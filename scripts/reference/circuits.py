"""Edge scores and circuit metrics, computed from their definitions, as references for our tests.

`circuits` has one file for each checkpoint of `inside`, which is read from the committed fixtures:

  METRIC.eap, METRIC.eap_ig, METRIC.clean_corrupted   score of every edge, the mean over 20 prompt pairs of two lengths
  by_position.eap                                     scores by position of the pairs of the first length
  masks, METRIC.values                                circuits (1 for an edge that is kept), and the metric of each

The model is written out as the graph defines it: every destination has its own sum of inputs, and PyTorch
differentiates with respect to that sum. Edges are ordered by destination (in a layer all queries, all keys,
all values, the MLP; then the logits), then by source. All values are computed in f64 and stored in f32.
Sources: arXiv:2310.10348 (EAP), arXiv:2403.17806 (EAP-IG), arXiv:2304.14997 (edges outside a circuit come
from the corrupted run).
"""

import math

import torch
import transformers
from transformers.activations import ACT2FN

from reference import common

CASES = ("plain", "inverse_layer", "untied", "gelu", "relu_inner", "unscaled", "epsilon")
PAIRS, STEPS, CIRCUITS = 20, 5, 5
METRICS = ("logit_difference", "probability_difference", "divergence")


class Graph:
    """One checkpoint in which every destination has its own input."""

    def __init__(self, name):
        model = transformers.GPT2LMHeadModel.from_pretrained(common.FIXTURES / "inside" / name, attn_implementation="eager")
        self.model, self.config = model.double().eval().requires_grad_(False), model.config
        self.heads, self.width = model.config.n_head, model.config.n_embd // model.config.n_head

    def norm(self, x, norm):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, self.config.layer_norm_epsilon)

    def run(self, ids, embeddings=None, corrupted=None, mask=None):
        """Returns the logits after the last token, the sources' outputs and the destinations' inputs."""
        transformer = self.model.transformer
        sources = [transformer.wte(ids) if embeddings is None else embeddings]
        fixed = transformer.wpe(torch.arange(ids.shape[-1])).expand_as(sources[0])
        inputs, first = [], 0

        def read():
            """Returns the next destination's input; removed edges carry the corrupted run's outputs."""
            nonlocal first
            total = fixed
            for place, source in enumerate(sources):
                is_kept = mask is None or mask[first + place]
                total = total + (source if is_kept else corrupted[place])
            first += len(sources)
            total = total.detach().requires_grad_() if not total.requires_grad else total
            total.retain_grad()
            inputs.append((total, len(sources)))
            return total

        for layer, block in enumerate(transformer.h):
            # For each of queries, keys and values: (H, D, C) and (H, D).
            weights = block.attn.c_attn.weight.t().reshape(3, self.heads, self.width, -1)
            biases = block.attn.c_attn.bias.reshape(3, self.heads, self.width)
            parts = [
                [self.norm(read(), block.ln_1) @ weights[part, head].t() + biases[part, head] for head in range(self.heads)]
                for part in range(3)
            ]
            scale = 1 / math.sqrt(self.width) if self.config.scale_attn_weights else 1.0
            scale /= layer + 1 if self.config.scale_attn_by_inverse_layer_idx else 1
            output = block.attn.c_proj.weight.reshape(self.heads, self.width, -1)
            written = []
            for head, (q, k, v) in enumerate(zip(*parts)):
                scores = q @ k.transpose(-1, -2) * scale
                hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
                written.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v @ output[head])
            sources += written
            fixed = fixed + block.attn.c_proj.bias
            activation = ACT2FN[self.config.activation_function]
            sources.append(block.mlp.c_proj(activation(block.mlp.c_fc(self.norm(read(), block.ln_2)))))
        logits = self.model.lm_head(self.norm(read(), transformer.ln_f))[..., -1, :]
        return logits, sources, inputs


def metric_of(name, logits, pair, reference):
    right, wrong = torch.tensor(pair["correct"]), torch.tensor(pair["incorrect"])
    if name == "logit_difference":
        return logits[right].mean() - logits[wrong].mean()
    if name == "probability_difference":
        return logits.softmax(-1)[right].sum() - logits.softmax(-1)[wrong].sum()
    return torch.nn.functional.kl_div(logits.log_softmax(-1), reference.log_softmax(-1), reduction="sum", log_target=True)


def scores(graph, pair, metric, clean, corrupted, reference, shares):
    """Returns the scores for one pair, (edges, T): difference times gradient, summed over the hidden size."""
    total = 0
    for share in shares:
        embeddings = corrupted[0] + share * (clean[0] - corrupted[0])
        logits, _, inputs = graph.run(torch.tensor(pair["clean"]), embeddings=embeddings)
        metric_of(metric, logits, pair, reference).backward()
        of_edges = [
            ((corrupted[place] - clean[place]) * entry.grad).sum(-1) for entry, count in inputs for place in range(count)
        ]
        total = total + torch.stack(of_edges) / len(shares)
    return total


def pairs_of(config, generator):
    def draw(*shape):
        return torch.randint(1, config.vocab_size, shape, generator=generator)

    for place in range(PAIRS):
        tokens = 6 if place < 12 else 8
        clean = draw(tokens)
        corrupted = clean.clone()
        corrupted[2], corrupted[4] = draw(2)
        right, wrong = draw(1 + place % 3).unique().tolist(), draw(1 + place % 2).unique().tolist()
        yield {"clean": clean.tolist(), "corrupted": corrupted.tolist(), "correct": right, "incorrect": wrong}


def export(_):
    for seed, name in enumerate(CASES):
        graph = Graph(name)
        generator = torch.Generator().manual_seed(7000 + seed)
        pairs = list(pairs_of(graph.config, generator))
        runs = []
        for pair in pairs:
            (reference, clean, inputs), (_, corrupted, _) = (graph.run(torch.tensor(pair[side])) for side in ("clean", "corrupted"))
            expected = graph.model(torch.tensor([pair["clean"]])).logits[0, -1]
            assert (reference - expected).abs().max() < 1e-10 * expected.abs().max(), name
            runs.append(([source.detach() for source in clean], [source.detach() for source in corrupted], reference.detach()))
        edges = sum(count for _, count in inputs)
        shares = {"eap": [1.0], "eap_ig": [step / STEPS for step in range(STEPS)], "clean_corrupted": [0.0, 1.0]}
        density = torch.linspace(0.2, 0.9, CIRCUITS).unsqueeze(1)
        masks = (torch.rand(CIRCUITS, edges, generator=generator) < density).double()
        tensors = {"masks": masks}
        for metric in METRICS:
            for method, at in shares.items():
                found = [scores(graph, pair, metric, *run, at) for pair, run in zip(pairs, runs)]
                tensors[f"{metric}.{method}"] = sum(of_pair.sum(-1) for of_pair in found) / PAIRS
                if (metric, method) == ("logit_difference", "eap"):
                    of_length = [of_pair for of_pair in found if of_pair.shape[-1] == found[0].shape[-1]]
                    tensors["by_position.eap"] = (sum(of_length) / len(of_length)).t()
            with_masks = [
                [metric_of(metric, graph.run(torch.tensor(pair["clean"]), corrupted=run[1], mask=mask)[0], pair, run[2]) for pair, run in zip(pairs, runs)]
                for mask in masks
            ]
            tensors[f"{metric}.values"] = torch.stack([torch.stack(values).mean() for values in with_masks])
        common.save(f"circuits/{name}", tensors, dtype=torch.float32, pairs=pairs, steps=STEPS)
