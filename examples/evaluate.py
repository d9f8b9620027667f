"""Benchmarks from Python, under named protocols that fix data, scoring and normalization.

usage: python examples/evaluate.py [MODEL]     folder, file or name on the Hub [default: the built-in model]

A notebook as a plain script: editors that support `# %%` show its parts as cells. It works offline with a few lines of data.
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
    """Prints the metrics of a report, with published values for models of this size."""
    dataset = report["dataset"]
    print(f"{report['protocol']}: {dataset['items']} items, {report['tokens_read']} tokens in {report['seconds']:.1f} s")
    for metric in report["metrics"]:
        spread = "" if metric["stderr"] is None else f" ± {metric['stderr']:.3f}"
        published = [f"{other['value']} by {other['source']}" for other in metric["published"]]
        print(f"  {metric['name']:20} {metric['value']:9.3f}{spread}", *published)


# %% List the protocols.
for protocol in candle_gpt2.protocols()[:3]:
    print(protocol["protocol"], "-", protocol["about"])

# %% Predict the last word of a passage, as in LAMBADA. The default data is the published file on the Hub.
passages = folder / "passages.jsonl"
texts = [
    "Tom had a red ball. Mia took the red ball",
    "Mia called Tom, and Tom called Mia",
    "Ben opened the box. There was nothing in the box",
]
passages.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
show(model.evaluate("lambada:lm-eval", passages))

# %% Compute bits per byte of any text. They do not depend on the tokenizer.
text = folder / "text.txt"
text.write_text("One day, Mia went to the park with her friend Tom. Tom had a red ball.\n" * 8)
show(model.evaluate("text:bits", text))

# %% Measure the cost of quantization: compare the model in q4 with the model above.
rounded = Model.from_pretrained(name, dtype="q4")
report = rounded.evaluate("kl", text, base=model)
found = {metric["name"]: metric["value"] for metric in report["metrics"]}
print(f"q4 versus {report['base']['dtype']}: KL {found['kl']:.4f} nats, the same top token {found['same_top']:.1%}")

# %% Log the result of each item. Another run can resume from the log, or be compared with it item by item.
items = folder / "items.jsonl"
model.evaluate("lambada:lm-eval", passages, limit=1, items=items)
model.evaluate("lambada:lm-eval", passages, items=items, resume=True)
for line in items.read_text().splitlines():
    item = json.loads(line)
    print(f"item {item['index']}: log-probability of the last word {item['choices'][0]['logprob']:.2f}")
against = rounded.evaluate("lambada:lm-eval", passages, against=items)["against"]
print(f"in q4 {against['answers'][0]['changed']} of {against['items']} answers differ")
