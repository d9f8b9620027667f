"""Interactive pictures in the book, `docs/src/pictures/{temperature,head}.html`.

They are templates of `docs/pictures` with numbers of the built-in model. To regenerate them, run
`WRITE_PICTURES=1 python -m pytest python/tests/test_pictures.py`.
"""

import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

from support import FIXTURES

BOOK = FIXTURES.parents[2] / "docs"
PROMPT = "One day, Mia found a"
REPEATED = "A red ball and a blue cup, a red"


def temperature(model):
    """Computes all logits for the next token."""
    logits = model.logits(PROMPT, last_only=True)
    tokens = model.str_tokens(range(len(logits)))
    return {"prompt": PROMPT, "tokens": tokens, "logits": [round(float(logit), 2) for logit in logits]}


def head(model):
    """Computes query-key products for the head with the strongest induction attention at the last token."""
    tokens = model.str_tokens(REPEATED)
    names = [f"blocks.*.attn.hook_{part}" for part in ("q", "k", "pattern")]
    cache = model.run_with_cache(REPEATED, names=names)[1]
    layers = len(cache) // 3
    parts = {part: np.stack([cache[f"blocks.{layer}.attn.hook_{part}"][0] for layer in range(layers)]) for part in ("q", "k", "pattern")}
    attention = parts["pattern"][:, :, -1, tokens.index(tokens[-1]) + 1]
    layer, number = np.unravel_index(attention.argmax(), attention.shape)
    q, k = parts["q"][layer, :, number], parts["k"][layer, :, number]
    return {"head": f"{layer}.{number}", "tokens": tokens, "width": q.shape[-1], "products": np.round(q @ k.T, 2).tolist()}


BUILDERS = {"temperature": temperature, "head": head}


@pytest.mark.parametrize("name", BUILDERS)
def test_pictures_show_the_built_in_model(name, model):
    data = BUILDERS[name](model)
    template = (BOOK / "pictures" / f"{name}.html").read_text(encoding="utf-8")
    file = BOOK / "src" / "pictures" / f"{name}.html"
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    if os.environ.get("WRITE_PICTURES"):
        file.write_text(template.replace("@@data@@", text), encoding="utf-8")
    advice = f"{file.name} is stale: WRITE_PICTURES=1 python -m pytest python/tests/test_pictures.py"
    begin, end = template.split("@@data@@")
    shown = file.read_text(encoding="utf-8")
    assert shown.startswith(begin) and shown.endswith(end), advice
    stored = json.loads(shown[len(begin) : len(shown) - len(end)])
    assert stored.keys() == data.keys() and stored["tokens"] == data["tokens"] and stored.get("head") == data.get("head"), advice
    # Tolerance for rounding to two decimals and for another order of summation.
    for key in data.keys() & {"logits", "products", "width"}:
        np.testing.assert_allclose(stored[key], data[key], atol=0.011, err_msg=advice)
    assert not re.search(r"https?://|@import|src=", shown), "the page loads nothing from elsewhere"


@pytest.mark.parametrize("name", BUILDERS)
def test_picture_scripts_match_numpy(name, model):
    """Runs the script without a browser, up to the drawing code."""
    if shutil.which("node") is None:
        pytest.skip("node is not on the path: https://nodejs.org")
    page = (BOOK / "src" / "pictures" / f"{name}.html").read_text(encoding="utf-8")
    script = page.split("<script>")[1].split("</script>")[0]
    if name == "head":
        script = script[: script.index("// -0.4")] + "console.log(JSON.stringify(weights))"
        found = json.loads(subprocess.run(["node", "-e", script.replace("document.", "0 && document.")], capture_output=True, check=True).stdout)
        data = head(model)
        scores = np.array(data["products"]) / data["width"] ** 0.5
        scores[np.triu_indices(len(scores), 1)] = -np.inf
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        np.testing.assert_allclose(found, powers / powers.sum(-1, keepdims=True), atol=0.01)
        return
    # Mock document with the few elements that the script uses.
    fake = """
      const made = name => ({ name, style: {}, children: [], append(...more) { this.children.push(...more); }, replaceChildren(...all) { this.children = all; } });
      const inputs = { temperature: { value: "0.5", nextElementSibling: {} }, top_p: { value: "0.9", nextElementSibling: {} } };
      const rest = { prompt: made(), said: made() }, table = made();
      const document = { getElementById: name => inputs[name] || rest[name], querySelector: () => table, querySelectorAll: () => Object.values(inputs),
        createElement: made, addEventListener() {} };
    """
    shown = "console.log(JSON.stringify([table.children.map(row => row.children.map(cell => cell.textContent)), rest.said.textContent]))"
    rows, summary = json.loads(subprocess.run(["node", "-e", fake + script + shown], capture_output=True, check=True).stdout)
    logits = np.sort(np.array(temperature(model)["logits"]))[::-1] / 0.5
    probabilities = np.exp(logits - logits[0])
    probabilities /= probabilities.sum()
    count = int(np.searchsorted(np.cumsum(probabilities), 0.9) + 1)
    probabilities = probabilities[:count] / probabilities[:count].sum()
    assert abs(int(summary.split()[0]) - count) <= 1
    assert abs(float(rows[0][2].removesuffix(" %")) - 100 * probabilities[0]) < 1
