"""Bulk generation and scoring of rows, as a callable for any data engine.

Ray Data, Spark (`mapInPandas`), Dask (`map_partitions`) and plain loops can all call :class:`Rows`. A pickle stores its
arguments, and each process opens the model once, on the first call. A row that fails gets a message in its `error` column and
affects no other row. The result of a row does not depend on other rows, so an engine may split, reorder and repeat batches.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from operator import itemgetter
from typing import Any, Callable

__all__ = ["Rows", "row_seed"]

# Columns that each task adds: an Arrow type, and a function that extracts the value from the model's result.
RESULTS: dict[str, dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "generate": {"text": ("string", lambda text: text)},
    "score": {
        "tokens": ("int64", lambda score: len(score["ids"])),
        "logprob": ("float64", itemgetter("sum")),
        "loss": ("float64", itemgetter("loss")),
        "perplexity": ("float64", itemgetter("perplexity")),
    },
}
# Prompt that every model can continue. If it fails, the options are the cause.
PROBE_PROMPT = "\n"

# Model that this process opened last, with a key that identifies its arguments.
_opened: tuple[str, Any] | None = None
_opening = threading.Lock()


def row_seed(seed: int, row_id: object) -> int:
    """Derives a row's seed from the job's seed.

    The seed is the upper 63 bits of the BLAKE2b hash (8 bytes, little-endian) of the text `{seed}:{row_id}`. It is the same on
    every machine and in every version, so the completion of a row does not depend on where it is computed. Rows with different
    ids get different completions, even of the same prompt.
    """
    digest = hashlib.blake2b(f"{seed}:{row_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Rows:
    """Continues or scores the prompt in every row of a batch.

    A batch is a dict of columns (lists or NumPy arrays), a pandas DataFrame or a PyArrow table. The result has the same type and
    contains the columns of the batch and these additional ones:

    - `task="generate"`: `text` (a list of texts if `num_return_sequences` is above 1);
    - `task="score"`: `tokens`, `logprob` (natural logarithm, summed), `loss`, `perplexity`;
    - both: `error`, the reason why a row has no result, or null.

    `model` and `model_options` are the arguments of `Model.from_pretrained`; `options` are those of `Model.generate` or
    `Model.score`. A prompt is a text or a list of token ids.

    When sampling, each row has its own seed: the value in `seed_column`, or `row_seed(seed, id)` with the id in `id_column`. With
    `id_column=None`, every row uses `seed` itself, as `gpt2 generate --prompts-file` does. If `seed` is also None, the model gets
    no seed. Rows are sampled if the options (`do_sample=True`) or the model's generation_config.json enable sampling. Otherwise
    the completions are those of `model.generate(prompt, **options)`.

    Local paths in `model`, `tokenizer`, `assistant_model`, `adapter` and `encoder_states` become absolute, so that they work in
    other working directories.

    `threads` is the number of compute threads, by default OMP_NUM_THREADS (which Ray sets from `num_cpus`), or all that the
    machine has.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        task: str = "generate",
        *,
        prompt_column: str = "prompt",
        id_column: str | None = "id",
        seed_column: str | None = None,
        seed: int | None = 0,
        text_column: str = "text",
        error_column: str = "error",
        threads: int | None = None,
        model_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if task not in RESULTS:
            raise ValueError(f"task: expected one of {', '.join(RESULTS)}, found {task!r}")
        if seed is None and id_column is not None and seed_column is None:
            raise ValueError("seed=None leaves rows without seeds; pass id_column=None as well")
        if seed is not None:
            _check_seed(seed)
        for name in ("details", "return_exceptions", "top"):
            if name in options:
                raise ValueError(f"{name}: not supported by Rows, which has no columns for its results")
        self.model = None if model is None else _absolute_if_local("model", model)
        self.task = task
        self.prompt_column, self.id_column, self.seed_column = prompt_column, id_column, seed_column
        self.seed = seed
        self.text_column, self.error_column = text_column, error_column
        self.threads = threads
        self.model_options = dict(model_options or {})
        for name in ("tokenizer", "assistant_model", "encoder_states", "adapter"):
            value = self.model_options.get(name)
            # An array of states and a list of adapters are kept unchanged.
            if value is not None and (name not in ("encoder_states", "adapter") or isinstance(value, (str, os.PathLike))):
                self.model_options[name] = _absolute_if_local(name, value)
        self.options = options
        inputs = [name for name in (prompt_column, id_column, seed_column) if name is not None]
        for name in self.result_types():
            if name in inputs:
                raise ValueError(f"column {name!r} is both an input and an output; rename one of them")
        self._reset()

    def _reset(self) -> None:
        self._model: Any = None
        # ID of the process that opened the model.
        self._process: int | None = None
        # Whether the model samples; None if unknown.
        self._samples: bool | None = None
        # Whether a row has succeeded with the options.
        self._options_work = False

    def __getstate__(self) -> dict[str, Any]:
        transient = ("_model", "_process", "_samples", "_options_work")
        return {name: value for name, value in vars(self).items() if name not in transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"Rows(model={self.model!r}, task={self.task!r}, options={self.options!r})"

    def result_types(self) -> dict[str, str]:
        """Returns the names and Arrow types of the added columns, with `error` last."""
        types = {name: kind for name, (kind, _) in RESULTS[self.task].items()}
        if self.task == "generate":
            has_several = (self.options.get("num_return_sequences") or 1) > 1
            types = {self.text_column: "list<string>" if has_several else "string"}
        return {**types, self.error_column: "string"}

    def open(self) -> Any:
        """Returns the model, and opens it if this process has not opened it yet."""
        global _opened
        # A forked process has its parent's model, but no compute threads. Reopening the model raises a clear error.
        if self._process != os.getpid():
            import candle_gpt2

            key = repr((os.getpid(), self.model, sorted(self.model_options.items())))
            with _opening:
                if _opened is None or _opened[0] != key:
                    if self.threads is not None and self.threads != candle_gpt2.thread_count():
                        candle_gpt2.set_threads(self.threads)
                    _opened = (key, candle_gpt2.Model.from_pretrained(self.model, **self.model_options))
                self._model, self._process = _opened[1], os.getpid()
        return self._model

    def __call__(self, batch: Any) -> Any:
        """Returns the batch with the result columns; see the class."""
        columns = _columns_of(batch)
        prompts = self._column(columns, self.prompt_column)
        seed_source = self._seed_source() if prompts else None
        results = self.results(
            prompts,
            ids=None if seed_source != "id" else self._column(columns, self.id_column),
            seeds=None if seed_source != "seed" else self._column(columns, self.seed_column),
        )
        return _with_columns(batch, columns, results, self.result_types())

    def results(
        self, prompts: list[Any], ids: list[Any] | None = None, seeds: list[Any] | None = None
    ) -> dict[str, list[Any]]:
        """Computes the added columns from lists of prompts.

        `ids` is required if seeds are derived from ids, and `seeds` if each row has its own seed.
        """
        prepared: list[Any] = []
        if prompts:
            # An error in opening the model concerns the whole job, not a single row.
            self.open()
        seed_source = self._seed_source() if prompts else None
        for row, prompt in enumerate(prompts):
            try:
                prepared.append((_check_prompt(prompt), self._seed_of(row, seed_source, ids, seeds)))
            except ValueError as error:
                prepared.append(error)
        outcomes: list[Any] = list(prepared)
        rows = [row for row, one in enumerate(prepared) if isinstance(one, tuple)]
        for row, outcome in zip(rows, self._outcomes([prepared[row] for row in rows])):
            outcomes[row] = outcome
        return self._as_columns(outcomes)

    def _seed_source(self) -> str | None:
        """Returns the source of the seeds: "seed" (the column), "id", "base" (one seed for all), or None."""
        if self.task != "generate":
            return None
        if self._samples is None:
            self._samples = self.open()._samples(**self.options)
        if not self._samples:
            return None
        if self.seed_column is not None:
            return "seed"
        if self.id_column is not None:
            return "id"
        return None if self.seed is None else "base"

    def _column(self, columns: dict[str, Any], name: str | None) -> list[Any]:
        if name not in columns:
            hint = ""
            if name == self.id_column:
                hint = "; seeds are derived from ids: pass id_column, seed_column, or id_column=None for one seed for all rows"
            raise ValueError(f"missing column {name!r}; found {', '.join(map(repr, columns))}{hint}")
        return [_to_python(value) for value in columns[name]]

    def _seed_of(self, row: int, seed_source: str | None, ids: list[Any] | None, seeds: list[Any] | None) -> int | None:
        match seed_source:
            case "seed":
                return _check_seed(None if seeds is None else seeds[row])
            case "id":
                row_id = None if ids is None else ids[row]
                if row_id is None or isinstance(row_id, (list, dict)):
                    raise ValueError(f"{self.id_column}: expected a string or a number, found {_short_repr(row_id)}")
                return row_seed(self.seed or 0, row_id)
            case "base":
                return self.seed
        return None

    def _outcomes(self, rows: list[tuple[Any, int | None]]) -> list[Any]:
        """Returns the result or the exception of each row."""
        if not rows:
            return []
        outcomes = self._try_rows(rows)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if len(failures) < len(outcomes):
            self._options_work = True
        elif not self._options_work:
            self._check_options(failures[0])
        return outcomes

    def _try_rows(self, rows: list[tuple[Any, int | None]]) -> list[Any]:
        try:
            return self._call_model(rows)
        except BaseException as error:
            if not _is_row_error(error):
                raise
            if len(rows) == 1:
                return [error]
        # A single bad row fails the whole batch. Bisection finds it and keeps the other rows in batches.
        half = len(rows) // 2
        return self._try_rows(rows[:half]) + self._try_rows(rows[half:])

    def _call_model(self, rows: list[tuple[Any, int | None]]) -> list[Any]:
        options = dict(self.options)
        if rows[0][1] is not None:
            options["seed"] = [seed for _, seed in rows]
        compute = getattr(self.open(), self.task)
        return list(compute([prompt for prompt, _ in rows], return_exceptions=True, **options))

    def _check_options(self, failure: BaseException) -> None:
        """Raises the error if the options cause it.

        They do if a prompt that always works fails in the same way.
        """
        seed = None if self._seed_source() is None else 0
        probe = self._try_rows([(PROBE_PROMPT, seed)])[0]
        if isinstance(probe, BaseException) and str(probe) == str(failure):
            raise failure

    def _as_columns(self, outcomes: list[Any]) -> dict[str, list[Any]]:
        errors = [_message(outcome) if isinstance(outcome, BaseException) else None for outcome in outcomes]
        worked = [None if error is not None else outcome for error, outcome in zip(errors, outcomes)]
        read = zip(self.result_types(), RESULTS[self.task].values())
        columns = {name: [None if one is None else value(one) for one in worked] for name, (_, value) in read}
        return {**columns, self.error_column: errors}


def _absolute_if_local(name: str, value: Any) -> str:
    """Returns the absolute path of a local file or folder, and other names unchanged."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(
            f"{name}: expected a name or a path, found {type(value).__name__}; each process opens its own model, "
            "so pass its name, and other arguments of Model.from_pretrained in model_options"
        )
    text = os.fspath(value)
    return os.path.abspath(text) if os.path.exists(text) else text


def _is_row_error(error: BaseException) -> bool:
    """Whether a single row may have caused an error.

    A wrong keyword, a missing file or an interrupt concerns all rows.
    """
    import candle_gpt2

    # A panic in native code raises a BaseException. It is a bug, but should fail only the row, not the job.
    row_errors = (ValueError, OverflowError, candle_gpt2.Gpt2Error)
    return isinstance(error, row_errors) or type(error).__name__ == "PanicException"


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _check_prompt(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return str(prompt)
    if isinstance(prompt, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        return prompt
    raise ValueError(f"prompt: expected a string or a list of token ids, found {_short_repr(prompt)}")


def _check_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed: expected a whole number from 0 to 2^64 - 1, found {_short_repr(seed)}")
    return seed


def _short_repr(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _to_python(value: Any) -> Any:
    """Converts a value to plain Python: NumPy scalars and arrays, and NaN to None."""
    # Values from NumPy, PyArrow and pandas can convert themselves.
    for method in ("as_py", "tolist"):
        if not isinstance(value, (str, bytes)) and hasattr(value, method):
            value = getattr(value, method)()
            break
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float) and math.isnan(value):
        return None
    # pandas' markers for missing values.
    return None if type(value).__name__ in ("NAType", "NaTType") else value


def _is_arrow(batch: Any) -> bool:
    return hasattr(batch, "column_names") and hasattr(batch, "schema")


def _is_frame(batch: Any) -> bool:
    return hasattr(batch, "columns") and hasattr(batch, "assign")


def _columns_of(batch: Any) -> dict[str, Any]:
    if _is_arrow(batch):
        return {name: batch.column(index).to_pylist() for index, name in enumerate(batch.column_names)}
    if _is_frame(batch):
        return {name: batch[name] for name in batch.columns}
    columns = dict(batch)
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of a batch must have the same length, found {lengths}")
    return columns


def _with_columns(
    batch: Any, columns: dict[str, Any], results: dict[str, list[Any]], types: dict[str, str]
) -> Any:
    if _is_arrow(batch):
        import pyarrow  # type: ignore[import-untyped, import-not-found, unused-ignore]

        names = [name for name in batch.column_names if name not in results]
        table = batch if isinstance(batch, pyarrow.Table) else pyarrow.Table.from_batches([batch])
        table = table.select(names)
        for name, column in results.items():
            table = table.append_column(name, pyarrow.array(column, arrow_type(types[name])))
        return table
    if _is_frame(batch):
        return batch.assign(**results)
    if any(hasattr(column, "dtype") for column in columns.values()):
        import numpy

        arrays: dict[str, Any] = {}
        for name, column in results.items():
            is_full_number = types[name] in ("int64", "float64") and None not in column
            arrays[name] = numpy.empty(len(column), dtype=types[name] if is_full_number else object)
            # Assign one by one, because NumPy would turn lists into further axes.
            for row, value in enumerate(column):
                arrays[name][row] = value
        return {**columns, **arrays}
    return {**columns, **results}


def arrow_type(name: str) -> Any:
    """Returns the Arrow type for a type name from :meth:`Rows.result_types`."""
    import pyarrow

    return pyarrow.list_(pyarrow.string()) if name == "list<string>" else pyarrow.type_for_alias(name)
