"""Bulk jobs on Ray: actors on many machines continue or score every row of JSONL, Parquet or text files.

Ray Data gives blocks of rows to a pool of actors, restarts actors that die and repeats what they had not finished. Each
block becomes a file of its own that appears when it is complete (see `_blocks`), and these files become the output. So nothing
is lost or duplicated when an actor, a machine or the job's own process dies. Ray's own checkpoints (a beta) are not used: they
would need a filter actor of one GiB next to those that compute, and cannot know of a write that outlives its job.

All machines read the input, the model and the folder of the blocks by the same path (a shared folder, or a URI such as `s3://…`
for input and output), and have this package installed.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import time
from pathlib import Path
from typing import Any, Callable

try:
    import ray  # type: ignore[import-not-found, unused-ignore]
    import ray.data  # type: ignore[import-not-found, unused-ignore]
except ModuleNotFoundError as _error:
    if _error.name is None or _error.name.split(".")[0] not in ("ray", "pyarrow", "pandas", "numpy"):
        raise
    raise ModuleNotFoundError(
        f"bulk jobs need Ray, and {_error.name} is not installed: pip install '.[ray]' in a clone", name=_error.name
    ) from None

from . import _blocks
from ._blocks import JobError
from .rows import Rows

# Ray Data gives a job up if no block is done for half an hour; a block of long texts of a large model may take as long.
NO_PROGRESS_SECONDS = 24 * 60 * 60

__all__ = ["JobError", "Summary", "generate_dataset", "score_dataset"]


@dataclasses.dataclass(frozen=True)
class Summary:
    """The result of a job."""

    output: str
    rows: int
    # Rows that have an error in place of a result.
    errors: int
    blocks: int
    # Blocks that an interrupted run had done.
    resumed_blocks: int
    actors: int
    threads: int
    # From the first block on, with the start of the actors.
    seconds: float


def generate_dataset(input: str | Path, output: str | Path, model: str | Path | None = None, **options: Any) -> Summary:
    """Continues the prompt of every row of `input`; every row has a `text`, or an `error` that says why not.

    `input` is a file or a folder of files: JSONL with `prompt` (a text, or token ids) in each line, Parquet with such a column,
    or plain text with a prompt a line. `output` is one file in the order of the input if its name ends in `.jsonl` or
    `.parquet`, else a folder of such files (`output_format`, by default the format of the input). Either is complete once it is
    there; `overwrite` replaces a file. Other keys and columns of a row are kept. A row without an `id` gets one: name of the file,
    colon, number of the line.

    `checkpoint` is a folder for what is done: after an interruption the same call resumes from it. It is removed at the end.

    Without `actors` there is one on each node, and without `threads` each has its share of the processors; the
    book's chapter on Ray says how to choose. An actor reserves as many logical CPUs as it has threads, and `gpus_per_actor` GPUs.
    When a machine dies, a block of `rows_per_block` rows is lost and computed again. `progress` is called with the number of blocks
    done and their total.

    The other `options` are those of :class:`candle_gpt2.Rows` (`seed`, `id_column`, `seed_column`, `model_options`, …) and of
    `Model.generate`. If Ray is not running in this process it is started, on the cluster at `address` if that is given.
    """
    return _dataset("generate", input, output, model, **options)


def score_dataset(input: str | Path, output: str | Path, model: str | Path | None = None, **options: Any) -> Summary:
    """Scores the `prompt` of every row of `input`: `tokens`, `logprob`, `loss` and `perplexity`, or an `error`.

    `options` are those of :func:`generate_dataset`, of :class:`candle_gpt2.Rows` and of `Model.score`.
    """
    return _dataset("score", input, output, model, **options)


class _Actor:
    """A worker in Ray Data's terms: a batch is one block, and so is what it answers."""

    def __init__(self, rows: Rows, parts: str, output_format: str) -> None:
        self._worker = _blocks.Worker(rows, parts, output_format)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        fields = [field.name for field in dataclasses.fields(_blocks.Block)]
        [block] = [_blocks.Block(*values) for values in zip(*(batch[name].tolist() for name in fields))]
        # What is raised here would come back as text of Ray's about Ray, after a while if a constructor raises it.
        failure = b""
        try:
            self._worker(block)
        except Exception as error:
            failure = _pickled(error)
        return {"block": [block.index], "failure": [failure]}


