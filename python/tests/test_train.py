"""Training: the same files as the program, interrupted or not."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import candle_gpt2
import numpy as np
import pytest

from support import FIXTURES

CONFIG = {"vocab_size": 270, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
TINY = FIXTURES / "tiny-checkpoint"
FILES = ["model.safetensors", "config.json", "tokenizer.json", "training-state.safetensors"]
REPORT = (
    "out parameters training_tokens held_out_tokens steps stopped_early loss best_step held_out_loss "
    "held_out_loss_per_character elapsed_s"
)


@pytest.fixture
def text(tmp_path):
    """File to train on."""
    path = tmp_path / "text.txt"
    lines = [f"FIRST CITIZEN {line % 7}:\nWhat say you, neighbour {line * 37 % 101}?\n\n" for line in range(300)]
    path.write_text("".join(lines))
    return path


def flags(options):
    """Converts keywords to the program's flags."""
    arguments = []
    for name, value in options.items():
        arguments.append("--" + name.replace("_", "-"))
        if isinstance(value, dict):
            value = [f"{label}={weight}" for label, weight in value.items()]
        if value is not True:
            arguments.append(",".join(value) if isinstance(value, list) else str(value))
    return arguments


@pytest.fixture
def rows(tmp_path):
    """Files with labels and with answers, keyed by task."""
    names = ("ada", "bob", "cid")
    labeled = [f"{name}\t{name} {verb} {other}" for verb in ("met", "saw", "told", "asked") for name in names for other in names]
    sums = [json.dumps({"prompt": f"{number} and one is", "completion": f" {number + 1}"}) for number in range(36)]
    files = {"classify": tmp_path / "rows.tsv", "answer": tmp_path / "rows.jsonl"}
    for file, lines in zip(files.values(), (labeled, sums), strict=True):
        file.write_text("\n".join(lines))
    return files


def read_log(folder):
    """Reads the log without times."""
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [[entry["step"], entry.get("loss"), entry.get("held_out_loss")] for entry in entries]


def assert_same_files(ours, theirs, names=FILES):
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    assert read_log(ours) == read_log(theirs)


STARTS = {
    "a new model": (
        {"config": "config.json"},
        {"steps": 12, "lr": 0.01, "eval_every": 5, "save_every": 4, "dropout": 0.1, "seed": 9, "accumulate": 2},
    ),
    "a checkpoint": (
        {"init": TINY},
        {"steps": 6, "schedule": "linear", "warmup_steps": 2, "weight_decay": 0.0, "grad_clip": 0.5, "dtype": "f16"},
    ),
    "adapters": (
        {"init": TINY},
        {"steps": 5, "lora_rank": 2, "lora_alpha": 3.0, "lora_targets": ["c_attn", "c_fc"], "recompute": True},
    ),
    "the built-in model": ({"init": "built-in"}, {"steps": 2, "context": 12, "held_out": 0.0, "patience": 3}),
    "labels": (
        {"init": TINY},
        {"steps": 6, "task": "classify", "class_weights": {"ada": 2, "cid": 0.5}, "train_blocks": 1, "held_out": 0.25},
    ),
    "answers": ({"init": TINY}, {"steps": 4, "task": "answer", "eval_every": 2, "lora_rank": 2}),
}


@pytest.mark.parametrize(("start", "options"), STARTS.values(), ids=STARTS)
def test_files_and_report_match_the_cli(start, options, text, rows, tmp_path, program):
    if "config" in start:
        start = {"config": tmp_path / "config.json"}
        start["config"].write_text(json.dumps(CONFIG))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    data = rows.get(options.get("task"), text)
    report = candle_gpt2.train(data, ours, batch_size=2, **start, **options)
    arguments = ["--batch-size", "2", *flags(start), *flags(options)]
    expected = json.loads(program("train", "--data", str(data), "--out", str(theirs), "--json", *arguments))
    assert set(report) >= set(REPORT.split())
    assert report.pop("out") == str(ours) and expected.pop("out") == str(theirs)
    assert report.pop("elapsed_s") > 0 and expected.pop("elapsed_s") > 0
    assert report == expected
    adapter = ["adapter/adapter_model.safetensors", "adapter/adapter_config.json"] if "lora_rank" in options else []
    picture = ["confusion.svg"] if options.get("task") == "classify" else []
    assert_same_files(ours, theirs, [*FILES, *adapter, *picture])
    if data is text:
        assert " ".join(["out", *report, "elapsed_s"]) == REPORT
    else:
        assert report["training_rows"] + report["held_out_rows"] == 36


