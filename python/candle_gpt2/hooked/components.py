"""GPT-2 components in numpy. Each can be called on its own.

b batch, p positions, H heads of width D, C residual width, M MLP width, V tokens.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import Kind, added, array, is_live, is_tensor, library, like, live, tensor, together, torch_module
from .config import HookedTransformerConfig
from .factored_matrix import FactoredMatrix
from .hook_points import HookPoint, Module
from .weights import Weights

_erf = np.frompyfunc(math.erf, 1, 1)
QUICK_GELU_FACTOR = 1.702


def gelu_new(x: np.ndarray) -> np.ndarray:
    """``0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))``."""
    root = np.float32(math.sqrt(2 / math.pi))
    # Use a single buffer, because these steps are memory-bound.
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
    """Returns ``x sigmoid(factor x)`` and its derivative."""
    steep = np.float32(factor)

    def slope(x: np.ndarray) -> np.ndarray:
        gate = _sigmoid(steep * x)
        return gate * (1 + steep * x * (1 - gate))

    return lambda x: x * _sigmoid(steep * x), slope


# Activation function and its derivative.
Activation = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]
ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": (gelu_new, _gelu_new_slope),
    "gelu_pytorch_tanh": (gelu_new, _gelu_new_slope),
    "gelu": (gelu, _gelu_slope),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(x.dtype)),
    "relu2": (lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0)),
    "silu": _gated(1),
    "swish": _gated(1),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "quick_gelu": _gated(QUICK_GELU_FACTOR),
}


# Activation functions for live tensors.
LIVE_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu_new": lambda x: torch_module().nn.functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: torch_module().nn.functional.gelu(x, approximate="tanh"),
    "gelu": lambda x: torch_module().nn.functional.gelu(x),
    "relu": lambda x: x.relu(),
    "relu2": lambda x: x.relu().square(),
    "silu": lambda x: x * x.sigmoid(),
    "swish": lambda x: x * x.sigmoid(),
    "tanh": lambda x: x.tanh(),
    "quick_gelu": lambda x: x * (QUICK_GELU_FACTOR * x).sigmoid(),
}


def softmax(x: Any) -> Any:
    """Softmax along the last axis. Rows of -inf, as at padded positions, become zeros."""
    if is_live(x):
        is_hidden = x.isneginf().all(-1, keepdim=True)
        return x.masked_fill(is_hidden, 0).softmax(-1).masked_fill(is_hidden, 0)
    largest = x.max(-1, keepdims=True)
    y = np.exp(x - np.where(np.isneginf(largest), 0, largest))
    total = y.sum(-1, keepdims=True)
    y /= np.where(total == 0, 1, total)
    return y


def by_head(x: Any, weights: Any) -> Any:
    """Multiplies x (…, H, a) by each head's matrix, weights (H, a, b). Returns (…, H, b)."""
    rows = x.reshape(-1, *x.shape[-2:]).swapaxes(0, 1)
    return (rows @ weights).swapaxes(0, 1).reshape(*x.shape[:-1], weights.shape[-1])


