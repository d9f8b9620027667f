"""Texts from Python: one, many, streamed, drawn and searched for.

usage: python examples/generate.py [MODEL]     a folder, a file or a name on the Hub; without one the model inside the package

A notebook as a plain script: editors that know `# %%` show its parts as cells.
"""

import sys

from candle_gpt2 import Model

# %% A model. Its line says what it is: parameters, precision, bytes, threads.
model = Model.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else None)
print(model)

# %% A text. The same prompt, options and seed give the same text everywhere.
prompt = "One day"
text = model.generate(prompt, max_new_tokens=40, temperature=0.8, seed=7)
print(prompt + text)
assert text == model.generate(prompt, max_new_tokens=40, temperature=0.8, seed=7)

# %% The same in pieces as they come.
print(prompt, end="")
for piece in model.stream(prompt, max_new_tokens=40, temperature=0.8, seed=7):
    print(piece, end="", flush=True)
print()

# %% Many prompts at once, each with a seed of its own; a text does not depend on those beside it.
prompts = ["One day", "Once there was", "In the", "Mia and Tom"]
for prompt, text in zip(prompts, model.generate(prompts, max_new_tokens=12, seed=[1, 2, 3, 4])):
    print(f"{prompt!r} -> {text!r}")

# %% The most probable token each time, the best of five beams, and a text that ends at a word.
print(repr(model.generate("One day, Mia", do_sample=False, max_new_tokens=12)))
print(repr(model.generate("One day, Mia", num_beams=5, max_new_tokens=12)))
print(repr(model.generate("One day, Mia", do_sample=False, stop=[","], max_new_tokens=40)))

# %% Why a text ended, and which tokens it has.
print(model.generate("Once", max_new_tokens=8, seed=1, details=True))

# %% A bias on the logits: no token that holds the letter e.
with_e = {token: float("-inf") for token in range(model.config["vocab_size"]) if "e" in model.decode([token])}
lipogram = model.generate("One day", max_new_tokens=20, seed=3, logit_bias=with_e)
print(repr(lipogram))
assert "e" not in lipogram

# %% How probable a text is.
score = model.score("One day, Mia went to the park with her friend Tom.")
print(f"{len(score['ids'])} tokens, loss {score['loss']:.3f}, perplexity {score['perplexity']:.1f}")
