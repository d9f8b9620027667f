"""Many rows at once, for any data engine: a callable from columns to columns.

Ray Data, Spark (`mapInPandas`), Dask (`map_partitions`) and a plain loop call the same :class:`Rows`. A pickle holds
its arguments, and each process opens the model once, at the first call. A row that fails gets a text in its `error` column and
affects no other row. A row's result does not depend on the other rows, so an engine may cut, order and repeat batches as it
likes.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from operator import itemgetter
from typing import Any, Callable

__all__ = ["Rows", "row_seed"]

# What each task adds to a row: of which type (Arrow's names), and how it is read of what the model gives.
RESULTS: dict[str, dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "generate": {"text": ("string", lambda text: text)},
    "score": {
        "tokens": ("int64", lambda score: len(score["ids"])),
        "logprob": ("float64", itemgetter("sum")),
        "loss": ("float64", itemgetter("loss")),
        "perplexity": ("float64", itemgetter("perplexity")),
    },
}
# A prompt that every model can continue: what fails with it fails by the options.
PLAIN_PROMPT = "\n"

# The model that this process opened last, by what it was opened with.
_opened: tuple[str, Any] | None = None
_opening = threading.Lock()


def row_seed(seed: int, row_id: object) -> int:
    """The seed of a row: the upper 63 bits of the BLAKE2b hash (8 bytes, little-endian) of the text `{seed}:{row_id}`.

    It is the same on every machine and in every version, so that a row gets the same text wherever it is computed; rows with
    other ids get other texts, of the same prompt too.
    """
    digest = hashlib.blake2b(f"{seed}:{row_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Rows:
    """Continues or scores the prompt of every row of a batch.

    A batch is a dict of columns (lists or NumPy arrays), a pandas DataFrame or a PyArrow table; the result is of the same kind,
    with the columns of the batch and these in addition:

    - `task="generate"`: `text` (a list of texts if `num_return_sequences` is above 1);
    - `task="score"`: `tokens`, `logprob` (natural, summed), `loss`, `perplexity`;
    - both: `error`, which says why a row has no result and is null if it has one.

    `model` and `model_options` are the arguments of `Model.from_pretrained`; `options` those of `Model.generate` or
    `Model.score`. A prompt is a text or a list of token ids.

    With sampling, each row has a seed of its own: the one in `seed_column`, or `row_seed(seed, id)` with the id in `id_column`.
    With `id_column=None` every row samples with `seed` itself, as `gpt2 generate --prompts-file` does, and with `seed=None` as well
    no seed is given to the model. Rows are sampled if the options (`do_sample=True`) or the model's generation_config.json ask for
    it; otherwise texts are those of `model.generate(prompt, **options)`.

    A local `model`, `tokenizer`, `assistant_model`, `adapter` or file of `encoder_states` is taken with its absolute path, as other working
    directories need it.

    The process computes with `threads`, by default with OMP_NUM_THREADS (which Ray sets from `num_cpus`), or with all that the
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
            raise ValueError("seed=None gives rows no seeds: it needs id_column=None")
        if seed is not None:
            _checked_seed(seed)
        for name in ("details", "return_exceptions", "top"):
            if name in options:
                raise ValueError(f"{name}: rows have no column for what it gives")
        self.model = None if model is None else _lasting("model", model)
        self.task = task
        self.prompt_column, self.id_column, self.seed_column = prompt_column, id_column, seed_column
        self.seed = seed
        self.text_column, self.error_column = text_column, error_column
        self.threads = threads
        self.model_options = dict(model_options or {})
        for name in ("tokenizer", "assistant_model", "encoder_states", "adapter"):
            given = self.model_options.get(name)
            # An array of states or a list of adapters stays as it is.
            if given is not None and (name not in ("encoder_states", "adapter") or isinstance(given, (str, os.PathLike))):
                self.model_options[name] = _lasting(name, given)
        self.options = options
        given = [name for name in (prompt_column, id_column, seed_column) if name is not None]
        for name in self.result_types():
            if name in given:
                raise ValueError(f"the column {name!r} is both read and written; give one of them another name")
        self._forget()

    def _forget(self) -> None:
        self._model: Any = None
        # Which process has opened it.
        self._process: int | None = None
        # Whether texts are drawn at random, once the model has said so.
        self._samples: bool | None = None
        # Whether a row has shown that the options work.
        self._options_work = False

    def __getstate__(self) -> dict[str, Any]:
        forgotten = ("_model", "_process", "_samples", "_options_work")
        return {name: value for name, value in vars(self).items() if name not in forgotten}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __repr__(self) -> str:
        return f"Rows(model={self.model!r}, task={self.task!r}, options={self.options!r})"

    def result_types(self) -> dict[str, str]:
        """The added columns and Arrow's names of their types, `error` last."""
        types = {name: kind for name, (kind, _) in RESULTS[self.task].items()}
        if self.task == "generate":
            many = (self.options.get("num_return_sequences") or 1) > 1
            types = {self.text_column: "list<string>" if many else "string"}
        return {**types, self.error_column: "string"}

    def open(self) -> Any:
        """The model, opened now if this process has not opened it yet."""
        global _opened
        # A fork has its parent's model without the threads that compute; opening one says so.
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
        """The batch with the columns of the results; see the class."""
        columns = _columns_of(batch)
        prompts = self._column(columns, self.prompt_column)
        draws_by = self._draws_by() if prompts else None
        results = self.results(
            prompts,
            ids=None if draws_by != "id" else self._column(columns, self.id_column),
            seeds=None if draws_by != "seed" else self._column(columns, self.seed_column),
        )
        return _with_columns(batch, columns, results, self.result_types())

    def results(
        self, prompts: list[Any], ids: list[Any] | None = None, seeds: list[Any] | None = None
    ) -> dict[str, list[Any]]:
        """The columns that are added, for plain lists of what the rows hold; `ids` or `seeds` if they are needed."""
        prepared: list[Any] = []
        if prompts:
            # What goes wrong there is no row's.
            self.open()
        draws_by = self._draws_by() if prompts else None
        for row, prompt in enumerate(prompts):
            try:
                prepared.append((_checked_prompt(prompt), self._seed_of(row, draws_by, ids, seeds)))
            except ValueError as error:
                prepared.append(error)
        outcomes: list[Any] = list(prepared)
        rows = [row for row, one in enumerate(prepared) if isinstance(one, tuple)]
        for row, outcome in zip(rows, self._outcomes([prepared[row] for row in rows])):
            outcomes[row] = outcome
        return self._as_columns(outcomes)

    def _draws_by(self) -> str | None:
        """What a row's seed comes from: its `seed` column, its `id`, the `base` seed of all, or nothing."""
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
                hint = "; a row's seed needs its id: give id_column, seed_column, or id_column=None for one seed for all"
            raise ValueError(f"there is no column {name!r} among {', '.join(map(repr, columns))}{hint}")
        return [_plain(value) for value in columns[name]]

    def _seed_of(self, row: int, draws_by: str | None, ids: list[Any] | None, seeds: list[Any] | None) -> int | None:
        match draws_by:
            case "seed":
                return _checked_seed(None if seeds is None else seeds[row])
            case "id":
                row_id = None if ids is None else ids[row]
                if row_id is None or isinstance(row_id, (list, dict)):
                    raise ValueError(f"{self.id_column}: expected a text or a number, found {_shown(row_id)}")
                return row_seed(self.seed or 0, row_id)
            case "base":
                return self.seed
        return None

    def _outcomes(self, rows: list[tuple[Any, int | None]]) -> list[Any]:
        """What each row gives, or the exception that says why it gives nothing."""
        if not rows:
            return []
        outcomes = self._tried(rows)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if len(failures) < len(outcomes):
            self._options_work = True
        elif not self._options_work:
            self._check_options(failures[0])
        return outcomes

    def _tried(self, rows: list[tuple[Any, int | None]]) -> list[Any]:
        try:
            return self._called(rows)
        except BaseException as error:
            if not _is_of_a_row(error):
                raise
            if len(rows) == 1:
                return [error]
        # Some row cannot even be asked for: halves find it, and the others stay together.
        half = len(rows) // 2
        return self._tried(rows[:half]) + self._tried(rows[half:])

    def _called(self, rows: list[tuple[Any, int | None]]) -> list[Any]:
        options = dict(self.options)
        if rows[0][1] is not None:
            options["seed"] = [seed for _, seed in rows]
        compute = getattr(self.open(), self.task)
        return list(compute([prompt for prompt, _ in rows], return_exceptions=True, **options))

    def _check_options(self, failure: BaseException) -> None:
        """Raises if not the rows but the options are wrong: then a prompt that always works fails alike."""
        seed = None if self._draws_by() is None else 0
        probed = self._tried([(PLAIN_PROMPT, seed)])[0]
        if isinstance(probed, BaseException) and str(probed) == str(failure):
            raise failure

    def _as_columns(self, outcomes: list[Any]) -> dict[str, list[Any]]:
        errors = [_message(outcome) if isinstance(outcome, BaseException) else None for outcome in outcomes]
        worked = [None if error is not None else outcome for error, outcome in zip(errors, outcomes)]
        read = zip(self.result_types(), RESULTS[self.task].values())
        columns = {name: [None if one is None else value(one) for one in worked] for name, (_, value) in read}
        return {**columns, self.error_column: errors}


