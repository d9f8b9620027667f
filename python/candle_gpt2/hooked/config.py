"""The configuration under TransformerLens' names."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class HookedTransformerConfig:
    """Sizes of a GPT-2, what was done to its weights, and which of the costly hook points are on."""

    n_layers: int
    d_model: int
    n_ctx: int
    d_head: int
    n_heads: int = -1
    d_mlp: int | None = None
    d_vocab: int = -1
    d_vocab_out: int = -1
    act_fn: str = "gelu_new"
    eps: float = 1e-5
    model_name: str = "gpt2"
    tokenizer_name: str | None = None
    use_attn_scale: bool = True
    attn_scale: float = 1.0
    scale_attn_by_inverse_layer_idx: bool = False
    # "LNPre" once the weights of the norms are folded into what follows them.
    normalization_type: str | None = "LN"
    default_prepend_bos: bool = True
    use_attn_result: bool = False
    use_attn_in: bool = False
    use_split_qkv_input: bool = False
    use_hook_mlp_in: bool = False
    # The same for every GPT-2.
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

    def to_dict(self) -> dict[str, Any]:
        """All of it as a dict."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "HookedTransformerConfig":
        """The same from a dict; an unknown key is a TypeError."""
        return cls(**values)

    @classmethod
    def of_model(cls, config: dict[str, Any], name: str) -> "HookedTransformerConfig":
        """That of a model with these keys of a config.json."""
        if config.get("add_cross_attention"):
            raise ValueError(f"{name}: a GPT-2 with cross-attention has no TransformerLens form; use Model.run_with_cache")
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
