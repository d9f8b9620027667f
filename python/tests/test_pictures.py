"""The interactive pictures of the course, `docs/src/pictures/{temperature,head}.html`: templates of `docs/pictures`, with numbers of the
model inside the package.

`WRITE_PICTURES=1 python -m pytest python/tests/test_pictures.py` writes them anew.
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
    """All logits of the next token."""
    logits = model.logits(PROMPT, last_only=True)
    tokens = model.str_tokens(range(len(logits)))
    return {"prompt": PROMPT, "tokens": tokens, "logits": [round(float(logit), 2) for logit in logits]}


def head(model):
    """Products of queries and keys of the head that looks most from the last token at what followed its earlier copy."""
    tokens = model.str_tokens(REPEATED)
    names = [f"blocks.*.attn.hook_{part}" for part in ("q", "k", "pattern")]
    cache = model.run_with_cache(REPEATED, names=names)[1]
    layers = len(cache) // 3
    of = {part: np.stack([cache[f"blocks.{layer}.attn.hook_{part}"][0] for layer in range(layers)]) for part in ("q", "k", "pattern")}
    looks = of["pattern"][:, :, -1, tokens.index(tokens[-1]) + 1]
    layer, number = np.unravel_index(looks.argmax(), looks.shape)
    q, k = of["q"][layer, :, number], of["k"][layer, :, number]
    return {"head": f"{layer}.{number}", "tokens": tokens, "width": q.shape[-1], "products": np.round(q @ k.T, 2).tolist()}


MADE = {"temperature": temperature, "head": head}


@pytest.mark.parametrize("name", MADE)
def test_pictures_show_the_model_inside_the_package(name, model):
    data = MADE[name](model)
    template = (BOOK / "pictures" / f"{name}.html").read_text(encoding="utf-8")
    file = BOOK / "src" / "pictures" / f"{name}.html"
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    if os.environ.get("WRITE_PICTURES"):
        file.write_text(template.replace("@@data@@", text), encoding="utf-8")
    how = f"{file.name} is stale: WRITE_PICTURES=1 python -m pytest python/tests/test_pictures.py"
    begin, end = template.split("@@data@@")
    shown = file.read_text(encoding="utf-8")
    assert shown.startswith(begin) and shown.endswith(end), how
    kept = json.loads(shown[len(begin) : len(shown) - len(end)])
    assert kept.keys() == data.keys() and kept["tokens"] == data["tokens"] and kept.get("head") == data.get("head"), how
    # Rounded to two decimals, of sums in another order.
    for key in data.keys() & {"logits", "products", "width"}:
        np.testing.assert_allclose(kept[key], data[key], atol=0.011, err_msg=how)
    assert not re.search(r"https?://|@import|src=", shown), "a page that asks for nothing"


@pytest.mark.parametrize("name", MADE)
def test_their_scripts_compute_what_numpy_does(name, model):
    """The script without a browser: what it computes before it draws."""
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
    # A document of the few elements that the script asks for.
    fake = """
      const made = name => ({ name, style: {}, children: [], append(...more) { this.children.push(...more); }, replaceChildren(...all) { this.children = all; } });
      const inputs = { temperature: { value: "0.5", nextElementSibling: {} }, top_p: { value: "0.9", nextElementSibling: {} } };
      const rest = { prompt: made(), said: made() }, table = made();
      const document = { getElementById: name => inputs[name] || rest[name], querySelector: () => table, querySelectorAll: () => Object.values(inputs),
        createElement: made, addEventListener() {} };
    """
    shown = "console.log(JSON.stringify([table.children.map(row => row.children.map(cell => cell.textContent)), rest.said.textContent]))"
    rows, said = json.loads(subprocess.run(["node", "-e", fake + script + shown], capture_output=True, check=True).stdout)
    logits = np.sort(np.array(temperature(model)["logits"]))[::-1] / 0.5
    shares = np.exp(logits - logits[0])
    shares /= shares.sum()
    kept = int(np.searchsorted(np.cumsum(shares), 0.9) + 1)
    shares = shares[:kept] / shares[:kept].sum()
    assert abs(int(said.split()[0]) - kept) <= 1
    assert abs(float(rows[0][2].removesuffix(" %")) - 100 * shares[0]) < 1
