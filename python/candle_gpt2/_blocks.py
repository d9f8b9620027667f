"""Bulk jobs split into blocks, independent of any engine.

A job plans its input, computes blocks, and assembles the output in input order.

A block is a contiguous range of rows of one input file. Its index determines the name of its file. The file is written under a
temporary name and renamed when it is complete, and its bytes do not depend on the machine. So a block may be computed twice, even
by a machine that was considered lost, and its rows still appear once. Resuming a job means computing the missing blocks.
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
# Maximum number of blocks in a job. Engines need a few kilobytes per block.
MAX_BLOCKS = 20_000
# Default block size: about a minute of GPT-2 on two cores, with fewer rows for long texts. With even fewer rows,
# actors would often wait for the last texts in a block.
ROWS_PER_BLOCK, NEW_TOKENS_PER_BLOCK, MIN_ROWS_FOR_LONG_TEXTS = 128, 6400, 32
# Minimum blocks per actor, so that no actor idles for long at the end. A block is never smaller than a batch.
BLOCKS_PER_ACTOR, MIN_ROWS_PER_BLOCK = 8, 8
# File that describes the job, next to its block files.
JOB_FILE = "job.json"
CHUNK_BYTES = 1 << 20


class JobError(Exception):
    """Raised when a job cannot start or continue."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Contiguous range of rows in an input file.

    `start..end` are byte offsets of lines in text files, and row indices in Parquet.
    """

    index: int
    file: str
    # Path of the file relative to the input folder, or its name. Generated ids contain it.
    name: str
    format: str
    # 1-based number of the first line or row.
    first: int
    start: int
    end: int

    def part_name(self, output_format: str) -> str:
        return f"part-{self.index:06}.{output_format}"


@dataclasses.dataclass(frozen=True)
class Source:
    """Input file."""

    file: str
    name: str
    format: str


def resolve(path: str | Path) -> tuple[fs.FileSystem, str]:
    """Returns the file system for a local path or a URI such as `s3://bucket/folder`, and the path in that file system."""
    text = str(path)
    if "://" in text:
        system, location = fs.FileSystem.from_uri(text)
        return system, location
    return fs.LocalFileSystem(), Path(text).absolute().as_posix()


def absolute(path: str | Path) -> str:
    """Returns the absolute path, or a URI unchanged."""
    text = str(path)
    return text if "://" in text else Path(text).absolute().as_posix()


def format_of(path: str | Path) -> str | None:
    """Returns the format that a path's extension indicates, or None."""
    extension = posixpath.splitext(str(path).rstrip("/"))[1].lower().lstrip(".")
    extension = {"ndjson": "jsonl", "pq": "parquet"}.get(extension, extension)
    return extension if extension in FORMATS else None


def sources_of(path: str | Path) -> list[Source]:
    """Lists the input files: a single file, or the files in a folder, sorted by name."""
    path = absolute(path)
    system, location = resolve(path)
    info = system.get_file_info(location)
    if info.type == fs.FileType.NotFound:
        raise FileNotFoundError(f"{path}: no such file or folder")
    if info.type == fs.FileType.File:
        found = format_of(location)
        if found is None:
            raise ValueError(f"{path}: expected a file that ends in .jsonl, .parquet or .txt")
        return [Source(path, info.base_name, found)]
    sources = []
    for entry in system.get_file_info(fs.FileSelector(location, recursive=True)):
        name = posixpath.relpath(entry.path, location)
        hidden = any(part.startswith((".", "_")) for part in name.split("/"))
        found = format_of(name)
        if entry.type == fs.FileType.File and found is not None and not hidden:
            sources.append(Source(posixpath.join(path.rstrip("/"), name), name, found))
    if not sources:
        raise ValueError(f"{path}: no .jsonl, .parquet or .txt files in this folder")
    return sorted(sources, key=lambda source: source.name)


@dataclasses.dataclass
class Plan:
    """Blocks of all input files, in order."""

    blocks: list[Block]
    rows: int
    rows_per_block: int
    # Name, length and hash of each file when the job was planned.
    inputs: list[list[Any]]


