"""What `gpt2 train` wrote: transformers loads it without a warning and finds the same held-out loss, and of a classifier the same
accuracy; PEFT finds the same logits from the adapters as transformers from the merged weights.

The trainings are short ones of the tiny checkpoint, made here; or --trained names a folder, with --data (text, a .tsv without names of
labels, a .jsonl of answers), --context and --task of its training, and --base, the checkpoint of `--init`, where it has adapters.
"""

import collections
import json
import logging

import pytest
from paths import FIXTURES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HELD_OUT = 0.1
TOLERANCE = 1e-4
TINY = FIXTURES / "tiny-checkpoint"
CONTEXT = 32
WAYS = {"all": [], "blocks": ["--train-blocks", "1"], "adapters": ["--lora-rank", "2", "--lora-targets", "c_attn,c_fc"]}


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


def write_data(task, folder):
    words = (FIXTURES / "evaluation" / "text.txt").read_text(encoding="utf-8").split()
    lines = [" ".join(words[place:place + 6]) for place in range(0, len(words) - 6, 3)]
    data = folder / {"text": "text.txt", "classify": "rows.tsv", "answer": "rows.jsonl"}[task]
    written = {
        "text": lambda place, line: line,
        "classify": lambda place, line: f"{('sea', 'lamp', 'fog')[place % 3]}\t{line}",
        "answer": lambda place, line: json.dumps({"prompt": line, "completion": f" {words[place]}"}),
    }
    data.write_text("".join(written[task](place, line) + "\n" for place, line in enumerate(lines)), encoding="utf-8")
    return data


def pytest_generate_tests(metafunc):
    cases = [(task, way) for task in ("text", "classify", "answer") for way in WAYS]
    if metafunc.config.getoption("trained"):
        cases = [(metafunc.config.getoption("task"), "as given")]
    metafunc.parametrize("task, way", cases)


def test_transformers_and_peft_find_the_same(request, option, tmp_path, caplog, recwarn, task, way):
    folder, data, context, base = (option(name) for name in ("trained", "data", "context", "base"))
    if not folder:
        folder, data, context, base = tmp_path / "trained", write_data(task, tmp_path), CONTEXT, TINY if way == "adapters" else None
        sizes = ("--steps", 6, "--batch-size", 4, "--context", context, "--eval-every", 3)
        request.getfixturevalue("program")("train", "--task", task, "--data", data, "--init", TINY, "--out", folder, *sizes, *WAYS[way])
    is_classifier = task == "classify"
    auto = transformers.AutoModelForSequenceClassification if is_classifier else transformers.AutoModelForCausalLM
    logging.getLogger("transformers").addHandler(caplog.handler)
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    logging.getLogger("transformers").removeHandler(caplog.handler)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] + [str(each.message) for each in recwarn]
    assert not told

    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    best = min((entry for entry in log if "held_out_loss" in entry), key=lambda entry: entry["held_out_loss"])
    if is_classifier:
        rows = list(labelled_rows(data))
        found, accuracy = loss_and_accuracy_of_labels(model, tokenizer, rows, context)
        assert accuracy == best["accuracy"]
        ids = tokenizer(rows[0][1])["input_ids"]
    elif task == "answer":
        found = loss_of_answers(model, tokenizer, data, context)
        ids = tokenizer(json.loads(data.read_text().splitlines()[0])["prompt"])["input_ids"]
    else:
        ids = tokenizer(held_out_text(data))["input_ids"] + [model.config.eos_token_id]
        found = loss_of(model, ids, context)
    assert found == pytest.approx(best["held_out_loss"], rel=0, abs=TOLERANCE)

    if base:
        peft = pytest.importorskip("peft")
        labels = dict(id2label=model.config.id2label, label2id=model.config.label2id) if is_classifier else {}
        adapted = peft.PeftModel.from_pretrained(auto.from_pretrained(base, dtype=torch.float32, **labels), folder / "adapter").eval()
        window = torch.tensor([ids[:context]])
        with torch.no_grad():
            torch.testing.assert_close(adapted(window).logits, model(window).logits, rtol=0, atol=TOLERANCE)
