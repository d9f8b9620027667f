"""Results from lm-evaluation-harness for few-shot prompts and for YAML tasks, in `evaluation`.

Writes the task files with their data to tasks/. few_shot.json contains the figures and the outputs of the
built-in model and the tiny checkpoint for each item, one sequence at a time, in float32 with float64
log-softmax. Takes a minute.
"""

import contextlib
import json
import os

from reference import common, evaluation, harness

import lm_eval  # noqa: E402
import lm_eval.tasks  # noqa: E402


# Protocols with the number of examples. If the question itself is excluded, one more example is sampled.
PROTOCOLS = [
    ("lambada:lm-eval", "lambada_parts.jsonl", 2),
    ("hellaswag:lm-eval", "hellaswag.jsonl", 1),
    ("arc-easy:lm-eval", "arc.jsonl", 2),
    ("piqa:lm-eval", "piqa.jsonl", 2),
    ("sciq:lm-eval", "sciq.jsonl", 1),
    ("openbookqa:lm-eval", "openbookqa.jsonl", 2),
    ("winogrande:lm-eval", "winogrande.jsonl", 2),
]

WORDS = "king queen sword letter ship horse garden night river crown bell candle door winter orchard lake".split()
PLACES = ["in the hall", "by the river", "under the tower", "at the gate"]


def training(number):
    word, place = WORDS[number % len(WORDS)], PLACES[number % 4]
    return {"ask": f"Where stands the {word}?", "places": PLACES, "at": number % 4, "said": f"The {word} stands {place}."}


def test(number):
    word = WORDS[(number * 5 + 3) % len(WORDS)]
    return {"ask": f"Where is the {word} now?", "places": PLACES, "at": (number * 3 + 1) % 4, "said": f"It is the {word}'s own night."}


# Task files, each with the number of examples to request.
FILES = {
    "choices.yaml": (
        """\
task: places
output_type: multiple_choice
dataset_path: json
dataset_kwargs: {data_files: {train: train.jsonl, test: test.jsonl}}
training_split: train
test_split: test
description: "Places of things.\\n\\n"
doc_to_text: "Q: {{ask.strip()}}\\nA:"
doc_to_choice: places
doc_to_target: at
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
  - {metric: acc_bytes, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
""",
        [0, 3, 7],
    ),
    "included.yaml": (
        """\
include: choices.yaml
task: places_after
description: ""
test_split: null
validation_split: test
fewshot_split: train
target_delimiter: " -> "
fewshot_delimiter: "\\n"
doc_to_choice: "{{[places[0], places[1], 'in the sea']}}"
doc_to_target: "{{1 if at == 3 else (at + 1) % 2}}"
fewshot_config: {sampler: first_n, doc_to_text: "Earlier: {{said}} {{ask}}"}
num_fewshot: 2
metric_list: [{metric: acc}]
""",
        [None, 4],
    ),
    "itself.yaml": (
        """\
task: itself
output_type: multiple_choice
dataset_path: json
dataset_kwargs: {data_files: {validation: test.jsonl}}
validation_split: validation
doc_to_text: "{{ask}}"
doc_to_choice: ["by day", "at night", "never"]
doc_to_target: "never"
""",
        [0, 2],
    ),
    "gaps.yaml": (
        """\
task: gaps
output_type: multiple_choice
dataset_path: json
dataset_kwargs: {data_files: {train: train.jsonl, validation: test.jsonl}}
training_split: train
validation_split: validation
doc_to_text: "{{at % 2}}"
doc_to_choice: "{{['The ' + ask.split(' ')[-1], 'A ' + ask.split(' ')[-2]]}}"
doc_to_target: "{{said}}"
metric_list: [{metric: acc}]
""",
        [0, 2],
    ),
    "said.yaml": (
        """\
task: said
output_type: loglikelihood
dataset_path: json
dataset_kwargs: {data_files: {test: test.jsonl}}
test_split: test
doc_to_text: "{{said.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+said.split(' ')[-1]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
        [0, 2],
    ),
    "rolling.yaml": (
        """\
task: rolling
output_type: loglikelihood_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: [test.jsonl, train.jsonl]}}
test_split: test
doc_to_text: ""
doc_to_target: "{{said}} {{ask}} {{places|join(', ')}}"
""",
        [0],
    ),
    "lines.yaml": (
        """\
task: lines
output_type: loglikelihood_rolling
dataset_path: text
dataset_kwargs: {data_files: {test: lines.txt}}
test_split: test
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
        [0],
    ),
}


def write_tasks():
    """Writes the task files and their data, and returns their folder."""
    folder = common.place("evaluation/tasks/train.jsonl").parent
    lines = {"train.jsonl": map(training, range(30)), "test.jsonl": map(test, range(9))}
    for name, rows in lines.items():
        (folder / name).write_text(evaluation.jsonl(rows), encoding="utf-8")
    (folder / "lines.txt").write_text("The king is dead.\nLong live the queen, and all her house\n  with a hall\n", encoding="utf-8")
    for name, (text, _) in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def of_files(hf, folder):
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    for name, (_, counts) in FILES.items():
        for count in counts:
            with contextlib.chdir(folder), open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                [task] = [line.split(": ")[1] for line in (folder / name).read_text().split("\n") if line.startswith("task: ")]
                found = lm_eval.simple_evaluate(model=hf, tasks=[task], task_manager=manager, num_fewshot=count, log_samples=True)
            figures = {key.split(",")[0]: value for key, value in found["results"][task].items() if key.endswith(",none")}
            metrics = {key: value for key, value in figures.items() if isinstance(value, float) and not key.endswith("_stderr")}
            samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
            yield {"task": name, "num_fewshot": count, "metrics": metrics, "items": [harness.item_of(sample) for sample in samples]}


def cases(tasks):
    for name, folder in {"built-in": common.built_in(), "tiny-checkpoint": common.TINY}.items():
        hf = harness.model(folder)
        for protocol, data, count in PROTOCOLS:
            found = harness.evaluate(hf, protocol, common.FIXTURES / "evaluation" / data, num_fewshot=count)
            yield {"model": name, "data": data, "num_fewshot": count, **found}
        for case in of_files(hf, tasks):
            yield {"model": name, **case}


def export(_):
    found = [evaluation.rounded(case) for case in cases(write_tasks())]
    lines = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in found)
    common.place("evaluation/few_shot.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    for case in found:
        print(case["model"], case.get("protocol", case.get("task")), case["num_fewshot"], case["metrics"])
