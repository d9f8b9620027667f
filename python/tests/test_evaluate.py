"""Benchmarks by named protocols: results equal to `gpt2 eval`, and resumable runs."""

import json
import signal
import subprocess
import sys
import time

import candle_gpt2
import pytest

from support import FIXTURES

PASSAGES = """\
{"text": "First Citizen: Before we proceed any further, hear me speak.\\nAll: Speak, speak"}
{"text": "My lord, the king of France is dead, and long live the king"}
{"context": "He said: “Come hither, boy, and give me thy", "continuation": "hand"}
{"text": "What is the city but the people? True, the people are the city."}
"""
QUESTIONS = """\
{"ind": 1, "activity_label": "Kings", "ctx_a": "The king sits upon the throne.", "ctx_b": "the queen", "endings": ["speaks to the people.", "eats a throne made of fish.", "sings.", "leaves the court."], "label": 0}
{"ind": 2, "activity_label": "Letters", "ctx_a": "A messenger brings a letter to the duke.", "ctx_b": "", "endings": ["He reads it.", "He drinks the sea.", "He is a letter.", "He gives it back."], "label": "3"}
"""
TEXT = "The king of France is dead, and all the people of the city speak of the queen. " * 40


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Creates a folder with data, and makes it the working directory."""
    (tmp_path / "passages.jsonl").write_text(PASSAGES)
    (tmp_path / "questions.jsonl").write_text(QUESTIONS)
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def without_time(report):
    """Returns the parts of a report that do not vary between runs."""
    return {name: value for name, value in report.items() if name != "seconds"}


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("protocol", "data", "arguments", "options"),
    [
        ("lambada:lm-eval", "passages.jsonl", [], {}),
        ("lambada:stop-words", "passages.jsonl", ["--limit", "3"], {"limit": 3}),
        ("hellaswag:lm-eval", "questions.jsonl", [], {}),
        ("hellaswag:llama.cpp", "questions.jsonl", ["--limit", "1"], {"limit": 1}),
        ("wikitext:hf-100", "text.txt", [], {}),
        ("wikitext:llama.cpp", "text.txt", ["--context", "64"], {"context": 64}),
        ("text:bits", "text.txt", [], {}),
        ("kl", "text.txt", ["--context", "64", "--limit", "3"], {"context": 64, "limit": 3}),
    ],
)
def test_reports_match_the_cli(model, program, folder, protocol, data, arguments, options):
    expected = json.loads(program("eval", protocol, "--data", data, "--json", *arguments))
    report = model.evaluate(protocol, data, **options)
    assert list(report) == list(expected)
    assert without_time(report) == without_time(expected)
    assert report["metrics"] and report["seconds"] > 0


def test_list_of_protocols_returns_a_list_of_reports(model, program, folder):
    names = ["lambada:last-token", "hellaswag:lm-eval"]
    data = ["passages.jsonl", folder / "questions.jsonl"]
    printed = program("eval", *names, "--data", str(data[0]), "--data", str(data[1]), "--json")
    reports = model.evaluate(names, data)
    assert [without_time(report) for report in reports] == [
        without_time(json.loads(line)) for line in printed.splitlines()
    ]
    assert model.evaluate(tuple(names[:1]), data[0])[0]["protocol"] == names[0]


def test_kl_compares_the_model_with_a_base(program, folder):
    rounded = candle_gpt2.Model.from_pretrained(dtype="q4")
    options = {"context": 64, "limit": 2}
    arguments = ["--data", "text.txt", "--context", "64", "--limit", "2", "--json"]
    # The default base is the same model in f32.
    expected = json.loads(program("eval", "kl", "--dtype", "q4", *arguments))
    report = rounded.evaluate("kl", "text.txt", **options)
    assert without_time(report) == without_time(expected)
    assert report["base"] == {"model": "built-in", "dtype": "f32"}
    base = candle_gpt2.Model.from_pretrained(dtype="q8")
    expected = json.loads(program("eval", "kl", "--dtype", "q4", "--base-dtype", "q8", *arguments))
    assert without_time(rounded.evaluate("kl", "text.txt", base=base, **options)) == without_time(expected)


def test_item_logs_are_shared_between_package_and_cli(model, program, folder):
    arguments = ["eval", "lambada:lm-eval", "--data", "passages.jsonl", "--json"]
    whole = json.loads(program(*arguments, "--items", "program.jsonl"))
    report = model.evaluate("lambada:lm-eval", "passages.jsonl", items="package.jsonl")
    assert without_time(report) == without_time(whole)
    log = (folder / "program.jsonl").read_text()
    assert (folder / "package.jsonl").read_text() == log
    # The beginning of the program's log, with an incomplete last line.
    (folder / "half.jsonl").write_text(log[: 3 * len(log) // 4])
    again = model.evaluate("lambada:lm-eval", "passages.jsonl", items=folder / "half.jsonl", resume=True)
    assert again["metrics"] == whole["metrics"] and again["tokens_read"] < whole["tokens_read"]
    assert (folder / "half.jsonl").read_text() == log
    expected = json.loads(program(*arguments, "--against", "program.jsonl"))
    compared = model.evaluate("lambada:lm-eval", "passages.jsonl", against="program.jsonl")
    assert compared["against"] == expected["against"] and compared["against"]["items"] == 4


def test_protocol_list_matches_the_cli(program):
    listed = candle_gpt2.protocols()
    assert listed == [json.loads(line) for line in program("eval", "--list", "--json").splitlines()]
    names = [protocol["protocol"] for protocol in listed]
    assert "lambada:lm-eval" in names and names[-1] == "kl"


def test_invalid_calls_are_rejected(model, folder, monkeypatch, tmp_path):
    def assert_raises(kind, expected, protocol, *arguments, **options):
        with pytest.raises(kind, match=expected):
            model.evaluate(protocol, *arguments, **options)

    passages = "passages.jsonl"
    assert_raises(ValueError, "unknown protocol `lambada:lm-evil`; `lambada` has `lambada:lm-eval`", "lambada:lm-evil")
    assert_raises(ValueError, "specify at least one protocol", [])
    assert_raises(ValueError, "^`limit`: expected at least 1, found 0$", "kl", "text.txt", limit=0)
    assert_raises(ValueError, "^`base` applies only to kl, which compares two models", "lambada:lm-eval", passages, base=model)
    assert_raises(ValueError, "^`data`: expected one path for all", "lambada:lm-eval", [passages, passages])
    assert_raises(ValueError, "^`num_fewshot`: expected at most", "hellaswag:lm-eval", "questions.jsonl", num_fewshot=9)
    tiny = candle_gpt2.Model.from_pretrained(FIXTURES / "tiny-checkpoint")
    assert_raises(ValueError, "vocabulary of the base model: expected 4096", "kl", "text.txt", base=tiny)
    assert_raises(TypeError, "protocol: expected the name of a protocol or a list of names, found int", 7)
    assert_raises(TypeError, "data: expected a path or a list of paths, found int", "kl", 7)
    assert_raises(FileNotFoundError, "^none.jsonl: ", "lambada:lm-eval", "none.jsonl")
    assert_raises(FileNotFoundError, "^none.jsonl: ", "lambada:lm-eval", passages, against="none.jsonl")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_raises(candle_gpt2.Gpt2Error, "is not in the cache, and network access is disabled", "lambada:lm-eval")


def test_invalid_data_is_reported_and_other_reports_are_kept(model, folder):
    (folder / "bad.jsonl").write_text(PASSAGES + '{"text": 7}\n')
    expected = "^bad.jsonl: line 5: field `text`: expected a string, found 7$"
    both = ["lambada:lm-eval", "lambada:last-token"]
    with pytest.raises(candle_gpt2.Gpt2Error, match=expected) as raised:
        model.evaluate(both, ["bad.jsonl", "passages.jsonl"], items="log.jsonl")
    assert [report["protocol"] for report in raised.value.partial] == ["lambada:last-token"]
    assert len(read_jsonl(folder / "log.jsonl")) == 8
    with pytest.raises(candle_gpt2.Gpt2Error, match="contains the items of another run"):
        model.evaluate("lambada:lm-eval", "passages.jsonl", items="log.jsonl")


INTERRUPTED = """
import candle_gpt2
model = candle_gpt2.Model.from_pretrained()
model.evaluate("text:bits", "short.txt")
print("ready", flush=True)
try:
    model.evaluate({protocols}, {data}, items="log.jsonl")
    print("finished")
