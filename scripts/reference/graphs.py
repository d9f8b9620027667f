"""Attribution graphs for small GPT-2s, as references for our tests. Files in `graphs`, for each case:

  transcoders/         transcoders of the checkpoint `inside/NAME`, in a common format
  expected.safetensors edges, values, influence; the nodes and edges (target, source) that pruning keeps
  expected.json        the nodes, the scores, and the settings of the case

Edges come from autograd: an f64 forward pass with detached attention patterns, norm scales and MLP outputs,
and the gradient of every target with respect to the MLP outputs and the embeddings. Influence is the sum of
the powers of the normalized matrix; pruning loops over it. Uses neither our code nor circuit-tracer's.
"""

import json

import torch
import transformers
from safetensors.torch import save_file

from reference import common

NODE_SHARE, EDGE_SHARE = 0.8, 0.98
# Checkpoint in `inside`; kind of transcoders; input hook; activation; whether position 0 has no latents.
CASES = {
    "set-relu": ("plain", "set", "hook_resid_mid", "relu", False),
    "cross-layer": ("inverse_layer", "clt", "hook_resid_mid", "jump_relu", True),
    "cross-layer-skip": ("relu_inner", "clt-skip", "mlp.hook_in", "relu", False),
    "set-skip": ("gelu", "set-skip", "mlp.hook_in", "jump_relu", False),
    "set-topk": ("unscaled", "set", "ln2.hook_normalized", "topk", False),
    "saelens-skip": ("untied", "saelens-skip", "ln2.hook_normalized", "relu", True),
}
LATENTS, KEPT = 11, 4


def randoms(generator, *shape, scale=1.0):
    """Returns random numbers that are exact in f32."""
    return (scale * torch.randn(shape, generator=generator)).float().double()


class Layers:
    """Random transcoders for all layers."""

    def __init__(self, seed, kind, activation, layers, width):
        generator = torch.Generator().manual_seed(seed)
        self.kind, self.activation, self.count = kind, activation, layers
        self.w_enc = [randoms(generator, LATENTS, width, scale=width**-0.5) for _ in range(layers)]
        self.b_enc = [randoms(generator, LATENTS, scale=0.3) for _ in range(layers)]
        self.threshold = [randoms(generator, LATENTS, scale=0.3).abs() for _ in range(layers)]
        targets = [layers - layer if "clt" in kind else 1 for layer in range(layers)]
        self.w_dec = [randoms(generator, LATENTS, targets[layer], width, scale=0.5) for layer in range(layers)]
        self.b_dec = [randoms(generator, width, scale=0.3) for _ in range(layers)]
        # The skip connection is always x W_skip^T.
        self.w_skip = [randoms(generator, width, width, scale=0.2) for _ in range(layers)] if "skip" in kind else None

    def encode(self, layer, x):
        before = x @ self.w_enc[layer].T + self.b_enc[layer]
        latents = before.relu()
        if self.activation == "jump_relu":
            latents = latents * (before > self.threshold[layer])
        elif self.activation == "topk":
            kept = before >= before.topk(KEPT, dim=-1).values[..., -1:]
            latents = latents * kept
        return before, latents

    def skip(self, layer, x):
        return x @ self.w_skip[layer].T if self.w_skip else torch.zeros_like(x)

    def save(self, folder, read):
        folder.mkdir(parents=True, exist_ok=True)
        write = lambda path, tensors: save_file({key: value.float().contiguous() for key, value in tensors.items()}, path)
        config = {"feature_input_hook": read, "feature_output_hook": "hook_mlp_out", "model_name": "random"}
        if self.activation == "topk":
            config |= {"activation": "topk", "k": KEPT}
        for layer in range(self.count):
            tensors = {"W_enc": self.w_enc[layer], "b_enc": self.b_enc[layer], "b_dec": self.b_dec[layer]}
            if "clt" in self.kind:
                tensors |= {"threshold": self.threshold[layer]} if self.activation == "jump_relu" else {}
                # circuit-tracer transposes the matrix in transcoder sets only.
                tensors |= {"W_skip": self.w_skip[layer].T} if self.w_skip else {}
                write(folder / f"W_enc_{layer}.safetensors", {f"{key}_{layer}": value for key, value in tensors.items()})
                write(folder / f"W_dec_{layer}.safetensors", {f"W_dec_{layer}": self.w_dec[layer]})
                continue
            tensors |= {"W_dec": self.w_dec[layer][:, 0]} | ({"W_skip": self.w_skip[layer]} if self.w_skip else {})
            if self.kind == "saelens-skip":
                inner = folder / f"layer_{layer}"
                inner.mkdir(exist_ok=True)
                write(inner / "sae_weights.safetensors", tensors | {"W_enc": self.w_enc[layer].T})
                width = self.w_enc[layer].shape[1]
                cfg = {"architecture": "skip_transcoder", "d_in": width, "d_sae": LATENTS, "d_out": width, "dtype": "float32",
                       "apply_b_dec_to_input": False, "metadata": {"hook_name": f"blocks.{layer}.{read}",
                       "hook_name_out": f"blocks.{layer}.hook_mlp_out", "sae_lens_version": "6.12.1"}}
                (inner / "cfg.json").write_text(json.dumps(cfg, indent=1) + "\n")
                continue
            if self.activation == "jump_relu":
                tensors["activation_function.threshold"] = self.threshold[layer][None]
            write(folder / f"layer_{layer}.safetensors", tensors)
        if self.kind != "saelens-skip":
            kind = "cross_layer_transcoder" if "clt" in self.kind else "transcoder_set"
            lines = "".join(f"{key}: {value}\n" for key, value in ({"model_kind": kind} | config).items())
            (folder / "config.yaml").write_text(lines)


