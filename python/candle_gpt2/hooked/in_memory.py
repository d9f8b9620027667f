"""Conversion of in-memory models and tokenizers from transformers."""

import json
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .._native import Model
from .weights import Weights


def is_transformers(value: Any) -> bool:
    """Whether a value is a transformers model."""
    return hasattr(value, "save_pretrained") and hasattr(value, "state_dict")


def model_of(hf_model: Any, name: str, tokenizer: Any, options: dict[str, Any]) -> tuple[Model, str]:
    """Opens a transformers GPT-2 through a temporary folder.

    The caller must remove the folder along with the model. name: the tokenizer's folder or Hub name if `tokenizer` is None; may be empty.
    """
    kind = getattr(hf_model.config, "model_type", None)
    if kind != "gpt2":
        raise ValueError(f"hf_model: expected a GPT-2 model (model_type 'gpt2'), found {type(hf_model).__name__} (model_type {kind!r})")
    if tokenizer is None and name and not Path(name).exists():
        tokenizer = sys.modules["transformers"].AutoTokenizer.from_pretrained(name)
    folder = tempfile.mkdtemp()
    hf_model.save_pretrained(folder)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    elif tokenizer is not None or name:
        options = {**options, "tokenizer": tokenizer or name}
    return Model.from_pretrained(folder, **options), folder


def model_with(native: Model, weights: Weights) -> tuple[Model, str]:
    """Opens a copy of a model with different weights through a temporary folder.

    The caller must remove the folder along with the model.
    """
    tensors, folder = weights.checkpoint(), tempfile.mkdtemp()
    try:
        copy = Path(folder, "model")
        native.convert(copy)
        config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        (copy / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}), encoding="utf-8")
        _write_safetensors(copy / "model.safetensors", tensors)
        return Model.from_pretrained(copy, dtype="f32", device=native.device), folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in tensors.items():
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": [end, end + value.nbytes]}
        end += value.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).data)


class ForeignTokenizer:
    """Adapter that gives a transformers tokenizer the methods that :class:`~.tokens.Tokenizer` calls."""

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
    """Placeholder for a missing tokenizer. It rejects all texts."""

    name = ""

    def __init__(self, vocab_size: int) -> None:
        self.config = {"bos_token_id": None, "eos_token_id": None, "vocab_size": vocab_size}

    def __getattr__(self, name: str) -> Any:
        raise ValueError("tokenizer: this model has no tokenizer; pass token ids, or HookedTransformer(cfg, tokenizer=…)")
