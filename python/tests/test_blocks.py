"""A bulk job in blocks, without an engine: what is planned, read and written, and what an interruption leaves behind."""

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


def prepared(source, output, rows=None, **options):
    defaults = {"checkpoint": None, "rows_per_block": None, "output_format": None, "overwrite": False, "actors": 1}
    rows = rows or Rows(max_new_tokens=LENGTH)
    return _blocks.prepare(source, output, rows, **{**defaults, **options}), rows


def run(source, output, rows=None, order=None, **options):
    """A whole job in this process; `order` is the order in which its blocks are computed."""
    job, rows = prepared(source, output, rows, **options)
    worker = _blocks.Worker(rows, job.parts, job.output_format)
    blocks = job.missing()
    for block in order(blocks) if order else blocks:
        worker(block)
    return job.finish()


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_file_has_every_row_in_the_order_of_the_input_with_what_it_held(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 25)
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", rows_per_block=4) == (25, 0)
    made = lines_of(tmp_path / "out.jsonl")
    expected = Rows(max_new_tokens=LENGTH)({"id": [row["id"] for row in made], "prompt": [row["prompt"] for row in made]})
    assert [row["page"] for row in made] == list(range(25))
    assert [row["text"] for row in made] == expected["text"]
    assert list(made[0]) == ["id", "prompt", "page", "text", "error"]
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("in.jsonl", "out.jsonl")] == []


@pytest.mark.parametrize("rows_per_block", [1, 2, 7, 100])
def test_bytes_do_not_depend_on_blocks_or_on_their_order(tmp_path, rows_per_block):
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
def test_lines_have_the_numbers_they_have_in_the_file(tmp_path, content, expected, rows_per_block):
    (tmp_path / "in.jsonl").write_bytes(content)
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", rows_per_block=rows_per_block) == (len(expected), 0)
    content = (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    made = [json.loads(line) for line in content.split("\n")[:-1]]
    assert [(row["id"], row["prompt"]) for row in made] == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"no json", "Expecting value"),
        (b'["prompt"]', "expected a JSON object"),
        (b'{"prompt": "\xff"}', "invalid start byte"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_line_that_is_no_object_harms_no_other(tmp_path, line, message):
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl") == (3, 1)
    [first, bad, last] = lines_of(tmp_path / "out.jsonl")
    error = bad.pop("error")
    assert error.startswith("in.jsonl:2: ") and message in error
    assert bad == {"id": "in.jsonl:2", "text": None}
    assert first["error"] is last["error"] is None and first["text"] and last["text"]


def test_plain_text_has_a_prompt_a_line_and_an_empty_one_is_a_prompt(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"ROMEO:\n\nJULIET:\r\n\n")
    run(tmp_path / "in.txt", tmp_path / "out.jsonl", rows_per_block=3)
    made = lines_of(tmp_path / "out.jsonl")
    assert [(row["id"], row["prompt"]) for row in made] == [
        ("in.txt:1", "One day"),
        ("in.txt:2", ""),
        ("in.txt:3", "Once there was"),
        ("in.txt:4", ""),
    ]


def test_parquet_keeps_its_columns_and_their_types(tmp_path):
    table = pyarrow.table({"n": pyarrow.array(range(9), pyarrow.int16()), "prompt": [f"Act {row}." for row in range(9)]})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=4)
    run(tmp_path / "in.parquet", tmp_path / "out.parquet", rows_per_block=3)
    made = parquet.read_table(tmp_path / "out.parquet")
    assert made.select(["n", "prompt"]).equals(table)
    assert made["id"].to_pylist() == [f"in.parquet:{row}" for row in range(1, 10)]
    expected = Rows(max_new_tokens=LENGTH)({"id": made["id"].to_pylist(), "prompt": table["prompt"].to_pylist()})
    assert made["text"].to_pylist() == expected["text"]
    assert [made.schema.field(name).type for name in ("text", "error")] == [pyarrow.string()] * 2


