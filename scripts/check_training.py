"""Checks what `gpt2 train` wrote: transformers loads it without a warning and finds the same held-out loss, and of a classifier
the same accuracy; PEFT finds the same logits from the adapters as transformers from the merged weights.

usage: python scripts/check_training.py FOLDER --data FILE --context T [--task text|classify|answer] [--base CHECKPOINT]

FILE is the file of `--data` (text, a .tsv without names of labels, a .jsonl of answers), T the context of the training. --base names
the checkpoint of `--init`, for a folder with adapters.
"""

import argparse
import collections
import json
import logging
import pathlib
import sys
import warnings

import torch
import transformers

HELD_OUT = 0.1
TOLERANCE = 1e-4


class Complaints(logging.Handler):
    """Keeps every warning of a library."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def held_out_text(path):
    """The last tenth of a text from the next line on, as `gpt2 train` cuts it."""
    data = path.read_bytes()
    return data[data.index(b"\n", int(len(data) * (1 - HELD_OUT))) + 1:].decode()


@torch.no_grad()
def loss_of(model, ids, context):
    total = 0.0
    for start in range(0, len(ids) - 1, context):
        window = torch.tensor([ids[start:start + context + 1]])
        logprobs = model(window[:, :-1]).logits.double().log_softmax(-1)
        total -= logprobs.gather(-1, window[:, 1:, None]).sum().item()
    return total / (len(ids) - 1)


def labelled_rows(path):
    """The last tenth of the rows of each label, as `gpt2 train --task classify` holds them out."""
    rows = [line.split("\t", 1) for line in path.read_text().splitlines() if line.strip()]
    left = collections.Counter(label for label, _ in rows)
    held_out = {label: round(count * HELD_OUT) for label, count in left.items()}
    for label, text in rows:
        if left[label] <= held_out[label]:
            yield label, text
        left[label] -= 1


@torch.no_grad()
def loss_and_accuracy_of_labels(model, tokenizer, rows, context):
    """Row by row, so that nothing is padded."""
    losses, hits = [], []
    for label, text in rows:
        ids = tokenizer(text)["input_ids"][-context:]
        logits = model(torch.tensor([ids])).logits[0].double()
        losses.append(-logits.log_softmax(-1)[model.config.label2id[label]].item())
        hits.append(model.config.id2label[logits.argmax().item()] == label)
    return sum(losses) / len(losses), sum(hits) / len(hits)


@torch.no_grad()
def loss_of_answers(model, tokenizer, path, context):
    """The mean loss of the tokens of the last tenth's completions, with their ends."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    total, count = 0.0, 0
    for row in rows[len(rows) - round(len(rows) * HELD_OUT):]:
        prompt, answer = (tokenizer(row[key])["input_ids"] for key in ("prompt", "completion"))
        answer = answer + [model.config.eos_token_id]
        ids = (prompt + answer)[-(context + 1):]
        logprobs = model(torch.tensor([ids[:-1]])).logits[0, -len(answer):].double().log_softmax(-1)
        total -= logprobs.gather(-1, torch.tensor(answer)[:, None]).sum().item()
        count += len(answer)
    return total / count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--task", choices=["text", "classify", "answer"], default="text")
    parser.add_argument("--base", type=pathlib.Path)
    arguments = parser.parse_args()
    is_classifier = arguments.task == "classify"
    auto = transformers.AutoModelForSequenceClassification if is_classifier else transformers.AutoModelForCausalLM
    complaints = Complaints()
    logging.getLogger("transformers").addHandler(complaints)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = auto.from_pretrained(arguments.folder, dtype=torch.float32).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.folder)
    complaints.messages += [str(warning.message) for warning in caught]
    failures = [f"a warning: {message}" for message in complaints.messages]

    log = [json.loads(line) for line in (arguments.folder / "log.jsonl").read_text().splitlines()]
    best = min((entry for entry in log if "held_out_loss" in entry), key=lambda entry: entry["held_out_loss"])
    expected = best["held_out_loss"]
    if is_classifier:
        rows = list(labelled_rows(arguments.data))
        found, accuracy = loss_and_accuracy_of_labels(model, tokenizer, rows, arguments.context)
        print(f"accuracy of {len(rows)} held-out rows: ours {best['accuracy']:.6f}, transformers {accuracy:.6f}")
        if accuracy != best["accuracy"]:
            failures.append("the accuracies differ")
        ids = tokenizer(rows[0][1])["input_ids"]
    elif arguments.task == "answer":
        found = loss_of_answers(model, tokenizer, arguments.data, arguments.context)
        ids = tokenizer(json.loads(arguments.data.read_text().splitlines()[0])["prompt"])["input_ids"]
    else:
        ids = tokenizer(held_out_text(arguments.data))["input_ids"] + [model.config.eos_token_id]
        found = loss_of(model, ids, arguments.context)
    print(f"held-out loss: ours {expected:.6f}, transformers {found:.6f}")
    if abs(found - expected) > TOLERANCE:
        failures.append("the losses differ")

    if arguments.base:
        import peft

        labels = dict(id2label=model.config.id2label, label2id=model.config.label2id) if is_classifier else {}
        base = auto.from_pretrained(arguments.base, dtype=torch.float32, **labels)
        adapted = peft.PeftModel.from_pretrained(base, arguments.folder / "adapter").eval()
        window = torch.tensor([ids[:arguments.context]])
        with torch.no_grad():
            difference = (adapted(window).logits - model(window).logits).abs().max().item()
        print(f"logits: PEFT and merged differ by {difference:.2e}")
        if difference > TOLERANCE:
            failures.append("adapters and merged weights differ")
    sys.exit("\n".join(failures) or None)


if __name__ == "__main__":
    main()