def test_config_may_be_a_dict_and_data_a_list(text, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "Speak, speak."}\n' * 40)
    data = [text, str(lines)]
    by_file = candle_gpt2.train(data, tmp_path / "file", config=file, steps=3, batch_size=2)
    by_dict = candle_gpt2.train(data, tmp_path / "dict", config=CONFIG, steps=np.int64(3), batch_size=2, lr=None)
    assert by_file["loss"] == by_dict["loss"] and by_file["training_tokens"] > 3000
    assert_same_files(tmp_path / "file", tmp_path / "dict")


def test_train_method_continues_from_the_model_checkpoint(tiny, text, tmp_path):
    prompt = "FIRST CITIZEN"
    before = tiny.score(prompt)["loss"]
    options = {"steps": 25, "lr": 0.003, "batch_size": 2, "seed": 1}
    report = tiny.train(text, tmp_path / "method", **options)
    candle_gpt2.train(text, tmp_path / "function", init=TINY, **options)
    assert_same_files(tmp_path / "method", tmp_path / "function")
    trained = candle_gpt2.Model.from_pretrained(tmp_path / "method")
    assert trained.score(prompt)["loss"] < before - 0.5
    assert tiny.score(prompt)["loss"] == before, "the open model is unchanged"
    assert report["parameters"] == int(repr(tiny).split(" parameters")[0].split()[-1])


def test_on_step_receives_every_log_entry(text, tmp_path):
    received = []
    report = candle_gpt2.train(
        text, tmp_path / "out", config=CONFIG, steps=4, batch_size=2, eval_every=2, sample="What", on_step=received.append
    )
    entries = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [entry for entry in received if "sample" not in entry] == entries
    assert [entry["step"] for entry in received] == [1, 2, 2, 2, 3, 4, 4, 4]
    samples = [entry for entry in received if "sample" in entry]
    assert all(entry["sample"].startswith("What") and len(entry["sample"]) > 8 for entry in samples)
    losses = [entry["held_out_loss"] for entry in received if "held_out_loss" in entry]
    assert report["held_out_loss"] == min(losses) and report["loss"] == entries[-2]["loss"]


def test_on_step_exception_saves_the_training_state(text, tmp_path):
    options = {"steps": 9, "batch_size": 2, "eval_every": 2, "seed": 3, "save_every": 100}
    candle_gpt2.train(text, tmp_path / "whole", config=CONFIG, **options)

    def raise_at(step, kind):
        def on_step(entry):
            if entry["step"] == step and kind in entry:
                raise LookupError(f"enough at {step}")

        return on_step

    out = tmp_path / "ended"
    # Interrupts after a step but before its evaluation, and after an evaluation.
    for step, kind in [(2, "loss"), (4, "held_out_loss"), (7, "loss")]:
        with pytest.raises(LookupError, match=f"enough at {step}"):
            candle_gpt2.train(text, out, config=CONFIG, resume=True, on_step=raise_at(step, kind), **options)
        assert max(step for step, *_ in read_log(out)) == step
    assert candle_gpt2.train(text, out, config=CONFIG, resume=True, **options)["steps"] == 9
    assert_same_files(out, tmp_path / "whole")


