"""Speed of the attention family compared with PyTorch: forward and backward, f32, same threads.

usage: python -m bench attention [--rounds N] [--threads N] [--isa avx2] [--only TEXT]

Alternates between `cargo bench -p candle-gpt2-attention --bench family` and the same layers in PyTorch, each
round in a separate process. Prints the medians in milliseconds and the ratio of PyTorch's time to ours; above
1, ours is faster.

PyTorch's attention is one fused or three separate projections, `scaled_dot_product_attention` and an output
projection. Its encoder and decoder layers are `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`.
`plain` weights need no gradients, `trained` weights do. `backward` is a forward pass plus the gradients of
input and weights. `--isa avx2` restricts both to AVX2 on processors with AVX-512. Needs the packages in
scripts/requirements.txt.
"""

import argparse
import json
import math
import statistics
import time

from bench import common

SIZES = [(1, 1024), (8, 128), (1, 1)]
MASKS = ["causal", "bidirectional", "window", "cross", "additive"]
MIN_PASSES, MIN_SECONDS = 5, 0.4
WINDOW = 128
LARGE_BLOCK = 31 << 20


def torch_family(threads, only):
    """Measures PyTorch in this process and prints a JSON line."""
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    torch.empty(LARGE_BLOCK, dtype=torch.uint8)  # same as in the Rust benchmark, which explains why
    found = {}

    class Attention(nn.Module):
        def __init__(self, width, heads, is_fused):
            super().__init__()
            self.heads, self.is_fused = heads, is_fused
            if is_fused:
                self.in_proj = nn.Linear(width, 3 * width)
            else:
                self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
            self.out_proj = nn.Linear(width, width)

        def forward(self, x, memory=None, **mask):
            if self.is_fused and memory is None:
                q, k, v = self.in_proj(x).chunk(3, dim=-1)
            elif self.is_fused:
                width = x.shape[-1]
                weight, bias = self.in_proj.weight, self.in_proj.bias
                q = nn.functional.linear(x, weight[:width], bias[:width])
                k, v = nn.functional.linear(memory, weight[width:], bias[width:]).chunk(2, dim=-1)
            else:
                memory = x if memory is None else memory
                q, k, v = self.query(x), self.key(memory), self.value(memory)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
            context = nn.functional.scaled_dot_product_attention(q, k, v, **mask)
            return self.out_proj(context.transpose(1, 2).flatten(-2))

    def measure(name, run):
        if only not in name:
            return
        run()
        seconds = []
        while len(seconds) < MIN_PASSES or sum(seconds) < MIN_SECONDS:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        found[name] = statistics.median(seconds) * 1e3

    def cases(name, layer, shape, forward):
        x, memory = torch.randn(shape), torch.randn(shape)
        with torch.inference_mode():
            measure(f"{name} plain forward", lambda: forward(layer, x, memory))
        measure(f"{name} trained forward", lambda: forward(layer, x, memory))
        x.requires_grad_(), memory.requires_grad_()

        def backward():
            layer.zero_grad(set_to_none=True)
            x.grad = memory.grad = None
            forward(layer, x, memory).sum().backward()

        measure(f"{name} backward", backward)

    for batch, tokens in SIZES:
        position = torch.arange(tokens)
        before = position[:, None] - position[None, :]
        masks = {
            "causal": {"is_causal": True},
            "window": {"attn_mask": (before >= 0) & (before <= WINDOW)},
            "additive": {"attn_mask": torch.randn(1, 12, tokens, tokens)},
        }
        for layout in ("fused", "separate"):
            layer = Attention(768, 12, layout == "fused")
            for mask in MASKS:

                def forward(layer, x, memory, mask=mask):
                    return layer(x, memory if mask == "cross" else None, **masks.get(mask, {}))

                cases(f"{layout} {mask} {batch}x{tokens}", layer, (batch, tokens, 768), forward)
        options = {"d_model": 512, "nhead": 8, "dim_feedforward": 2048, "dropout": 0.0, "batch_first": True}
        encoder, decoder = nn.TransformerEncoderLayer(**options), nn.TransformerDecoderLayer(**options)
        causal = nn.Transformer.generate_square_subsequent_mask(tokens)
        cases(f"encoder {batch}x{tokens}", encoder, (batch, tokens, 512), lambda layer, x, _: layer(x))

        def decode(layer, x, memory, causal=causal):
            return layer(x, memory, tgt_mask=causal, tgt_is_causal=True)

        cases(f"decoder {batch}x{tokens}", decoder, (batch, tokens, 512), decode)
    print(json.dumps(found))


def main():
    parser = common.parser(__doc__, "rounds", "threads", "isa", "only")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        torch_family(arguments.threads, arguments.only)
        return
    options = ["--threads", str(arguments.threads), "--only", arguments.only]
    common.restrict_to(arguments.isa)
    ours = common.cargo_bench("candle-gpt2-attention", "family", arguments.isa)
    theirs = common.worker("attention", "--worker")
    rounds = [(common.json_of(ours + options), common.json_of(theirs + options)) for _ in range(arguments.rounds)]
    ratios = []
    print(f"{'':44} {'ours':>9} {'PyTorch':>9} {'PyTorch/ours':>13}")
    for case in rounds[0][0]:
        peer = case.replace("candle_backward", "backward")
        our_median = statistics.median(ours[case] for ours, _ in rounds)
        their_median = statistics.median(theirs[peer] for _, theirs in rounds)
        print(f"{case:44} {our_median:9.3f} {their_median:9.3f} {their_median / our_median:13.2f}")
        if not case.endswith("candle_backward"):
            ratios.append(their_median / our_median)
    if ratios:
        mean = math.exp(statistics.mean(map(math.log, ratios)))
        print(f"PyTorch's time over ours, geometric mean of {len(ratios)} cases: {mean:.2f}; lowest: {min(ratios):.2f}")
