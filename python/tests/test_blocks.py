"""Bulk jobs split into blocks, without an engine: planning, reading, writing and interruption."""

import json
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
from candle_gpt2 import Rows

from support import FIXTURES, read_safetensors, write_safetensors

pyarrow = pytest.importorskip("pyarrow", reason="bulk jobs read and write with pyarrow: pip install '.[ray]' in a clone")

import pyarrow.parquet as parquet  # noqa: E402
from candle_gpt2 import _blocks  # noqa: E402

LENGTH = 4


def write_jsonl(path, count):
    lines = [json.dumps({"id": f"row-{row}", "prompt": f"Act {row % 3}.", "page": row}) for row in range(count)]
    path.write_text("".join(f"{line}\n" for line in lines))


def prepare(source, output, rows=None, **options):
    defaults = {"checkpoint": None, "rows_per_block": None, "output_format": None, "overwrite": False, "actors": 1}
    rows = rows or Rows(max_new_tokens=LENGTH)
    return _blocks.prepare(source, output, rows, **{**defaults, **options}), rows


def run(source, output, rows=None, order=None, **options):
    """Runs a whole job in this process. `order` sorts the blocks before they are computed."""
    job, rows = prepare(source, output, rows, **options)
    worker = _blocks.Worker(rows, job.parts, job.output_format)
    blocks = job.missing()
    for block in order(blocks) if order else blocks:
        worker(block)
    return job.finish()


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_output_file_keeps_row_order_and_input_columns(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 25)
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", rows_per_block=4) == (25, 0)
    written = read_jsonl(tmp_path / "out.jsonl")
    expected = Rows(max_new_tokens=LENGTH)({"id": [row["id"] for row in written], "prompt": [row["prompt"] for row in written]})
    assert [row["page"] for row in written] == list(range(25))
    assert [row["text"] for row in written] == expected["text"]
    assert list(written[0]) == ["id", "prompt", "page", "text", "error"]
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("in.jsonl", "out.jsonl")] == []


@pytest.mark.parametrize("rows_per_block", [1, 2, 7, 100])
def test_output_does_not_depend_on_block_size_or_order(tmp_path, rows_per_block):
    write_jsonl(tmp_path / "in.jsonl", 10)
    run(tmp_path / "in.jsonl", tmp_path / "expected.jsonl", rows_per_block=5)

    def shuffled(blocks):
        return random.Random(rows_per_block).sample(blocks, len(blocks))

    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", rows_per_block=rows_per_block, order=shuffled)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "expected.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"prompt": "a"}\n{"prompt": "b"}', [("in.jsonl:1", "a"), ("in.jsonl:2", "b")]),
        (b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n\n  \n{"prompt": "b"}\r\n', [("in.jsonl:1", "a"), ("in.jsonl:5", "b")]),
        (b'{"id": 7, "prompt": "a"}\n{"id": null, "prompt": "b"}\n', [(7, "a"), ("in.jsonl:2", "b")]),
        ('{"prompt": "é\\u2028 \u2028"}\n'.encode(), [("in.jsonl:1", "é\u2028 \u2028")]),
        (b"", []),
        (b"\n\n", []),
    ],
)
@pytest.mark.parametrize("rows_per_block", [1, 3])
def test_default_ids_are_line_numbers_of_the_input(tmp_path, content, expected, rows_per_block):
    (tmp_path / "in.jsonl").write_bytes(content)
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", rows_per_block=rows_per_block) == (len(expected), 0)
    content = (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    written = [json.loads(line) for line in content.split("\n")[:-1]]
    assert [(row["id"], row["prompt"]) for row in written] == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"no json", "Expecting value"),
        (b'["prompt"]', "expected a JSON object"),
        (b'{"prompt": "\xff"}', "invalid start byte"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_invalid_line_does_not_affect_other_rows(tmp_path, line, message):
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl") == (3, 1)
    [first, bad, last] = read_jsonl(tmp_path / "out.jsonl")
    error = bad.pop("error")
    assert error.startswith("in.jsonl:2: ") and message in error
    assert bad == {"id": "in.jsonl:2", "text": None}
    assert first["error"] is last["error"] is None and first["text"] and last["text"]


def test_each_line_of_plain_text_is_a_prompt_even_if_empty(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"One day\n\nOnce there was\r\n\n")
    run(tmp_path / "in.txt", tmp_path / "out.jsonl", rows_per_block=3)
    written = read_jsonl(tmp_path / "out.jsonl")
    assert [(row["id"], row["prompt"]) for row in written] == [
        ("in.txt:1", "One day"),
        ("in.txt:2", ""),
        ("in.txt:3", "Once there was"),
        ("in.txt:4", ""),
    ]


def test_parquet_columns_keep_their_types(tmp_path):
    table = pyarrow.table({"n": pyarrow.array(range(9), pyarrow.int16()), "prompt": [f"Act {row}." for row in range(9)]})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=4)
    run(tmp_path / "in.parquet", tmp_path / "out.parquet", rows_per_block=3)
    written = parquet.read_table(tmp_path / "out.parquet")
    assert written.select(["n", "prompt"]).equals(table)
    assert written["id"].to_pylist() == [f"in.parquet:{row}" for row in range(1, 10)]
    expected = Rows(max_new_tokens=LENGTH)({"id": written["id"].to_pylist(), "prompt": table["prompt"].to_pylist()})
    assert written["text"].to_pylist() == expected["text"]
    assert [written.schema.field(name).type for name in ("text", "error")] == [pyarrow.string()] * 2