def frozen_norm(norm, x):
    """Returns the normalized input without and with the weight and bias; the scale is detached."""
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt().detach()
    return centred / scale, centred / scale * norm.weight + norm.bias


def attend(block, config, layer, x):
    attn, width = block.attn, config.n_embd // config.n_head
    q, k, v = (part.unflatten(-1, (config.n_head, width)).transpose(0, 1) for part in attn.c_attn(x).split(config.n_embd, -1))
    scores = q @ k.transpose(1, 2)
    scores = scores / width**0.5 if config.scale_attn_weights else scores
    scores = scores / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scores
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    pattern = scores.masked_fill(~mask, -torch.inf).softmax(-1).detach()
    return attn.c_proj((pattern @ v).transpose(0, 1).flatten(1))


def graph(model, ids, layers, read, skips_first):
    config, blocks = model.config, model.transformer.h
    embeddings = [model.transformer.wte.weight[ids].clone().requires_grad_(), model.transformer.wpe.weight[: len(ids)].clone().requires_grad_()]
    x, outputs, features, before, written = sum(embeddings), [], [], [], []
    sums = [layers.b_dec[layer].expand(len(ids), -1) for layer in range(config.n_layer)]
    for layer, block in enumerate(blocks):
        x = x + attend(block, config, layer, frozen_norm(block.ln_1, x)[1])
        normalised, normed = frozen_norm(block.ln_2, x)
        # circuit-tracer runs unprocessed models in TransformerLens 2, where this hook follows the norm's
        # weight and bias.
        behind_norm = normalised if layers.kind == "saelens-skip" else normed
        seen = {"hook_resid_mid": x, "ln2.hook_normalized": behind_norm, "mlp.hook_in": normed}[read]
        pre, latents = layers.encode(layer, seen)
        skip = layers.skip(layer, seen)
        output = block.mlp(normed).detach().requires_grad_()
        outputs.append(output)
        for position in range(int(skips_first), len(ids)):
            for feature in latents[position].nonzero().flatten().tolist():
                activation = latents[position, feature].item()
                features.append((layer, position, feature, activation))
                before.append(pre[position, feature])
                directions = activation * layers.w_dec[layer][feature]
                written.append([(layer + step, position, direction) for step, direction in enumerate(directions)])
        sums[layer] = sums[layer] + skip.detach()
        x = x + output + skip - skip.detach()
    for steps in written:
        for layer, position, direction in steps:
            one = torch.zeros(len(ids), 1, dtype=torch.float64)
            one[position] = 1
            sums[layer] = sums[layer] + one * direction
    errors = [output.detach() - total for output, total in zip(outputs, sums)]

    logits = frozen_norm(model.transformer.ln_f, x)[1][-1] @ model.lm_head.weight.T
    probabilities = logits.detach().softmax(-1)
    top = probabilities.topk(10)
    count = int((top.values.cumsum(0) < 0.95).sum().clamp(max=9)) + 1
    targets = before + [(logits - logits.mean())[token] for token in top.indices[:count]]

    rows = []
    for target in targets:
        found = torch.autograd.grad(target, outputs + embeddings, retain_graph=True, allow_unused=True)
        found = [torch.zeros_like(embeddings[0]) if one is None else one for one in found]
        row = [sum((found[layer][position] * direction).sum() for layer, position, direction in steps) for steps in written]
        row += [(error * gradient).sum(-1) for error, gradient in zip(errors, found)]
        row += [(embedding * gradient).sum(-1) for embedding, gradient in zip(embeddings, found[config.n_layer :])]
        rows.append(torch.cat([torch.stack(row[: len(features)]), *row[len(features) :]]).detach())
    values = torch.stack(targets).detach()
    return features, torch.stack(rows), values, top.indices[:count], top.values[:count]