except KeyboardInterrupt as error:
    print("interrupted", [report["protocol"] for report in getattr(error, "partial", [])])
print(model.evaluate("text:bits", "short.txt")["metrics"][0]["value"] > 0)
"""
# The documented limit is 0.1 s; the rest allows for busy machines.
MAX_SECONDS = 0.5


@pytest.mark.parametrize(
    ("protocols", "data"),
    [
        (["text:bits", "wikitext:hf-1"], "long.txt"),
        (["text:bits", "kl"], "long.txt"),
        (["lambada:lm-eval"], "many.jsonl"),
        (["lambada:stop-words"], "many.jsonl"),
    ],
)
def test_interrupted_run_keeps_finished_reports_and_items(model, folder, protocols, data):
    (folder / "short.txt").write_text(TEXT[:100])
    (folder / "long.txt").write_text(TEXT * 4)
    (folder / "many.jsonl").write_text(PASSAGES * 500)
    script = INTERRUPTED.format(protocols=protocols, data=repr(data))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        log = folder / "log.jsonl"
        # Send the signal during the last protocol.
        while not log.exists() or protocols[-1] not in log.read_text():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        printed = process.stdout.readline()
        elapsed = time.monotonic() - start
        rest = process.stdout.read()
    assert printed == f"interrupted {protocols[:-1]}\n"
    assert elapsed < MAX_SECONDS
    assert rest == "True\n"
    # The log contains only complete lines, equal to those from an uninterrupted run.
    items = read_jsonl(log)
    assert items and len([line for line in items if line["protocol"] == protocols[-1]]) < 2000
    if data == "many.jsonl":
        log.unlink()
        model.evaluate(protocols, data, items=log, limit=len(items))
        assert read_jsonl(log) == items


def test_interrupt_stops_reading_a_long_text(folder):
    (folder / "short.txt").write_text(TEXT)
    (folder / "long.txt").write_text(TEXT * 1000)
    script = INTERRUPTED.format(protocols=["kl"], data="'long.txt'")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        assert process.stdout.readline() == "interrupted []\n"
        assert time.monotonic() - start < MAX_SECONDS
    assert not (folder / "log.jsonl").exists(), "no item was evaluated"


def test_nothing_is_printed_without_a_terminal(python, folder):
    script = "import candle_gpt2; candle_gpt2.Model.from_pretrained().evaluate('kl', 'text.txt')"
    done = python(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_example_prints_metrics():
    example = FIXTURES.parents[2] / "examples" / "evaluate.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, check=True, timeout=100)
    for part in ("lambada:lm-eval: 3 items", "bits_per_byte", "q4 versus q8: KL 0.0", "item 2: ", "of 3 answers"):
        assert part in done.stdout, done.stdout
    assert done.stderr == ""


def test_few_shot_and_task_files_match_the_cli(model, program, folder):
    tasks = FIXTURES / "evaluation" / "tasks"
    options = {"num_fewshot": 2, "fewshot_data": "questions.jsonl", "fewshot_seed": 7}
    arguments = ["--num-fewshot", "1", "--fewshot-data", "questions.jsonl", "--fewshot-seed", "7"]
    for protocol, options, arguments in [
        ("hellaswag:lm-eval", options | {"num_fewshot": 1, "data": "questions.jsonl"}, ["--data", "questions.jsonl", *arguments]),
        (str(tasks / "choices.yaml"), {"num_fewshot": 3}, ["--num-fewshot", "3"]),
    ]:
        found = model.evaluate(protocol, **options)
        assert found["num_fewshot"] == options["num_fewshot"]
        expected = json.loads(program("eval", protocol, "--json", *arguments))
        assert without_time(found) == without_time(expected)
