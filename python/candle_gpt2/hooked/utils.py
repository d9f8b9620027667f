"""Helpers from `transformer_lens.utils` that notebooks use."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from .arrays import array, is_live, like, live, tensor, torch_module
from .components import gelu_new as _gelu_new
from .components import softmax
from .factored_matrix import FactoredMatrix
from .slices import Slice, SliceInput
from .tokens import Tokenizer
from .tokens import attention_mask as _attention_mask

__all__ = [
    "Slice",
    "SliceInput",
    "USE_DEFAULT_VALUE",
    "composition_scores",
    "gelu_new",
    "get_act_name",
    "get_attention_mask",
    "get_corner",
    "get_device",
    "is_lower_triangular",
    "is_square",
    "lm_accuracy",
    "lm_cross_entropy_loss",
    "remove_batch_dim",
    "repeat_along_head_dimension",
    "sample_logits",
    "test_prompt",
    "to_numpy",
    "tokenize_and_concatenate",
    "transpose",
]

USE_DEFAULT_VALUE = None

_LAYER_TYPES = {"a": "attn", "m": "mlp", "b": "", "block": "", "blocks": "", "attention": "attn"}
_SHORT = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "key": "k",
    "query": "q",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_mid": "mid",
    "mlp_post": "post",
}
_IN_ATTENTION = ("k", "v", "q", "z", "result", "pattern", "attn_scores")
_IN_MLP = ("pre", "post", "mid")
_IN_NORMS = ("scale", "normalized")


def get_act_name(name: str, layer: int | str | None = None, layer_type: str | None = None) -> str:
    """Returns the full name of a hook point.

    Examples: `get_act_name("k", 6)`, `get_act_name("scale", 4, "ln1")`, `get_act_name("pre5")`.
    """
    if ("." in name or name.startswith("hook_")) and layer is None and layer_type is None:
        return name
    match = re.match(r"([a-z]+)(\d+)([a-z]?.*)", name)
    if match:
        name, layer, layer_type = match.groups()
    name = _SHORT.get(name, name)
    if name in _IN_ATTENTION:
        layer_type = "attn"
    elif name in _IN_MLP:
        layer_type = "mlp"
    else:
        layer_type = _LAYER_TYPES.get(layer_type or "", layer_type)
    block = "" if layer is None else f"blocks.{layer}."
    part = f"{layer_type}." if layer_type else ""
    final = "ln_final." if name in _IN_NORMS and layer is None else ""
    return f"{final}{block}{part}hook_{name}"


def to_numpy(tensor: Any) -> np.ndarray:
    """Converts a tensor, an array, a list or a number to an array."""
    return array(tensor)


def get_corner(tensor: Any, n: int = 3) -> Any:
    """Returns the first n values along every axis."""
    if isinstance(tensor, FactoredMatrix):
        return tensor.get_corner(n)
    return tensor[tuple(slice(n) for _ in range(tensor.ndim))]


def remove_batch_dim(tensor: Any) -> Any:
    """Removes a first axis of length 1."""
    return tensor[0] if tensor.shape[0] == 1 else tensor


def transpose(tensor: Any) -> Any:
    """Swaps the last two axes."""
    return tensor.swapaxes(-1, -2)


def repeat_along_head_dimension(tensor: Any, n_heads: int, clone_tensor: bool = True) -> Any:
    """Repeats (b, p, C) along a new head axis to (b, p, n_heads, C)."""
    return like(tensor, np.repeat(array(tensor)[:, :, None], n_heads, axis=2))


def gelu_new(input: Any) -> Any:
    """Computes GPT-2's activation function."""
    return like(input, _gelu_new(array(input)))


def is_square(x: Any) -> bool:
    """Whether a value is a square matrix."""
    return bool(x.ndim == 2 and x.shape[0] == x.shape[1])


def is_lower_triangular(x: Any) -> bool:
    """Whether a value is a square matrix with zeros above the diagonal."""
    return is_square(x) and bool(np.array_equal(array(x), np.tril(array(x))))


def get_device() -> str:
    """Returns the device of arrays, which is always the CPU."""
    return "cpu"


