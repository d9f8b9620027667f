"""Type stubs of the native module, whose classes `candle_gpt2` exports."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import GenericAlias
from typing import Any, Generic, Literal, NotRequired, Self, SupportsIndex, TypeAlias, TypedDict, Unpack, final, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVar

_Ids: TypeAlias = Iterable[SupportsIndex] | npt.NDArray[np.integer[Any]]
_Text: TypeAlias = str | _Ids
_Texts: TypeAlias = Iterable[str] | Iterable[_Ids] | npt.NDArray[np.integer[Any]]
_TextList: TypeAlias = Sequence[str] | Sequence[_Ids]
_Path: TypeAlias = str | PathLike[str]
# A path, or a path with a weight.
_Adapter: TypeAlias = _Path | tuple[_Path, float]
_Adapters: TypeAlias = _Adapter | Sequence[_Adapter]
# `Any` covers dtypes of torch.
_DType: TypeAlias = str | type[np.generic] | np.dtype[Any] | Any
_Floats: TypeAlias = npt.NDArray[np.float32]
_Hooks: TypeAlias = (
    Sequence[tuple[str, Callable[[_Floats, str], npt.ArrayLike | None] | npt.ArrayLike] | Steering | ControlVector] | Steering | ControlVector
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

class _StandardOptions(TypedDict, total=False):
    # Generated from the table of options.
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
    top_h: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    seed: int | Iterable[int] | None
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

class _GenerationConfig(_StandardOptions, total=False):
    num_return_sequences: int

class _TextOptions(_StandardOptions, total=False):
    # Additional options of this package.
    prepend_bos: bool
    stop: str | Sequence[str] | None
    bad_words: str | Sequence[str] | None
    logit_bias: Mapping[int, float] | None
    keep_last: int | None
    keep_head: int | None
    slide: bool | None
    json_schema: str | Mapping[str, object] | bool | None
    json_object: bool | None
    regex: str | None
    grammar: str | None
    logits_processor: _LogitsProcessor | Sequence[_LogitsProcessor] | None

class _GenerationOptions(_TextOptions, total=False):
    num_return_sequences: int | None

# Results, which are dicts at run time.
class _Generated(TypedDict):
    ids: list[int]
    text: str
    stop_reason: str
    score: NotRequired[float]

class _Score(TypedDict):
    ids: list[int]
    logprobs: npt.NDArray[np.float64]
    sum: float
    loss: float
    perplexity: float
    alternatives: NotRequired[list[list[tuple[int, float]]]]

class _Label(TypedDict):
    label: str
    score: float
    logit: float

class _LabeledToken(TypedDict):
    id: int
    text: str
    start: int
    end: int
    labels: list[_Label]

class _RankedChoice(TypedDict):
    index: int
    text: str
    score: float
    logit: float

# Labels of a text or of its tokens, or ranked choices, depending on the model's head.
class _Classification(TypedDict):
    prompt_ids: list[int]
    labels: NotRequired[list[_Label]]
    tokens: NotRequired[list[_LabeledToken]]
    choices: NotRequired[list[_RankedChoice]]

class _PublishedCheck(TypedDict):
    check: str
    source: str
    difference: float
    tolerance: float
    holds: bool

class _Verification(TypedDict):
    sound: bool
    problems: list[str]
    notes: list[str]
    cache_difference: float | None
    against_difference: float | None
    batch_difference: NotRequired[float]
    fingerprint: NotRequired[str]
    published: NotRequired[list[_PublishedCheck]]

class _Conversion(TypedDict):
    output: str
    format: str
    dtype: str
    bytes: int
    notes: list[str]

class _ContinuationScore(TypedDict):
    text: str
    ids: list[int]
    logprobs: npt.NDArray[np.float64]
    is_greedy: bool
    sum: float
    mean: float
    per_token: float
    per_character: float
    per_byte: float

# Keys of config.json.
class _Config(TypedDict):
    model_type: str
    architectures: list[str]
    vocab_size: int
    n_positions: int
    n_ctx: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None
    activation_function: str
    layer_norm_epsilon: float
    scale_attn_weights: bool
    scale_attn_by_inverse_layer_idx: bool
    reorder_and_upcast_attn: bool
    tie_word_embeddings: bool
    embd_pdrop: float
    attn_pdrop: float
    resid_pdrop: float
    initializer_range: float
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: NotRequired[int]
    add_cross_attention: NotRequired[bool]
    id2label: NotRequired[dict[str, str]]
    label2id: NotRequired[dict[str, int]]
    problem_type: NotRequired[str]
    classifier_dropout: NotRequired[float | None]
    summary_type: NotRequired[str]
    summary_activation: NotRequired[str | None]
    summary_first_dropout: NotRequired[float]
    summary_last_dropout: NotRequired[float]

class _StoredFile(TypedDict):
    path: str
    bytes: int

class _VocabularySizes(TypedDict):
    config: int
    embedding_rows: int | None
    tokenizer: int | None

class _ParameterCounts(TypedDict):
    unique: int
    with_untied_head: int
    embedding: int
    blocks: int
    per_block: int
    attention_per_block: int
    mlp_per_block: int

class _ParameterCount(TypedDict):
    name: str
    count: int
    definition: str

class _Statistics(TypedDict):
    min: float
    max: float
    mean: float
    standard_deviation: float
    zeros: int
    nan: int
    infinite: int

class _StoredTensor(TypedDict):
    name: str
    shape: list[int]
    dtype: str
    role: str
    statistics: NotRequired[_Statistics]

# The key is a Python keyword.
_OfClass = TypedDict("_OfClass", {"class": str})

class _Inspection(_OfClass):
    format: str
    evidence: str
    path: str | None
    files: list[_StoredFile]
    naming: str
    prefix: str
    orientation: str
    orientation_evidence: str
    tied_head: bool
    vocabulary: _VocabularySizes
    rules: list[str]
    config: _Config
    parameters: _ParameterCounts
    ledger: list[_ParameterCount]
    stored_parameters: int | None
    memory_bytes: dict[str, int]
    kv_bytes_per_token: dict[str, int]
    dtypes: dict[str, int]
    tensors: list[_StoredTensor]
    mismatches: list[str]

class _DifferingParameter(TypedDict):
    name: str
    difference: str
    largest: float | None

class _CheckpointDifference(TypedDict):
    equal: bool
    first_differing: str | None
    largest: float | None
    differences: list[_DifferingParameter]

class _Logprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

class _SiteActivations(TypedDict):
    site: str
    shape: list[int]
    positions: list[int]
    dtype: str
    data: list[float | None] | str

class _ActivationsInfo(TypedDict):
    bos: bool
    processing: str
    tokens: list[str]
    token_ids: list[int]

class _Choice(TypedDict):
    text: str
    index: int
    logprobs: _Logprobs | None
    finish_reason: str
    stop_reason: str | int | None
    activations: NotRequired[list[_SiteActivations]]
    activations_info: NotRequired[_ActivationsInfo]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int] | None]

class _Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

class _Completion(TypedDict):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    seed: NotRequired[int]
    choices: list[_Choice]
    usage: _Usage
    warnings: NotRequired[list[str]]

_NotFinite: TypeAlias = Literal["Infinity", "-Infinity", "NaN"]

class _Published(TypedDict):
    model: str
    metric: str
    value: float
    source: str
    protocol: str
    exact: bool

class _Metric(TypedDict):
    name: str
    value: float | _NotFinite
    stderr: float | _NotFinite | None
    stderr_kind: Literal["binomial", "delta", "none"]
    count: int
    published: list[_Published]
    z: float | None

class _EvaluatedData(TypedDict):
    name: str
    path: str
    revision: str | None
    sha256: str
    known: bool | None
    items: int
    limit: int | None

class _BaseModel(TypedDict):
    model: str
    dtype: str

class _PairedDifference(TypedDict):
    difference: float | _NotFinite
    stderr: float | _NotFinite | None

class _Flips(_PairedDifference):
    measure: str
    n11: int
    n10: int
    n01: int
    n00: int
    changed: int

class _ItemComparison(TypedDict):
    path: str
    run: str
    items: int
    answers: list[_Flips]
    logprob: _PairedDifference | None

class _Evaluation(TypedDict):
    model: str
    dtype: str
    kv_dtype: str
    device: str
    base: NotRequired[_BaseModel]
    protocol: str
    protocol_source: str
    num_fewshot: NotRequired[int]
    dataset: _EvaluatedData
    metrics: list[_Metric]
    against: NotRequired[_ItemComparison]
    cut: int
    notes: list[str]
    tokens_read: int
    tokens_scored: int
    seconds: float
    version: str

class _ProtocolParameter(TypedDict):
    default: int | None
    about: str

class _ProtocolData(TypedDict):
    name: str
    hub: str | None
    sha256: list[str]
    license: str

class _Protocol(TypedDict):
    protocol: str
    about: str
    source: str
    parameter: _ProtocolParameter | None
    dataset: _ProtocolData | None
    published: list[_Published]

class _LabelReport(TypedDict):
    label: str
    rows: int
    precision: float
    recall: float
    f1: float

class _ClassificationReport(TypedDict):
    accuracy: float
    macro_f1: float
    labels: list[_LabelReport]
    confusion: list[list[int]]

class _DictionaryReport(TypedDict):
    tokens: int
    l0: float
    explained_variance: float
    explained_variance_per_layer: NotRequired[list[float]]
    dead_latents: int
    cross_entropy: dict[str, float]
    delta_cross_entropy: float
    recovered_from_zero: float | None
    recovered_from_mean: float | None
    definitions: dict[str, str]

class _TrainReport(TypedDict):
    out: str
    parameters: int
    training_tokens: int
    held_out_tokens: int
    training_rows: NotRequired[int]
    held_out_rows: NotRequired[int]
    steps: int
    stopped_early: bool
    loss: float | None
    best_step: int | None
    held_out_loss: float | None
    held_out_loss_per_character: float | None
    classification: NotRequired[_ClassificationReport]
    dictionary: NotRequired[_DictionaryReport]
    elapsed_s: float

class _Step(TypedDict):
    step: int
    loss: float | None
    learning_rate: float
    gradient_norm: float | None
    tokens_per_s: float
    held_out_loss: NotRequired[float | None]
    held_out_loss_per_character: NotRequired[float | None]
    accuracy: NotRequired[float]
    macro_f1: NotRequired[float]
    l0: NotRequired[float]
    explained_variance: NotRequired[float]
    delta_cross_entropy: NotRequired[float]
    dead_latents: NotRequired[int]
    elapsed_s: float

class _TokenFiles(TypedDict):
    out: str
    format: str
    dtype: str
    training_tokens: int
    held_out_tokens: int
    documents: int
    shards: list[str]
    bytes: int
    encoded_bytes: int
    elapsed_s: float

class _PromptPair(TypedDict):
    clean: str
    corrupt: str
    answer: list[str]
    against: list[str]
    spans: dict[str, list[int]]

# Picture details.
class _NoDetails(TypedDict): ...

class _LensDetails(TypedDict):
    entropy: _Floats
    divergence: _Floats
    next_logprob: _Floats
    top_ids: npt.NDArray[np.uint32]
    top_logprobs: _Floats
    watched_rank: NotRequired[npt.NDArray[np.uint64]]
    watched_logprob: NotRequired[_Floats]

class _AttributeDetails(TypedDict):
    bias: float
    total: float
    logit: NotRequired[float]
    mean_logit: NotRequired[float]

class _PictureToken(TypedDict):
    index: int
    id: int
    text: str

class _PatchDetails(TypedDict):
    site: str
    corrupted_tokens: list[_PictureToken]

class _PathDetails(TypedDict):
    to: str
    corrupted_tokens: list[_PictureToken]

class _SaliencyDetails(TypedDict):
    sums: _Floats
    norms: _Floats

class _NeuronPlace(_PictureToken):
    before: str
    after: str
    value: float

class _NeuronsDetails(TypedDict):
    places: list[_NeuronPlace]

class _Explained(TypedDict):
    mean_l0: float
    variance_explained: float
    mse: float

class _FeatureHistogram(TypedDict):
    bin_width: float
    counts: list[int]

class _FeatureText(TypedDict):
    tokens: list[str]
    tokens_acts_list: list[float]
    train_token_ind: int
    is_repeated_datapoint: bool

class _FeatureQuantile(TypedDict):
    quantile_name: str
    examples: list[_FeatureText]

class _FeatureCard(TypedDict):
    index: int
    density: float
    act_min: float
    act_max: float
    histogram: _FeatureHistogram
    top_logits: list[str]
    bottom_logits: list[str]
    examples_quantiles: list[_FeatureQuantile]

class _FeaturesDetails(TypedDict):
    site: str
    explained: NotRequired[_Explained]
    features: NotRequired[list[_FeatureCard]]

class _ZeroedEffect(TypedDict):
    predicted: float
    actual: float

class _GraphNode(TypedDict):
    node_id: str
    feature: int
    layer: str
    ctx_idx: int
    feature_type: str
    jsNodeId: str
    clerp: str
    activation: NotRequired[float]
    influence: NotRequired[float]
    token_prob: NotRequired[float]
    is_target_logit: NotRequired[bool]
    top_logits: NotRequired[list[str]]
    bottom_logits: NotRequired[list[str]]
    examples_quantiles: NotRequired[list[_FeatureQuantile]]
    zeroed: NotRequired[_ZeroedEffect]
    command: NotRequired[str]

class _GraphLink(TypedDict):
    source: str
    target: str
    weight: float

# One key is a Python keyword.
_Setting = TypedDict("_Setting", {"node_id": str, "from": float, "to": float})

class _MovedLogit(TypedDict):
    id: int
    text: str
    before: float
    predicted: float
    actual: float

class _Interventions(TypedDict):
    set: list[_Setting]
    logits: list[_MovedLogit]

class _GraphDetails(TypedDict):
    metadata: dict[str, object]
    qParams: dict[str, object]
    nodes: list[_GraphNode]
    links: list[_GraphLink]
    replacement_score: float
    completeness_score: float
    interventions: NotRequired[_Interventions]

class _CircuitNode(TypedDict):
    in_graph: bool

class _SpanEdge(TypedDict):
    source: str
    destination: str
    score: float
    in_graph: bool

class _CircuitEdge(TypedDict):
    score: float
    in_graph: bool
    spans: NotRequired[list[_SpanEdge]]

class _CurvePoint(TypedDict):
    share: float
    chosen: int
    edges: int
    metric: float
    faithfulness: float | None

class _CircuitDetails(TypedDict):
    cfg: dict[str, object]
    nodes: dict[str, _CircuitNode]
    edges: dict[str, _CircuitEdge]
    clean: float
    corrupted: float
    curve: list[_CurvePoint]
    cpr: float | None
    cmd: float | None

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
    kind: Literal["top-k", "batch-top-k", "matryoshka", "standard", "jump-relu", "gated", "transcoder", "skip-transcoder", "cross-layer-transcoder"] | None
    latents: int | None
    k: int | None
    sparsity: float | None
    dead_after: int | None
    lora_rank: int | None
    lora_alpha: float | None
    lora_targets: Sequence[Literal["c_attn", "c_proj", "c_fc"]] | None
    ignore_memory: bool | None
    optimizer: Literal["adamw", "muon"] | None
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
        name_or_path: _Path | None,
        dtype: _DType | None = None,
        device: str | None = None,
        tokenizer: _Path | None = None,
        revision: str | None = None,
        offline: bool = False,
        cache_dir: _Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        adapter: _Adapters | None = None,
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
    def config(self) -> _Config: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: _Ids, skip_special_tokens: bool = True) -> str: ...
    # A list of texts returns a list of dicts. The overloads overlap, because a str is also a sequence of str.
    @overload
    def classify(  # type: ignore[overload-overlap]
        self,
        text: _Text,
        choices: Sequence[str] | None = None,
        *,
        batch_size: int = 8,
        keep_last: int | None = None,
    ) -> _Classification: ...
    @overload
    def classify(
        self,
        text: _TextList,
        choices: Sequence[str] | Sequence[Sequence[str]] | None = None,
        *,
        batch_size: int = 8,
        keep_last: int | None = None,
    ) -> list[_Classification]: ...

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
        adapter: _Adapters | None = None,
    ) -> Self: ...
    # Takes an array (1, S, width) or a file that contains one.
    def with_encoder_states(self, states: _Path | npt.ArrayLike) -> Model: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def config(self) -> _Config: ...
    @property
    def generation_config(self) -> _GenerationConfig: ...
    @property
    def hook_names(self) -> list[str]: ...
    def encode(self, text: str, prepend_bos: bool = False) -> list[int]: ...
    def decode(self, ids: _Ids, skip_special_tokens: bool = True) -> str: ...
    def vocab(self) -> dict[str, int]: ...
    def str_tokens(self, text: _Text, prepend_bos: bool = False) -> list[str]: ...
    # A list of prompts returns a list. `num_return_sequences` above 1 returns a list for each prompt. `details` returns dicts
    # instead of texts.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: _Text,
        *,
        batch_size: int = 8,
        details: Literal[False] = False,
        return_exceptions: Literal[False] = False,
        hooks: _Hooks | None = None,
        **options: Unpack[_TextOptions],
    ) -> str: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: _Text,
        *,
        batch_size: int = 8,
        details: Literal[True],
        return_exceptions: Literal[False] = False,
        hooks: _Hooks | None = None,
        **options: Unpack[_TextOptions],
    ) -> _Generated: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: _Text,
        *,
        batch_size: int = 8,
        details: Literal[False] = False,
        return_exceptions: Literal[False] = False,
        hooks: _Hooks | None = None,
        num_return_sequences: int,
        **options: Unpack[_TextOptions],
    ) -> str | list[str]: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: _Text,
        *,
        batch_size: int = 8,
        details: Literal[True],
        return_exceptions: Literal[False] = False,
        hooks: _Hooks | None = None,
        num_return_sequences: int,
        **options: Unpack[_TextOptions],
    ) -> _Generated | list[_Generated]: ...
    @overload
    def generate(
        self,
        prompt: _TextList,
        *,
        batch_size: int = 8,
        details: Literal[False] = False,
        return_exceptions: Literal[False] = False,
        hooks: _Hooks | None = None,
        **options: Unpack[_TextOptions],
    ) -> list[str]: ...
    @overload
    def generate(
        self,
        prompt: _TextList,
        *,
        batch_size: int = 8,
        details: Literal[True],
        return_exceptions: Literal[False] = False,
        hooks: _Hooks | None = None,
        **options: Unpack[_TextOptions],
    ) -> list[_Generated]: ...
    @overload
    def generate(
        self,
        prompt: _TextList,
        *,
        batch_size: int = 8,
        details: Literal[False] = False,
        return_exceptions: Literal[False] = False,
        hooks: _Hooks | None = None,
        num_return_sequences: int,
        **options: Unpack[_TextOptions],
    ) -> list[str | list[str]]: ...
    @overload
    def generate(
        self,
        prompt: _TextList,
        *,
        batch_size: int = 8,
        details: Literal[True],
        return_exceptions: Literal[False] = False,
        hooks: _Hooks | None = None,
        num_return_sequences: int,
        **options: Unpack[_TextOptions],
    ) -> list[_Generated | list[_Generated]]: ...
    @overload
    def generate(
        self,
        prompt: _TextList,
        *,
        batch_size: int = 8,
        details: Literal[False] = False,
        return_exceptions: Literal[True],
        hooks: _Hooks | None = None,
        **options: Unpack[_TextOptions],
    ) -> list[str | Exception]: ...
    @overload
    def generate(
        self,
        prompt: _TextList,
        *,
        batch_size: int = 8,
        details: Literal[True],
        return_exceptions: Literal[True],
        hooks: _Hooks | None = None,
        **options: Unpack[_TextOptions],
    ) -> list[_Generated | Exception]: ...
    def _samples(self, **options: object) -> bool: ...
    def stream(
        self, prompt: _Text, *, hooks: _Hooks | None = None, **options: Unpack[_GenerationOptions]
    ) -> TextStream: ...
    @overload
    def stream_batch(
        self,
        prompts: _Texts,
        *,
        batch_size: int = 8,
        return_exceptions: Literal[False] = False,
        hooks: _Hooks | None = None,
        **options: Unpack[_GenerationOptions],
    ) -> BatchStream: ...
    @overload
    def stream_batch(
        self,
        prompts: _Texts,
        *,
        batch_size: int = 8,
        return_exceptions: Literal[True],
        hooks: _Hooks | None = None,
        **options: Unpack[_GenerationOptions],
    ) -> BatchStream[str | Exception]: ...
    def complete(self, prompt: _Text | _Texts, **options: object) -> _Completion: ...
    @overload
    def score(  # type: ignore[overload-overlap]
        self,
        text: _Text,
        stride: int | None = None,
        top: int = 0,
        *,
        prepend_bos: bool = False,
        return_exceptions: Literal[False] = False,
    ) -> _Score: ...
    @overload
    def score(
        self,
        text: _TextList,
        stride: int | None = None,
        top: int = 0,
        *,
        prepend_bos: bool = False,
        return_exceptions: Literal[False] = False,
    ) -> list[_Score]: ...
    @overload
    def score(
        self,
        text: _TextList,
        stride: int | None = None,
        top: int = 0,
        *,
        prepend_bos: bool = False,
        return_exceptions: Literal[True],
    ) -> list[_Score | Exception]: ...
    def score_continuations(self, prompt: str, continuations: Sequence[str]) -> list[_ContinuationScore]: ...
    def logits(
        self,
        ids: _Text,
        last_only: bool = True,
        cache: Cache | None = None,
        hooks: _Hooks | None = None,
        prepend_bos: bool = False,
    ) -> _Floats: ...
    def cache(self, capacity: int | None = None) -> Cache: ...
    # Generated from the options of the analyses.
    def run_with_cache(
        self,
        text: _Text,
        names: str | Sequence[str] | None = None,
        hooks: _Hooks | None = None,
        prepend_bos: bool = False,
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
        prepend_bos: bool = False,
    ) -> Picture[_LensDetails]: ...
    def tuned_lens(
        self,
        text: _Text,
        tuned: _Path,
        *,
        top: int = 5,
        watch: Sequence[_Token] | None = None,
        show: Literal["probability", "entropy", "divergence", "next", "rank", "watched-probability"] = "probability",
        prepend_bos: bool = False,
    ) -> Picture[_LensDetails]: ...
    def attention(
        self,
        text: _Text,
        *,
        layers: _Numbers | None = None,
        heads: _Heads | None = None,
        prepend_bos: bool = False,
    ) -> Picture[_NoDetails]: ...
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
        prepend_bos: bool = False,
    ) -> Picture[_AttributeDetails]: ...
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
        prepend_bos: bool = False,
    ) -> Picture[_NoDetails]: ...
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
        prepend_bos: bool = False,
    ) -> Picture[_PatchDetails]: ...
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
        prepend_bos: bool = False,
    ) -> Picture[_PatchDetails]: ...
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
        prepend_bos: bool = False,
    ) -> Picture[_PathDetails]: ...
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
        prepend_bos: bool = False,
    ) -> Picture[_SaliencyDetails]: ...
    def neurons(
        self,
        text: _Text,
        neuron: str | tuple[int, int],
        *,
        top: int = 20,
        prepend_bos: bool = False,
    ) -> Picture[_NeuronsDetails]: ...
    def features(
        self,
        text: _Text | None,
        sae: _Path = "built-in",
        *,
        site: str | None = None,
        top: int = 20,
        prompts_file: _Path | None = None,
        features: _Numbers | None = None,
        examples: int = 6,
        features_dir: _Path | None = None,
        prepend_bos: bool = False,
    ) -> Picture[_FeaturesDetails]: ...
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
        prompts_file: _Path | None = None,
        examples: int = 6,
        prepend_bos: bool = False,
    ) -> Picture[_GraphDetails]: ...
    def circuit(
        self,
        data: _Path | Sequence[Mapping[str, object]],
        *,
        method: Literal["eap", "eap-ig", "clean-corrupted", "position-aware", "acdc"] = "eap-ig",
        metric: Literal["logit-diff", "prob-diff", "kl"] = "logit-diff",
        edges: str | int | None = None,
        select: Literal["greedy", "top"] = "greedy",
        steps: int = 5,
        threshold: float = 0.01,
        pairs: int | None = None,
        prepend_bos: bool = False,
    ) -> Picture[_CircuitDetails]: ...
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
        prepend_bos: bool = False,
    ) -> Picture[_NoDetails]: ...
    def task_data(
        self,
        task: Literal["ioi", "greater-than", "gender"],
        *,
        count: int = 100,
        seed: int = 0,
    ) -> list[_PromptPair]: ...
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
    ) -> _Evaluation: ...
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
    ) -> list[_Evaluation]: ...
    # Other methods.
    def gradients(
        self,
        text: _Text,
        names: str | Sequence[str] | None = None,
        hooks: _Hooks | None = None,
        dictionaries: Sequence[Dictionary] = (),
        error_term: bool = True,
        prepend_bos: bool = False,
        *,
        answer: _Token | None = None,
        against: _Token | None = None,
        position: int = -1,
        measure: Literal["logit", "log-probability", "probability"] = "logit",
    ) -> tuple[float, dict[str, _Floats], dict[str, _Floats]]: ...
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
    ) -> _TrainReport: ...
    def control_vector(
        self,
        vector: _Path | Mapping[int, npt.ArrayLike],
        *,
        scale: float = 1.0,
        layers: tuple[int, int] | None = None,
    ) -> ControlVector: ...
    def dictionary(self, path: _Path, site: str | None = None) -> Dictionary: ...
    def parameters(self) -> dict[str, _Floats]: ...
    @overload
    def inspect(self, *, tensors: bool = False, diff: None = None) -> _Inspection: ...
    @overload
    def inspect(self, *, tensors: Literal[False] = False, diff: _Path) -> _CheckpointDifference: ...
    def verify(self, *, against: _Path | None = None, tolerance: float = 0.001) -> _Verification: ...
    def convert(self, output: _Path, *, dtype: str = "f32", tokenizer: _Path | None = None) -> _Conversion: ...
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
    def hook_name_out(self) -> str | None: ...
    @property
    def cfg(self) -> dict[str, Any]: ...
    @property
    def d_in(self) -> int: ...
    @property
    def d_sae(self) -> int: ...
    @property
    def trained_on_processed(self) -> bool | None: ...
    @property
    def architecture(self) -> str: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    @staticmethod
    def read(path: _Path, site: str | None = None) -> Dictionary: ...
    @staticmethod
    def of_arrays(cfg: str, weights: Mapping[str, npt.ArrayLike]) -> Dictionary: ...
    def with_arrays(self, weights: Mapping[str, npt.ArrayLike]) -> Dictionary: ...
    def arrays(self) -> dict[str, _Floats]: ...
    def save(self, folder: _Path) -> None: ...
    def check(self, model: Model) -> None: ...
    def weight(self, name: str) -> _Floats | None: ...
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

_Piece = TypeVar("_Piece", covariant=True, default=str)

@final
class BatchStream(Iterator[tuple[int, _Piece]], Generic[_Piece]):
    def __class_getitem__(cls, key: object) -> GenericAlias: ...
    @property
    def ids(self) -> list[list[int]]: ...
    @property
    def stop_reasons(self) -> list[str | None]: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> tuple[int, _Piece]: ...

_Details = TypeVar("_Details", covariant=True, default=Mapping[str, object])

@final
class Picture(Generic[_Details]):
    def __class_getitem__(cls, key: object) -> GenericAlias: ...
    def __new__(
        cls,
        title: str,
        values: npt.ArrayLike,
        axes: dict[str, Iterable[object]],
        *,
        texts: Sequence[str] | None = None,
        scale: Literal["signed", "share", "amount"] = "signed",
    ) -> Self: ...
    @staticmethod
    def colored_tokens(
        tokens: Sequence[str], values: npt.ArrayLike, title: str = "", *, scale: Literal["signed", "share", "amount"] = "signed"
    ) -> Picture: ...
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
    def details(self) -> _Details: ...
    # Keys of the report, including `details`.
    def to_dict(self) -> dict[str, object]: ...
    def html(self) -> str: ...
    def svg(self, columns: int = 2) -> str: ...
    def save(self, path: _Path) -> None: ...
    def _repr_html_(self) -> str: ...

@final
class Steering:
    @property
    def layer(self) -> int: ...
    @property
    def everywhere(self) -> bool: ...
    @property
    def vectors(self) -> _Floats: ...

@overload
def inspect(
    model: _Path | None = None,
    *,
    preset: str | None = None,
    tensors: bool = False,
    diff: None = None,
    n_head: int | None = None,
    offline: bool = False,
) -> _Inspection: ...
@overload
def inspect(
    model: _Path | None = None,
    *,
    preset: None = None,
    tensors: Literal[False] = False,
    diff: _Path,
    n_head: int | None = None,
    offline: bool = False,
) -> _CheckpointDifference: ...
def verify(
    model: _Path | None = None,
    *,
    against: _Path | None = None,
    tolerance: float = 0.001,
    n_head: int | None = None,
    offline: bool = False,
) -> _Verification: ...
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
    input: _Path | None,
    output: _Path,
    *,
    dtype: str = "f32",
    tokenizer: _Path | None = None,
    n_head: int | None = None,
    offline: bool = False,
    adapter: _Adapters | None = None,
) -> _Conversion: ...
def protocols() -> list[_Protocol]: ...
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
) -> _TokenFiles: ...
def train(
    data: _Path | Sequence[_Path],
    out: _Path,
    *,
    init: _Path | None = None,
    config: _Path | Mapping[str, object] | None = None,
    tokenizer: _Path | None = None,
    resume: bool = False,
    on_step: _OnStep | None = None,
    offline: bool = False,
    **options: Unpack[_TrainOptions],
) -> _TrainReport: ...

@final
class Trainer:
    def __new__(
        cls,
        data: _Path | Sequence[_Path],
        out: _Path,
        *,
        init: _Path | None = None,
        config: _Path | Mapping[str, object] | None = None,
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
    def apply(self, gradients: npt.ArrayLike, loss: float) -> _Step: ...
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
