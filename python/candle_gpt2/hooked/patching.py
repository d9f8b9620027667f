"""Activation patching: copies one activation at a time from a clean run into a corrupted run."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .arrays import array, has_tensor, matching, tensor
from .cache import ActivationCache
from .progress import progress
from .utils import get_act_name

Metric = Callable[[Any], Any]
Setter = Callable[[Any, Sequence[int], Any], Any]


def layer_pos_patch_setter(corrupted: Any, index: Sequence[int], clean: Any) -> Any:
    """Patches one position."""
    _, pos = index
    corrupted[:, pos] = clean[:, pos]
    return corrupted


def layer_pos_head_vector_patch_setter(corrupted: Any, index: Sequence[int], clean: Any) -> Any:
    """Patches one head at one position."""
    _, pos, head = index
    corrupted[:, pos, head] = clean[:, pos, head]
    return corrupted


def layer_head_vector_patch_setter(corrupted: Any, index: Sequence[int], clean: Any) -> Any:
    """Patches one head."""
    _, head = index
    corrupted[:, :, head] = clean[:, :, head]
    return corrupted


def layer_head_pattern_patch_setter(corrupted: Any, index: Sequence[int], clean: Any) -> Any:
    """Patches the attention pattern of one head."""
    _, head = index
    corrupted[:, head] = clean[:, head]
    return corrupted


def layer_head_pos_pattern_patch_setter(corrupted: Any, index: Sequence[int], clean: Any) -> Any:
    """Patches one row of a head's attention pattern."""
    _, head, dest = index
    corrupted[:, head, dest] = clean[:, head, dest]
    return corrupted


def layer_head_dest_src_pos_pattern_patch_setter(corrupted: Any, index: Sequence[int], clean: Any) -> Any:
    """Patches one entry of a head's attention pattern."""
    _, head, dest, src = index
    corrupted[:, head, dest, src] = clean[:, head, dest, src]
    return corrupted


def generic_activation_patch(
    model: Any,
    corrupted_tokens: Any,
    clean_cache: ActivationCache,
    patching_metric: Metric,
    patch_setter: Setter,
    activation_name: str,
    index_axis_names: Sequence[str] | None = None,
    index_df: Any = None,
    return_index_df: bool = False,
) -> Any:
    """Patches the corrupted run with one clean activation at a time.

    Returns the metric of each patched run. corrupted_tokens: (b, p). clean_cache: cache of a run with the same number of tokens.
    patching_metric: function from logits (b, p, V) to a number. index_axis_names: axes of the result, among layer, pos, head or
    head_index, dest_pos, src_pos. index_df: alternatively, a pandas DataFrame or rows of indices, whose first column is the
    layer; the result then has one axis. return_index_df: also return the indices, as a DataFrame if pandas is installed.
    """
    sizes = {"layer": model.cfg.n_layers, "head": model.cfg.n_heads, "head_index": model.cfg.n_heads}
    sizes |= dict.fromkeys(("pos", "src_pos", "dest_pos"), corrupted_tokens.shape[-1])
    if (index_df is None) == (index_axis_names is None):
        raise AssertionError("expected exactly one of index_axis_names and index_df")
    if index_axis_names is not None:
        shape: tuple[int, ...] = tuple(sizes[name] for name in index_axis_names)
        rows: list[Sequence[int]] = list(itertools.product(*map(range, shape)))
    else:
        rows = [tuple(map(int, row)) for row in (index_df.to_numpy() if hasattr(index_df, "to_numpy") else index_df)]
        shape = (len(rows),)
    found = np.zeros(len(rows), np.float32)
    steps = progress(rows, len(rows), f"patching {activation_name}")
    for row, logits in enumerate(_patched_logits(model, corrupted_tokens, clean_cache, patch_setter, activation_name, steps)):
        found[row] = array(patching_metric(logits)).item()
    out = model.kind.out(found.reshape(shape))
    out = tensor(out) if has_tensor(corrupted_tokens) else out
    return (out, _table(rows, index_axis_names) if index_df is None else index_df) if return_index_df else out