def default_rows_per_block(rows: Rows) -> int:
    """Returns the default number of rows per block for a large job."""
    new_tokens = rows.options.get("max_new_tokens")
    if not isinstance(new_tokens, int) or new_tokens < 1:
        return ROWS_PER_BLOCK
    return max(MIN_ROWS_FOR_LONG_TEXTS, min(ROWS_PER_BLOCK, NEW_TOKENS_PER_BLOCK // new_tokens))


def plan(sources: list[Source], rows_per_block: int | None, actors: int, default_rows: int = ROWS_PER_BLOCK) -> Plan:
    """Splits the input files into blocks. Reads text files once to find their lines."""
    if rows_per_block is not None and rows_per_block < 1:
        raise ValueError(f"rows_per_block: expected at least 1, found {rows_per_block}")
    scanned = [(source, *_scan(source)) for source in sources]
    rows = sum(len(starts) - 1 for _, _, starts, _ in scanned)
    if rows_per_block is None:
        fair = -(-rows // (BLOCKS_PER_ACTOR * max(1, actors)))
        rows_per_block = max(min(default_rows, max(MIN_ROWS_PER_BLOCK, fair)), -(-rows // MAX_BLOCKS))
    blocks: list[Block] = []
    for source, numbers, starts, _ in scanned:
        for at in range(0, len(starts) - 1, rows_per_block):
            end = starts[min(at + rows_per_block, len(starts) - 1)]
            blocks.append(Block(len(blocks), source.file, source.name, source.format, numbers[at], starts[at], end))
    inputs = [[source.name, *fingerprint] for source, _, _, fingerprint in scanned]
    return Plan(blocks, rows, rows_per_block, inputs)


def _scan(source: Source) -> tuple[Sequence[int], Sequence[int], list[Any]]:
    """Finds the rows of a file.

    Returns the line number of each row, the start of each row, and the length and hash of the file. Both lists have one more
    entry for the end.
    """
    system, location = resolve(source.file)
    if source.format == "parquet":
        with system.open_input_file(location) as file:
            rows = _parquet(source.file, file).metadata.num_rows
            length = file.size()
            file.seek(max(0, length - CHUNK_BYTES))
            return range(1, rows + 2), range(rows + 1), [length, _hash(file.read())]
    numbers, starts = array.array("q"), array.array("q")
    digest, at, number = hashlib.blake2b(digest_size=16), 0, 0
    with system.open_input_stream(location) as stream:
        for line in io.BufferedReader(stream, CHUNK_BYTES):
            number += 1
            digest.update(line)
            # In JSONL empty lines are ignored; in plain text they are empty prompts.
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
    """Row of a text file: its parsed object, or the reason why it is invalid."""

    key: str
    content: dict[str, Any]
    error: str | None = None


def _lines(block: Block) -> Iterator[tuple[int, bytes]]:
    system, location = resolve(block.file)
    with system.open_input_file(location) as file:
        file.seek(block.start)
        content = file.read(block.end - block.start)
    # The last line break ends a line and does not start a new one.
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), block.first):
        yield number, line.removesuffix(b"\r")


def _records(block: Block, prompt_column: str) -> list[Record]:
    records = []
    for number, line in _lines(block):
        if block.format == "jsonl" and not line.strip():
            continue
        record = Record(f"{block.name}:{number}", {})
        try:
            # Some editors write a byte-order mark before UTF-8.
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
    """Computes blocks. Each of an engine's actors has its own worker."""

    def __init__(self, rows: Rows, parts: str, output_format: str) -> None:
        self.rows, self.parts, self.output_format = rows, parts, output_format

    def __call__(self, block: Block) -> None:
        """Writes a block's file, unless it already exists."""
        system, folder = resolve(self.parts)
        final = posixpath.join(folder, block.part_name(self.output_format))
        if system.get_file_info(final).type == fs.FileType.File:
            return
        content = self._compute_parquet(block) if block.format == "parquet" else self._compute_lines(block)
        write_complete(system, final, content)

    def _compute_lines(self, block: Block) -> bytes:
        rows = self.rows
        records = _records(block, rows.prompt_column)
        for record in records:
            if rows.id_column is not None and record.content.get(rows.id_column) is None:
                # Put the id first, because readers look for it in the output.
                record.content = {rows.id_column: record.key, **record.content}
                record.content[rows.id_column] = record.key
        valid = [record for record in records if record.error is None]

        def column(name: str | None) -> list[Any] | None:
            return None if name is None else [record.content.get(name) for record in valid]

        columns = rows.results(column(rows.prompt_column) or [], column(rows.id_column), column(rows.seed_column))
        results = iter(zip(*columns.values()))
        nothing = (None,) * (len(columns) - 1)
        outcomes = [next(results) if record.error is None else (*nothing, record.error) for record in records]
        if self.output_format == "jsonl":
            return b"".join(
                _json_line(_with_results(record.content, dict(zip(columns, outcome))))
                for record, outcome in zip(records, outcomes)
            )
        return _parquet_bytes(self._table_of(records, dict(zip(columns, zip(*outcomes)))))

    def _table_of(self, records: list[Record], results: dict[str, Any]) -> pyarrow.Table:
        """Returns a table with fixed columns.

        Lines may have different keys, so one column contains the whole line.
        """

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

    def _compute_parquet(self, block: Block) -> bytes:
        rows = self.rows
        system, location = resolve(block.file)
        with system.open_input_file(location) as file:
            table = _rows_of(_parquet(block.file, file), block.start, block.end)
        if rows.id_column is not None:
            table = _with_ids(table, rows.id_column, [f"{block.name}:{block.first + row}" for row in range(len(table))])
        table = rows(table)
        if self.output_format == "parquet":
            return _parquet_bytes(table)
        return b"".join(_json_line(row) for row in table.to_pylist())


def _rows_of(file: pyarrow.parquet.ParquetFile, start: int, end: int) -> pyarrow.Table:
    """Reads a range of rows from a Parquet file, without reading the other row groups."""
    groups, first, begin = [], None, 0
    for group in range(file.metadata.num_row_groups):
        after = begin + file.metadata.row_group(group).num_rows
        if begin < end and after > start:
            groups.append(group)
            first = begin if first is None else first
        begin = after
    return file.read_row_groups(groups).slice(start - (first or 0), end - start)


def _with_ids(table: pyarrow.Table, id_column: str, generated: list[str]) -> pyarrow.Table:
    if id_column not in table.column_names:
        return table.add_column(0, id_column, pyarrow.array(generated, pyarrow.string()))
    at = table.column_names.index(id_column)
    if table.column(at).null_count == 0:
        return table
    ids = [new if found is None else found for new, found in zip(generated, table.column(at).to_pylist())]
    if not pyarrow.types.is_string(table.schema.field(at).type):
        # Generated ids are strings, which a numeric column cannot store. Rows without an id get an error instead.
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
    """Replaces non-finite numbers, which JSON lacks, with the strings `Infinity`, `-Infinity` and `NaN`."""
    if isinstance(value, dict):
        return {_finite(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def _json_line(content: dict[str, Any]) -> bytes:
    # A lone surrogate, which JSON can escape, has no UTF-8 encoding, so keep the escape.
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
    """Writes a file atomically."""
    partial = _temporary_path(path)
    with system.open_output_stream(partial) as stream:
        stream.write(content)
    system.move(partial, path)


def _temporary_path(path: str) -> str:
    """Returns a unique temporary name in the same folder."""
    folder, name = posixpath.split(path)
    return posixpath.join(folder, f".{name}.{uuid.uuid4().hex}")


@dataclasses.dataclass
class Job:
    """Files of a job: its output, and the folder with its finished blocks."""

    output: str
    output_format: str
    is_one_file: bool
    # Folder with the job's description; its subfolder `parts` holds the block files.
    folder: str
    plan: Plan
    error_column: str

    @property
    def parts(self) -> str:
        return posixpath.join(self.folder, "parts")

    def done(self) -> set[str]:
        """Returns the names of existing block files."""
        system, location = resolve(self.parts)
        infos = system.get_file_info(fs.FileSelector(location, allow_not_found=True))
        return {info.base_name for info in infos if info.base_name.startswith("part-")}

    def missing(self) -> list[Block]:
        done = self.done()
        return [block for block in self.plan.blocks if block.part_name(self.output_format) not in done]

    def finish(self) -> tuple[int, int]:
        """Assembles the output from the parts and removes them.

        Returns the number of rows and the number of rows with errors.
        """
        names = [block.part_name(self.output_format) for block in self.plan.blocks]
        system, location = resolve(self.parts)
        paths = [posixpath.join(location, name) for name in names]
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
            partial = _temporary_path(output)
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
        """Removes the folder of a job without finished blocks."""
        if not self.done():
            self._remove()

    def _remove(self) -> None:
        # Delete the description first, so that parts that outlive a killed process are not mistaken for a job to resume.
        system, folder = resolve(self.folder)
        system.delete_file(posixpath.join(folder, JOB_FILE))
        system.delete_dir(folder)


def _count_lines(content: bytes, error_column: str) -> tuple[int, int]:
    lines = content.splitlines()
    # The error is the last key in each line.
    ending = f'{json.dumps(error_column, ensure_ascii=False)}: null}}'.encode()
    return len(lines), sum(not line.endswith(ending) for line in lines)


def _count_parquet(content: bytes, error_column: str) -> tuple[int, int]:
    errors = pyarrow.parquet.read_table(io.BytesIO(content), columns=[error_column]).column(0)
    return len(errors), len(errors) - errors.null_count


def _schema(system: fs.FileSystem, paths: list[str]) -> pyarrow.Schema:
    """Returns the columns for all files, each with a type that can hold every file's values."""
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
    """Plans a job, or resumes an interrupted one from the folder `checkpoint`."""
    sources = sources_of(input)
    output = absolute(output)
    system, location = resolve(output)
    named = format_of(output)
    if named == "txt" or output_format not in (None, "jsonl", "parquet"):
        raise ValueError("output: the format must be JSONL or Parquet")
    if named is not None and output_format not in (None, named):
        raise ValueError(f"{output}: the extension implies {named}, but output_format is {output_format}")
    is_one_file = named is not None
    chosen = named or output_format or ("parquet" if sources[0].format == "parquet" else "jsonl")
    folder = f"{output.rstrip('/')}.parts" if checkpoint is None else absolute(checkpoint)
    job_system, folder_location = resolve(folder)
    job_path = posixpath.join(folder_location, JOB_FILE)
    earlier = _read_json(job_system, job_path)
    if earlier is not None and rows_per_block is None:
        rows_per_block = earlier.get("rows_per_block")
    planned = plan(sources, rows_per_block, actors, default_rows_per_block(rows))
    job = Job(output, chosen, is_one_file, folder, planned, rows.error_column)
    description = _description(job, rows)
    if earlier is not None:
        other = [name for name in description if description[name] != earlier.get(name)]
        if checkpoint is None:
            raise JobError(
                f"{folder}: contains an interrupted run with {len(job.done())} of {len(planned.blocks)} blocks; "
                "pass this folder as checkpoint to resume it, or remove it"
            )
        if other:
            raise JobError(
                f"{folder}: the interrupted run has different {', '.join(other)}; "
                "pass the same input and options, or another folder as checkpoint"
            )
        return job
    if checkpoint is not None and job_system.get_file_info(folder_location).type == fs.FileType.Directory:
        if job_system.get_file_info(fs.FileSelector(folder_location)):
            raise JobError(f"{folder}: the folder is neither empty nor the checkpoint of a job; choose another one")
    info = system.get_file_info(location)
    exists = info.type == fs.FileType.File
    if info.type == fs.FileType.Directory:
        if is_one_file:
            raise JobError(f"{output}: expected a file, found a folder")
        exists = bool(system.get_file_info(fs.FileSelector(location)))
    if exists and not overwrite:
        raise FileExistsError(f"{output}: the output already exists; choose another name, or pass overwrite")
    if exists and not is_one_file:
        raise JobError(f"{output}: a non-empty folder cannot be overwritten; empty it, or choose another one")
    job_system.create_dir(posixpath.join(folder_location, "parts"), recursive=True)
    parent = posixpath.dirname(location)
    system.create_dir(parent, recursive=True)
    write_complete(job_system, job_path, json.dumps(description, indent=1).encode())
    return job


def _read_json(system: fs.FileSystem, path: str) -> dict[str, Any] | None:
    if system.get_file_info(path).type != fs.FileType.File:
        return None
    with system.open_input_file(path) as file:
        content = json.loads(file.read())
    return content if isinstance(content, dict) else None


def _description(job: Job, rows: Rows) -> dict[str, Any]:
    """Returns the settings that must match when a run is resumed, after a round trip through JSON."""
    columns = [rows.prompt_column, rows.id_column, rows.seed_column, rows.text_column, rows.error_column]
    description = {
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
    text = json.dumps(description, default=lambda value: getattr(value, "__qualname__", repr(value)))
    parsed: dict[str, Any] = json.loads(text)
    return parsed
