"""Bulk generation and scoring of JSONL, Parquet or text files on a Ray cluster.

Ray Data passes blocks of rows to a pool of actors, restarts actors that die, and repeats their unfinished blocks. Each block
becomes a separate file, written atomically (see `_blocks`), and these files become the output. Nothing is lost or duplicated
when an actor, a machine or the job's own process dies. Ray's checkpoints (a beta feature) are not used: they would need a
filter actor with one GiB of memory, and cannot detect a write that outlives its job.

All machines must have this package installed. They must reach the input, the model and the block folder under the same
path: a shared folder, or for input and output a URI such as `s3://…`.
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

# Timeout in case no block finishes. Ray Data's default of half an hour is too short for long texts and large models.
NO_PROGRESS_SECONDS = 24 * 60 * 60

__all__ = ["JobError", "Summary", "generate_dataset", "score_dataset"]


@dataclasses.dataclass(frozen=True)
class Summary:
    """Statistics of a finished job."""

    output: str
    rows: int
    # Rows with an error instead of a result.
    errors: int
    blocks: int
    # Blocks that an interrupted run had already finished.
    resumed_blocks: int
    actors: int
    threads: int
    # Includes the actors' startup.
    seconds: float


def generate_dataset(input: str | Path, output: str | Path, model: str | Path | None = None, **options: Any) -> Summary:
    """Continues the prompt in every row of `input`. Every output row has a `text` or an `error`.

    `input` is a file or a folder of files: JSONL with `prompt` (a text, or token ids) in each line, Parquet with such a column,
    or plain text with one prompt per line. `output` is a single file in input order if its name ends in `.jsonl` or `.parquet`,
    otherwise a folder of such files (`output_format`, by default the input's format). Files are written atomically; `overwrite`
    replaces an existing file. Other keys and columns of a row are preserved. A row without an `id` gets one: file name, colon,
    line number.

    `checkpoint` is a folder for finished blocks. After an interruption, the same call resumes from it. It is removed at the end.

    By default there is one actor per node (`actors`), and each has an equal share of the CPUs (`threads`); the guide on scaling
    explains how to choose. An actor reserves one logical CPU per thread, and `gpus_per_actor` GPUs. When a machine dies, a block
    of `rows_per_block` rows is computed again. `progress` is called with the number of finished blocks and the total.

    The other `options` are those of :class:`candle_gpt2.Rows` (`seed`, `id_column`, `seed_column`, `model_options`, …) and of
    `Model.generate`. If Ray is not running in this process, the call starts it, or connects to the cluster at `address`.
    """
    return _dataset("generate", input, output, model, **options)


def score_dataset(input: str | Path, output: str | Path, model: str | Path | None = None, **options: Any) -> Summary:
    """Scores the `prompt` in every row of `input`.

    Every output row has `tokens`, `logprob`, `loss` and `perplexity`, or an `error`. `options` are those of
    :func:`generate_dataset`, :class:`candle_gpt2.Rows` and `Model.score`.
    """
    return _dataset("score", input, output, model, **options)


class _Actor:
    """Adapter from Ray Data to a worker: each input batch and each result is one block."""

    def __init__(self, rows: Rows, parts: str, output_format: str) -> None:
        self._worker = _blocks.Worker(rows, parts, output_format)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        fields = [field.name for field in dataclasses.fields(_blocks.Block)]
        [block] = [_blocks.Block(*values) for values in zip(*(batch[name].tolist() for name in fields))]
        # Return exceptions as values. Ray would wrap raised ones in its own, and report those from constructors late.
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
    except Exception:  # an exception class may raise anything when it is pickled
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
    # Reject an invalid input before Ray starts.
    _blocks.sources_of(input)
    started_here = not ray.is_initialized()
    if started_here:
        # Ray's default niceness lets other programs preempt the workers, so that their threads wait for each other.
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
        if started_here:
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
            # A block in a busy actor's queue would be unavailable to idle actors.
            compute=ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=1),
            num_cpus=rows.threads,
            num_gpus=gpus_per_actor or None,
        )
        for result in dataset.iter_rows():
            if result["failure"]:
                raise pickle.loads(result["failure"])
            done += 1
            progress(min(done, blocks), blocks)
    counted = job.finish()
    seconds = time.monotonic() - start
    return Summary(job.output, *counted, blocks, blocks - len(missing), actors, rows.threads or 1, seconds)


def _cpus_of_nodes() -> list[int]:
    """Returns the number of logical CPUs on each live node that has any."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call, unused-ignore]
    cpus = [int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]]
    return [count for count in cpus if count > 0]


def shares(actors: int | None, threads: int | None, cpus: list[int]) -> tuple[int, int]:
    """Returns the number of actors, and the number of threads per actor.

    By default there is one actor per node, each with an equal share of the CPUs.
    """
    if not cpus:
        raise JobError("no node in the Ray cluster has a CPU for actors")
    if threads is not None and threads > max(cpus):
        raise ValueError(f"threads: expected at most {max(cpus)}, the logical CPUs of the largest node, found {threads}")
    if actors is None:
        # With explicit threads, start as many actors as fit on the nodes.
        actors = len(cpus) if threads is None else sum(count // threads for count in cpus)
    if threads is None:
        # Largest number of threads per actor that lets all actors fit on the nodes.
        fits = [count for count in range(1, max(cpus) + 1) if sum(cpu // count for cpu in cpus) >= actors]
        threads = max(fits, default=1)
    return actors, threads