def test_lines_become_parquet_of_fixed_columns(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt": "a", "x": [1]}\n{"prompt": 5}\n{"id": "k", "prompt": "b", "x": "y"}\n')
    assert run(tmp_path / "in.jsonl", tmp_path / "out.parquet", rows_per_block=1) == (3, 1)
    made = parquet.read_table(tmp_path / "out.parquet")
    assert made.column_names == ["id", "prompt", "input", "text", "error"]
    assert made["id"].to_pylist() == ["1", "in.jsonl:2", "k"]
    assert [json.loads(line).get("x") for line in made["input"].to_pylist()] == [[1], None, "y"]
    assert [error is None for error in made["error"].to_pylist()] == [True, False, True]


def test_a_folder_goes_to_a_folder(tmp_path):
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    write_jsonl(folder / "2.jsonl", 5)
    write_jsonl(folder / "b" / "1.jsonl", 3)
    (folder / "_hidden.jsonl").write_text("no")
    (folder / "notes.md").write_text("no")
    assert run(folder, tmp_path / "out", rows_per_block=2) == (8, 0)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [f"part-{block:06}.jsonl" for block in range(5)]
    made = [row for name in names for row in lines_of(tmp_path / "out" / name)]
    assert [row["id"] for row in made] == [f"row-{row}" for row in [*range(5), *range(3)]]
    assert not (tmp_path / "out.parts").exists()


def test_scores_are_written_too(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "What say you to this?"}\n{"prompt": ""}\n')
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", Rows(task="score")) == (2, 1)
    [good, bad] = lines_of(tmp_path / "out.jsonl")
    assert list(good) == ["id", "prompt", "tokens", "logprob", "loss", "perplexity", "error"]
    assert good["loss"] > 0 and bad["loss"] is None and bad["error"]


def test_lines_are_json_whatever_numbers_are_in_them(tmp_path):
    folder = shutil.copytree(FIXTURES / "tiny-checkpoint", tmp_path / "model")
    _, arrays = read_safetensors(folder / "model.safetensors")
    [name] = [name for name in arrays if name.endswith("ln_f.weight")]
    # So sure of other tokens that the perplexity is beyond any float.
    write_safetensors(folder / "model.safetensors", {**arrays, name: arrays[name] * np.float32(1e4)})
    (tmp_path / "in.jsonl").write_text('{"prompt": "What say you?", "x": [NaN, {"y": -Infinity}]}\n')
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", Rows(folder, "score")) == (1, 0)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    made = json.loads((tmp_path / "out.jsonl").read_text(), parse_constant=refuse)
    assert (made["x"], made["perplexity"]) == (["NaN", {"y": "-Infinity"}], "Infinity")
    assert 700 < made["loss"] < 1e6


def test_places_may_be_uris(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 5)
    run(tmp_path / "in.jsonl", tmp_path / "expected.jsonl")
    uri = tmp_path.as_uri()
    assert run(f"{uri}/in.jsonl", f"{uri}/out.jsonl", checkpoint=f"{uri}/kept", rows_per_block=2) == (5, 0)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "expected.jsonl").read_bytes()
    assert not (tmp_path / "kept").exists()


def test_an_interrupted_job_goes_on_to_the_same_bytes(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 20)
    run(tmp_path / "in.jsonl", tmp_path / "expected.jsonl", rows_per_block=3)
    options = {"checkpoint": tmp_path / "kept", "rows_per_block": 3}
    job, rows = prepared(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options)
    worker = _blocks.Worker(rows, job.parts, job.output_format)
    for block in job.plan.blocks[1:4]:
        worker(block)
    # What a kill leaves of a file that was being written.
    (tmp_path / "kept" / "parts" / ".part-000000.jsonl.half").write_text('{"id": "row')
    assert not (tmp_path / "out.jsonl").exists()

    # The size of blocks is the interrupted run's where none is given.
    again, _ = prepared(tmp_path / "in.jsonl", tmp_path / "out.jsonl", checkpoint=tmp_path / "kept")
    assert [block.index for block in again.missing()] == [0, 4, 5, 6]
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options) == (20, 0)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "expected.jsonl").read_bytes()
    assert not (tmp_path / "kept").exists()


