"""Models and tokenizers of transformers, taken from memory."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from .._native import Model


def is_transformers(value: Any) -> bool:
    """Whether it is a model of transformers."""
    return hasattr(value, "save_pretrained") and hasattr(value, "state_dict")


def model_of(hf_model: Any, name: str, tokenizer: Any, options: dict[str, Any]) -> tuple[Model, str]:
    """Opens a GPT-2 of transformers by way of a temporary folder, which the caller removes with the model.

    name: where the tokenizer comes from without `tokenizer`, a folder or a name on the Hub; empty if there is none."""
    kind = getattr(hf_model.config, "model_type", None)
    if kind != "gpt2":
        raise ValueError(f"hf_model: expected a GPT-2, model_type 'gpt2', found {type(hf_model).__name__} of model_type {kind!r}")
    if tokenizer is None and name and not Path(name).exists():
        tokenizer = sys.modules["transformers"].AutoTokenizer.from_pretrained(name)
    folder = tempfile.mkdtemp()
    hf_model.save_pretrained(folder)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    elif tokenizer is not None or name:
        options = {**options, "tokenizer": tokenizer or name}
    return Model.from_pretrained(folder, **options), folder


class ForeignTokenizer:
    """A tokenizer of transformers with the methods of `Model` that :class:`~.tokens.Tokenizer` calls."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.name: str = tokenizer.name_or_path
        self.config = {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "vocab_size": len(tokenizer),
        }

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def str_tokens(self, ids: Any) -> list[str]:
        return [self.decode([int(one)]) for one in ids]

    def vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())


class NoTokenizer:
    """The tokenizer of a model that has none: it refuses texts."""

    name = ""

    def __init__(self, vocab_size: int) -> None:
        self.config = {"bos_token_id": None, "eos_token_id": None, "vocab_size": vocab_size}

    def __getattr__(self, name: str) -> Any:
        raise ValueError("tokenizer: this model has none; pass token ids, or HookedTransformer(cfg, tokenizer=…)")
