"""Types of the native module; its classes are those of `candle_gpt2`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Self, SupportsIndex, TypeAlias, TypedDict, Unpack, final, overload

import numpy as np
import numpy.typing as npt

_Ids: TypeAlias = Iterable[SupportsIndex] | npt.NDArray[np.integer[Any]]
_Text: TypeAlias = str | _Ids
_Texts: TypeAlias = Iterable[str] | Iterable[_Ids] | npt.NDArray[np.integer[Any]]
_Path: TypeAlias = str | PathLike[str]
# Or a type of torch's.
_DType: TypeAlias = str | type[np.generic] | np.dtype[Any] | Any
_Floats: TypeAlias = npt.NDArray[np.float32]
_Hooks: TypeAlias = (
    Sequence[tuple[str, Callable[[_Floats, str], npt.ArrayLike | None]] | Steering | ControlVector] | Steering | ControlVector
)
_LogitsProcessor: TypeAlias = Callable[[npt.NDArray[np.uint32], _Floats], npt.ArrayLike | None]
_OnStep: TypeAlias = Callable[[dict[str, Any]], object]
_Token: TypeAlias = str | int
_Numbers: TypeAlias = Sequence[int] | int | str
_Heads: TypeAlias = Sequence[str | tuple[int, int]] | str
_Instead: TypeAlias = str | tuple[Literal["mean"], Sequence[_Text]] | tuple[Literal["sample"], _Text]

_Biases: TypeAlias = (
    Mapping[tuple[int, ...], float]
    | Sequence[tuple[Sequence[int], float]]
    | Sequence[Sequence[Sequence[int] | float]]
)

class _GenerationOptions(TypedDict, total=False):
    # From the table of options.
    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    max_time: float | None
    eos_token_id: int | Iterable[int] | None
    stop_strings: str | Sequence[str] | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    seed: int | Iterable[int] | None
    num_return_sequences: int | None
    encoder_repetition_penalty: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    bad_words_ids: Sequence[Sequence[int]] | None
    sequence_bias: _Biases | None
    suppress_tokens: int | Iterable[int] | None
    begin_suppress_tokens: int | Iterable[int] | None
    forced_bos_token_id: int | None
    renormalize_logits: bool | None
    num_beams: int | None
    num_beam_groups: int | None
    diversity_penalty: float | None
    pad_token_id: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    penalty_alpha: float | None
    num_assistant_tokens: int | None
    prompt_lookup_num_tokens: int | None
    # Options of this package.
    stop: str | Sequence[str] | None
    bad_words: str | Sequence[str] | None
    logit_bias: Mapping[int, float] | None
    keep_last: int | None
    keep_head: int | None
    slide: bool | None
    json_schema: str | Mapping[str, Any] | bool | None
    json_object: bool | None
    regex: str | None
    grammar: str | None
    logits_processor: _LogitsProcessor | Sequence[_LogitsProcessor] | None

class _TrainOptions(TypedDict, total=False):
    task: Literal["text", "classify", "answer", "dictionary"] | None
    steps: int | None
    batch_size: int | None
    accumulate: int | None
    context: int | None
    context_ramp: str | None
    batch_ramp: str | None
    random_positions: bool | None
    document_starts: float | None
    initialization: Literal["gpt2", "mimetic"] | None
    recompute: bool | None
    train_blocks: int | None
    class_weights: Mapping[str, float] | Literal["balanced"] | None
    site: str | None
    output_site: str | None
    kind: Literal["top-k", "batch-top-k", "jump-relu", "gated", "transcoder", "skip-transcoder", "cross-layer-transcoder"] | None
    latents: int | None
    k: int | None
    sparsity: float | None
    dead_after: int | None
    lora_rank: int | None
    lora_alpha: float | None
    lora_targets: Sequence[Literal["c_attn", "c_proj", "c_fc"]] | None
    ignore_memory: bool | None
    lr: float | None
    schedule: Literal["cosine", "linear", "constant"] | None
    final_share: float | None
    warmup_steps: int | None
    weight_decay: float | None
    beta_2_half_life: float | None
    grad_clip: float | None
    dropout: float | None
    held_out: float | None
    eval_every: int | None
    save_every: int | None
    keep_steps: Sequence[int] | None
    sample: str | None
    patience: int | None
    seed: int | None
    dtype: Literal["f32", "f16", "bf16"] | None
    device: str | None
    compute_dtype: Literal["f32", "bf16"] | None
    n_head: int | None

class Gpt2Error(Exception): ...

@final
class Classifier:
    @classmethod
    def from_pretrained(
        cls,
        name_or_path: _Path,
        dtype: _DType | None = None,
        device: str | None = None,
        tokenizer: _Path | None = None,
        revision: str | None = None,
        offline: bool = False,
        cache_dir: _Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> Self: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def labels(self) -> list[str]: ...
    @property
    def config(self) -> dict[str, Any]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: _Ids, skip_special_tokens: bool = True) -> str: ...
    # A list of texts gives a list of dicts.
    @overload
    def classify(
        self,
        text: str,
        choices: Sequence[str] | None = None,
        *,
        batch_size: int = 8,
        keep_last: int | None = None,
    ) -> dict[str, Any]: ...
    @overload
    def classify(
        self,
        text: _Text | _Texts,
        choices: Sequence[str] | Sequence[Sequence[str]] | None = None,
        *,
        batch_size: int = 8,
        keep_last: int | None = None,
    ) -> Any: ...

@final
class Model:
    @classmethod
    def from_pretrained(
        cls,
        name_or_path: _Path | None = None,
        dtype: _DType | None = None,
        kv_dtype: _DType | None = None,
        device: str | None = None,
        tokenizer: _Path | None = None,
        revision: str | None = None,
        offline: bool = False,
        assistant_model: _Path | None = None,
        encoder_states: _Path | npt.ArrayLike | None = None,
        cache_dir: _Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> Self: ...
    # The same weights in memory, attending to an array (1, S, width) or a file of it.
    def with_encoder_states(self, states: _Path | npt.ArrayLike) -> Model: ...
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
    def vocab(self) -> dict[str, int]: ...
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
    def _samples(self, **options: Any) -> bool: ...
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
    def score(
        self, text: _Text | _Texts, stride: int | None = None, top: int = 0, *, return_exceptions: bool = False
    ) -> Any: ...
    def score_continuations(self, prompt: str, continuations: Sequence[str]) -> list[dict[str, Any]]: ...
    def logits(
        self, ids: _Text, last_only: bool = True, cache: Cache | None = None, hooks: _Hooks | None = None
    ) -> _Floats: ...
    def cache(self, capacity: int | None = None) -> Cache: ...
    # From the options of looks.
    def run_with_cache(
        self,
        text: _Text,
        names: str | Sequence[str] | None = None,
        hooks: _Hooks | None = None,
        bos: bool = False,
        *,
        layers: _Numbers | None = None,
        positions: _Numbers | None = None,
        as_: Literal["raw", "transformer-lens"] = "raw",
    ) -> tuple[_Floats, dict[str, _Floats]]: ...
    def logit_lens(
        self,
        text: _Text,
        *,
        top: int = 5,
        watch: Sequence[_Token] | None = None,
        show: Literal["probability", "entropy", "divergence", "next", "rank", "watched-probability"] = "probability",
        bos: bool = False,
    ) -> Picture: ...
    def tuned_lens(
        self,
        text: _Text,
        tuned: _Path,
        *,
        top: int = 5,
        watch: Sequence[_Token] | None = None,
        show: Literal["probability", "entropy", "divergence", "next", "rank", "watched-probability"] = "probability",
        bos: bool = False,
    ) -> Picture: ...
    def attention(
        self,
        text: _Text,
        *,
        layers: _Numbers | None = None,
        heads: _Heads | None = None,
        bos: bool = False,
    ) -> Picture: ...
    def attribute(
        self,
        text: _Text,
        *,
        answer: _Token | None = None,
        against: _Token | None = None,
        position: int = -1,
        measure: Literal["logit", "log-probability", "probability"] = "logit",
        unit: Literal["component", "layer", "head", "neuron"] = "component",
        as_: Literal["raw", "transformer-lens"] = "raw",
        top: int = 40,
        bos: bool = False,
    ) -> Picture: ...
    def ablate(
        self,
        text: _Text,
        *,
        answer: _Token | None = None,
        against: _Token | None = None,
        position: int = -1,
        measure: Literal["logit", "log-probability", "probability"] = "logit",
        heads: _Heads | None = None,
        at: int | None = None,
        with_: _Instead = "raw-zero",
        bos: bool = False,
    ) -> Picture: ...
    def patch(
        self,
        clean: _Text,
        corrupt: _Text,
        *,
        answer: _Token | None = None,
        against: _Token | None = None,
        position: int = -1,
        measure: Literal["logit", "log-probability", "probability"] = "logit",
        site: str = "resid_pre",
        by: Literal["layer", "position", "head", "head-and-position"] | None = None,
        bos: bool = False,
    ) -> Picture: ...
    def estimate(
        self,
        clean: _Text,
        corrupt: _Text,
        *,
        answer: _Token | None = None,
        against: _Token | None = None,
        position: int = -1,
        measure: Literal["logit", "log-probability", "probability"] = "logit",
        site: str = "resid_pre",
        by: Literal["layer", "position", "head", "head-and-position"] | None = None,
        bos: bool = False,
    ) -> Picture: ...
    def path(
        self,
        clean: _Text,
        corrupt: _Text,
        *,
        answer: _Token | None = None,
        against: _Token | None = None,
        position: int = -1,
        measure: Literal["logit", "log-probability", "probability"] = "logit",
        from_: _Heads | None = None,
        to: str = "final",
        bos: bool = False,
    ) -> Picture: ...
    def saliency(
        self,
        text: _Text,
        *,
        answer: _Token | None = None,
        against: _Token | None = None,
        position: int = -1,
        measure: Literal["logit", "log-probability", "probability"] = "logit",
        method: Literal["integrated", "input-x-gradient", "gradient"] = "integrated",
        steps: int = 50,
        baseline: _Token | None = None,
        bos: bool = False,
    ) -> Picture: ...
    def neurons(
        self,
        text: _Text,
        neuron: str | tuple[int, int],
        *,
        top: int = 20,
        bos: bool = False,
    ) -> Picture: ...
    def features(
        self,
        text: _Text | None,
        sae: _Path,
        *,
        site: str | None = None,
        top: int = 20,
        prompts_file: _Path | None = None,
        features: _Numbers | None = None,
        examples: int = 6,
        features_dir: _Path | None = None,
        bos: bool = False,
    ) -> Picture: ...
    def attribution_graph(
        self,
        text: _Text,
        *,
        transcoders: _Path | None = None,
        max_feature_nodes: int = 4096,
        max_memory: int = 4096,
        node_threshold: float = 0.8,
        edge_threshold: float = 0.98,
        set: Sequence[str] | None = None,
        top: int = 20,
        bos: bool = False,
    ) -> Picture: ...
    def circuit(
        self,
        data: _Path | Sequence[Mapping[str, Any]],
        *,
        method: Literal["eap", "eap-ig", "clean-corrupted", "position-aware", "acdc"] = "eap-ig",
        metric: Literal["logit-diff", "prob-diff", "kl"] = "logit-diff",
        edges: str | int | None = None,
        select: Literal["greedy", "top"] = "greedy",
        steps: int = 5,
        threshold: float = 0.01,
        pairs: int | None = None,
        bos: bool = False,
    ) -> Picture: ...
    def heads(
        self,
        text: _Text | None = None,
        *,
        length: int | None = None,
        rows: int = 2,
        seed: int = 0,
        from_: int | None = None,
        below: int | None = None,
        exclude_bos: bool = False,
        exclude_current: bool = False,
        bos: bool = False,
    ) -> Picture: ...
    def task_data(
        self,
        task: Literal["ioi", "greater-than", "gender"],
        *,
        count: int = 100,
        seed: int = 0,
    ) -> list[dict[str, Any]]: ...
    @overload
    def evaluate(
        self,
        protocol: str,
        data: _Path | Sequence[_Path] | None = None,
        *,
        num_fewshot: int | None = None,
        fewshot_data: _Path | Sequence[_Path] | None = None,
        fewshot_seed: int | None = None,
        limit: int | None = None,
        context: int | None = None,
        items: _Path | None = None,
        resume: bool = False,
        against: _Path | None = None,
        base: Model | None = None,
    ) -> dict[str, Any]: ...
    @overload
    def evaluate(
        self,
        protocol: list[str] | tuple[str, ...],
        data: _Path | Sequence[_Path] | None = None,
        *,
        num_fewshot: int | None = None,
        fewshot_data: _Path | Sequence[_Path] | None = None,
        fewshot_seed: int | None = None,
        limit: int | None = None,
        context: int | None = None,
        items: _Path | None = None,
        resume: bool = False,
        against: _Path | None = None,
        base: Model | None = None,
    ) -> list[dict[str, Any]]: ...
    # Other methods.
    def steering(
        self,
        steer: str | tuple[_Text, _Text] | npt.ArrayLike,
        *,
        layer: int,
        scale: float = 1.0,
        everywhere: bool = False,
    ) -> Steering: ...
    def train(
        self,
        data: _Path | Sequence[_Path],
        out: _Path,
        *,
        tokenizer: _Path | None = None,
        resume: bool = False,
        on_step: _OnStep | None = None,
        **options: Unpack[_TrainOptions],
    ) -> dict[str, Any]: ...
    def control_vector(
        self,
        vector: _Path | Mapping[int, npt.ArrayLike],
        *,
        scale: float = 1.0,
        layers: tuple[int, int] | None = None,
    ) -> ControlVector: ...
    # A sparse autoencoder for this model.
    def dictionary(self, path: _Path, site: str | None = None) -> Dictionary: ...
    def parameters(self) -> dict[str, _Floats]: ...
    def inspect(self, *, tensors: bool = False, diff: _Path | None = None) -> dict[str, Any]: ...
    def verify(self, *, against: _Path | None = None, tolerance: float = 0.001) -> dict[str, Any]: ...
    def convert(self, output: _Path, *, dtype: str = "f32", tokenizer: _Path | None = None) -> dict[str, Any]: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class ControlVector:
    @property
    def directions(self) -> dict[int, _Floats]: ...
    def save(self, path: _Path) -> None: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Dictionary:
    @property
    def hook_name(self) -> str: ...
    @property
    def d_in(self) -> int: ...
    @property
    def d_sae(self) -> int: ...
    @property
    def trained_on_processed(self) -> bool: ...
    @property
    def architecture(self) -> str: ...
    @staticmethod
    def read(path: _Path, site: str | None = None) -> Dictionary: ...
    def check(self, model: Model) -> None: ...
    def weight(self, name: str) -> _Floats | None: ...
    def pre_activations(self, x: npt.ArrayLike) -> _Floats: ...
    def activate(self, before: npt.ArrayLike) -> _Floats: ...
    def encode(self, x: npt.ArrayLike) -> _Floats: ...
    def decode(self, latents: npt.ArrayLike, x: npt.ArrayLike) -> _Floats: ...
    def direction(self, latent: int) -> _Floats: ...

@final
class Cache:
    @property
    def ids(self) -> list[int]: ...
    def __len__(self) -> int: ...
    def fork(self) -> Cache: ...
    def truncate(self, length: int) -> Self: ...

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
    def __new__(
        cls,
        title: str,
        values: npt.ArrayLike,
        axes: dict[str, Iterable[object]],
        *,
        texts: Sequence[str] | None = None,
        scale: Literal["signed", "share", "amount"] = "signed",
    ) -> Self: ...
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
    def details(self) -> dict[str, Any]: ...
    def to_dict(self) -> dict[str, Any]: ...
    def html(self) -> str: ...
    def svg(self, columns: int = 2) -> str: ...
    def save(self, path: _Path) -> None: ...
    def _repr_html_(self) -> str: ...

@final
class Steering: ...

def inspect(
    model: _Path | None = None,
    *,
    preset: str | None = None,
    tensors: bool = False,
    diff: _Path | None = None,
    n_head: int | None = None,
    offline: bool = False,
) -> dict[str, Any]: ...
def verify(
    model: _Path | None = None,
    *,
    against: _Path | None = None,
    tolerance: float = 0.001,
    n_head: int | None = None,
    offline: bool = False,
) -> dict[str, Any]: ...
def compress(
    data: bytes,
    model: Model | _Path | None = None,
    *,
    dtype: str = "q8",
    kv_dtype: str | None = None,
    context: int | None = None,
    tokenizer: _Path | None = None,
    n_head: int | None = None,
    offline: bool = False,
) -> bytes: ...
def decompress(
    data: bytes,
    model: Model | _Path | None = None,
    *,
    tokenizer: _Path | None = None,
    n_head: int | None = None,
    offline: bool = False,
) -> bytes: ...
def convert(
    input: _Path,
    output: _Path,
    *,
    dtype: str = "f32",
    tokenizer: _Path | None = None,
    n_head: int | None = None,
    offline: bool = False,
) -> dict[str, Any]: ...
def protocols() -> list[dict[str, Any]]: ...
def set_threads(threads: int) -> None: ...
def thread_count() -> int: ...
def tokenize(
    data: _Path | Sequence[_Path],
    out: _Path,
    *,
    format: Literal["nanogpt", "llm.c"] = "nanogpt",
    dtype: Literal["u16", "u32"] | None = None,
    shard_tokens: int | None = None,
    held_out: float = 0.01,
    resume: bool = False,
    model: _Path | None = None,
    tokenizer: _Path | None = None,
    n_head: int | None = None,
    offline: bool = False,
) -> dict[str, Any]: ...
def train(
    data: _Path | Sequence[_Path],
    out: _Path,
    *,
    init: _Path | None = None,
    config: _Path | Mapping[str, Any] | None = None,
    tokenizer: _Path | None = None,
    resume: bool = False,
    on_step: _OnStep | None = None,
    offline: bool = False,
    **options: Unpack[_TrainOptions],
) -> dict[str, Any]: ...

@final
class Trainer:
    def __new__(
        cls,
        data: _Path | Sequence[_Path],
        out: _Path,
        *,
        init: _Path | None = None,
        config: _Path | Mapping[str, Any] | None = None,
        tokenizer: _Path | None = None,
        resume: bool = False,
        rank: int = 0,
        world_size: int = 1,
        offline: bool = False,
        **options: Unpack[_TrainOptions],
    ) -> Self: ...
    @property
    def step(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def done(self) -> bool: ...
    def loss_and_gradients(self) -> tuple[float, _Floats]: ...
    def apply(self, gradients: npt.ArrayLike, loss: float) -> dict[str, Any]: ...
    def parameters(self) -> dict[str, _Floats]: ...
    def save(self) -> None: ...
    def state(self) -> bytes: ...
    def set_state(self, state: bytes) -> None: ...

def _number_options() -> list[tuple[str, bool, str]]: ...

__version__: str

__all__ = [
    "BatchStream",
    "Cache",
    "Classifier",
    "ControlVector",
    "Dictionary",
    "Gpt2Error",
    "Model",
    "Picture",
    "Steering",
    "TextStream",
    "Trainer",
    "__version__",
    "_number_options",
    "compress",
    "convert",
    "decompress",
    "inspect",
    "protocols",
    "set_threads",
    "thread_count",
    "tokenize",
    "train",
    "verify",
]
