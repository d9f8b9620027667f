"""Interpretability from Python: activations, hooks, analyses, steering, and forked KV caches.

usage: python examples/look_inside.py [MODEL]     folder, file or name on the Hub [default: the built-in model]

A notebook as a plain script: editors that support `# %%` show its parts as cells, and display the pictures.
"""

import sys

import numpy as np
from candle_gpt2 import Model

model = Model.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else None)
text = "A red ball and a blue cup, a red"
ids = model.encode(text)
tokens = model.str_tokens(text)

# %% Hook points have TransformerLens names; patterns may contain `*`.
print(len(model.hook_names), "hook points, such as", model.hook_names[:3])
logits, cache = model.run_with_cache(text, names=["blocks.*.attn.hook_pattern", "blocks.*.hook_resid_post"])
print("logits", logits.shape)
for name, values in list(cache.items())[:2]:
    print(name, values.shape)

# %% Find the head that attends most to the previous token.
patterns = {name: value for name, value in cache.items() if name.endswith("hook_pattern")}
previous = {
    (layer, head): float(np.diagonal(pattern[0, head], offset=-1).mean())
    for layer, pattern in enumerate(patterns.values())
    for head in range(pattern.shape[1])
}
head = max(previous, key=previous.get)
print(f"head {head[0]}.{head[1]} attends to the previous token with weight {previous[head]:.2f}")


# %% Replace an activation with a hook, here to ablate a head.
def ablate(z, name):
    z = z.copy()
    z[0, :, head[1]] = 0
    return z


without = model.logits(ids, hooks=[(f"blocks.{head[0]}.attn.hook_z", ablate)])
with_it = model.logits(ids)
best = int(with_it.argmax())
print(f"the logit of {model.decode([best])!r}, the best next token: {with_it[best]:.3f}, without the head {without[best]:.3f}")

# %% Logit lens: predictions of each layer as if it were the last. Notebooks display the picture, and `save` writes it.
lens = model.logit_lens(text)
lens

# %%
top = np.asarray(lens.details["top_ids"])
for layer in range(top.shape[0]):
    print(f"layer {layer}: after {tokens[-1]!r} comes {model.decode([int(top[layer, -1, 0])])!r}")

# %% Attention patterns.
model.attention(text, layers=[head[0]])

# %% Attribute the prediction to components, and ablate each head.
parts = model.attribute(text, answer=best)
strongest = int(np.abs(parts.values).argmax())
print(f"{parts.axes['part'][strongest]} adds {parts.values[strongest]:.2f} of {parts.details['total']:.2f}")
without = model.ablate(text, answer=best)
layer, number = np.unravel_index(np.abs(without.values).argmax(), without.values.shape)
print(f"without head {layer}.{number} the logit changes by {without.values[layer, number]:.2f}")
without

# %% Saliency of the input tokens.
weights = model.saliency(text, answer=best)
print("most important token:", repr(tokens[int(weights.values.argmax())]))

# %% Patch activations of one text into a run of another text with the same number of tokens.
other = [*ids[:3], ids[-1], *ids[4:]]
patched = model.patch(ids, other, answer=best)
print("fraction restored by each input token:", dict(zip(tokens, patched.values[0].round(2).tolist(), strict=True)))
patched

# %% Steer the model: add a direction to the residual stream.
steering = model.steering((" happy", " sad"), layer=len(patterns) // 2, scale=4)
for hooks in (None, [steering]):
    print(repr(model.generate("Tom lost his ball. He was", hooks=hooks, do_sample=False, max_new_tokens=12)))

# %% Compute a prefix once, and continue it in forks of its KV cache.
prefix = model.cache()
model.logits(ids, cache=prefix)
for name in (" ball", " cup"):
    fork = prefix.fork()
    after = model.logits(model.encode(name), cache=fork)
    print(f"{text}{name} ->", repr(model.decode([int(after.argmax())])))
