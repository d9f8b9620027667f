"""Bulk jobs on a local Ray cluster of two nodes, during which a node or the driver dies.

Every row must appear once, with the bytes of a plain loop in this process. `CANDLE_GPT2_RAY_ROWS` (2000) and
`CANDLE_GPT2_RAY_TOKENS` (32) set the amount of work. The tests kill only processes that they started.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import candle_gpt2
import pytest
from candle_gpt2 import Rows

from support import FIXTURES

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]' in a clone")

from candle_gpt2 import _bulk_cli  # noqa: E402
from candle_gpt2.ray import generate_dataset, score_dataset, shares  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

# Ignore Ray's own warnings.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]

ROWS = int(os.environ.get("CANDLE_GPT2_RAY_ROWS", "2000"))
TOKENS = int(os.environ.get("CANDLE_GPT2_RAY_TOKENS", "32"))
BLOCKS = 50
OPTIONS = {"max_new_tokens": TOKENS, "seed": 7}
# Resources for a run: one actor for each of the two nodes.
RESOURCES = {"actors": 2, "threads": 1, "rows_per_block": -(-ROWS // BLOCKS)}
OBJECT_STORE_BYTES = 150_000_000
# Invalid rows: a prompt longer than any context, a prompt that is not a text, and a missing prompt.
BAD = {ROWS // 3: "to be or not to be " * 2000, ROWS // 2: 5, ROWS - 1: None}
START_TIMEOUT = 300.0


@pytest.fixture
def cluster():
    """Cluster of a head node and a second node, with one CPU each."""
    node = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.second = cluster.add_node(**node)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prompts, and the results of a plain loop."""
    folder = tmp_path_factory.mktemp("data")
    prompts = [BAD.get(row, f"Act {row % 5}, scene {row % 7}.") for row in range(ROWS)]
    rows = [{"id": f"row-{row}", "prompt": prompt} for row, prompt in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = Rows(**OPTIONS)({"id": [row["id"] for row in rows], "prompt": prompts})
    results = [{"text": text, "error": error} for text, error in zip(output["text"], output["error"], strict=True)]
    lines = [json.dumps({**row, **result}, ensure_ascii=False) for row, result in zip(rows, results, strict=True)]
    (folder / "expected.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def assert_output(output, data):
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n")[:-1]]
    ids = [row["id"] for row in rows]
    assert len(ids) == len(set(ids)) == ROWS, "a row is missing or duplicated"
    assert {row["id"] for row in rows if row["error"] is not None} == {f"row-{row}" for row in BAD}
    assert output.read_bytes() == (data / "expected.jsonl").read_bytes()


def test_node_failure_does_not_change_the_output(cluster, data, tmp_path):
    ray.init(cluster.address, log_to_driver=False)
    nodes = []

    def kill_in_the_middle(done, blocks):
        nodes.append(sum(node["Alive"] for node in ray.nodes()))
        if done == blocks // 3:
            cluster.remove_node(cluster.second, allow_graceful=False)

    summary = generate_dataset(
        data / "prompts.jsonl", tmp_path / "texts.jsonl", progress=kill_in_the_middle, **RESOURCES, **OPTIONS
    )
    assert (nodes[0], nodes[-1]) == (2, 1), "the node died during the job"
    assert (summary.rows, summary.errors, summary.actors, summary.threads) == (ROWS, len(BAD), 2, 1)
    assert_output(tmp_path / "texts.jsonl", data)


def start_driver(cluster, data, folder):
    """Starts a driver process that writes `texts.jsonl` and prints its summary."""
    program = (
        "import json, sys; from candle_gpt2.ray import generate_dataset; "
        "print(json.dumps(vars(generate_dataset(**json.loads(sys.argv[1])))))"
    )
    arguments = {
        "input": str(data / "prompts.jsonl"),
        "output": str(folder / "texts.jsonl"),
        "checkpoint": str(folder / "kept"),
        "address": cluster.address,
        **RESOURCES,
        **OPTIONS,
    }
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(arguments)], stdout=subprocess.PIPE, stderr=log, text=True
        )


def test_killed_driver_resumes_with_every_row_once(cluster, data, tmp_path):
    first = start_driver(cluster, data, tmp_path)
    deadline = time.monotonic() + START_TIMEOUT
    parts = tmp_path / "kept" / "parts"
    while len(list(parts.glob("part-*"))) < BLOCKS // 4:
        assert first.poll() is None, (tmp_path / "log.txt").read_text()
        assert time.monotonic() < deadline, "no block finished in time"
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not (tmp_path / "texts.jsonl").exists(), "the driver was killed before the end"
    second = start_driver(cluster, data, tmp_path)
    printed, _ = second.communicate(timeout=600)
    assert second.returncode == 0, (tmp_path / "log.txt").read_text()
    summary = json.loads(printed)
    assert BLOCKS // 4 <= summary["resumed_blocks"] < summary["blocks"] == BLOCKS
    assert (summary["rows"], summary["errors"]) == (ROWS, len(BAD))
    assert_output(tmp_path / "texts.jsonl", data)
    assert not (tmp_path / "kept").exists()


