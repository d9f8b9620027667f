"""A bulk job in blocks, on no engine in particular: a plan of the input, a file for each block that is done, and the output made
of these files in the order of the input.

A block is a run of rows of one input file. Its file has a name that follows from its place, is written under another name and
renamed when it is complete, and has the same bytes whichever machine writes it: so a block may be computed twice, even by a machine
that was believed lost, and its rows are there once. Resuming a job is to compute the blocks whose files are missing.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import io
import json
import math
import posixpath
import uuid
from pathlib import Path
from typing import Any, Iterator, Sequence

import pyarrow  # type: ignore[import-untyped, import-not-found, unused-ignore]
import pyarrow.parquet  # type: ignore[import-untyped, import-not-found, unused-ignore]
from pyarrow import fs

from .rows import Rows, arrow_type

FORMATS = ("jsonl", "parquet", "txt")
# The planned blocks of a job, at most: engines keep some kilobytes for each.
MAX_BLOCKS = 20_000
# A block by default: so many rows, and fewer of long texts, about a minute of GPT-2 on two cores. Below the least of
# them actors would often wait for the last texts of a block.
ROWS_PER_BLOCK, NEW_TOKENS_PER_BLOCK, LEAST_ROWS_OF_LONG_TEXTS = 128, 6400, 32
# Few rows in few blocks would leave actors idle at the end: each gets so many blocks, unless they are smaller than a batch.
BLOCKS_PER_ACTOR, LEAST_ROWS_PER_BLOCK = 8, 8
# What describes the job, beside the files of its blocks.
JOB_FILE = "job.json"
BYTES_AT_ONCE = 1 << 20


class JobError(Exception):
    """The job cannot continue as it is."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A run of rows of an input file: in text files the lines that begin at the bytes `start..end`, in Parquet the rows
    `start..end`."""

    index: int
    file: str
    # The file's path below the input, or its name if it is the input: a part of the ids that are made up.
    name: str
    format: str
    # Number of its first line or row, from 1.
    first: int
    start: int
    end: int

    def part_name(self, output_format: str) -> str:
        return f"part-{self.index:06}.{output_format}"


@dataclasses.dataclass(frozen=True)
class Source:
    """An input file."""

    file: str
    name: str
    format: str


def resolve(path: str | Path) -> tuple[fs.FileSystem, str]:
    """The file system and the path there of a local path, or of a URI such as `s3://bucket/folder`."""
    text = str(path)
    if "://" in text:
        system, place = fs.FileSystem.from_uri(text)
        return system, place
    return fs.LocalFileSystem(), Path(text).absolute().as_posix()


def absolute(path: str | Path) -> str:
    """The path as it is on every machine and in every working directory; a URI as it is."""
    text = str(path)
    return text if "://" in text else Path(text).absolute().as_posix()


def format_of(path: str | Path) -> str | None:
    """The format that the end of a path names."""
    extension = posixpath.splitext(str(path).rstrip("/"))[1].lower().lstrip(".")
    extension = {"ndjson": "jsonl", "pq": "parquet"}.get(extension, extension)
    return extension if extension in FORMATS else None


def sources_of(path: str | Path) -> list[Source]:
    """The input files: the one, or those of a folder in the order of their names."""
    path = absolute(path)
    system, place = resolve(path)
    info = system.get_file_info(place)
    if info.type == fs.FileType.NotFound:
        raise FileNotFoundError(f"{path}: no such file or folder")
    if info.type == fs.FileType.File:
        found = format_of(place)
        if found is None:
            raise ValueError(f"{path}: expected a file that ends in .jsonl, .parquet or .txt")
        return [Source(path, info.base_name, found)]
    sources = []
    for entry in system.get_file_info(fs.FileSelector(place, recursive=True)):
        name = posixpath.relpath(entry.path, place)
        hidden = any(part.startswith((".", "_")) for part in name.split("/"))
        found = format_of(name)
        if entry.type == fs.FileType.File and found is not None and not hidden:
            sources.append(Source(posixpath.join(path.rstrip("/"), name), name, found))
    if not sources:
        raise ValueError(f"{path}: there is no file that ends in .jsonl, .parquet or .txt in this folder")
    return sorted(sources, key=lambda source: source.name)


@dataclasses.dataclass
class Plan:
    """The blocks of all input files, in their order."""

    blocks: list[Block]
    rows: int
    rows_per_block: int
    # What a file was when it was planned: its name, length and hash.
    inputs: list[list[Any]]


def usual_rows(rows: Rows) -> int:
    """Rows in a block of a long job by default."""
    new_tokens = rows.options.get("max_new_tokens")
    if not isinstance(new_tokens, int) or new_tokens < 1:
        return ROWS_PER_BLOCK
    return max(LEAST_ROWS_OF_LONG_TEXTS, min(ROWS_PER_BLOCK, NEW_TOKENS_PER_BLOCK // new_tokens))


def plan(sources: list[Source], rows_per_block: int | None, actors: int, usual: int = ROWS_PER_BLOCK) -> Plan:
    """Cuts the input files into blocks. Text files are read once, to find their lines."""
    if rows_per_block is not None and rows_per_block < 1:
        raise ValueError(f"rows_per_block: expected at least 1, found {rows_per_block}")
    read = [(source, *_places_of(source)) for source in sources]
    rows = sum(len(starts) - 1 for _, _, starts, _ in read)
    if rows_per_block is None:
        fair = -(-rows // (BLOCKS_PER_ACTOR * max(1, actors)))
        rows_per_block = max(min(usual, max(LEAST_ROWS_PER_BLOCK, fair)), -(-rows // MAX_BLOCKS))
    blocks: list[Block] = []
    for source, numbers, starts, _ in read:
        for at in range(0, len(starts) - 1, rows_per_block):
            end = starts[min(at + rows_per_block, len(starts) - 1)]
            blocks.append(Block(len(blocks), source.file, source.name, source.format, numbers[at], starts[at], end))
    inputs = [[source.name, *told] for source, _, _, told in read]
    return Plan(blocks, rows, rows_per_block, inputs)


def _places_of(source: Source) -> tuple[Sequence[int], Sequence[int], list[Any]]:
    """The number of each row's line and the place where it begins, and behind them those of the end; and what the file is."""
    system, place = resolve(source.file)
    if source.format == "parquet":
        with system.open_input_file(place) as file:
            rows = _parquet(source.file, file).metadata.num_rows
            length = file.size()
            file.seek(max(0, length - BYTES_AT_ONCE))
            return range(1, rows + 2), range(rows + 1), [length, _hash(file.read())]
    numbers, starts = array.array("q"), array.array("q")
    digest, at, number = hashlib.blake2b(digest_size=16), 0, 0
    with system.open_input_stream(place) as stream:
        for line in io.BufferedReader(stream, BYTES_AT_ONCE):
            number += 1
            digest.update(line)
            # In JSONL an empty line is nothing; in plain text it is an empty prompt.
            if source.format == "txt" or line.strip():
                numbers.append(number)
                starts.append(at)
            at += len(line)
    numbers.append(number + 1)
    starts.append(at)
    return numbers, starts, [at, digest.hexdigest()]


