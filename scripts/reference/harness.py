"""Runs lm-evaluation-harness's own tasks on local files, for fixtures, a check and a benchmark.

Tasks are loaded unchanged from the harness, with their templates and functions; only the Hub's datasets
are replaced with files. Needs lm_eval, torch and transformers (scripts/requirements.txt); downloads nothing.
"""

import contextlib
import csv
import json
import logging
import os
import pathlib
import tempfile

# Set before the imports that read them.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
CACHE = tempfile.TemporaryDirectory()
os.environ["HF_DATASETS_CACHE"] = os.environ["HF_HOME"] = CACHE.name

import datasets  # noqa: E402
import lm_eval  # noqa: E402
import lm_eval.api.metrics  # noqa: E402
import transformers  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

END_OF_TEXT = "<|endoftext|>"
TASKS = {
    "lambada:lm-eval": "lambada_openai",
    "wikitext:lm-eval": "wikitext",
    "hellaswag:lm-eval": "hellaswag",
    "piqa:lm-eval": "piqa",
    "arc-easy:lm-eval": "arc_easy",
    "arc-challenge:lm-eval": "arc_challenge",
    "openbookqa:lm-eval": "openbookqa",
    "sciq:lm-eval": "sciq",
    "winogrande:lm-eval": "winogrande",
    "blimp:lm-eval": "blimp",
}
# Task for HellaSwag items that are already prepared.
PREPARED = {
    "task": "hellaswag_prepared",
    "dataset_path": "prepared",
    "output_type": "multiple_choice",
    "validation_split": "validation",
    "doc_to_text": "{{query}}",
    "doc_to_target": "{{gold}}",
    "doc_to_choice": "choices",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
# Some samples exceed the context on purpose, and the tasks warn about every truncation.
logging.getLogger("lm_eval").setLevel(logging.ERROR)
# Bootstrap resampling takes longer than these small models, and nothing compares its result.
lm_eval.api.metrics.bootstrap_stderr = lambda *_, **__: float("nan")


def model(folder, batch_size=1, **options):
    """Returns the `hf` model for a checkpoint folder, whose tokenizer file may have a name prefix."""
    folder = pathlib.Path(folder)
    [path] = list(folder.glob("*tokenizer.json"))
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **special)
    options = {"dtype": "float32", "softmax_dtype": "float64", "device": "cpu"} | options
    return HFLM(pretrained=str(folder), tokenizer=tokenizer, batch_size=batch_size, **options)


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def pages_of(text):
    """Splits a raw file into the harness's WikiText pages; each begins with a title with one `=`."""
    pages = [[]]
    for line in text.split("\n"):
        squeezed = line.strip().replace("= = =", "===").replace("= =", "==")
        if squeezed.startswith("= ") and squeezed.endswith(" ="):
            pages.append([])
        pages[-1].append(line)
    pages = ["\n".join(lines) for lines in pages]
    return [page for page in pages if page.strip()]


def rows_of(protocol, path):
    """Returns the entries of a file in the format of the Hub's dataset."""
    if protocol == "wikitext:lm-eval" and path.suffix != ".jsonl":
        return [{"page": page} for page in pages_of(path.read_bytes().decode())]
    if path.suffix == ".csv":
        with open(path, encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    rows = read_jsonl(path)
    if protocol == "lambada:lm-eval":
        return [{"text": row["text"] if "text" in row else f"{row['context']} {row['continuation']}"} for row in rows]
    if protocol == "hellaswag:lm-eval":
        # The Hub stores labels as strings.
        return [row | {"gold" if "query" in row else "label": str(row.get("gold", row.get("label")))} for row in rows]
    if protocol.startswith("arc-"):
        return [hub_question(row) for row in rows]
    return rows


def hub_question(row):
    """Converts an ARC question from either format to the Hub's format."""
    if isinstance(row["question"], str):
        return row
    choices = row["question"]["choices"]
    columns = {name: [choice[name] for choice in choices] for name in ("text", "label")}
    return {"id": row["id"], "question": row["question"]["stem"], "choices": columns, "answerKey": row["answerKey"]}


@contextlib.contextmanager
def hub_has(rows_by_name):
    """Replaces the harness's loader for Hub datasets with rows keyed by subset name; all splits are the same."""

    def load(path, name=None, **_):
        rows = datasets.Dataset.from_list(rows_by_name.get(name, rows_by_name.get(None)))
        return datasets.DatasetDict({split: rows for split in ("train", "validation", "test")})

    original, datasets.load_dataset = datasets.load_dataset, load
    try:
        yield
    finally:
        datasets.load_dataset = original


def tasks_of(protocol, path, limit=None):
    """Returns the names of the harness's tasks, and the rows of each part."""
    path = pathlib.Path(path)
    if protocol == "blimp:lm-eval":
        paths = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        parts = {part.stem: read_jsonl(part)[:limit] for part in paths}
        return [f"blimp_{name}" for name in parts], parts
    rows = rows_of(protocol, path)[:limit]
    return [PREPARED if "query" in rows[0] else TASKS[protocol]], {None: rows}


def evaluate(hf, protocol, path, limit=None, num_fewshot=None):
    """Returns the harness's figures with standard errors, and its output for each item in data order."""
    tasks, rows = tasks_of(protocol, path, limit)
    # The harness's progress bars cannot be turned off.
    with hub_has(rows), open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        results = lm_eval.simple_evaluate(model=hf, tasks=tasks, num_fewshot=num_fewshot, log_samples=True)
    metrics, stderr, items = {}, {}, []
    names = [task if isinstance(task, str) else task["task"] for task in tasks]
    for name in names:
        for key, value in results["results"][name].items():
            metric, _, filter = key.partition(",")
            if filter and isinstance(value, (int, float)):
                into, metric = (stderr, metric.removesuffix("_stderr")) if metric.endswith("_stderr") else (metrics, metric)
                into.setdefault(metric, []).append(value)
        samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
        items += [item_of(sample) for sample in samples]
    # Averages over parts, as the BLiMP group does with equal weights. Pooling the group's standard error is
    # not needed.
    metrics = {name: sum(values) / len(values) for name, values in metrics.items()}
    stderr = {name: values[0] for name, values in stderr.items() if len(values) == 1 and values[0] == values[0]}
    return {"protocol": protocol, "metrics": metrics, "stderr": stderr, "items": items}


def item_of(sample):
    answers = [answer[0] for answer in sample["resps"]]
    if not isinstance(answers[0], (list, tuple)):
        logprob, words = sample["word_perplexity"]
        return {"choices": [{"logprob": float(logprob), "words": words, "bytes": sample["byte_perplexity"][1]}]}
    choices = [{"logprob": float(logprob), "is_greedy": str(greedy) == "True"} for logprob, greedy in answers]
    return {"choices": choices} | {name: bool(sample[name]) for name in ("acc", "acc_norm") if name in sample}
