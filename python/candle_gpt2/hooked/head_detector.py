"""Detection of previous-token, duplicate-token and induction heads."""

from typing import Any

import numpy as np

from .arrays import array
from .cache import ActivationCache
from .utils import is_lower_triangular, is_square

HEAD_NAMES = ["previous_token_head", "duplicate_token_head", "induction_head"]


def detect_head(
    model: Any,
    seq: str | list[str],
    detection_pattern: Any,
    heads: list[tuple[int, int]] | dict[int, list[int]] | None = None,
    cache: ActivationCache | None = None,
    *,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: str = "mul",
) -> Any:
    """Scores how closely each head's attention matches a pattern, (layer, head).

    Heads that are not selected get −1. A list of texts, which needs a named pattern, returns the mean.

    detection_pattern: a name in HEAD_NAMES, or a lower triangular matrix (p, p). error_measure: "mul" is the fraction of attention
    on the pattern, "abs" is 1 − p times the mean absolute difference. exclude_bos, exclude_current_token: ignore the first column,
    or the diagonal.
    """
    if error_measure not in ("mul", "abs"):
        raise AssertionError(f"error_measure: expected 'mul' or 'abs', found {error_measure!r}")
    tokens = array(model.to_tokens(seq))
    length = tokens.shape[-1]
    assert 1 < length < model.cfg.n_ctx, f"the text must have 2 to {model.cfg.n_ctx - 1} tokens, found {length}"
    options: dict[str, Any] = dict(exclude_bos=exclude_bos, exclude_current_token=exclude_current_token, error_measure=error_measure)
    if isinstance(detection_pattern, str):
        if detection_pattern not in HEAD_NAMES:
            raise AssertionError(f"detection_pattern: expected a matrix or one of {HEAD_NAMES}, found {detection_pattern!r}")
        if isinstance(seq, list):
            if cache is not None:
                raise ValueError("cache: expected a single text with a cache, found a list of texts")
            scores = [array(detect_head(model, one, detection_pattern, heads, **options)) for one in seq]
            return model.kind.out(np.mean(scores, 0))
        detection_pattern = _PATTERNS[detection_pattern](tokens)
    pattern = array(detection_pattern)
    assert is_lower_triangular(pattern) and len(pattern) == length, (
        f"detection_pattern: expected a lower triangular matrix ({length}, {length}), found shape {pattern.shape}"
    )
    if cache is None:
        _, cache = model.run_with_cache(
            tokens, return_type=None, remove_batch_dim=True, names_filter=lambda name: name.endswith("hook_pattern")
        )
    if heads is None:
        heads = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    elif isinstance(heads, dict):
        heads = [(layer, head) for layer, in_layer in heads.items() for head in in_layer]
    found = np.full((model.cfg.n_layers, model.cfg.n_heads), -1, np.float32)
    for layer, head in heads:
        attention = array(cache["pattern", layer])[head]
        found[layer, head] = compute_head_attention_similarity_score(attention, pattern, **options)
    return model.kind.out(found)


def get_previous_token_head_detection_pattern(tokens: Any) -> Any:
    """Attention from every token to the previous token."""
    return np.eye(tokens.shape[-1], k=-1, dtype=np.float32)


def get_duplicate_token_head_detection_pattern(tokens: Any) -> Any:
    """Attention from every token to earlier occurrences of the same token."""
    ids = array(tokens).reshape(-1)
    return np.tril(ids[:, None] == ids, -1).astype(np.float32)


def get_induction_head_detection_pattern(tokens: Any) -> Any:
    """Attention from every token to the successors of its earlier occurrences."""
    duplicate = get_duplicate_token_head_detection_pattern(tokens)
    return np.tril(np.pad(duplicate[:, :-1], ((0, 0), (1, 0))))


_PATTERNS = {
    "previous_token_head": get_previous_token_head_detection_pattern,
    "duplicate_token_head": get_duplicate_token_head_detection_pattern,
    "induction_head": get_induction_head_detection_pattern,
}


def get_supported_heads() -> None:
    """Prints the names of the supported patterns."""
    print(f"Supported heads: {HEAD_NAMES}")


def compute_head_attention_similarity_score(
    attention_pattern: Any,
    detection_pattern: Any,
    *,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: str = "mul",
) -> float:
    """Scores the attention pattern (p, p) of one head; see detect_head."""
    attention, pattern = array(attention_pattern), array(detection_pattern)
    assert is_square(attention), f"attention_pattern: expected a square matrix, found shape {attention.shape}"
    mask = np.ones_like(attention)
    if exclude_bos:
        mask[:, 0] = 0
    if exclude_current_token:
        np.fill_diagonal(mask, 0)
    if error_measure == "mul":
        return float((attention * pattern * mask).sum() / (attention * mask).sum())
    return 1 - round(float((np.abs(attention - pattern) * mask).mean() * len(attention)), 3)