def _parquet(path: str, file: Any) -> pyarrow.parquet.ParquetFile:
    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from None


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclasses.dataclass
class Record:
    """A row of a text file: its object, or why it is none."""

    key: str
    content: dict[str, Any]
    error: str | None = None


def _lines(block: Block) -> Iterator[tuple[int, bytes]]:
    system, place = resolve(block.file)
    with system.open_input_file(place) as file:
        file.seek(block.start)
        content = file.read(block.end - block.start)
    # What follows the last line break is no line.
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), block.first):
        yield number, line.removesuffix(b"\r")


def _records(block: Block, prompt_column: str) -> list[Record]:
    records = []
    for number, line in _lines(block):
        if block.format == "jsonl" and not line.strip():
            continue
        record = Record(f"{block.name}:{number}", {})
        try:
            # The mark that some editors put in front of UTF-8.
            text = line.decode().removeprefix("\ufeff" if number == 1 else "")
            content = {prompt_column: text} if block.format == "txt" else json.loads(text)
            if not isinstance(content, dict):
                raise ValueError("expected a JSON object")
            record.content = content
        except (ValueError, RecursionError) as error:
            record.error = f"{record.key}: {error}"
        records.append(record)
    return records


class Worker:
    """Computes blocks: what each actor of an engine holds."""

    def __init__(self, rows: Rows, parts: str, output_format: str) -> None:
        self.rows, self.parts, self.output_format = rows, parts, output_format

    def __call__(self, block: Block) -> None:
        """Writes the file of a block, unless it is there."""
        system, folder = resolve(self.parts)
        final = posixpath.join(folder, block.part_name(self.output_format))
        if system.get_file_info(final).type == fs.FileType.File:
            return
        content = self._of_parquet(block) if block.format == "parquet" else self._of_lines(block)
        write_complete(system, final, content)

    def _of_lines(self, block: Block) -> bytes:
        rows = self.rows
        records = _records(block, rows.prompt_column)
        for record in records:
            if rows.id_column is not None and record.content.get(rows.id_column) is None:
                # A content of its own goes first: it is what one looks for in the output.
                record.content = {rows.id_column: record.key, **record.content}
                record.content[rows.id_column] = record.key
        sound = [record for record in records if record.error is None]

        def column(name: str | None) -> list[Any] | None:
            return None if name is None else [record.content.get(name) for record in sound]

        made = rows.results(column(rows.prompt_column) or [], column(rows.id_column), column(rows.seed_column))
        results = iter(zip(*made.values()))
        nothing = (None,) * (len(made) - 1)
        outcomes = [next(results) if record.error is None else (*nothing, record.error) for record in records]
        if self.output_format == "jsonl":
            return b"".join(
                _json_line(_with_results(record.content, dict(zip(made, outcome))))
                for record, outcome in zip(records, outcomes)
            )
        return _parquet_bytes(self._table_of(records, dict(zip(made, zip(*outcomes)))))

    def _table_of(self, records: list[Record], results: dict[str, Any]) -> pyarrow.Table:
        """A table of fixed columns: the lines of a text file need not have the same keys, so the whole line is one of them."""

        def text(value: Any) -> str | None:
            return value if value is None or isinstance(value, str) else json.dumps(value)

        columns: dict[str, Any] = {}
        for name in (self.rows.id_column, self.rows.prompt_column):
            if name is not None:
                values = [text(record.content.get(name)) for record in records]
                columns[name] = pyarrow.array(values, pyarrow.string())
        columns["input"] = pyarrow.array([_dumps(record.content) for record in records], pyarrow.string())
        for name, kind in self.rows.result_types().items():
            columns[name] = pyarrow.array(results.get(name, []), arrow_type(kind))
        return pyarrow.table(columns)

    def _of_parquet(self, block: Block) -> bytes:
        rows = self.rows
        system, place = resolve(block.file)
        with system.open_input_file(place) as file:
            table = _rows_of(_parquet(block.file, file), block.start, block.end)
        if rows.id_column is not None:
            table = _with_ids(table, rows.id_column, [f"{block.name}:{block.first + row}" for row in range(len(table))])
        table = rows(table)
        if self.output_format == "parquet":
            return _parquet_bytes(table)
        return b"".join(_json_line(row) for row in table.to_pylist())


