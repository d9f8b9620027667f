"""Model configuration with TransformerLens' names."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

# Prefixes of TransformerLens settings that have no effect on their own.
_IGNORED = ("rotary_", "yarn_", "NTK_", "checkpoint_", "n_params", "tokenizer_prepends_bos", "tie_word_embeddings", "trust_remote_code")


@dataclass
class HookedTransformerConfig:
    """Sizes of a GPT-2, processing of its weights, and switches for expensive hook points."""

    n_layers: int
    d_model: int
    n_ctx: int
    d_head: int
    n_heads: int = -1
    d_mlp: int | None = None
    d_vocab: int = -1
    d_vocab_out: int = -1
    act_fn: str | None = None
    eps: float = 1e-5
    model_name: str = "custom"
    tokenizer_name: str | None = None
    use_attn_scale: bool = True
    # -1 means sqrt(d_head).
    attn_scale: float = -1.0
    scale_attn_by_inverse_layer_idx: bool = False
    # "LNPre" after the norms' weights are folded into the next layers.
    normalization_type: str | None = "LN"
    default_prepend_bos: bool = True
    use_attn_result: bool = False
    use_attn_in: bool = False
    use_split_qkv_input: bool = False
    use_hook_mlp_in: bool = False
    # For untrained weights; -1 means 0.8 / sqrt(d_model).
    init_mode: str = "gpt2"
    initializer_range: float = -1.0
    init_weights: bool = True
    # These settings are the same for every GPT-2.
    positional_embedding_type: str = "standard"
    attention_dir: str = "causal"
    original_architecture: str = "GPT2LMHeadModel"
    attn_only: bool = False
    gated_mlp: bool = False
    final_rms: bool = False
    tokenizer_prepends_bos: bool = False
    n_key_value_heads: int | None = None
    n_devices: int = 1
    device: str = "cpu"
    dtype: Any = "float32"
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.n_heads == -1:
            self.n_heads = self.d_model // self.d_head
        if self.d_mlp is None and not self.attn_only:
            self.d_mlp = 4 * self.d_model
        if self.d_vocab_out == -1:
            self.d_vocab_out = self.d_vocab
        if self.attn_scale == -1.0:
            self.attn_scale = self.d_head**0.5 if self.use_attn_scale else 1.0

    @property
    def n_params(self) -> int:
        """Number of attention and MLP weights, without embeddings, biases and norms."""
        return self.n_layers * self.d_model * (4 * self.d_head * self.n_heads + 2 * (self.d_mlp or 0))

    def check(self) -> None:
        """Raises a ValueError for the first setting that a float32 GPT-2 on the CPU does not support."""
        expected = {
            "positional_embedding_type": ("standard",),
            "attention_dir": ("causal",),
            "attn_only": (False,),
            "gated_mlp": (False,),
            "final_rms": (False,),
            "n_key_value_heads": (None, self.n_heads),
            "normalization_type": ("LN", "LNPre"),
            "n_devices": (1,),
            "device": ("cpu", None),
            "init_mode": ("gpt2",),
        }
        for name, values in expected.items():
            found = getattr(self, name)
            if (None if found is None else str(found) if name == "device" else found) not in values:
                raise ValueError(f"{name}={found!r}: not supported by GPT-2 on the CPU; expected {' or '.join(map(repr, values))}")
        if str(self.dtype).removeprefix("torch.") not in ("float32", "f32"):
            raise ValueError(f"dtype={self.dtype!r}: this model computes in float32")
        if self.act_fn is None:
            raise ValueError("act_fn: missing; pass the MLPs' activation function, such as 'gelu_new'")
        if self.d_vocab < 1:
            raise ValueError("d_vocab: missing; pass the vocabulary size")

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings as a dict."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "HookedTransformerConfig":
        """Reads a dict, which may come from TransformerLens.

        Raises a ValueError for a key that is unknown or does not apply to GPT-2.
        """
        own = {field.name for field in fields(cls)}
        for name, value in values.items():
            # Settings for other architectures are ignored if they are off.
            is_off = value is None or value is False or value == -1.0 or name.startswith(_IGNORED)
            if name not in own and not is_off:
                nearest = difflib.get_close_matches(name, own, n=1)
                hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
                raise ValueError(f"{name}={value!r}: not a GPT-2 setting{hint}")
        return cls(**{name: value for name, value in values.items() if name in own})

    @classmethod
    def unwrap(cls, config: Any) -> "HookedTransformerConfig":
        """Copies a configuration, which may also be a TransformerLens configuration or a dict."""
        if isinstance(config, cls):
            return replace(config)
        return cls.from_dict(dict(config) if isinstance(config, dict) else config.to_dict())

    @classmethod
    def of_model(cls, config: Mapping[str, Any], name: str) -> "HookedTransformerConfig":
        """Creates the configuration for a model from its config.json."""
        if config.get("add_cross_attention"):
            raise ValueError(f"{name}: TransformerLens does not support cross-attention; use Model.run_with_cache")
        width, heads = config["n_embd"], config["n_head"]
        is_scaled = config.get("scale_attn_weights", True)
        return cls(
            n_layers=config["n_layer"],
            d_model=width,
            n_ctx=config["n_positions"],
            d_head=width // heads,
            n_heads=heads,
            d_mlp=config.get("n_inner"),
            d_vocab=config["vocab_size"],
            act_fn=config.get("activation_function", "gelu_new"),
            eps=config.get("layer_norm_epsilon", 1e-5),
            model_name=name,
            tokenizer_name=name,
            use_attn_scale=is_scaled,
            attn_scale=(width // heads) ** 0.5 if is_scaled else 1.0,
            scale_attn_by_inverse_layer_idx=config.get("scale_attn_by_inverse_layer_idx", False),
        )