def get_attention_mask(tokenizer: Tokenizer, tokens: Any, prepend_bos: bool) -> Any:
    """Computes the attention mask, (b, p): 1 for tokens, 0 for padding on the tokenizer's padding_side."""
    return like(tokens, _attention_mask(tokenizer, array(tokens), prepend_bos))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Computes log-probabilities along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def lm_cross_entropy_loss(logits: Any, tokens: Any, attention_mask: Any = None, per_token: bool = False) -> Any:
    """Computes the mean cross-entropy of the next tokens, ignoring padding.

    per_token: return the loss of each token, (b, p − 1).
    """
    predicted, chosen = live(logits)[..., :-1, :], array(tokens)[..., 1:, None]
    if is_live(predicted):
        found = predicted.log_softmax(-1).gather(-1, tensor(chosen.astype(np.int64)))[..., 0]
    else:
        found = np.take_along_axis(log_softmax(predicted), chosen, -1)[..., 0]
    count: Any = chosen.size
    if attention_mask is not None:
        mask = array(attention_mask)
        is_counted = (mask[:, :-1] != 0) & (mask[:, 1:] != 0)
        found = found * like(found, is_counted)
        count = is_counted.sum()
    if per_token or is_live(found):
        return like(logits, -found if per_token else -found.sum() / count)
    return like(logits, np.float32(-found.sum() / count))


def lm_accuracy(logits: Any, tokens: Any, per_token: bool = False) -> Any:
    """Computes the fraction of next tokens that the model predicts as most probable.

    per_token: return a bool for each token, (b, p − 1).
    """
    matches = array(logits).argmax(-1)[:, :-1] == array(tokens)[:, 1:]
    return like(logits, matches if per_token else np.float32(matches.mean()))


def sample_logits(
    final_logits: Any,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    tokens: Any = None,
) -> Any:
    """Samples a token for each row of logits (b, V), with numpy's global generator (`numpy.random.seed`)."""
    logits = array(final_logits)
    if temperature == 0:
        return like(final_logits, logits.argmax(-1))
    logits = logits.astype(np.float64) / temperature
    if freq_penalty > 0:
        if tokens is None:
            raise ValueError("freq_penalty needs tokens, the previous token ids (b, p)")
        logits -= freq_penalty * np.stack([np.bincount(row, minlength=logits.shape[-1]) for row in array(tokens)])
    if top_k is not None:
        if top_k < 1:
            raise ValueError(f"top_k: expected at least 1, found {top_k}")
        threshold = np.sort(logits, -1)[:, -min(top_k, logits.shape[-1]), None]
        logits[logits < threshold] = -np.inf
    elif top_p is not None:
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p: expected a number above 0 and at most 1, found {top_p}")
        order = np.argsort(-logits, -1)
        before = np.cumsum(softmax(np.take_along_axis(logits, order, -1)), -1)
        is_out = np.roll(before > top_p, 1, -1)
        is_out[:, 0] = False
        np.put_along_axis(logits, order, np.where(is_out, -np.inf, np.take_along_axis(logits, order, -1)), -1)
    cumulative = np.cumsum(softmax(logits), -1)
    drawn = np.random.random((len(logits), 1)) * cumulative[:, -1:]
    return like(final_logits, (cumulative <= drawn).sum(-1).clip(max=logits.shape[-1] - 1))


