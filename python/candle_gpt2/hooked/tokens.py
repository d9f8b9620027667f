"""Tokenization with TransformerLens' beginning-of-text token and padding."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .._native import Model
from .arrays import array, tensor
from .in_memory import ForeignTokenizer, NoTokenizer


def checked_side(side: str) -> str:
    """Validates a padding side and returns it."""
    if side not in ("left", "right"):
        raise ValueError(f"padding_side: expected 'left' or 'right', found {side!r}")
    return side


class Encoding(dict[str, Any]):
    """Output of a tokenizer, accessible by key or attribute."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Tokenizer:
    """Tokenizer of a model, with the attributes of transformers' tokenizers that notebooks use."""

    def __init__(self, model: Model | ForeignTokenizer | NoTokenizer, padding_side: str = "right") -> None:
        self._model: Any = model
        self.padding_side = padding_side
        config = model.config
        # The ids are None if the model has no tokenizer.
        bos: Any = config.get("bos_token_id")
        eos: Any = config.get("eos_token_id")
        eos = eos[0] if isinstance(eos, list) else eos
        self.eos_token_id: Any = bos if eos is None else eos
        self.bos_token_id: Any = self.eos_token_id if bos is None else bos
        # GPT-2 has no padding token. The end-of-text token serves as padding, and a mask distinguishes the two uses.
        self.pad_token_id: Any = self.eos_token_id
        self.name_or_path = model.name
        self.vocab_size: int = int(config["vocab_size"] or 0)

    @property
    def padding_side(self) -> str:
        """Side on which rows are padded: left or right."""
        return self._padding_side

    @padding_side.setter
    def padding_side(self, side: str) -> None:
        self._padding_side = checked_side(side)

    @property
    def bos_token(self) -> str:
        """Beginning-of-text token as text."""
        return self.decode([self.bos_token_id])

    @property
    def eos_token(self) -> str:
        """End-of-text token as text."""
        return self.decode([self.eos_token_id])

    @property
    def pad_token(self) -> str:
        """Padding token as text."""
        return self.decode([self.pad_token_id])

    def __call__(
        self,
        text: str | Sequence[str],
        padding: bool = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        padding_side: str | None = None,
        add_special_tokens: bool = True,
    ) -> "Encoding":
        """Tokenizes one or more texts. Returns `input_ids` and `attention_mask`.

        These are lists, or with return_tensors="np" or "pt" arrays or tensors (b, p).
        """
        rows = [self.encode(one) for one in ([text] if isinstance(text, str) else text)]
        rows = [row[:max_length] for row in rows] if truncation else rows
        masks = [[1] * len(row) for row in rows]
        side = padding_side or self.padding_side
        if padding:
            rows, masks = padded(rows, self.pad_token_id, side).tolist(), padded(masks, 0, side).tolist()
        if return_tensors is not None:
            if return_tensors not in ("np", "pt"):
                raise ValueError(f"return_tensors: expected 'np' or 'pt', found {return_tensors!r}")
            out = tensor if return_tensors == "pt" else array
            return Encoding(input_ids=out(np.array(rows)), attention_mask=out(np.array(masks)))
        if isinstance(text, str):
            return Encoding(input_ids=rows[0], attention_mask=masks[0])
        return Encoding(input_ids=rows, attention_mask=masks)

    def encode(self, text: str) -> list[int]:
        """Encodes a text into token ids, without a BOS token."""
        return list(self._model.encode(text))

    def decode(self, tokens: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """Decodes token ids."""
        return str(self._model.decode(array(tokens).reshape(-1), skip_special_tokens))

    def str_tokens(self, tokens: Any) -> list[str]:
        """Returns the text of each token id."""
        return list(self._model.str_tokens(array(tokens)))

    def batch_decode(self, rows: Iterable[Any], skip_special_tokens: bool = False, **_: Any) -> list[str]:
        """Decodes each row of token ids."""
        return [self.decode(row, skip_special_tokens) for row in rows]

    @property
    def vocab(self) -> dict[str, int]:
        """Same as `get_vocab()`."""
        return self.get_vocab()

    def get_vocab(self) -> dict[str, int]:
        """Returns a dict from token strings to ids. A space is `Ġ`."""
        return dict(self._model.vocab())

    def __len__(self) -> int:
        return self.vocab_size


def padded(rows: list[list[int]], pad: int, side: str) -> np.ndarray:
    """Pads rows of ids to the longest, (b, p)."""
    is_left = checked_side(side) == "left"
    length = max(map(len, rows), default=0)
    fills = [[pad] * (length - len(row)) for row in rows]
    filled = [fill + row if is_left else row + fill for fill, row in zip(fills, rows, strict=True)]
    return np.array(filled, np.int64).reshape(len(rows), length)


def attention_mask(tokenizer: Tokenizer, tokens: np.ndarray, prepend_bos: bool, padding_side: str | None = None) -> np.ndarray:
    """Computes the attention mask, (b, p): 1 for tokens, 0 for padding.

    If the padding token is also BOS, the last token of the left padding counts as BOS.
    """
    if tokenizer.pad_token_id is None:
        return np.ones_like(tokens, np.int64)
    is_token = tokens != tokenizer.pad_token_id
    if (padding_side or tokenizer.padding_side) == "right":
        is_visible = np.logical_or.accumulate(is_token[:, ::-1], 1)[:, ::-1]
    else:
        is_visible = np.logical_or.accumulate(is_token, 1)
        if prepend_bos and tokenizer.bos_token_id == tokenizer.pad_token_id:
            begin = (~is_visible).sum(1) - 1
            is_visible[np.arange(len(tokens)), begin] = True
    return is_visible.astype(np.int64)