def _lasting(name: str, place: Any) -> str:
    """A name on the Hub as it is, and the path of what is on this machine as every working directory has it."""
    if not isinstance(place, (str, os.PathLike)):
        raise TypeError(
            f"{name}: expected a name or a path, found {type(place).__name__}; each process opens a model of its own, "
            "so give what it is opened by, and other arguments of Model.from_pretrained as model_options"
        )
    text = os.fspath(place)
    return os.path.abspath(text) if os.path.exists(text) else text


def _is_of_a_row(error: BaseException) -> bool:
    """Whether an error may be a single row's: not a wrong keyword, a missing file or an interruption."""
    import candle_gpt2

    # A panic of native code is no Exception; it is a defect, and shall cost a row and not the job.
    of_rows = (ValueError, OverflowError, candle_gpt2.Gpt2Error)
    return isinstance(error, of_rows) or type(error).__name__ == "PanicException"


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _checked_prompt(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return str(prompt)
    if isinstance(prompt, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        return prompt
    raise ValueError(f"prompt: expected a text or a list of token ids, found {_shown(prompt)}")


def _checked_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed: expected a whole number from 0 to 2^64 - 1, found {_shown(seed)}")
    return seed


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(value: Any) -> Any:
    """A value as Python knows it: no scalars or arrays of NumPy, no NaN in place of nothing."""
    # What NumPy, PyArrow and pandas hand out knows its Python value.
    for method in ("as_py", "tolist"):
        if not isinstance(value, (str, bytes)) and hasattr(value, method):
            value = getattr(value, method)()
            break
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float) and math.isnan(value):
        return None
    # pandas' own mark of a missing value.
    return None if type(value).__name__ in ("NAType", "NaTType") else value


def _is_arrow(batch: Any) -> bool:
    return hasattr(batch, "column_names") and hasattr(batch, "schema")


def _is_frame(batch: Any) -> bool:
    return hasattr(batch, "columns") and hasattr(batch, "assign")


def _columns_of(batch: Any) -> dict[str, Any]:
    if _is_arrow(batch):
        return {name: batch.column(place).to_pylist() for place, name in enumerate(batch.column_names)}
    if _is_frame(batch):
        return {name: batch[name] for name in batch.columns}
    columns = dict(batch)
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of a batch are of one length, found {lengths}")
    return columns


def _with_columns(
    batch: Any, columns: dict[str, Any], results: dict[str, list[Any]], types: dict[str, str]
) -> Any:
    if _is_arrow(batch):
        import pyarrow  # type: ignore[import-untyped, import-not-found, unused-ignore]

        kept = [name for name in batch.column_names if name not in results]
        table = batch if isinstance(batch, pyarrow.Table) else pyarrow.Table.from_batches([batch])
        table = table.select(kept)
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
            # One by one: NumPy would take lists in a row for further axes.
            for row, value in enumerate(column):
                arrays[name][row] = value
        return {**columns, **arrays}
    return {**columns, **results}


def arrow_type(name: str) -> Any:
    """The type of Arrow with this name of :meth:`Rows.result_types`."""
    import pyarrow

    return pyarrow.list_(pyarrow.string()) if name == "list<string>" else pyarrow.type_for_alias(name)