def test_command_and_functions_report_errors(cluster, tmp_path, capsys):
    ray.init(cluster.address, log_to_driver=False)
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "One day"}\n{"prompt": 5}\n{"prompt": "Once there was"}\n')

    def call(*arguments):
        code = _bulk_cli.main([*map(str, arguments), "--actors", "1", "--threads", "1"])
        return code, capsys.readouterr()

    code, printed = call("generate", source, tmp_path / "out.jsonl", "--max-new-tokens", 4, "--seed", 3, "--json")
    assert code == 1, "a row has an error"
    summary = json.loads(printed.out)
    assert (summary["rows"], summary["errors"], summary["blocks"]) == (3, 1, 1)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = Rows(max_new_tokens=4, seed=3)({"id": ["in.jsonl:1", "in.jsonl:3"], "prompt": ["One day", "Once there was"]})
    assert [rows[0]["text"], rows[2]["text"]] == expected["text"]

    source.write_text('{"prompt": "What say you?"}\n')
    code, printed = call("score", source, tmp_path / "scores.parquet")
    assert (code, printed.err) == (0, "")
    assert printed.out.startswith("1 rows, 0 with errors, ")

    code, printed = call("generate", source, tmp_path / "no.jsonl", "--temperature", "-1")
    assert code == 2 and "temperature" in printed.err
    code, printed = call("generate", source, tmp_path / "no.jsonl", "--option", "max_new_token=4")
    assert code == 2 and "max_new_token" in printed.err
    code, printed = call("generate", source, tmp_path / "no.jsonl", "--option", "max_new_tokens")
    assert code == 2 and "expected NAME=JSON" in printed.err
    code, printed = call("generate", source, tmp_path / "no.jsonl", "--model", tmp_path / "nothing")
    assert code == 1 and "nothing" in printed.err
    code, printed = call("generate", tmp_path / "nothing.jsonl", tmp_path / "no.jsonl")
    assert code == 1 and "no such file or folder" in printed.err
    # Failed jobs leave no files.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "scores.parquet"]

    with pytest.raises(ValueError, match="threads: expected at most 1, the logical CPUs of the largest node, found 2"):
        generate_dataset(source, tmp_path / "no.jsonl", threads=2)
    with pytest.raises(ValueError, match="actors: expected at least 1, found 0"):
        score_dataset(source, tmp_path / "no.jsonl", actors=0)


@pytest.mark.parametrize("config", [{"do_sample": False}, {"num_beams": 3, "do_sample": False}], ids=["greedy", "beams"])
def test_command_follows_generation_config_and_relative_paths(cluster, tmp_path, monkeypatch, config):
    ray.init(cluster.address, log_to_driver=False)
    folder = shutil.copytree(FIXTURES / "tiny-checkpoint", tmp_path / "searching")
    (folder / "generation_config.json").write_text(json.dumps(config))
    prompts = ["One day", "What say you?"]
    (tmp_path / "in.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    monkeypatch.chdir(tmp_path)
    arguments = ["generate", "in.txt", "out.jsonl", "--model", "searching", "--tokenizer", "searching", "--threads", "1"]
    assert _bulk_cli.main([*arguments, "--actors", "1", "--max-new-tokens", "4", "--seed", "7"]) == 0
    completions = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert completions == candle_gpt2.Model.from_pretrained(folder).generate(prompts, max_new_tokens=4)


def test_rows_work_in_a_custom_pipeline(cluster):
    ray.init(cluster.address, log_to_driver=False)
    prompts = [{"id": row, "prompt": f"Act {row}."} for row in range(8)]
    dataset = ray.data.from_items(prompts).map_batches(
        Rows,
        fn_constructor_kwargs={"threads": 1, **OPTIONS},
        batch_format="pyarrow",
        batch_size=3,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    texts = {row["id"]: row["text"] for row in dataset.take_all()}
    expected = Rows(**OPTIONS)({"id": list(range(8)), "prompt": [row["prompt"] for row in prompts]})["text"]
    assert [texts[row] for row in range(8)] == expected


@pytest.mark.parametrize(
    ("actors", "threads", "cpus", "expected"),
    [
        (None, None, [16], (1, 16)),
        (None, None, [16, 16, 8], (3, 8)),
        (None, 4, [16, 8], (6, 4)),
        (4, None, [16], (4, 4)),
        (5, None, [16], (5, 3)),
        (3, 2, [2], (3, 2)),
        (9, None, [2, 2], (9, 1)),
    ],
)
def test_actors_and_threads_divide_the_cpus(actors, threads, cpus, expected):
    assert shares(actors, threads, cpus) == expected


def test_help_exits_0_and_usage_errors_exit_2(capsys):
    for arguments in (["--help"], ["generate", "--help"], ["score", "--help"]):
        with pytest.raises(SystemExit) as exit_info:
            _bulk_cli.main(arguments)
        assert exit_info.value.code == 0
        printed = capsys.readouterr().out
        assert "gpt2-ray generate prompts.jsonl" in printed and "Exit codes: 0 success" in printed
    for arguments in ([], ["translate", "a", "b"], ["generate", "a"], ["generate", "a", "b", "--max-new-token", "5"]):
        with pytest.raises(SystemExit) as exit_info:
            _bulk_cli.main(arguments)
        assert exit_info.value.code == 2


def test_missing_ray_error_explains_the_installation():
    program = (
        "import sys; sys.modules['ray'] = None\nimport candle_gpt2\n"
        "try: import candle_gpt2.ray\nexcept ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "bulk jobs need Ray, and ray is not installed: pip install '.[ray]' in a clone"


def test_command_is_installed():
    program = Path(sys.executable).parent / "gpt2-ray"
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=True, timeout=100)
    assert "gpt2-ray generate prompts.jsonl" in done.stdout