def _rows_of(file: pyarrow.parquet.ParquetFile, start: int, end: int) -> pyarrow.Table:
    """Some rows of a Parquet file; only the groups they are in are read."""
    groups, first, begin = [], None, 0
    for group in range(file.metadata.num_row_groups):
        after = begin + file.metadata.row_group(group).num_rows
        if begin < end and after > start:
            groups.append(group)
            first = begin if first is None else first
        begin = after
    return file.read_row_groups(groups).slice(start - (first or 0), end - start)


def _with_ids(table: pyarrow.Table, id_column: str, made_up: list[str]) -> pyarrow.Table:
    if id_column not in table.column_names:
        return table.add_column(0, id_column, pyarrow.array(made_up, pyarrow.string()))
    at = table.column_names.index(id_column)
    if table.column(at).null_count == 0:
        return table
    ids = [made if given is None else given for made, given in zip(made_up, table.column(at).to_pylist())]
    if not pyarrow.types.is_string(table.schema.field(at).type):
        # An id of a row without one is a text, which a column of numbers cannot hold: such rows say so themselves.
        return table
    return table.set_column(at, id_column, pyarrow.array(ids, pyarrow.string()))


def _with_results(content: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    return {**{name: value for name, value in content.items() if name not in results}, **results}


def _dumps(content: dict[str, Any], ensure_ascii: bool = False) -> str:
    try:
        return json.dumps(content, ensure_ascii=ensure_ascii, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(content), ensure_ascii=ensure_ascii, default=str)


def _finite(value: Any) -> Any:
    """A value with texts for the numbers that JSON has not, those of the program: `Infinity`, `-Infinity`, `NaN`."""
    if isinstance(value, dict):
        return {_finite(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def _json_line(content: dict[str, Any]) -> bytes:
    # A lone surrogate, which JSON may escape, has no UTF-8: it stays escaped.
    text = _dumps(content)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return _dumps(content, ensure_ascii=True).encode() + b"\n"


def _parquet_bytes(table: pyarrow.Table) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue()


def write_complete(system: fs.FileSystem, path: str, content: bytes) -> None:
    """Writes a file that is complete once it is there."""
    partial = _beside(path)
    with system.open_output_stream(partial) as stream:
        stream.write(content)
    system.move(partial, path)


def _beside(path: str) -> str:
    """A name for the file while it is written, which no other writer has."""
    folder, name = posixpath.split(path)
    return posixpath.join(folder, f".{name}.{uuid.uuid4().hex}")


@dataclasses.dataclass
class Job:
    """Where a job keeps what is done, and what it makes of it."""

    output: str
    output_format: str
    is_one_file: bool
    # The folder of the job's description and, in `parts`, of the files of its blocks.
    folder: str
    plan: Plan
    error_column: str

    @property
    def parts(self) -> str:
        return posixpath.join(self.folder, "parts")

    def done(self) -> set[str]:
        """Names of the files of blocks that are there."""
        system, place = resolve(self.parts)
        infos = system.get_file_info(fs.FileSelector(place, allow_not_found=True))
        return {info.base_name for info in infos if info.base_name.startswith("part-")}

    def missing(self) -> list[Block]:
        done = self.done()
        return [block for block in self.plan.blocks if block.part_name(self.output_format) not in done]

    def finish(self) -> tuple[int, int]:
        """Makes the output of the parts, and removes them; returns its rows and how many of them have an error."""
        names = [block.part_name(self.output_format) for block in self.plan.blocks]
        system, place = resolve(self.parts)
        paths = [posixpath.join(place, name) for name in names]
        target, output = resolve(self.output)
        is_parquet = self.output_format == "parquet"
        rows = errors = 0

        def contents() -> Iterator[bytes]:
            nonlocal rows, errors
            for path in paths:
                with system.open_input_file(path) as file:
                    content = file.read()
                counted = (_count_parquet if is_parquet else _count_lines)(content, self.error_column)
                rows, errors = rows + counted[0], errors + counted[1]
                yield content

        if self.is_one_file:
            partial = _beside(output)
            with target.open_output_stream(partial) as stream:
                if is_parquet:
                    _join_parquet(stream, _schema(system, paths), contents())
                else:
                    stream.writelines(contents())
            target.move(partial, output)
        else:
            target.create_dir(output, recursive=True)
            for name, content in zip(names, contents()):
                write_complete(target, posixpath.join(output, name), content)
        self._remove()
        return rows, errors

    def drop_if_empty(self) -> None:
        """Removes the folder of a job that has done nothing."""
        if not self.done():
            self._remove()

    def _remove(self) -> None:
        # Without its description the folder is of no job: parts that a kill leaves behind are not taken for a job to resume.
        system, folder = resolve(self.folder)
        system.delete_file(posixpath.join(folder, JOB_FILE))
        system.delete_dir(folder)


def _count_lines(content: bytes, error_column: str) -> tuple[int, int]:
    lines = content.splitlines()
    # The error is written last.
    sound = f'{json.dumps(error_column, ensure_ascii=False)}: null}}'.encode()
    return len(lines), sum(not line.endswith(sound) for line in lines)


def _count_parquet(content: bytes, error_column: str) -> tuple[int, int]:
    errors = pyarrow.parquet.read_table(io.BytesIO(content), columns=[error_column]).column(0)
    return len(errors), len(errors) - errors.null_count


def _schema(system: fs.FileSystem, paths: list[str]) -> pyarrow.Schema:
    """All columns of the files, each of a type that holds those of all."""
    schemas = []
    for path in paths:
        with system.open_input_file(path) as file:
            schemas.append(_parquet(path, file).schema_arrow)
    return pyarrow.unify_schemas(schemas, promote_options="permissive") if schemas else pyarrow.schema([])


def _join_parquet(stream: Any, schema: pyarrow.Schema, contents: Iterator[bytes]) -> None:
    with pyarrow.parquet.ParquetWriter(stream, schema) as writer:
        for content in contents:
            table = pyarrow.parquet.read_table(io.BytesIO(content))
            for field in schema:
                if field.name not in table.column_names:
                    table = table.append_column(field, pyarrow.nulls(len(table), field.type))
            writer.write_table(table.select(schema.names).cast(schema))


def prepare(
    input: str | Path,
    output: str | Path,
    rows: Rows,
    *,
    checkpoint: str | Path | None,
    rows_per_block: int | None,
    output_format: str | None,
    overwrite: bool,
    actors: int,
) -> Job:
    """Plans a job, or finds what an interrupted one has done: then `checkpoint` names its folder."""
    sources = sources_of(input)
    output = absolute(output)
    system, place = resolve(output)
    named = format_of(output)
    if named == "txt" or output_format not in (None, "jsonl", "parquet"):
        raise ValueError("the output is JSONL or Parquet")
    if named is not None and output_format not in (None, named):
        raise ValueError(f"{output}: the name says {named}, and output_format says {output_format}")
    is_one_file = named is not None
    chosen = named or output_format or ("parquet" if sources[0].format == "parquet" else "jsonl")
    folder = f"{output.rstrip('/')}.parts" if checkpoint is None else absolute(checkpoint)
    kept, folder_place = resolve(folder)
    job_path = posixpath.join(folder_place, JOB_FILE)
    earlier = _read_json(kept, job_path)
    if earlier is not None and rows_per_block is None:
        rows_per_block = earlier.get("rows_per_block")
    planned = plan(sources, rows_per_block, actors, usual_rows(rows))
    job = Job(output, chosen, is_one_file, folder, planned, rows.error_column)
    described = _described(job, rows)
    if earlier is not None:
        other = [name for name in described if described[name] != earlier.get(name)]
        if checkpoint is None:
            raise JobError(
                f"{folder}: this is what an interrupted run has done, {len(job.done())} of {len(planned.blocks)} blocks; "
                "give this folder as checkpoint to resume it, or remove it"
            )
        if other:
            raise JobError(
                f"{folder}: the interrupted run was another one, with other {', '.join(other)}; "
                "give the same input and options, or another folder as checkpoint"
            )
        return job
    if checkpoint is not None and kept.get_file_info(folder_place).type == fs.FileType.Directory:
        if kept.get_file_info(fs.FileSelector(folder_place)):
            raise JobError(f"{folder}: this folder is not empty and not of a run like this")
    info = system.get_file_info(place)
    is_there = info.type == fs.FileType.File
    if info.type == fs.FileType.Directory:
        if is_one_file:
            raise JobError(f"{output}: expected a file, found a folder")
        is_there = bool(system.get_file_info(fs.FileSelector(place)))
    if is_there and not overwrite:
        raise FileExistsError(f"{output}: there is an output already; choose another name, or overwrite it")
    if is_there and not is_one_file:
        raise JobError(f"{output}: a folder with files in it is not overwritten; empty it, or choose another one")
    kept.create_dir(posixpath.join(folder_place, "parts"), recursive=True)
    parent = posixpath.dirname(place)
    system.create_dir(parent, recursive=True)
    write_complete(kept, job_path, json.dumps(described, indent=1).encode())
    return job


def _read_json(system: fs.FileSystem, path: str) -> dict[str, Any] | None:
    if system.get_file_info(path).type != fs.FileType.File:
        return None
    with system.open_input_file(path) as file:
        content = json.loads(file.read())
    return content if isinstance(content, dict) else None


def _described(job: Job, rows: Rows) -> dict[str, Any]:
    """What must be the same when a run is resumed, as JSON gives it back."""
    columns = [rows.prompt_column, rows.id_column, rows.seed_column, rows.text_column, rows.error_column]
    described = {
        "task": rows.task,
        "model": rows.model,
        "model_options": rows.model_options,
        "options": rows.options,
        "seed": rows.seed,
        "columns": columns,
        "input": job.plan.inputs,
        "rows_per_block": job.plan.rows_per_block,
        "output_format": job.output_format,
    }
    text = json.dumps(described, default=lambda value: getattr(value, "__qualname__", repr(value)))
    as_read: dict[str, Any] = json.loads(text)
    return as_read
