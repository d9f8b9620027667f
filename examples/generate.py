"""Generation from Python: one prompt, many prompts, streaming, sampling and beam search.

usage: python examples/generate.py [MODEL]     folder, file or name on the Hub [default: the built-in model]

A notebook as a plain script: editors that support `# %%` show its parts as cells.
"""

import sys

from candle_gpt2 import Model

# %% Open a model. Its repr shows parameters, precision, size and threads.
model = Model.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else None)
print(model)

# %% Generate a completion. The same prompt, options and seed give the same completion everywhere.
prompt = "One day"
text = model.generate(prompt, max_new_tokens=40, temperature=0.8, seed=7)
print(prompt + text)
assert text == model.generate(prompt, max_new_tokens=40, temperature=0.8, seed=7)

# %% Stream the same completion.
print(prompt, end="")
for piece in model.stream(prompt, max_new_tokens=40, temperature=0.8, seed=7):
    print(piece, end="", flush=True)
print()

# %% Generate from several prompts in a batch, each with its own seed. Completions do not depend on the batch.
prompts = ["One day", "Once there was", "In the", "Mia and Tom"]
for prompt, text in zip(prompts, model.generate(prompts, max_new_tokens=12, seed=[1, 2, 3, 4])):
    print(f"{prompt!r} -> {text!r}")

# %% Greedy decoding, beam search, and a stop string.
print(repr(model.generate("One day, Mia", do_sample=False, max_new_tokens=12)))
print(repr(model.generate("One day, Mia", num_beams=5, max_new_tokens=12)))
print(repr(model.generate("One day, Mia", do_sample=False, stop=[","], max_new_tokens=40)))

# %% Get the stop reason and the token ids.
print(model.generate("Once", max_new_tokens=8, seed=1, details=True))

# %% Bias the logits to ban all tokens that contain the letter e.
with_e = {token: float("-inf") for token in range(model.config["vocab_size"]) if "e" in model.decode([token])}
lipogram = model.generate("One day", max_new_tokens=20, seed=3, logit_bias=with_e)
print(repr(lipogram))
assert "e" not in lipogram

# %% Score a text.
score = model.score("One day, Mia went to the park with her friend Tom.")
print(f"{len(score['ids'])} tokens, loss {score['loss']:.3f}, perplexity {score['perplexity']:.1f}")