def test_a_block_that_is_done_is_not_computed_again(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 2)
    job, rows = prepared(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    worker = _blocks.Worker(rows, job.parts, job.output_format)
    [block] = job.missing()
    worker(block)
    worker.rows = None  # it would be asked
    worker(block)
    assert job.missing() == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda options: options.update(rows=Rows(max_new_tokens=LENGTH + 1)), "options"),
        (lambda options: options.update(rows=Rows(max_new_tokens=LENGTH, seed=1)), "seed"),
        (lambda options: options.update(rows=Rows(max_new_tokens=LENGTH, id_column="page")), "columns"),
        (lambda options: options.update(rows_per_block=4), "rows_per_block"),
    ],
)
def test_another_job_does_not_go_on_there(tmp_path, change, named):
    write_jsonl(tmp_path / "in.jsonl", 9)
    options = {"checkpoint": tmp_path / "kept", "rows_per_block": 3}
    prepared(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options)
    change(options)
    with pytest.raises(_blocks.JobError, match=f"with other {named}"):
        prepared(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options)


def test_an_input_that_was_changed_does_not_go_on(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 9)
    prepared(tmp_path / "in.jsonl", tmp_path / "out.jsonl", checkpoint=tmp_path / "kept")
    content = (tmp_path / "in.jsonl").read_text()
    (tmp_path / "in.jsonl").write_text(content.replace("Act 1", "Act 9"))
    with pytest.raises(_blocks.JobError, match="with other input"):
        prepared(tmp_path / "in.jsonl", tmp_path / "out.jsonl", checkpoint=tmp_path / "kept")


def test_what_an_interrupted_run_has_done_is_not_lost_unseen(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 3)
    prepared(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(_blocks.JobError, match="0 of 1 blocks; give this folder as checkpoint"):
        prepared(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", checkpoint=tmp_path / "out.jsonl.parts") == (3, 0)


def test_an_output_that_is_there_is_kept_unless_it_shall_go(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 3)
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(FileExistsError, match="there is an output already"):
        run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "mine"
    assert not (tmp_path / "out.jsonl.parts").exists()
    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", overwrite=True)
    assert len(lines_of(tmp_path / "out.jsonl")) == 3


def test_a_folder_of_something_else_is_no_checkpoint(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", 3)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "diary.txt").write_text("mine")
    with pytest.raises(_blocks.JobError, match="not empty and not of a run like this"):
        prepared(tmp_path / "in.jsonl", tmp_path / "out.jsonl", checkpoint=tmp_path / "kept")
    assert (tmp_path / "kept" / "diary.txt").read_text() == "mine"


def test_wrong_inputs_are_named(tmp_path):
    (tmp_path / "in.csv").write_text("a,b")
    (tmp_path / "broken.parquet").write_text("no")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        prepared(tmp_path / "nothing.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="ends in .jsonl, .parquet or .txt"):
        prepared(tmp_path / "in.csv", tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="broken.parquet: not a Parquet file"):
        prepared(tmp_path / "broken.parquet", tmp_path / "out.jsonl")
    write_jsonl(tmp_path / "in.jsonl", 1)
    with pytest.raises(ValueError, match="rows_per_block: expected at least 1, found 0"):
        prepared(tmp_path / "in.jsonl", tmp_path / "out.jsonl", rows_per_block=0)
    with pytest.raises(ValueError, match="the name says jsonl, and output_format says parquet"):
        prepared(tmp_path / "in.jsonl", tmp_path / "out.jsonl", output_format="parquet")


@pytest.mark.parametrize(
    ("rows", "actors", "expected"),
    [(10, 1, 8), (1000, 1, 125), (100_000, 1, 128), (1000, 16, 8), (3_000_000, 4, 150)],
)
def test_blocks_are_small_for_many_actors_and_not_too_many(tmp_path, rows, actors, expected):
    (tmp_path / "in.jsonl").write_bytes(b"{}\n" * rows)
    planned = _blocks.plan(_blocks.sources_of(tmp_path / "in.jsonl"), None, actors)
    assert planned.rows_per_block == expected
    assert len(planned.blocks) == -(-rows // expected) <= _blocks.MAX_BLOCKS


@pytest.mark.parametrize(("new_tokens", "expected"), [(None, 128), (20, 128), (50, 128), (100, 64), (1000, 32)])
def test_blocks_of_long_texts_have_fewer_rows(new_tokens, expected):
    assert _blocks.usual_rows(Rows(max_new_tokens=new_tokens)) == expected


def test_reading_and_writing_need_no_ray():
    program = "import sys; import candle_gpt2._blocks; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "False"