def _table(rows: list[Sequence[int]], names: Any) -> Any:
    """Returns rows as a DataFrame if pandas is installed, otherwise unchanged."""
    try:
        from pandas import DataFrame  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return rows
    return DataFrame(rows, columns=list(names))


def _patched_logits(
    model: Any, tokens: Any, clean_cache: ActivationCache, setter: Setter, activation_name: str, rows: Iterable[Sequence[int]]
) -> Iterable[Any]:
    """Yields the logits of each patched run.

    Computes the blocks before the patched block only once per layer.
    """
    before: tuple[int, Any] = (-1, None)
    for index in rows:
        layer = index[0]
        name = get_act_name(activation_name, layer)
        if before[0] != layer:
            before = (layer, model(tokens, stop_at_layer=layer))
        clean = clean_cache[name]

        def patch(value: Any, hook: Any, index: Sequence[int] = index, clean: Any = clean) -> Any:
            return setter(value, index, matching(value, clean))

        residual = before[1].clone() if has_tensor(before[1]) else before[1].copy()
        yield model.run_with_hooks(residual, fwd_hooks=[(name, patch)], start_at_layer=layer, tokens=tokens)


def _patch_function(activation_name: str, setter: Setter, *axes: str) -> Callable[..., Any]:
    def patch(model: Any, corrupted_tokens: Any, clean_cache: ActivationCache, patching_metric: Metric, **options: Any) -> Any:
        axis_names = None if options.get("index_df") is not None else axes
        return generic_activation_patch(
            model, corrupted_tokens, clean_cache, patching_metric, setter, activation_name, axis_names, **options
        )

    patch.__doc__ = f"Patches `{activation_name}` by {', '.join(axes)}. The result has these axes."
    return patch


get_act_patch_resid_pre = _patch_function("resid_pre", layer_pos_patch_setter, "layer", "pos")
get_act_patch_resid_mid = _patch_function("resid_mid", layer_pos_patch_setter, "layer", "pos")
get_act_patch_attn_out = _patch_function("attn_out", layer_pos_patch_setter, "layer", "pos")
get_act_patch_mlp_out = _patch_function("mlp_out", layer_pos_patch_setter, "layer", "pos")
get_act_patch_attn_head_out_by_pos = _patch_function("z", layer_pos_head_vector_patch_setter, "layer", "pos", "head")
get_act_patch_attn_head_q_by_pos = _patch_function("q", layer_pos_head_vector_patch_setter, "layer", "pos", "head")
get_act_patch_attn_head_k_by_pos = _patch_function("k", layer_pos_head_vector_patch_setter, "layer", "pos", "head")
get_act_patch_attn_head_v_by_pos = _patch_function("v", layer_pos_head_vector_patch_setter, "layer", "pos", "head")
get_act_patch_attn_head_pattern_by_pos = _patch_function(
    "pattern", layer_head_pos_pattern_patch_setter, "layer", "head_index", "dest_pos"
)
get_act_patch_attn_head_pattern_dest_src_pos = _patch_function(
    "pattern", layer_head_dest_src_pos_pattern_patch_setter, "layer", "head_index", "dest_pos", "src_pos"
)
get_act_patch_attn_head_out_all_pos = _patch_function("z", layer_head_vector_patch_setter, "layer", "head")
get_act_patch_attn_head_q_all_pos = _patch_function("q", layer_head_vector_patch_setter, "layer", "head")
get_act_patch_attn_head_k_all_pos = _patch_function("k", layer_head_vector_patch_setter, "layer", "head")
get_act_patch_attn_head_v_all_pos = _patch_function("v", layer_head_vector_patch_setter, "layer", "head")
get_act_patch_attn_head_pattern_all_pos = _patch_function("pattern", layer_head_pattern_patch_setter, "layer", "head_index")


