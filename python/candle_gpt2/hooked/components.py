"""The parts of a GPT-2, in numpy over whatever weights they are given. Each can be called by itself.

b batch, p positions, H heads of width D, C residual width, M inner width, V tokens.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import Kind, array, like
from .config import HookedTransformerConfig
from .factored_matrix import FactoredMatrix
from .hook_points import HookPoint, Module
from .weights import Weights

_erf = np.frompyfunc(math.erf, 1, 1)


def gelu_new(x: np.ndarray) -> np.ndarray:
    """``0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))``."""
    root = np.float32(math.sqrt(2 / math.pi))
    # In one buffer: the steps are many, and memory is what they wait for.
    y = x * x
    y *= np.float32(0.044715) * root
    y += root
    y *= x
    np.tanh(y, out=y)
    y += 1
    y *= x
    y *= np.float32(0.5)
    return y


def gelu(x: np.ndarray) -> np.ndarray:
    """``0.5 x (1 + erf(x / sqrt 2))``."""
    return np.float32(0.5) * x * (1 + np.asarray(_erf(x / np.float32(math.sqrt(2))), np.float32))


def _gelu_new_slope(x: np.ndarray) -> np.ndarray:
    root, cubic = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)
    bent = np.tanh(root * (x + cubic * x * x * x))
    return np.float32(0.5) * (1 + bent + x * (1 - bent * bent) * root * (1 + 3 * cubic * x * x))


def _gelu_slope(x: np.ndarray) -> np.ndarray:
    below = np.float32(0.5) * (1 + np.asarray(_erf(x / np.float32(math.sqrt(2))), np.float32))
    return below + x * np.exp(-x * x / 2) / np.float32(math.sqrt(2 * math.pi))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.float32(0.5) * (1 + np.tanh(x / 2))


def _gated(factor: float) -> "Activation":
    """x sigmoid(factor x)."""
    steep = np.float32(factor)

    def slope(x: np.ndarray) -> np.ndarray:
        gate = _sigmoid(steep * x)
        return gate * (1 + steep * x * (1 - gate))

    return lambda x: x * _sigmoid(steep * x), slope


# A function and its derivative.
Activation = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]
ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": (gelu_new, _gelu_new_slope),
    "gelu_pytorch_tanh": (gelu_new, _gelu_new_slope),
    "gelu": (gelu, _gelu_slope),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(x.dtype)),
    "silu": _gated(1),
    "swish": _gated(1),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "quick_gelu": _gated(1.702),
}


def softmax(x: np.ndarray) -> np.ndarray:
    """Along the last axis. A row of -inf, of a padded position, becomes zeros."""
    largest = x.max(-1, keepdims=True)
    y = np.exp(x - np.where(np.isneginf(largest), 0, largest))
    total = y.sum(-1, keepdims=True)
    y /= np.where(total == 0, 1, total)
    return y


def by_head(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """x (…, H, a) times the matrix of each head, weights (H, a, b): (…, H, b)."""
    rows = x.reshape(-1, *x.shape[-2:]).swapaxes(0, 1)
    return (rows @ weights).swapaxes(0, 1).reshape(*x.shape[:-1], weights.shape[-1])


class Weighted(Module):
    """A module whose weights are read and set under the names of `weights`."""

    def __init__(self, kind: Kind, **weights: np.ndarray) -> None:
        self.kind = kind
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        if name in type(self).weights:
            return self.kind.out(self._weights[name])
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).weights:
            self._weights[name][...] = array(value)
        else:
            super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Arrays in, an array out; a tensor if the first is one."""
        return like(args[0], self.compute(*(array(one) for one in args), **kwargs))

    def compute(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise NotImplementedError


class Embed(Weighted):
    """Vectors of tokens: ids (b, p) to (b, p, C)."""

    weights = ("W_E",)

    def compute(self, tokens: np.ndarray) -> np.ndarray:
        return self._weights["W_E"][tokens]


class PosEmbed(Weighted):
    """Vectors of positions: ids (b, p) to (b, p, C). With a mask they are counted from the first token that is no padding, and padding
    gets zeros."""

    weights = ("W_pos",)

    def forward(self, tokens: Any, past_kv_pos_offset: int = 0, attention_mask: Any = None) -> Any:
        """Those after so many positions."""
        mask = None if attention_mask is None else array(attention_mask)
        return like(tokens, self.compute(array(tokens), past_kv_pos_offset, mask))

    def compute(self, tokens: np.ndarray, offset: int = 0, mask: np.ndarray | None = None) -> np.ndarray:
        batch, count = tokens.shape
        table = self._weights["W_pos"]
        if mask is None:
            return np.broadcast_to(table[offset : offset + count], (batch, count, table.shape[1])).copy()
        ids = np.maximum(mask.cumsum(1) - 1, 0)[:, offset:]
        return np.where(mask[:, offset : offset + count, None] != 0, table[ids], np.float32(0))


class LayerNorm(Weighted):
    """(x − mean) / scale, then weight and bias unless they are folded into what follows."""

    weights = ("w", "b")

    def __init__(self, cfg: HookedTransformerConfig, kind: Kind, w: np.ndarray, b: np.ndarray) -> None:
        super().__init__(kind, w=w, b=b)
        self.cfg = cfg
        self.eps = cfg.eps
        self.hook_scale = HookPoint(kind)
        self.hook_normalized = HookPoint(kind)

    def compute(self, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        square = np.einsum("...c,...c->...", x, x)[..., None] / np.float32(x.shape[-1])
        scale = self.hook_scale(np.sqrt(square + np.float32(self.eps)))
        normalized = self.hook_normalized(x / scale)
        if self.cfg.normalization_type == "LNPre":
            return normalized
        return normalized * self._weights["w"] + self._weights["b"]


class Attention(Weighted):
    """Causal self-attention. Its inputs are normalized: (b, p, C), or (b, p, H, C) with one for each head."""

    weights = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")

    def __init__(self, cfg: HookedTransformerConfig, kind: Kind, layer: int, weights: Weights) -> None:
        matrices, biases = weights.W_QKV[layer], weights.b_QKV[layer]
        parts = {f"W_{part}": np.moveaxis(matrices[:, i], 0, 1) for i, part in enumerate("QKV")}  # (H, C, D)
        parts |= {f"b_{part}": biases[i] for i, part in enumerate("QKV")}
        super().__init__(kind, **parts, W_O=weights.W_O[layer], b_O=weights.b_O[layer])
        self.cfg = cfg
        self.layer_id = layer
        self._fused = matrices.reshape(cfg.d_model, -1), biases.reshape(-1)
        self._output = weights.W_O[layer].reshape(-1, cfg.d_model)
        self.attn_scale = cfg.attn_scale * (layer + 1 if cfg.scale_attn_by_inverse_layer_idx else 1)
        self.hook_k = HookPoint(kind)
        self.hook_q = HookPoint(kind)
        self.hook_v = HookPoint(kind)
        self.hook_z = HookPoint(kind)
        self.hook_attn_scores = HookPoint(kind)
        self.hook_pattern = HookPoint(kind)
        self.hook_result = HookPoint(kind)

    @property
    def OV(self) -> FactoredMatrix:
        """What each head moves, (H, C, C)."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def QK(self) -> FactoredMatrix:
        """Where each head looks, (H, C, C)."""
        return FactoredMatrix(self.W_Q, self.W_K.swapaxes(-1, -2))

    def compute(
        self,
        query_input: np.ndarray,
        key_input: np.ndarray | None = None,
        value_input: np.ndarray | None = None,
        past_kv_cache_entry: "KeyValues | None" = None,
        attention_mask: np.ndarray | None = None,
    ) -> np.ndarray:
        """What is added to the residual stream, (b, p, C). Keys and values have the input of the queries if they have none."""
        q, k, v = self._projected(query_input, key_input, value_input)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        if past_kv_cache_entry is not None:
            k, v = past_kv_cache_entry.append(k, v)
        scores = q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1)  # (b, H, p, keys)
        scores /= np.float32(self.attn_scale)
        queries, keys = scores.shape[-2:]
        is_seen = np.tri(queries, keys, keys - queries, dtype=bool)
        if attention_mask is not None:
            is_seen = is_seen & (attention_mask[:, None, None] != 0)
        np.copyto(scores, -np.inf, where=~is_seen)
        pattern = self.hook_pattern(softmax(self.hook_attn_scores(scores)))
        z = self.hook_z((pattern @ v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3))  # (b, p, H, D)
        bias = self._weights["b_O"]
        if self.cfg.use_attn_result:
            return self.hook_result(self.results(z)).sum(2) + bias
        return (z.reshape(-1, len(self._output)) @ self._output + bias).reshape(*z.shape[:2], -1)

    def results(self, z: np.ndarray) -> np.ndarray:
        """What each head writes, (…, H, C), for z (…, H, D); b_O is in none of them."""
        return by_head(z, self._weights["W_O"])

    def _projected(self, x: np.ndarray, key_input: np.ndarray | None, value_input: np.ndarray | None) -> list[np.ndarray]:
        """Queries, keys and values, each (b, p, H, D)."""
        is_one = (key_input is None or key_input is x) and (value_input is None or value_input is x)
        if is_one and x.ndim == 3:
            matrix, bias = self._fused
            both = x.reshape(-1, len(matrix)) @ matrix
            both += bias
            both = both.reshape(*x.shape[:2], 3, self.cfg.n_heads, self.cfg.d_head)
            return [both[:, :, i] for i in range(3)]
        inputs = (x, x if key_input is None else key_input, x if value_input is None else value_input)
        found = []
        for part, one in zip("QKV", inputs, strict=True):
            weight, bias = self._weights[f"W_{part}"], self._weights[f"b_{part}"]
            one = np.broadcast_to(one[:, :, None], (*one.shape[:2], len(weight), one.shape[2])) if one.ndim == 3 else one
            found.append(by_head(one, weight) + bias)
        return found


class MLP(Weighted):
    """Two products with an activation between them, (b, p, C) to (b, p, C)."""

    weights = ("W_in", "b_in", "W_out", "b_out")

    def __init__(self, cfg: HookedTransformerConfig, kind: Kind, layer: int, weights: Weights) -> None:
        super().__init__(kind, **{name: getattr(weights, name)[layer] for name in self.weights})
        if cfg.act_fn not in ACTIVATIONS:
            raise ValueError(f"activation_function: expected one of {', '.join(ACTIVATIONS)}, found {cfg.act_fn!r}")
        self.act_fn, self.slope = ACTIVATIONS[cfg.act_fn]
        self.hook_pre = HookPoint(kind)
        self.hook_post = HookPoint(kind)

    def compute(self, x: np.ndarray) -> np.ndarray:
        of = self._weights
        pre = x.reshape(-1, x.shape[-1]) @ of["W_in"]
        pre += of["b_in"]
        post = self.hook_post(self.act_fn(self.hook_pre(pre.reshape(*x.shape[:-1], -1))))
        found = post.reshape(-1, post.shape[-1]) @ of["W_out"]
        found += of["b_out"]
        return found.reshape(*post.shape[:-1], -1)


class Unembed(Weighted):
    """Logits: (b, p, C) to (b, p, V)."""

    weights = ("W_U", "b_U")

    def compute(self, x: np.ndarray) -> np.ndarray:
        found = x.reshape(-1, x.shape[-1]) @ self._weights["W_U"]
        found += self._weights["b_U"]
        return found.reshape(*x.shape[:-1], -1)


class TransformerBlock(Module):
    """Attention and MLP, each after a norm and added to the residual stream (b, p, C)."""

    def __init__(self, cfg: HookedTransformerConfig, kind: Kind, layer: int, weights: Weights) -> None:
        self.cfg = cfg
        self.ln1 = LayerNorm(cfg, kind, weights.ln1_w[layer], weights.ln1_b[layer])
        self.ln2 = LayerNorm(cfg, kind, weights.ln2_w[layer], weights.ln2_b[layer])
        self.attn = Attention(cfg, kind, layer, weights)
        self.mlp = MLP(cfg, kind, layer, weights)
        self.hook_attn_in = HookPoint(kind)
        self.hook_q_input = HookPoint(kind)
        self.hook_k_input = HookPoint(kind)
        self.hook_v_input = HookPoint(kind)
        self.hook_mlp_in = HookPoint(kind)
        self.hook_attn_out = HookPoint(kind)
        self.hook_mlp_out = HookPoint(kind)
        self.hook_resid_pre = HookPoint(kind)
        self.hook_resid_mid = HookPoint(kind)
        self.hook_resid_post = HookPoint(kind)

    def forward(self, resid_pre: Any, **options: Any) -> Any:
        """The residual stream after the block."""
        return like(resid_pre, self.compute(array(resid_pre), **options))

    def compute(self, resid_pre: np.ndarray, **options: Any) -> np.ndarray:
        resid_pre = self.hook_resid_pre(resid_pre)
        inputs = zip(("query_input", "key_input", "value_input"), self._attention_inputs(resid_pre))
        normalized: dict[str, Any] = {name: self.ln1.compute(one) for name, one in inputs}
        attn_out = self.hook_attn_out(self.attn.compute(**normalized, **options))
        resid_mid = self.hook_resid_mid(resid_pre + attn_out)
        mlp_in = self.hook_mlp_in(resid_mid.copy()) if self.cfg.use_hook_mlp_in else resid_mid
        mlp_out = self.hook_mlp_out(self.mlp.compute(self.ln2.compute(mlp_in)))
        return self.hook_resid_post(resid_mid + mlp_out)

    def _attention_inputs(self, resid_pre: np.ndarray) -> list[np.ndarray]:
        """One for queries, keys and values, or three."""

        def repeated() -> np.ndarray:
            return np.repeat(resid_pre[:, :, None], self.cfg.n_heads, axis=2)  # (b, p, H, C)

        inputs = [resid_pre]
        if self.cfg.use_attn_in:
            inputs = [self.hook_attn_in(repeated())]
        if self.cfg.use_split_qkv_input:
            inputs = [hook(repeated()) for hook in (self.hook_q_input, self.hook_k_input, self.hook_v_input)]
        return inputs


class KeyValues:
    """Keys and values of one block, (b, positions, H, D) each."""

    def __init__(self) -> None:
        self.past_keys: np.ndarray | None = None
        self.past_values: np.ndarray | None = None

    def append(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All of them, with new ones behind."""
        if self.past_keys is not None and self.past_values is not None:
            keys = np.concatenate([self.past_keys, keys], 1)
            values = np.concatenate([self.past_values, values], 1)
        self.past_keys, self.past_values = keys, values
        return keys, values