def _pickled(error: Exception) -> bytes:
    try:
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:  # whatever a class of exceptions makes of being pickled
        return pickle.dumps(JobError(f"{type(error).__name__}: {error}"))
    return content


def _dataset(
    task: str,
    input: str | Path,
    output: str | Path,
    model: str | Path | None,
    *,
    checkpoint: str | Path | None = None,
    actors: int | None = None,
    threads: int | None = None,
    gpus_per_actor: float = 0,
    rows_per_block: int | None = None,
    output_format: str | None = None,
    overwrite: bool = False,
    address: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Summary:
    for name, value in (("actors", actors), ("threads", threads)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, found {value}")
    rows = Rows(model, task, **options)
    # What can be refused is refused before Ray is started.
    _blocks.sources_of(input)
    is_ours = not ray.is_initialized()
    if is_ours:
        # Ray's own default lets whatever else runs go before the workers, and then a thread waits for the other.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    try:
        actors, rows.threads = shares(actors, threads, _cpus_of_nodes())
        job = _blocks.prepare(
            input,
            output,
            rows,
            checkpoint=checkpoint,
            rows_per_block=rows_per_block,
            output_format=output_format,
            overwrite=overwrite,
            actors=actors,
        )
        try:
            return _run(job, rows, actors, gpus_per_actor, progress or (lambda done, blocks: None))
        except BaseException:
            job.drop_if_empty()
            raise
    finally:
        if is_ours:
            ray.shutdown()


def _run(
    job: _blocks.Job, rows: Rows, actors: int, gpus_per_actor: float, progress: Callable[[int, int], None]
) -> Summary:
    start = time.monotonic()
    blocks, missing = len(job.plan.blocks), job.missing()
    done = blocks - len(missing)
    progress(done, blocks)
    if missing:
        actors = min(actors, len(missing))
        items = [dataclasses.asdict(block) for block in missing]
        dataset: ray.data.Dataset = ray.data.from_items(items, override_num_blocks=len(missing))
        dataset.context.enable_progress_bars = False
        dataset.context.execution_no_progress_timeout_s = NO_PROGRESS_SECONDS
        dataset = dataset.map_batches(
            _Actor,
            fn_constructor_args=[rows, job.parts, job.output_format],
            batch_size=None,
            # A block that waits at a busy actor would keep an idle one from it.
            compute=ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=1),
            num_cpus=rows.threads,
            num_gpus=gpus_per_actor or None,
        )
        for answer in dataset.iter_rows():
            if answer["failure"]:
                raise pickle.loads(answer["failure"])
            done += 1
            progress(min(done, blocks), blocks)
    counted = job.finish()
    seconds = time.monotonic() - start
    return Summary(job.output, *counted, blocks, blocks - len(missing), actors, rows.threads or 1, seconds)


def _cpus_of_nodes() -> list[int]:
    """The logical CPUs of each node that has one."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call, unused-ignore]
    cpus = [int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]]
    return [count for count in cpus if count > 0]


def shares(actors: int | None, threads: int | None, cpus: list[int]) -> tuple[int, int]:
    """The number of actors and their threads: as given, by default one actor per node, each with its share of the CPUs."""
    if not cpus:
        raise JobError("no node of the Ray cluster has a CPU for actors")
    if threads is not None and threads > max(cpus):
        raise ValueError(f"threads: expected at most {max(cpus)}, the logical CPUs of the largest node, found {threads}")
    if actors is None:
        # With threads given: all that the nodes have room for.
        actors = len(cpus) if threads is None else sum(count // threads for count in cpus)
    if threads is None:
        # The most with which all of them have room on these nodes.
        fits = [count for count in range(1, max(cpus) + 1) if sum(cpu // count for cpu in cpus) >= actors]
        threads = max(fits, default=1)
    return actors, threads