def _stacked(model: Any, tokens: Any, found: Iterable[Any]) -> Any:
    stack = np.stack([array(one) for one in found])
    return tensor(stack) if model.kind.is_torch or has_tensor(tokens) else stack


def get_act_patch_attn_head_all_pos_every(model: Any, corrupted_tokens: Any, clean_cache: ActivationCache, metric: Metric) -> Any:
    """Patches the output, queries, keys, values and pattern of each head: (5, layer, head)."""
    patches = (
        get_act_patch_attn_head_out_all_pos,
        get_act_patch_attn_head_q_all_pos,
        get_act_patch_attn_head_k_all_pos,
        get_act_patch_attn_head_v_all_pos,
        get_act_patch_attn_head_pattern_all_pos,
    )
    return _stacked(model, corrupted_tokens, (patch(model, corrupted_tokens, clean_cache, metric) for patch in patches))


def get_act_patch_attn_head_by_pos_every(model: Any, corrupted_tokens: Any, clean_cache: ActivationCache, metric: Metric) -> Any:
    """Patches the output, queries, keys, values and pattern by head and position: (5, layer, pos, head)."""
    patches = (
        get_act_patch_attn_head_out_by_pos,
        get_act_patch_attn_head_q_by_pos,
        get_act_patch_attn_head_k_by_pos,
        get_act_patch_attn_head_v_by_pos,
    )
    found = [patch(model, corrupted_tokens, clean_cache, metric) for patch in patches]
    pattern = get_act_patch_attn_head_pattern_by_pos(model, corrupted_tokens, clean_cache, metric)
    return _stacked(model, corrupted_tokens, [*found, array(pattern).swapaxes(1, 2)])


def get_act_patch_block_every(model: Any, corrupted_tokens: Any, clean_cache: ActivationCache, metric: Metric) -> Any:
    """Patches the residual stream, attention output and MLP output of each block: (3, layer, pos)."""
    patches = (get_act_patch_resid_pre, get_act_patch_attn_out, get_act_patch_mlp_out)
    return _stacked(model, corrupted_tokens, (patch(model, corrupted_tokens, clean_cache, metric) for patch in patches))


def get_act_patch_direct_path(
    model: Any,
    corrupted_tokens: Any,
    clean_cache: ActivationCache,
    corrupted_cache: ActivationCache,
    patching_metric: Metric,
    src_layer: int,
    src_head: int,
    component: str = "q",
    verbose: bool = True,
) -> Any:
    """Path patching from head (src_layer, src_head) to the query, key or value input of each later head.

    Returns the metric when that input contains the clean output of the source head, (layer, head), and 0 for layers up to
    src_layer. component: "q", "k" or "v".
    """
    if component not in ("q", "k", "v"):
        raise ValueError(f"component: expected 'q', 'k' or 'v', found {component!r}")
    name = get_act_name("z", src_layer)
    change = array(clean_cache[name])[:, :, src_head] - array(corrupted_cache[name])[:, :, src_head]
    delta = change @ array(model.blocks[src_layer].attn.W_O)[src_head]
    found = np.zeros((model.cfg.n_layers, model.cfg.n_heads), np.float32)
    before = model.cfg.use_attn_in, model.cfg.use_split_qkv_input
    model.set_use_attn_in(False)
    model.set_use_split_qkv_input(True)
    try:
        heads = list(itertools.product(range(src_layer + 1, model.cfg.n_layers), range(model.cfg.n_heads)))
        for layer, head in progress(heads, len(heads), "patching paths", verbose):

            def add(value: Any, hook: Any, head: int = head) -> Any:
                value = array(value).copy()
                value[:, :, head] += delta
                return value

            logits = model.run_with_hooks(corrupted_tokens, fwd_hooks=[(f"blocks.{layer}.hook_{component}_input", add)])
            found[layer, head] = array(patching_metric(logits)).item()
    finally:
        model.set_use_attn_in(before[0])
        model.set_use_split_qkv_input(before[1])
    return _stacked(model, corrupted_tokens, found)