def test_jsonl_to_parquet_has_fixed_columns(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt": "a", "x": [1]}\n{"prompt": 5}\n{"id": "k", "prompt": "b", "x": "y"}\n')
    assert run(tmp_path / "in.jsonl", tmp_path / "out.parquet", rows_per_block=1) == (3, 1)
    written = parquet.read_table(tmp_path / "out.parquet")
    assert written.column_names == ["id", "prompt", "input", "text", "error"]
    assert written["id"].to_pylist() == ["1", "in.jsonl:2", "k"]
    assert [json.loads(line).get("x") for line in written["input"].to_pylist()] == [[1], None, "y"]
    assert [error is None for error in written["error"].to_pylist()] == [True, False, True]


def test_input_folder_gives_an_output_folder(tmp_path):
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    write_jsonl(folder / "2.jsonl", 5)
    write_jsonl(folder / "b" / "1.jsonl", 3)
    (folder / "_hidden.jsonl").write_text("no")
    (folder / "notes.md").write_text("no")
    assert run(folder, tmp_path / "out", rows_per_block=2) == (8, 0)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [f"part-{block:06}.jsonl" for block in range(5)]
    written = [row for name in names for row in read_jsonl(tmp_path / "out" / name)]
    assert [row["id"] for row in written] == [f"row-{row}" for row in [*range(5), *range(3)]]
    assert not (tmp_path / "out.parts").exists()


def test_score_task_writes_scores(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "What say you to this?"}\n{"prompt": ""}\n')
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", Rows(task="score")) == (2, 1)
    [good, bad] = read_jsonl(tmp_path / "out.jsonl")
    assert list(good) == ["id", "prompt", "tokens", "logprob", "loss", "perplexity", "error"]
    assert good["loss"] > 0 and bad["loss"] is None and bad["error"]


def test_non_finite_numbers_are_written_as_json_strings(tmp_path):
    folder = shutil.copytree(FIXTURES / "tiny-checkpoint", tmp_path / "model")
    _, arrays = read_safetensors(folder / "model.safetensors")
    [name] = [name for name in arrays if name.endswith("ln_f.weight")]
    # Makes the model so certain of other tokens that the perplexity overflows.
    write_safetensors(folder / "model.safetensors", {**arrays, name: arrays[name] * np.float32(1e4)})
    (tmp_path / "in.jsonl").write_text('{"prompt": "What say you?", "x": [NaN, {"y": -Infinity}]}\n')
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", Rows(folder, "score")) == (1, 0)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    written = json.loads((tmp_path / "out.jsonl").read_text(), parse_constant=refuse)
    assert (written["x"], written["perplexity"]) == (["NaN", {"y": "-Infinity"}], "Infinity")
    assert 700 < written["loss"] < 1e6


def test_paths_may_be_uris(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 5)
    run(tmp_path / "in.jsonl", tmp_path / "expected.jsonl")
    uri = tmp_path.as_uri()
    assert run(f"{uri}/in.jsonl", f"{uri}/out.jsonl", checkpoint=f"{uri}/kept", rows_per_block=2) == (5, 0)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "expected.jsonl").read_bytes()
    assert not (tmp_path / "kept").exists()


def test_resumed_job_writes_the_same_bytes(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 20)
    run(tmp_path / "in.jsonl", tmp_path / "expected.jsonl", rows_per_block=3)
    options = {"checkpoint": tmp_path / "kept", "rows_per_block": 3}
    job, rows = prepare(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options)
    worker = _blocks.Worker(rows, job.parts, job.output_format)
    for block in job.plan.blocks[1:4]:
        worker(block)
    # A partial file from a killed process.
    (tmp_path / "kept" / "parts" / ".part-000000.jsonl.half").write_text('{"id": "row')
    assert not (tmp_path / "out.jsonl").exists()

    # Without rows_per_block, the interrupted run determines the block size.
    again, _ = prepare(tmp_path / "in.jsonl", tmp_path / "out.jsonl", checkpoint=tmp_path / "kept")
    assert [block.index for block in again.missing()] == [0, 4, 5, 6]
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options) == (20, 0)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "expected.jsonl").read_bytes()
    assert not (tmp_path / "kept").exists()


