"""`TransformerBridge`: the API for opening models in TransformerLens 4."""

from collections.abc import Iterator
from os import PathLike
from typing import Any, Self

from .._native import Model
from .transformer import HookedTransformer


class TransformerBridge(HookedTransformer):
    """HookedTransformer that opens with unprocessed weights, and processes them in compatibility mode.

    >>> from candle_gpt2 import TransformerBridge
    >>> model = TransformerBridge.boot_transformers("gpt2")
    >>> model.enable_compatibility_mode()

    After the last line, `model` is equivalent to `HookedTransformer.from_pretrained("gpt2")`.
    """

    @classmethod
    def boot_transformers(cls, model_name: str | PathLike[str] | Model | None = None, **options: Any) -> Self:
        """Opens a model, with the options of `HookedTransformer.from_pretrained`."""
        return cls.from_pretrained_no_processing(model_name, **options)

    def enable_compatibility_mode(
        self,
        disable_warnings: bool = False,
        no_processing: bool = False,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Processes the weights unless no_processing is set. disable_warnings has no effect."""
        if no_processing:
            return
        self.process_weights_(
            fold_ln,
            center_writing_weights,
            center_unembed,
            refactor_factored_attn_matrices,
            fold_value_biases=fold_value_biases,
        )

    def tl_named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Alias of `named_parameters`, which uses TransformerLens' names."""
        return self.named_parameters()

    def tl_parameters(self) -> dict[str, Any]:
        """Alias of `state_dict`."""
        return self.state_dict()
