"""Looking inside from Python: activations, hooks that replace them, the looks of `gpt2 look`, steering, and a cache that is forked.

usage: python examples/look_inside.py [MODEL]     a folder, a file or a name on the Hub; without one the model inside the package

A notebook as a plain script: editors that know `# %%` show its parts as cells, and there the pictures show themselves.
"""

import sys

import numpy as np
from candle_gpt2 import Model

model = Model.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else None)
text = "A red ball and a blue cup, a red"
ids = model.encode(text)
tokens = model.str_tokens(text)

# %% Every place has a name, TransformerLens'; names may hold `*`.
print(len(model.hook_names), "places, such as", model.hook_names[:3])
logits, cache = model.run_with_cache(text, names=["blocks.*.attn.hook_pattern", "blocks.*.hook_resid_post"])
print("logits", logits.shape)
for name, values in list(cache.items())[:2]:
    print(name, values.shape)

# %% Which head looks most at the token before?
patterns = {name: value for name, value in cache.items() if name.endswith("hook_pattern")}
previous = {
    (layer, head): float(np.diagonal(pattern[0, head], offset=-1).mean())
    for layer, pattern in enumerate(patterns.values())
    for head in range(pattern.shape[1])
}
head = max(previous, key=previous.get)
print(f"head {head[0]}.{head[1]} gives {previous[head]:.2f} to the token before")


# %% A hook replaces what is at a place: here a head's output is left out.
def leave_out(z, name):
    z = z.copy()
    z[0, :, head[1]] = 0
    return z


without = model.logits(ids, hooks=[(f"blocks.{head[0]}.attn.hook_z", leave_out)])
with_it = model.logits(ids)
best = int(with_it.argmax())
print(f"the logit of {model.decode([best])!r}, the best next token: {with_it[best]:.3f}, without the head {without[best]:.3f}")

# %% What each layer would predict if it were the last; a notebook shows the picture, and `save` writes it.
lens = model.logit_lens(text)
lens

# %%
top = np.asarray(lens.details["top_ids"])
for layer in range(top.shape[0]):
    print(f"layer {layer}: after {tokens[-1]!r} comes {model.decode([int(top[layer, -1, 0])])!r}")

# %% Where heads attend.
model.attention(text, layers=[head[0]])

# %% Which parts of the model make the next token, and what it becomes without each head.
parts = model.attribute(text, answer=best)
strongest = int(np.abs(parts.values).argmax())
print(f"{parts.axes['part'][strongest]} adds {parts.values[strongest]:.2f} of {parts.details['total']:.2f}")
without = model.ablate(text, answer=best)
layer, number = np.unravel_index(np.abs(without.values).argmax(), without.values.shape)
print(f"without head {layer}.{number} the logit changes by {without.values[layer, number]:.2f}")
without

# %% Which tokens it depends on.
weights = model.saliency(text, answer=best)
print("of most weight:", repr(tokens[int(weights.values.argmax())]))

# %% What carries a prediction from one text over to another of as many tokens.
other = [*ids[:3], ids[-1], *ids[4:]]
patched = model.patch(ids, other, answer=best)
print("as much as these tokens of the input:", dict(zip(tokens, patched.values[0].round(2).tolist(), strict=True)))
patched

# %% Steering: a direction is added to the residual stream of whatever the model writes.
steering = model.steering((" happy", " sad"), layer=len(patterns) // 2, scale=4)
for hooks in (None, [steering]):
    print(repr(model.generate("One day, Mia was", hooks=hooks, do_sample=False, max_new_tokens=12)))

# %% A prefix is read once: each fork continues it.
prefix = model.cache()
model.logits(ids, cache=prefix)
for name in (" ball", " cup"):
    fork = prefix.fork()
    after = model.logits(model.encode(name), cache=fork)
    print(f"{text}{name} ->", repr(model.decode([int(after.argmax())])))
