"""Shows that transformers reads the classifiers that `gpt2 convert` writes, and gives the logits of `gpt2 classify`.

usage: python scripts/check_heads.py PROGRAM [CHECKPOINT …]      (default: the fixtures, and seeded models of other sizes)

PROGRAM is the built gpt2. Needs scripts/requirements.txt (of it torch and transformers). Each checkpoint is classified as it is and
as it is written in f32, f16 and bf16, where transformers computes with the written numbers in f32. Prints a line for each check with the
largest difference; exit code 1 if one is above 1e-4.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from export_heads import HEADS, seeded
from export_reference import FIXTURES

LARGEST = 1e-4
ROWS = [[5, 299, 1, 17, 130], [42], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]]


def run(program, *arguments):
    output = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    assert output.returncode == 0, (arguments, output.stderr)
    return output.stdout


def ours(program, path, folder):
    """The logits of the rows, in the order of labels, tokens and choices."""
    file = folder / "rows.jsonl"
    config = json.loads((path / "config.json").read_text())
    names = [config["id2label"][str(number)] for number in range(len(config["id2label"]))] if "id2label" in config else []
    is_double = config["architectures"] == ["GPT2DoubleHeadsModel"]
    file.write_text("".join(json.dumps({"ids": row}) + "\n" for row in ([ROWS] if is_double else ROWS)))
    lines = [json.loads(line) for line in run(program, "classify", "--model", path, "--prompts-file", file).splitlines()]

    def in_order(labels):
        logits = {label["label"]: label["logit"] for label in labels}
        return [logits[name] for name in names]

    if is_double:
        return [choice["logit"] for choice in sorted(lines[0]["choices"], key=lambda choice: choice["index"])]
    if "tokens" in lines[0]:
        return [logit for line in lines for token in line["tokens"] for logit in in_order(token["labels"])]
    return [logit for line in lines for logit in in_order(line["labels"])]


@torch.no_grad()
def theirs(path):
    architecture = json.loads((path / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32).eval()
    if architecture == "GPT2DoubleHeadsModel":
        # One row at a time, since other summaries than `cls_index` take no axis of choices.
        return [model(torch.tensor([row])).mc_logits.item() for row in ROWS]
    return [logit for row in ROWS for logit in model(torch.tensor([row])).logits.flatten().tolist()]


def seeded_models(folder):
    """Models of other sizes, with a head of its own, other activations and other summaries."""
    sizes = dict(vocab_size=311, n_positions=37, n_embd=36, n_layer=2, n_head=3, n_inner=52, bos_token_id=0, eos_token_id=0)
    cases = {
        "one label": (transformers.GPT2ForSequenceClassification, dict(num_labels=1, pad_token_id=0)),
        "eleven labels": (transformers.GPT2ForSequenceClassification, dict(num_labels=11, activation_function="gelu")),
        "tokens": (transformers.GPT2ForTokenClassification, dict(num_labels=4, scale_attn_by_inverse_layer_idx=True)),
        "choices": (transformers.GPT2DoubleHeadsModel, dict(summary_activation="tanh", tie_word_embeddings=False)),
        "choices by mean": (transformers.GPT2DoubleHeadsModel, dict(summary_type="mean", tie_word_embeddings=True)),
    }
    for seed, (name, (model, options)) in enumerate(cases.items()):
        options.setdefault("tie_word_embeddings", True)
        seeded(model(transformers.GPT2Config(**sizes, **options)), seed).save_pretrained(folder / name)
        yield folder / name


def main():
    transformers.logging.set_verbosity_error()
    program = pathlib.Path(sys.argv[1]).resolve()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        named = [pathlib.Path(path) for path in sys.argv[2:]]
        paths = named or [*(path for path in sorted(HEADS.iterdir()) if path.is_dir()), *seeded_models(folder)]
        for number, path in enumerate(paths):
            targets = {"as it is": path}
            for dtype in ("f32", "f16", "bf16"):
                target = folder / f"{number}-{dtype}"
                run(program, "convert", path, target, "--dtype", dtype, "--tokenizer", FIXTURES / "tiny-checkpoint" / "tokenizer.json")
                targets[dtype] = target
            for what, target in targets.items():
                found, expected = ours(program, target, folder), theirs(target)
                assert len(found) == len(expected) > 0, (path, len(found), len(expected))
                difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
                failed |= not difference <= LARGEST
                print(f"{path.name}, {what}: {len(found)} logits, largest difference {difference:.1e}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