def tokenize_and_concatenate(
    dataset: Any,
    tokenizer: Any,
    streaming: bool = False,
    max_length: int = 1024,
    column_name: str = "text",
    add_bos_token: bool = True,
    num_proc: int | None = 10,
    set_format: bool = True,
) -> "TokenRows":
    """Concatenates the tokens of texts and splits them into rows of max_length tokens.

    End-of-text tokens separate the texts. dataset: texts, or dicts with a text in column_name, such as a Hugging Face Dataset. As
    in TransformerLens, each batch of 1,000 texts is split separately. Its last, incomplete row is dropped, or padded if it is the
    only one. add_bos_token: begin each row with a BOS token. streaming and num_proc are ignored. set_format: return tensors if
    torch is imported.
    """
    length = max_length - 1 if add_bos_token else max_length
    found: list[np.ndarray] = []
    batch: list[str] = []

    def cut() -> None:
        encoded = tokenizer(batch, add_special_tokens=False)["input_ids"]
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        tokens = np.array([token for ids in encoded for token in (*ids, tokenizer.eos_token_id)][:-1], np.int64)
        if len(tokens) < length:
            tokens = np.pad(tokens, (0, length - len(tokens)), constant_values=pad)
        found.append(tokens[: len(tokens) // length * length].reshape(-1, length))
        batch.clear()

    for row in dataset:
        batch.append(row if isinstance(row, str) else row[column_name])
        if len(batch) == 1000:
            cut()
    if batch:
        cut()
    rows = np.concatenate(found) if found else np.zeros((0, length), np.int64)
    if add_bos_token:
        rows = np.concatenate([np.full((len(rows), 1), tokenizer.bos_token_id), rows], 1)
    return TokenRows(tensor(rows) if set_format and torch_module() is not None else rows)


class TokenRows:
    """Rows of token ids: `rows[i]["tokens"]` (n), `rows[:k]["tokens"]` (k, n), `rows["tokens"]` for all."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return {"tokens": self.tokens}[index]
        return {"tokens": self.tokens[index]}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"tokens": row} for row in self.tokens)


def composition_scores(left: FactoredMatrix, right: FactoredMatrix, broadcast_dims: bool = True) -> Any:
    """Computes ``‖left @ right‖ / (‖left‖ ‖right‖)`` with Frobenius norms.

    broadcast_dims: score every pair; the result has the leading dimensions of left, then those of right.
    """
    if left.rdim != right.ldim:
        raise AssertionError(f"left.rdim must equal right.ldim, found shapes {left.shape} and {right.shape}")
    # The norm of a product equals the norm of its small core.
    before, after = array(left.collapse_l()), array(right.collapse_r())
    norms = _norm(before), _norm(after)
    if not broadcast_dims:
        return like(left.A, _norm(before @ after) / norms[0] / norms[1])
    rows, width, columns = before.shape[-2], before.shape[-1], after.shape[-1]
    # Concatenate all right sides into one matrix, so that each left side needs a single product.
    joined = np.moveaxis(after.reshape(-1, width, columns), 0, 1).reshape(width, -1)
    products = (one @ joined for one in before.reshape(-1, rows, width))
    found = np.stack([np.sqrt((product**2).reshape(rows, -1, columns).sum((0, 2))) for product in products])
    scale = norms[0].reshape(-1, 1) * norms[1].reshape(1, -1)
    return like(left.A, (found / scale).reshape(left.shape[:-2] + right.shape[:-2]))


def _norm(x: np.ndarray) -> np.ndarray:
    """Computes Frobenius norms of matrices (…, i, j)."""
    return np.sqrt(np.einsum("...ij,...ij->...", x, x))


def test_prompt(
    prompt: str,
    answer: str | list[str],
    model: Any,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
) -> None:
    """Prints the rank of an answer after a prompt, token by token.

    For several answers, prints the rank of each answer's first token.
    """
    answers = [answer] if isinstance(answer, str) else answer
    if prepend_space_to_answer:
        answers = [one if one.startswith(" ") else f" {one}" for one in answers]
    several = not isinstance(answer, str)
    ids = [array(model.to_tokens(one, prepend_bos=False))[0] for one in answers]
    ids = [one[:1] for one in ids] if several else ids
    before = array(model.to_tokens(prompt, prepend_bos=prepend_bos))[0]
    logits = array(model(np.stack([np.concatenate([before, one]) for one in ids])))
    probabilities = softmax(logits)

    def text(token: int) -> str:
        return str(model.to_string([int(token)]))

    if print_details:
        print("Tokenized prompt:", model.to_str_tokens(prompt, prepend_bos=prepend_bos))
        shown = [[text(token) for token in one] for one in ids]
        print(f"Tokenized {'answers' if several else 'answer'}:", shown if several else shown[0])
    ranks = []
    for offset in range(len(ids[0])):
        position = len(before) + offset - 1
        step_ranks = []
        for row, one in enumerate(ids):
            token = one[offset]
            rank = int((logits[row, position] > logits[row, position, token]).sum())
            step_ranks.append((text(token), rank))
            if print_details:
                if row == 0:
                    print(f"Performance on answer token{'s' if several else ''}:")
                logit, probability = logits[row, position, token], probabilities[row, position, token]
                print(f"Rank: {rank: <8} Logit: {logit:5.2f} Prob: {probability:6.2%} Token: |{text(token)}|")
        if print_details:
            for number, token in enumerate(np.argsort(-logits[0, position], kind="stable")[:top_k]):
                logit, probability = logits[0, position, token], probabilities[0, position, token]
                print(f"Top {number}th token. Logit: {logit:5.2f} Prob: {probability:6.2%} Token: |{text(token)}|")
        ranks.append(step_ranks if several else step_ranks[0])
    print("Ranks of the answer tokens:", ranks)


# Not a pytest test.
test_prompt.__test__ = False  # type: ignore[attr-defined]
