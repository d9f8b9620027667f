"""Backward pass without torch, from the logits to every hook point.

Each step is the transpose of a step in `components`. The pass differentiates norms, attention patterns and activations, but
computes no weight gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .arrays import array
from .components import LayerNorm, TransformerBlock, by_head
from .hook_points import HookPoint

# Activations that a block's backward pass needs.
_RECORDED = ("hook_resid_pre", "hook_resid_mid", "hook_mlp_in", "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_pattern", "mlp.hook_pre")


class Tape:
    """Recorded activations from a run."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.values: dict[str, np.ndarray] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records a run. Its forward hooks may read activations but not edit them."""
        model, before = self.model, {}
        if model.acts_to_saes:
            saes = ", ".join(model.acts_to_saes)
            raise NotImplementedError(f"{saes}: arrays have no gradients through SAEs; pass tensors='torch', or call reset_saes first")

        def note(value: Any, hook: HookPoint) -> None:
            before[hook.name] = array(value).copy()

        def compare(value: Any, hook: HookPoint) -> None:
            if not np.array_equal(array(value), before[hook.name], equal_nan=True):
                raise NotImplementedError(
                    f"{hook.name}: a forward hook edits this value, and arrays have no gradients through edits; use tensors='torch'"
                )

        def keep(value: Any, hook: HookPoint) -> None:
            self.values[hook.name or ""] = array(value)

        names = {f"blocks.{layer}.{name}" for layer in range(model.cfg.n_layers) for name in _RECORDED}
        names.add(f"blocks.{model.cfg.n_layers - 1}.hook_resid_post")
        watched = [point for point in model.hook_points() if point.fwd_hooks]
        hooks = [(point.name, compare) for point in watched] + [(name, keep) for name in names]
        with model.hooks(fwd_hooks=[(name, hook) for name, hook in hooks if model.switch(name) is None]):
            for point in watched:
                point.add_hook(note, level=model.context_level, prepend=True)
            yield

    def back(self, gradient: np.ndarray) -> None:
        """Runs the backward hooks, starting from the gradient at the logits (b, p, V)."""
        model, last = self.model, self.model.cfg.n_layers - 1
        gradient = gradient.astype(np.float32, copy=False) @ model.unembed._weights["W_U"].T
        gradient = _norm_backward(model.ln_final, self.values[f"blocks.{last}.hook_resid_post"], gradient)
        for layer in range(last, -1, -1):
            values = {name: self.values.get(f"blocks.{layer}.{name}") for name in _RECORDED}
            gradient = _block_backward(model.blocks[layer], values, gradient)
        for point in (model.hook_embed, model.hook_pos_embed):
            point.backward(gradient)


def loss_gradient(logits: np.ndarray, tokens: np.ndarray, mask: np.ndarray | None, gradient: np.ndarray) -> np.ndarray:
    """Computes the gradient of utils.lm_cross_entropy_loss with respect to the logits (b, p, V).

    gradient: the gradient at the loss, a number or (b, p − 1).
    """
    shifted = np.exp(logits[:, :-1] - logits[:, :-1].max(-1, keepdims=True))
    found = shifted / shifted.sum(-1, keepdims=True)
    np.put_along_axis(found, tokens[:, 1:, None], np.take_along_axis(found, tokens[:, 1:, None], -1) - 1, -1)
    is_counted = np.ones(found.shape[:2]) if mask is None else (mask[:, :-1] != 0) & (mask[:, 1:] != 0)
    weights = is_counted / is_counted.sum() if gradient.ndim == 0 else is_counted
    return np.pad(found * (gradient * weights)[..., None], ((0, 0), (0, 1), (0, 0)))


def _norm_backward(norm: LayerNorm, x: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    if norm.cfg.normalization_type != "LNPre":
        gradient = gradient * norm._weights["w"]
    x = x - x.mean(-1, keepdims=True)
    scale = np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(norm.eps))
    gradient = norm.hook_normalized.backward(gradient)
    at_scale = norm.hook_scale.backward(-(gradient * x).sum(-1, keepdims=True) / scale**2)
    at_x = gradient / scale + at_scale * x / (scale * x.shape[-1])
    return at_x - at_x.mean(-1, keepdims=True)


def _block_backward(block: TransformerBlock, values: dict[str, Any], gradient: np.ndarray) -> np.ndarray:
    gradient = block.hook_resid_post.backward(gradient)
    mlp, resid_mid = block.mlp, values["hook_resid_mid"]
    at_post = mlp.hook_post.backward(block.hook_mlp_out.backward(gradient) @ mlp._weights["W_out"].T)
    at_pre = mlp.hook_pre.backward(at_post * mlp.slope(values["mlp.hook_pre"]))
    at_mlp_in = _norm_backward(block.ln2, resid_mid, at_pre @ mlp._weights["W_in"].T)
    if block.cfg.use_hook_mlp_in:
        at_mlp_in = block.hook_mlp_in.backward(at_mlp_in)
    gradient = block.hook_resid_mid.backward(gradient + at_mlp_in)
    at_attention = _attention_backward(block, values, block.hook_attn_out.backward(gradient))
    return block.hook_resid_pre.backward(gradient + at_attention)


def _attention_backward(block: TransformerBlock, values: dict[str, Any], gradient: np.ndarray) -> np.ndarray:
    """Propagates the gradient from the attention output to the residual stream before it."""
    attn, x = block.attn, values["hook_resid_pre"]
    q, k, v = (values[f"attn.hook_{part}"].transpose(0, 2, 1, 3) for part in "qkv")  # (b, H, p, D)
    pattern = values["attn.hook_pattern"]
    by_heads = np.repeat(gradient[:, :, None], block.cfg.n_heads, axis=2)  # (b, p, H, C)
    if block.cfg.use_attn_result:
        by_heads = attn.hook_result.backward(by_heads)
    at_z = attn.hook_z.backward(by_head(by_heads, attn._weights["W_O"].swapaxes(1, 2))).transpose(0, 2, 1, 3)
    at_pattern = attn.hook_pattern.backward(at_z @ v.swapaxes(-1, -2))
    at_scores = pattern * (at_pattern - (pattern * at_pattern).sum(-1, keepdims=True))
    at_scores = attn.hook_attn_scores.backward(at_scores) / np.float32(attn.attn_scale)
    found = {"q": at_scores @ k, "k": at_scores.swapaxes(-1, -2) @ q, "v": pattern.swapaxes(-1, -2) @ at_z}
    inputs = []
    for part, at_part in found.items():
        at_part = getattr(attn, f"hook_{part}").backward(at_part.transpose(0, 2, 1, 3))
        inputs.append(by_head(at_part, attn._weights[f"W_{part.upper()}"].swapaxes(1, 2)))
    if block.cfg.use_split_qkv_input:
        points = (block.hook_q_input, block.hook_k_input, block.hook_v_input)
        parts = [point.backward(_norm_backward(block.ln1, x[:, :, None], one)) for point, one in zip(points, inputs, strict=True)]
        return np.add.reduce(parts).sum(2)
    if block.cfg.use_attn_in:
        return block.hook_attn_in.backward(_norm_backward(block.ln1, x[:, :, None], np.add.reduce(inputs))).sum(2)
    return _norm_backward(block.ln1, x, np.add.reduce(inputs).sum(2))
