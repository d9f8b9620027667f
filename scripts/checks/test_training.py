"""Output of `gpt2 train`: transformers loads it without warnings and computes the same held-out loss.

For a classifier, the accuracy must agree too. For adapters, PEFT must compute the same logits as transformers
from the merged weights. By default the checks train the tiny checkpoint briefly. Alternatively, --trained
names a folder, with the --data (text, a .tsv without a header line, a .jsonl of answers), --context and
--task of its training, and for adapters --base, the checkpoint of `--init`.
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
METHODS = {"all": [], "blocks": ["--train-blocks", "1"], "adapters": ["--lora-rank", "2", "--lora-targets", "c_attn,c_fc"]}


def held_out_text(path):
    """Returns the last tenth of a text, from the start of a line, as `gpt2 train` splits it."""
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


def labeled_rows(path):
    """Yields the last tenth of the rows with each label, which `gpt2 train --task classify` holds out."""
    rows = [line.split("\t", 1) for line in path.read_text().splitlines() if line.strip()]
    left = collections.Counter(label for label, _ in rows)
    held_out = {label: round(count * HELD_OUT) for label, count in left.items()}
    for label, text in rows:
        if left[label] <= held_out[label]:
            yield label, text
        left[label] -= 1


@torch.no_grad()
def loss_and_accuracy_of_labels(model, tokenizer, rows, context):
    """Evaluates one row at a time, without padding."""
    losses, hits = [], []
    for label, text in rows:
        ids = tokenizer(text)["input_ids"][-context:]
        logits = model(torch.tensor([ids])).logits[0].double()
        losses.append(-logits.log_softmax(-1)[model.config.label2id[label]].item())
        hits.append(model.config.id2label[logits.argmax().item()] == label)
    return sum(losses) / len(losses), sum(hits) / len(hits)


@torch.no_grad()
def loss_of_answers(model, tokenizer, path, context):
    """Returns the mean loss over the completion tokens, including end tokens, in the last tenth of the rows."""
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
    lines = [" ".join(words[index:index + 6]) for index in range(0, len(words) - 6, 3)]
    data = folder / {"text": "text.txt", "classify": "rows.tsv", "answer": "rows.jsonl"}[task]
    written = {
        "text": lambda index, line: line,
        "classify": lambda index, line: f"{('sea', 'lamp', 'fog')[index % 3]}\t{line}",
        "answer": lambda index, line: json.dumps({"prompt": line, "completion": f" {words[index]}"}),
    }
    data.write_text("".join(written[task](index, line) + "\n" for index, line in enumerate(lines)), encoding="utf-8")
    return data


def pytest_generate_tests(metafunc):
    cases = [(task, method) for task in ("text", "classify", "answer") for method in METHODS]
    if metafunc.config.getoption("trained"):
        cases = [(metafunc.config.getoption("task"), "supplied")]
    metafunc.parametrize("task, method", cases)


def test_transformers_and_peft_compute_the_same(request, option, tmp_path, caplog, recwarn, task, method):
    folder, data, context, base = (option(name) for name in ("trained", "data", "context", "base"))
    if not folder:
        folder, data, context, base = tmp_path / "trained", write_data(task, tmp_path), CONTEXT, TINY if method == "adapters" else None
        sizes = ("--steps", 6, "--batch-size", 4, "--context", context, "--eval-every", 3)
        request.getfixturevalue("program")("train", "--task", task, "--data", data, "--init", TINY, "--out", folder, *sizes, *METHODS[method])
    is_classifier = task == "classify"
    auto = transformers.AutoModelForSequenceClassification if is_classifier else transformers.AutoModelForCausalLM
    logging.getLogger("transformers").addHandler(caplog.handler)
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    logging.getLogger("transformers").removeHandler(caplog.handler)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] + [str(warning.message) for warning in recwarn]
    assert not warnings

    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    best = min((entry for entry in log if "held_out_loss" in entry), key=lambda entry: entry["held_out_loss"])
    if is_classifier:
        rows = list(labeled_rows(data))
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