INTERRUPTED = """
import sys, candle_gpt2
steps = 0
def on_step(entry):
    global steps
    steps += 1
    if steps == 3:
        print("ready", flush=True)
try:
    candle_gpt2.train({text!r}, {out!r}, init={init!r}, steps=100_000, batch_size=2, save_every=100_000, eval_every=100_000, {more})
    print("finished")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.timeout(120)
def test_interrupted_training_resumes_to_the_same_bytes(text, tmp_path):
    out = tmp_path / "out"
    script = INTERRUPTED.format(text=str(text), out=str(out), init="built-in", more="on_step=on_step")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        printed = process.stdout.readline()
        elapsed = time.monotonic() - start
    assert printed == "interrupted\n"
    # Allows time for one operation, and for writing 107 MB.
    assert elapsed < 6, elapsed
    steps = max(step for step, *_ in read_log(out))
    assert steps >= 3 and (out / "training-state.safetensors").exists()
    assert not list(out.glob("*.tokens"))

    last_step = steps + 2

    def raise_at_last_step(entry):
        if entry["step"] == last_step:
            raise LookupError

    options = {"init": "built-in", "steps": 100_000, "batch_size": 2, "save_every": 100_000, "eval_every": 100_000}
    for folder in (out, tmp_path / "whole"):
        with pytest.raises(LookupError):
            candle_gpt2.train(text, folder, resume=True, on_step=raise_at_last_step, **options)
    assert_same_files(out, tmp_path / "whole", ["training-state.safetensors"])


def test_invalid_calls_are_rejected_before_any_work(text, rows, tmp_path):
    out = tmp_path / "out"

    def assert_raises(kind, match, **options):
        options = {"config": CONFIG, **options}
        with pytest.raises(kind, match=match):
            candle_gpt2.train(options.pop("data", text), out, **options)
        assert not out.exists()

    assert_raises(ValueError, "exactly one of init .* and config", init="built-in")
    assert_raises(ValueError, "exactly one of init .* and config", config=None)
    assert_raises(ValueError, "`steps`: expected at least 1, found 0", steps=0)
    assert_raises(ValueError, "steps: invalid type: string", steps="many")
    assert_raises(ValueError, "seed: expected a non-negative number, found -1", seed=-1)
    assert_raises(ValueError, "schedule: unknown variant `steps`, expected one of `constant`, `linear`, `cosine`", schedule="steps")
    assert_raises(ValueError, "dtype: expected one of f32, f16, bf16", dtype="q8_0")
    assert_raises(ValueError, "`lora_targets`: expected one or more of c_attn, c_proj, c_fc, found wte", lora_rank=1, lora_targets=["wte"])
    assert_raises(ValueError, "config: the key `n_head` is missing", config={"n_embd": 12})
    assert_raises(ValueError, "at least one file", data=[])
    assert_raises(TypeError, "unknown option `step`; did you mean `steps`", step=1)
    assert_raises(TypeError, "config: expected a path, or a dict", config=3)
    assert_raises(TypeError, "data: expected a path or a list of paths", data=3)
    assert_raises(TypeError, "on_step: expected a function", on_step=3)
    assert_raises(FileNotFoundError, "nothing.txt", data=tmp_path / "nothing.txt")
    assert_raises(FileNotFoundError, "nothing.json", config=tmp_path / "nothing.json")
    assert_raises(FileNotFoundError, "no such file or folder", config=None, init=tmp_path / "nothing")
    assert_raises(candle_gpt2.Gpt2Error, "the tokenizer trained on the data has only .* tokens", config={**CONFIG, "vocab_size": 9000})
    with pytest.raises(ValueError, match="not a folder"):
        candle_gpt2.train(text, text, config=CONFIG)
    task = {"config": None, "init": TINY, "task": "classify", "data": rows["classify"]}
    assert_raises(ValueError, "`class_weights`: expected labels from ada, bob, cid, found dan", **task, class_weights={"dan": 2})
    assert_raises(ValueError, "class_weights: .*a number greater than 0 for each label", **task, class_weights={"ada": 0})
    assert_raises(ValueError, "task: unknown variant `sort`", task="sort")
    with pytest.raises(TypeError, match="unknown option `init`"):
        candle_gpt2.Model.from_pretrained().train(text, out, init="gpt2")


def test_end_token_outside_the_vocabulary_warns(text, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file in TINY.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 50256}))
    with pytest.warns(UserWarning, match="50256 is outside the vocabulary"):
        candle_gpt2.train(text, tmp_path / "out", init=folder, steps=1, batch_size=2)
    # If warnings are errors, training stops.
    with pytest.raises(UserWarning, match="50256 is outside the vocabulary"):
        candle_gpt2.train(text, tmp_path / "other", init=folder, steps=1, batch_size=2)
    assert not (tmp_path / "other" / "model.safetensors").exists()


def test_docstring_names_every_option():
    names = [line for line in Path(candle_gpt2.__file__).with_name("_native.pyi").read_text().split("class ")]
    [options] = [part for part in names if part.startswith("_TrainOptions(")]
    options = [line.split(":")[0].strip() for line in options.splitlines()[1:] if ":" in line]
    assert {"steps", "initialization"} <= set(options)
    assert [name for name in options if name not in candle_gpt2.train.__doc__] == []
