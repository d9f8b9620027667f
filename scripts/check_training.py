"""Checks what `gpt2 train` wrote: transformers loads it without a warning and finds the same held-out loss; PEFT finds the
same logits from the adapters as transformers from the merged weights.

usage: python scripts/check_training.py FOLDER --data TEXT --context T [--base CHECKPOINT]

TEXT is the file of `--data`, T the context of the training. --base names the checkpoint of `--init`, for a folder with
adapters; it needs the package peft besides scripts/requirements.txt.
"""

import argparse
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--base", type=pathlib.Path)
    arguments = parser.parse_args()
    complaints = Complaints()
    logging.getLogger("transformers").addHandler(complaints)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = transformers.AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.folder)
    complaints.messages += [str(warning.message) for warning in caught]
    failures = [f"a warning: {message}" for message in complaints.messages]

    ids = tokenizer(held_out_text(arguments.data))["input_ids"] + [model.config.eos_token_id]
    found = loss_of(model, ids, arguments.context)
    log = [json.loads(line) for line in (arguments.folder / "log.jsonl").read_text().splitlines()]
    expected = min(entry["held_out_loss"] for entry in log if "held_out_loss" in entry)
    print(f"held-out loss: ours {expected:.6f}, transformers {found:.6f}")
    if abs(found - expected) > TOLERANCE:
        failures.append("the losses differ")

    if arguments.base:
        import peft

        base = transformers.AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.float32)
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
