"""Benchmarks from Python: what a model makes of data, by protocols whose names say what is scored and divided by what.

usage: python examples/evaluate.py [MODEL]     a folder, a file or a name on the Hub; without one the model inside the package

A notebook as a plain script: editors that know `# %%` show its parts as cells. It needs no network: the data are a few lines of its own.
"""

import json
import sys
import tempfile
from pathlib import Path

import candle_gpt2
from candle_gpt2 import Model

name = sys.argv[1] if len(sys.argv) > 1 else None
model = Model.from_pretrained(name)
folder = Path(tempfile.mkdtemp())


def show(report: dict) -> None:
    """The figures of a report, with what others published of a model of this size."""
    dataset = report["dataset"]
    print(f"{report['protocol']}: {dataset['items']} items, {report['tokens_read']} tokens in {report['seconds']:.1f} s")
    for metric in report["metrics"]:
        spread = "" if metric["stderr"] is None else f" ± {metric['stderr']:.3f}"
        published = [f"{other['value']} by {other['source']}" for other in metric["published"]]
        print(f"  {metric['name']:20} {metric['value']:9.3f}{spread}", *published)


# %% Which protocols there are, and where their data come from.
for protocol in candle_gpt2.protocols()[:3]:
    print(protocol["protocol"], "-", protocol["about"])

# %% The last word of a passage, as LAMBADA asks for it. Without data it would be the published file, from the Hub.
passages = folder / "passages.jsonl"
texts = [
    "Tom had a red ball. Mia took the red ball",
    "Mia called Tom, and Tom called Mia",
    "Ben opened the box. There was nothing in the box",
]
passages.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
show(model.evaluate("lambada:lm-eval", passages))

# %% Any text: bits per byte do not depend on the tokenizer.
text = folder / "text.txt"
text.write_text("One day, Mia went to the park with her friend Tom. Tom had a red ball.\n" * 8)
show(model.evaluate("text:bits", text))

# %% What rounding the weights costs: the model in q4 beside the model that is here.
rounded = Model.from_pretrained(name, dtype="q4")
report = rounded.evaluate("kl", text, base=model)
found = {metric["name"]: metric["value"] for metric in report["metrics"]}
print(f"q4 beside {report['base']['dtype']}: KL {found['kl']:.4f} nats, the same top token {found['same_top']:.1%}")

# %% The result for each item is kept line by line; another run resumes it, or is compared with it item by item.
items = folder / "items.jsonl"
model.evaluate("lambada:lm-eval", passages, limit=1, items=items)
model.evaluate("lambada:lm-eval", passages, items=items, resume=True)
for line in items.read_text().splitlines():
    item = json.loads(line)
    print(f"item {item['index']}: log-probability of the last word {item['choices'][0]['logprob']:.2f}")
against = rounded.evaluate("lambada:lm-eval", passages, against=items)["against"]
print(f"in q4 {against['answers'][0]['changed']} of {against['items']} answers are others")