def test_finished_block_is_not_recomputed(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 2)
    job, rows = prepare(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    worker = _blocks.Worker(rows, job.parts, job.output_format)
    [block] = job.missing()
    worker(block)
    worker.rows = None  # would fail if used
    worker(block)
    assert job.missing() == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda options: options.update(rows=Rows(max_new_tokens=LENGTH + 1)), "options"),
        (lambda options: options.update(rows=Rows(max_new_tokens=LENGTH, seed=1)), "seed"),
        (lambda options: options.update(rows=Rows(max_new_tokens=LENGTH, id_column="page")), "columns"),
        (lambda options: options.update(rows_per_block=4), "rows_per_block"),
    ],
)
def test_checkpoint_of_another_job_is_rejected(tmp_path, change, field):
    write_jsonl(tmp_path / "in.jsonl", 9)
    options = {"checkpoint": tmp_path / "kept", "rows_per_block": 3}
    prepare(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options)
    change(options)
    with pytest.raises(_blocks.JobError, match=f"has different {field}"):
        prepare(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options)


def test_checkpoint_with_changed_input_is_rejected(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 9)
    prepare(tmp_path / "in.jsonl", tmp_path / "out.jsonl", checkpoint=tmp_path / "kept")
    content = (tmp_path / "in.jsonl").read_text()
    (tmp_path / "in.jsonl").write_text(content.replace("Act 1", "Act 9"))
    with pytest.raises(_blocks.JobError, match="has different input"):
        prepare(tmp_path / "in.jsonl", tmp_path / "out.jsonl", checkpoint=tmp_path / "kept")


def test_unfinished_run_is_not_discarded_silently(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 3)
    prepare(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(_blocks.JobError, match="0 of 1 blocks; pass this folder as checkpoint"):
        prepare(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", checkpoint=tmp_path / "out.jsonl.parts") == (3, 0)


def test_existing_output_is_kept_unless_overwrite_is_set(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 3)
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(FileExistsError, match="the output already exists"):
        run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "mine"
    assert not (tmp_path / "out.jsonl.parts").exists()
    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", overwrite=True)
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 3


def test_folder_with_other_files_is_not_a_checkpoint(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 3)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "diary.txt").write_text("mine")
    with pytest.raises(_blocks.JobError, match="neither empty nor the checkpoint of a job"):
        prepare(tmp_path / "in.jsonl", tmp_path / "out.jsonl", checkpoint=tmp_path / "kept")
    assert (tmp_path / "kept" / "diary.txt").read_text() == "mine"


def test_invalid_inputs_are_rejected(tmp_path):
    (tmp_path / "in.csv").write_text("a,b")
    (tmp_path / "broken.parquet").write_text("no")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        prepare(tmp_path / "nothing.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="ends in .jsonl, .parquet or .txt"):
        prepare(tmp_path / "in.csv", tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="broken.parquet: not a Parquet file"):
        prepare(tmp_path / "broken.parquet", tmp_path / "out.jsonl")
    write_jsonl(tmp_path / "in.jsonl", 1)
    with pytest.raises(ValueError, match="rows_per_block: expected at least 1, found 0"):
        prepare(tmp_path / "in.jsonl", tmp_path / "out.jsonl", rows_per_block=0)
    with pytest.raises(ValueError, match="the extension implies jsonl, but output_format is parquet"):
        prepare(tmp_path / "in.jsonl", tmp_path / "out.jsonl", output_format="parquet")


@pytest.mark.parametrize(
    ("rows", "actors", "expected"),
    [(10, 1, 8), (1000, 1, 125), (100_000, 1, 128), (1000, 16, 8), (3_000_000, 4, 150)],
)
def test_block_size_adapts_to_row_and_actor_counts(tmp_path, rows, actors, expected):
    (tmp_path / "in.jsonl").write_bytes(b"{}\n" * rows)
    planned = _blocks.plan(_blocks.sources_of(tmp_path / "in.jsonl"), None, actors)
    assert planned.rows_per_block == expected
    assert len(planned.blocks) == -(-rows // expected) <= _blocks.MAX_BLOCKS


@pytest.mark.parametrize(("new_tokens", "expected"), [(None, 128), (20, 128), (50, 128), (100, 64), (1000, 32)])
def test_blocks_of_long_completions_have_fewer_rows(new_tokens, expected):
    assert _blocks.default_rows_per_block(Rows(max_new_tokens=new_tokens)) == expected


def test_blocks_do_not_import_ray():
    program = "import sys; import candle_gpt2._blocks; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "False"
