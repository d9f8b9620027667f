"""Types of the native module; its classes are those of `candle_gpt2`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Self, SupportsIndex, TypeAlias, TypedDict, Unpack, final, overload

import numpy as np
import numpy.typing as npt

_Ids: TypeAlias = Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]]
_Text: TypeAlias = str | _Ids
_Texts: TypeAlias = Sequence[str] | Sequence[_Ids] | npt.NDArray[np.integer[Any]]
_Path: TypeAlias = str | PathLike[str]
_Floats: TypeAlias = npt.NDArray[np.float32]
_Hooks: TypeAlias = Sequence[tuple[str, Callable[[_Floats, str], npt.ArrayLike | None]]]
_LogitsProcessor: TypeAlias = Callable[[npt.NDArray[np.uint32], _Floats], npt.ArrayLike | None]
_Show: TypeAlias = Literal["probability", "entropy", "divergence", "next", "rank", "watched-probability"]

class _GenerationOptions(TypedDict, total=False):
    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    max_time: float | None
    eos_token_id: int | Sequence[int] | None
    stop: str | Sequence[str] | None
    stop_strings: str | Sequence[str] | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    seed: int | Sequence[int] | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    no_repeat_ngram_size: int | None
    bad_words: str | Sequence[str] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    logit_bias: Mapping[int, float] | None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[tuple[Sequence[int], float]] | None
    suppress_tokens: Sequence[int] | None
    begin_suppress_tokens: Sequence[int] | None
    forced_bos_token_id: int | None
    renormalize_logits: bool | None
    num_beams: int | None
    num_beam_groups: int | None
    diversity_penalty: float | None
    pad_token_id: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    num_return_sequences: int | None
    penalty_alpha: float | None
    num_assistant_tokens: int | None
    prompt_lookup_num_tokens: int | None
    keep_last: int | None
    keep_head: int | None
    slide: bool | None
    json_schema: str | Mapping[str, Any] | bool | None
    json_object: bool | None
    regex: str | None
    grammar: str | None
    logits_processor: _LogitsProcessor | Sequence[_LogitsProcessor] | None

class Gpt2Error(Exception): ...

@final
class Model:
    @classmethod
    def from_pretrained(
        cls,
        name_or_path: _Path | None = None,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        device: str | None = None,
        tokenizer: _Path | None = None,
        revision: str | None = None,
        offline: bool = False,
        assistant_model: _Path | None = None,
    ) -> Self: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def generation_config(self) -> dict[str, Any]: ...
    @property
    def hook_names(self) -> list[str]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: _Ids, skip_special_tokens: bool = True) -> str: ...
    def str_tokens(self, text: _Text) -> list[str]: ...
    # A list of prompts gives a list, several texts of a prompt a list of them, `details` dicts in place of texts.
    def generate(
        self,
        prompt: _Text | _Texts,
        *,
        batch_size: int = 8,
        details: bool = False,
        return_exceptions: bool = False,
        hooks: _Hooks | None = None,
        **options: Unpack[_GenerationOptions],
    ) -> Any: ...
    def stream(
        self, prompt: _Text, *, hooks: _Hooks | None = None, **options: Unpack[_GenerationOptions]
    ) -> TextStream: ...
    def stream_batch(
        self,
        prompts: _Texts,
        *,
        batch_size: int = 8,
        hooks: _Hooks | None = None,
        **options: Unpack[_GenerationOptions],
    ) -> BatchStream: ...
    def complete(self, prompt: _Text | _Texts, **options: Any) -> dict[str, Any]: ...
    @overload
    def score(self, text: str, stride: int | None = None, top: int = 0) -> dict[str, Any]: ...
    @overload
    def score(self, text: _Text | _Texts, stride: int | None = None, top: int = 0) -> Any: ...
    def score_continuations(self, prompt: str, continuations: Sequence[str]) -> list[dict[str, Any]]: ...
    def logits(
        self, ids: _Text, last_only: bool = True, cache: Cache | None = None, hooks: _Hooks | None = None
    ) -> _Floats: ...
    def cache(self, capacity: int | None = None) -> Cache: ...
    def run_with_cache(
        self,
        text: _Text,
        names: str | Sequence[str] | None = None,
        hooks: _Hooks | None = None,
        bos: bool = False,
    ) -> tuple[_Floats, dict[str, _Floats]]: ...
    def logit_lens(
        self,
        text: _Text,
        *,
        show: _Show = "probability",
        top: int = 5,
        watch: Sequence[str | int] | None = None,
        bos: bool = False,
    ) -> Picture: ...
    def attention(
        self,
        text: _Text,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[str | tuple[int, int]] | None = None,
        bos: bool = False,
    ) -> Picture: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Cache:
    @property
    def ids(self) -> list[int]: ...
    def __len__(self) -> int: ...
    def fork(self) -> Cache: ...
    def truncate(self, length: int) -> None: ...

@final
class TextStream(Iterator[str]):
    @property
    def ids(self) -> list[int]: ...
    @property
    def stop_reason(self) -> str | None: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> str: ...

@final
class BatchStream(Iterator[tuple[int, str]]):
    @property
    def ids(self) -> list[list[int]]: ...
    @property
    def stop_reasons(self) -> list[str | None]: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> tuple[int, str]: ...

@final
class Picture:
    @property
    def title(self) -> str: ...
    @property
    def tokens(self) -> list[str]: ...
    @property
    def axes(self) -> dict[str, list[str]]: ...
    @property
    def values(self) -> _Floats: ...
    @property
    def texts(self) -> list[str]: ...
    @property
    def details(self) -> dict[str, npt.NDArray[Any]]: ...
    def to_dict(self) -> dict[str, Any]: ...
    def html(self) -> str: ...
    def svg(self, columns: int = 2) -> str: ...
    def save(self, path: _Path) -> None: ...
    def _repr_html_(self) -> str: ...

def set_thread_count(threads: int) -> None: ...
def thread_count() -> int: ...

__version__: str

__all__ = [
    "BatchStream",
    "Cache",
    "Gpt2Error",
    "Model",
    "Picture",
    "TextStream",
    "__version__",
    "set_thread_count",
    "thread_count",
]