class Weighted(Module):
    """Module whose weights are attributes with the names in `weights`."""

    def __init__(self, kind: Kind, **weights: np.ndarray) -> None:
        self.kind = kind
        self._weights = weights
        # Tensors that share memory with the weights and hold their gradients.
        self._tensors: dict[str, Any] = {}
        # Checksum of the weights at their first access. Callers may change them from then on.
        self._checksum: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name in self.weights:
            self._record()
            if not self.kind.is_torch:
                return self._weights[name]
            if name not in self._tensors:
                self._tensors[name] = tensor(self._weights[name])
            return self._tensors[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.weights:
            self._record()
            new, own = array(value), self._weights[name]
            if new.shape != own.shape:
                raise ValueError(f"{self.name or type(self).__name__}.{name}: expected shape {own.shape}, found {new.shape}")
            own[...] = new
        else:
            super().__setattr__(name, value)

    def _record(self) -> None:
        if self._checksum is None:
            self._checksum = self.checksum()

    def checksum(self) -> int:
        """Computes a checksum of the weights."""
        found = 0
        for name in self._weights:
            found = zlib.crc32(np.ascontiguousarray(array(self._weight(name))).data, found)
        return found

    @property
    def is_changed(self) -> bool:
        """Whether the weights have changed since `accept_changes`."""
        return self._checksum is not None and self._checksum != self.checksum()

    def accept_changes(self) -> None:
        """Makes the current weights the reference for `is_changed`."""
        if self._checksum is not None:
            self._checksum = self.checksum()

    def _weight(self, name: str) -> Any:
        """Returns a weight as an array, or as a tensor if it is live."""
        own, found = self._weights[name], self._tensors.get(name)
        if found is None:
            return own
        if found.data_ptr() != own.ctypes.data:  # after `weight.data = …`
            own[...] = array(found)
            found.data = tensor(own)
        return found if is_live(found) else own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the output, as a tensor if the first argument is one."""
        values = {name: live(one) if is_tensor(one) else one for name, one in kwargs.items()}
        return like([*args, *kwargs.values()][0], self.compute(*(live(one) for one in args), **values))

    def _product(self, x: Any, matrix: str, bias: str) -> Any:
        """Computes ``x @ matrix + bias`` along the last axis."""
        x, weight, shift = together(x, self._weight(matrix), self._weight(bias))
        found = x.reshape(-1, x.shape[-1]) @ weight
        found += shift
        return found.reshape(*x.shape[:-1], -1)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the output for arrays and live tensors.

        The output is a live tensor if an input or a weight is one, otherwise an array.
        """
        raise NotImplementedError


class Embed(Weighted):
    """Token embedding: ids (b, p) to (b, p, C)."""

    weights = ("W_E",)

    def compute(self, tokens: np.ndarray) -> Any:
        return self._weight("W_E")[tokens]


class PosEmbed(Weighted):
    """Position embedding: ids (b, p) to (b, p, C).

    With a mask, positions count from the first token that is not padding, and padding gets zeros.
    """

    weights = ("W_pos",)

    def forward(self, tokens: Any, past_kv_pos_offset: int = 0, attention_mask: Any = None) -> Any:
        """Returns the vectors for the positions that start at past_kv_pos_offset."""
        mask = None if attention_mask is None else array(attention_mask)
        return like(tokens, self.compute(array(tokens), past_kv_pos_offset, mask))

    def compute(self, tokens: np.ndarray, offset: int = 0, mask: np.ndarray | None = None) -> Any:
        batch, count = tokens.shape
        table = self._weight("W_pos")
        if mask is None:
            return table[np.arange(offset, offset + count)[None].repeat(batch, 0)]
        ids = np.maximum(mask.cumsum(1) - 1, 0)[:, offset:]
        vectors, is_token = together(table[ids], mask[:, offset : offset + count, None] != 0)
        return vectors * is_token


class LayerNorm(Weighted):
    """Layer norm: ``(x − mean) / scale``, then weight and bias unless these are folded."""

    weights = ("w", "b")

    def __init__(self, cfg: HookedTransformerConfig, kind: Kind, w: np.ndarray, b: np.ndarray) -> None:
        super().__init__(kind, w=w, b=b)
        self.cfg = cfg
        self.eps = cfg.eps
        self.hook_scale = HookPoint(kind)
        self.hook_normalized = HookPoint(kind)

    def compute(self, x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        square = library(x).einsum("...c,...c->...", x, x)[..., None] / np.float32(x.shape[-1])
        x, scale = together(x, self.hook_scale(library(x).sqrt(square + np.float32(self.eps))))
        normalized = self.hook_normalized(x / scale)
        if self.cfg.normalization_type == "LNPre":
            return normalized
        normalized, weight, bias = together(normalized, self._weight("w"), self._weight("b"))
        return normalized * weight + bias


class Attention(Weighted):
    """Causal self-attention. Inputs are normalized: (b, p, C), or (b, p, H, C) with a separate input for each head."""

    weights = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")

    def __init__(self, cfg: HookedTransformerConfig, kind: Kind, layer: int, weights: Weights) -> None:
        matrices, biases = weights.W_QKV[layer], weights.b_QKV[layer]
        parts = {f"W_{part}": np.moveaxis(matrices[:, i], 0, 1) for i, part in enumerate("QKV")}  # (H, C, D)
        parts |= {f"b_{part}": biases[i] for i, part in enumerate("QKV")}
        super().__init__(kind, **parts, W_O=weights.W_O[layer], b_O=weights.b_O[layer])
        self.cfg = cfg
        self.layer_id = layer
        self._fused = matrices.reshape(cfg.d_model, -1), biases.reshape(-1)
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
        """OV circuit of each head, (H, C, C)."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def QK(self) -> FactoredMatrix:
        """QK circuit of each head, (H, C, C)."""
        return FactoredMatrix(self.W_Q, self.W_K.swapaxes(-1, -2))

    def compute(
        self,
        query_input: Any,
        key_input: Any = None,
        value_input: Any = None,
        past_kv_cache_entry: "KeyValues | None" = None,
        attention_mask: np.ndarray | None = None,
    ) -> Any:
        """Computes the output, which is added to the residual stream, (b, p, C).

        Keys and values use the queries' input unless they have their own.
        """
        q, k, v = self._projected(query_input, key_input, value_input)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        if past_kv_cache_entry is not None:
            k, v = past_kv_cache_entry.append(k, v)
        q, k = together(q, k)
        scores = q.swapaxes(1, 2) @ k.swapaxes(1, 2).swapaxes(2, 3)  # (b, H, p, keys)
        scores /= np.float32(self.attn_scale)
        queries, keys = scores.shape[-2:]
        is_visible = np.tri(queries, keys, keys - queries, dtype=bool)
        if attention_mask is not None:
            is_visible = is_visible & (attention_mask[:, None, None] != 0)
        if is_live(scores):
            scores = scores.masked_fill(tensor(~is_visible), -np.inf)
        else:
            np.copyto(scores, -np.inf, where=~is_visible)
        pattern, v = together(self.hook_pattern(softmax(self.hook_attn_scores(scores))), v)
        z = self.hook_z((pattern @ v.swapaxes(1, 2)).swapaxes(1, 2))  # (b, p, H, D)
        z, weight, bias = together(z, self._weight("W_O"), self._weight("b_O"))
        if self.cfg.use_attn_result:
            return added(self.hook_result(by_head(z, weight)).sum(2), bias)
        weight = weight.reshape(-1, self.cfg.d_model)
        return (z.reshape(-1, len(weight)) @ weight + bias).reshape(*z.shape[:2], -1)

    def results(self, z: np.ndarray) -> np.ndarray:
        """Computes the output of each head, (…, H, C), from z (…, H, D), without b_O."""
        return by_head(z, self._weights["W_O"])

    def _projected(self, x: Any, key_input: Any, value_input: Any) -> list[Any]:
        """Computes queries, keys and values, each (b, p, H, D)."""
        is_one = (key_input is None or key_input is x) and (value_input is None or value_input is x)
        weights = [(self._weight(f"W_{part}"), self._weight(f"b_{part}")) for part in "QKV"]
        if is_one and x.ndim == 3 and not any(is_live(one) for pair in weights for one in pair):
            x, matrix, bias = together(x, *self._fused)
            qkv = x.reshape(-1, len(matrix)) @ matrix
            qkv += bias
            qkv = qkv.reshape(*x.shape[:2], 3, self.cfg.n_heads, self.cfg.d_head)
            return [qkv[:, :, i] for i in range(3)]
        inputs = (x, x if key_input is None else key_input, x if value_input is None else value_input)
        found = []
        for one, (weight, bias) in zip(inputs, weights, strict=True):
            one, weight, bias = together(one, weight, bias)
            if one.ndim == 3:
                one = one.reshape(-1, one.shape[2]) @ weight.swapaxes(0, 1).reshape(one.shape[2], -1)
                found.append(one.reshape(*inputs[0].shape[:2], *bias.shape) + bias)
            else:
                found.append(by_head(one, weight) + bias)
        return found


class MLP(Weighted):
    """Two linear layers with an activation function between them, (b, p, C) to (b, p, C)."""

    weights = ("W_in", "b_in", "W_out", "b_out")

    def __init__(self, cfg: HookedTransformerConfig, kind: Kind, layer: int, weights: Weights) -> None:
        super().__init__(kind, **{name: getattr(weights, name)[layer] for name in self.weights})
        if cfg.act_fn is None or cfg.act_fn not in ACTIVATIONS:
            raise ValueError(f"act_fn: expected one of {', '.join(ACTIVATIONS)}, found {cfg.act_fn!r}")
        self.cfg = cfg
        self.hook_pre = HookPoint(kind)
        self.hook_post = HookPoint(kind)

    @property
    def act_fn(self) -> Callable[[np.ndarray], np.ndarray]:
        """Activation function for arrays."""
        return ACTIVATIONS[str(self.cfg.act_fn)][0]

    @property
    def slope(self) -> Callable[[np.ndarray], np.ndarray]:
        """Derivative of the activation function."""
        return ACTIVATIONS[str(self.cfg.act_fn)][1]

    def compute(self, x: Any) -> Any:
        pre = self.hook_pre(self._product(x, "W_in", "b_in"))
        post = LIVE_ACTIVATIONS[str(self.cfg.act_fn)](pre) if is_live(pre) else self.act_fn(pre)
        return self._product(self.hook_post(post), "W_out", "b_out")


class Unembed(Weighted):
    """Unembedding: (b, p, C) to logits (b, p, V)."""

    weights = ("W_U", "b_U")

    def compute(self, residual: Any) -> Any:
        return self._product(residual, "W_U", "b_U")


class TransformerBlock(Module):
    """Pre-norm attention and MLP, both added to the residual stream (b, p, C)."""

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
        """Computes the residual stream after the block."""
        return like(resid_pre, self.compute(live(resid_pre), **options))

    def compute(self, resid_pre: Any, **options: Any) -> Any:
        resid_pre = self.hook_resid_pre(resid_pre)
        inputs = zip(("query_input", "key_input", "value_input"), self._attention_inputs(resid_pre))
        normalized: dict[str, Any] = {name: self.ln1.compute(one) for name, one in inputs}
        attn_out = self.hook_attn_out(self.attn.compute(**normalized, **options))
        resid_mid = self.hook_resid_mid(added(resid_pre, attn_out))
        mlp_in = resid_mid
        if self.cfg.use_hook_mlp_in:
            mlp_in = self.hook_mlp_in(resid_mid if is_live(resid_mid) else resid_mid.copy())
        mlp_out = self.hook_mlp_out(self.mlp.compute(self.ln2.compute(mlp_in)))
        return self.hook_resid_post(added(resid_mid, mlp_out))

    def _attention_inputs(self, resid_pre: Any) -> list[Any]:
        """Returns one shared input for queries, keys and values, or a separate input for each."""

        def repeated() -> Any:
            one = resid_pre[:, :, None]
            heads = self.cfg.n_heads
            return one.expand(-1, -1, heads, -1) if is_live(one) else np.repeat(one, heads, axis=2)  # (b, p, H, C)

        inputs = [resid_pre]
        if self.cfg.use_attn_in:
            inputs = [self.hook_attn_in(repeated())]
        if self.cfg.use_split_qkv_input:
            inputs = [hook(repeated()) for hook in (self.hook_q_input, self.hook_k_input, self.hook_v_input)]
        return inputs


class KeyValues:
    """Cached keys and values of one block, (b, positions, H, D) each."""

    def __init__(self) -> None:
        self.past_keys: Any = None
        self.past_values: Any = None

    def append(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Appends keys and values, and returns all of them."""
        if self.past_keys is not None:
            keys, values = (
                library(new).concatenate([before, new], 1)
                for before, new in (together(live(self.past_keys), keys), together(live(self.past_values), values))
            )
        self.past_keys, self.past_values = keys, values
        return keys, values