def least_kept(scores, share):
    """Returns the smallest of the top scores that together reach the fraction `share`."""
    ordered = scores.flatten().sort(descending=True).values
    reached = int((ordered.cumsum(0) < share * ordered.sum()).sum())
    return ordered[min(reached, len(ordered) - 1)]


def normalised(matrix):
    return matrix.abs() / matrix.abs().sum(1, keepdim=True).clamp_min(1e-10)


def influence(matrix, weights):
    step, total = weights, torch.zeros_like(weights)
    while step.any():
        step = step @ matrix
        total = total + step
    return total


def pruned(matrix, weights, features, errors, logits):
    of_nodes = influence(normalised(matrix), weights)
    nodes = of_nodes >= least_kept(of_nodes, NODE_SHARE)
    nodes[features + errors :] = True
    left = matrix * nodes[:, None] * nodes
    through = normalised(left) * (influence(normalised(left), weights) + weights)[:, None]
    edges = (through >= least_kept(through, EDGE_SHARE)) & (through > 0)
    while True:
        keeps = nodes.clone()
        keeps[: features + errors] &= edges.any(0)[: features + errors]
        keeps[:features] &= edges.any(1)[:features]
        if torch.equal(keeps, nodes):
            return of_nodes, nodes, edges
        nodes = keeps
        edges = edges & nodes & nodes[:, None]


def export(_):
    for seed, (name, (checkpoint, kind, read, activation, skips_first)) in enumerate(CASES.items()):
        model = transformers.GPT2LMHeadModel.from_pretrained(common.FIXTURES / "inside" / checkpoint).double().eval().requires_grad_(False)
        ids = json.loads((common.FIXTURES / "inside" / checkpoint / "analyses.json").read_text())["clean_ids"]
        layers = Layers(100 + seed, kind, activation, model.config.n_layer, model.config.n_embd)
        layers.save(common.place(f"graphs/{name}/transcoders"), read)
        features, edges, values, tokens, probabilities = graph(model, ids, layers, read, skips_first)
        errors = model.config.n_layer * len(ids)
        inner = len(features) + errors + 2 * len(ids)
        matrix = torch.zeros(inner + len(tokens), inner + len(tokens), dtype=torch.float64)
        matrix[: len(features), :inner] = edges[: len(features)]
        matrix[inner:, :inner] = edges[len(features) :]
        weights = torch.zeros(len(matrix), dtype=torch.float64)
        weights[inner:] = probabilities
        of_nodes, nodes, kept = pruned(matrix, weights, len(features), errors, len(tokens))
        from_errors = normalised(matrix)[:, len(features) : len(features) + errors].sum(1)
        total = of_nodes + weights
        of_errors = of_nodes[len(features) : len(features) + errors].sum()
        of_embeddings = of_nodes[len(features) + errors : inner].sum()
        common.save(
            f"graphs/{name}/expected",
            {"edges": edges, "values": values, "influence": of_nodes, "nodes": nodes.float(), "kept": kept.nonzero().float()},
            dtype=torch.float32,
        )
        common.save_json(
            f"graphs/{name}/expected",
            {
                "checkpoint": checkpoint, "ids": ids, "skips_first": skips_first, "input": read, "kind": kind, "topk": KEPT if activation == "topk" else None,
                "features": [feature[:3] for feature in features], "activations": [feature[3] for feature in features],
                "tokens": tokens.tolist(), "probabilities": probabilities.tolist(),
                "replacement": (of_embeddings / (of_embeddings + of_errors)).item(),
                "completeness": (((1 - from_errors) * total).sum() / total.sum()).item(),
            },
            indent=None,
        )
