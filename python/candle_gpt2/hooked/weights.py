"""Weights in TransformerLens' shapes, with its processing steps.

The weights of all blocks are stacked; `model.blocks[3].attn.W_Q` is a view of the array in use.
Processing does not change predictions. Sources: TransformerLens 4.3.0, `weight_processing.py`; "A Mathematical Framework for
Transformer Circuits", appendix on centering.
"""

from dataclasses import dataclass

import numpy as np

from .config import HookedTransformerConfig
from .factored_matrix import FactoredMatrix


@dataclass
class Weights:
    """Weights of a model, oriented for `x @ W`.

    L blocks, H heads of width D, residual width C, MLP width M, V tokens.
    """

    W_E: np.ndarray  # (V, C)
    W_pos: np.ndarray  # (n_ctx, C)
    ln1_w: np.ndarray  # (L, C)
    ln1_b: np.ndarray  # (L, C)
    W_QKV: np.ndarray  # (L, C, 3, H, D)
    b_QKV: np.ndarray  # (L, 3, H, D)
    W_O: np.ndarray  # (L, H, D, C)
    b_O: np.ndarray  # (L, C)
    ln2_w: np.ndarray  # (L, C)
    ln2_b: np.ndarray  # (L, C)
    W_in: np.ndarray  # (L, C, M)
    b_in: np.ndarray  # (L, M)
    W_out: np.ndarray  # (L, M, C)
    b_out: np.ndarray  # (L, C)
    ln_w: np.ndarray  # (C)
    ln_b: np.ndarray  # (C)
    W_U: np.ndarray  # (C, V)
    b_U: np.ndarray  # (V)

    @classmethod
    def untrained(cls, cfg: HookedTransformerConfig) -> "Weights":
        """Creates GPT-2's initial weights: normally distributed matrices and zero biases.

        Without init_weights all values are zero.
        """
        layers, heads, width, channels, inner = cfg.n_layers, cfg.n_heads, cfg.d_head, cfg.d_model, cfg.d_mlp or 0
        deviation = cfg.initializer_range if cfg.initializer_range >= 0 else 0.8 / channels**0.5
        generator = np.random.default_rng(cfg.seed)

        def matrix(*shape: int) -> np.ndarray:
            values = generator.standard_normal(shape, np.float32) if cfg.init_weights else np.zeros(shape, np.float32)
            return values * np.float32(deviation)

        def zeros(*shape: int) -> np.ndarray:
            return np.zeros(shape, np.float32)

        return cls(
            W_E=matrix(cfg.d_vocab, channels),
            W_pos=matrix(cfg.n_ctx, channels),
            ln1_w=zeros(layers, channels) + 1,
            ln1_b=zeros(layers, channels),
            W_QKV=matrix(layers, channels, 3, heads, width),
            b_QKV=zeros(layers, 3, heads, width),
            W_O=matrix(layers, heads, width, channels),
            b_O=zeros(layers, channels),
            ln2_w=zeros(layers, channels) + 1,
            ln2_b=zeros(layers, channels),
            W_in=matrix(layers, channels, inner),
            b_in=zeros(layers, inner),
            W_out=matrix(layers, inner, channels),
            b_out=zeros(layers, channels),
            ln_w=zeros(channels) + 1,
            ln_b=zeros(channels),
            W_U=matrix(channels, cfg.d_vocab_out),
            b_U=zeros(cfg.d_vocab_out),
        )

    @classmethod
    def of_checkpoint(cls, parameters: dict[str, np.ndarray], cfg: HookedTransformerConfig) -> "Weights":
        """Converts the result of `Model.parameters()`, whose matrices are (out, in)."""
        layers, heads, width, channels = cfg.n_layers, cfg.n_heads, cfg.d_head, cfg.d_model
        inner = cfg.d_mlp or 0

        def stacked(name: str, *shape: int) -> np.ndarray:
            found = np.empty((layers, *shape), np.float32)
            for layer in range(layers):
                value = parameters.pop(f"h.{layer}.{name}")
                found[layer] = (value.T if value.ndim == 2 else value).reshape(shape)
            return found

        embedding = parameters["wte.weight"]
        head = parameters.get("lm_head.weight", embedding)
        return cls(
            W_E=embedding,
            W_pos=parameters["wpe.weight"],
            ln1_w=stacked("ln_1.weight", channels),
            ln1_b=stacked("ln_1.bias", channels),
            W_QKV=stacked("attn.c_attn.weight", channels, 3, heads, width),
            b_QKV=stacked("attn.c_attn.bias", 3, heads, width),
            W_O=stacked("attn.c_proj.weight", heads, width, channels),
            b_O=stacked("attn.c_proj.bias", channels),
            ln2_w=stacked("ln_2.weight", channels),
            ln2_b=stacked("ln_2.bias", channels),
            W_in=stacked("mlp.c_fc.weight", channels, inner),
            b_in=stacked("mlp.c_fc.bias", inner),
            W_out=stacked("mlp.c_proj.weight", inner, channels),
            b_out=stacked("mlp.c_proj.bias", channels),
            ln_w=parameters["ln_f.weight"],
            ln_b=parameters["ln_f.bias"],
            # Copy, because a tied head may be processed separately from the embedding.
            W_U=head.T.copy(),
            b_U=np.zeros(len(head), np.float32),
        )

    def checkpoint(self) -> dict[str, np.ndarray]:
        """Converts the weights to the tensors of a Hugging Face checkpoint with an untied head."""
        layers, channels = len(self.W_O), self.W_E.shape[1]
        norm_weight, norm_bias, head = self._final()
        of_blocks = {
            "ln_1.weight": self.ln1_w,
            "ln_1.bias": self.ln1_b,
            "attn.c_attn.weight": self.W_QKV.reshape(layers, channels, -1),
            "attn.c_attn.bias": self.b_QKV.reshape(layers, -1),
            "attn.c_proj.weight": self.W_O.reshape(layers, -1, channels),
            "attn.c_proj.bias": self.b_O,
            "ln_2.weight": self.ln2_w,
            "ln_2.bias": self.ln2_b,
            "mlp.c_fc.weight": self.W_in,
            "mlp.c_fc.bias": self.b_in,
            "mlp.c_proj.weight": self.W_out,
            "mlp.c_proj.bias": self.b_out,
        }
        found = {f"transformer.h.{layer}.{name}": values[layer] for name, values in of_blocks.items() for layer in range(layers)}
        return found | {
            "transformer.wte.weight": self.W_E,
            "transformer.wpe.weight": self.W_pos,
            "transformer.ln_f.weight": norm_weight,
            "transformer.ln_f.bias": norm_bias,
            "lm_head.weight": head.T,
        }

    def _final(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the final norm's weight and bias and the output head (C, V) for a model that has no b_U, like GPT-2."""
        if not self.b_U.any():
            return self.ln_w, self.ln_b, self.W_U
        # Normalized values sum to 0. A vector added to every row of the head thus reaches the logits only through the norm's bias.
        head, bias = self.ln_w[:, None] * self.W_U, self.b_U + self.ln_b @ self.W_U
        return np.ones_like(self.ln_w), np.full_like(self.ln_b, 1 / len(head)), head + bias - head.mean(0)

    def fold_ln(self) -> None:
        """Folds the norms' weights and biases into the next layers, and centers the weights that read from the norms."""
        flat = self.W_QKV.reshape(*self.W_QKV.shape[:2], -1)  # (L, C, 3HD)
        self.b_QKV += (self.ln1_b[:, None] @ flat).reshape(self.b_QKV.shape)
        self.b_in += (self.ln2_b[:, None] @ self.W_in)[:, 0]
        self.b_U += self.ln_b @ self.W_U
        for matrix, weight in ((flat, self.ln1_w), (self.W_in, self.ln2_w), (self.W_U, self.ln_w)):
            matrix *= weight[..., None]
            matrix -= matrix.mean(-2, keepdims=True)
        for weight, bias in ((self.ln1_w, self.ln1_b), (self.ln2_w, self.ln2_b), (self.ln_w, self.ln_b)):
            weight[...], bias[...] = 1, 0

    def center_writing_weights(self) -> None:
        """Centers all weights that write to the residual stream, because norms subtract the mean anyway."""
        for values in (self.W_E, self.W_pos, self.W_O, self.b_O, self.W_out, self.b_out):
            values -= values.mean(-1, keepdims=True)

    def center_unembed(self) -> None:
        """Centers the logits of each position, which does not change the softmax."""
        self.W_U -= self.W_U.mean(-1, keepdims=True)
        self.b_U -= self.b_U.mean()

    def fold_value_biases(self) -> None:
        """Folds value biases into b_O, because the rows of an attention pattern sum to 1."""
        self.b_O += np.einsum("lhd,lhdc->lc", self.b_QKV[:, 2], self.W_O)
        self.b_QKV[:, 2] = 0

    def refactor_factored_attn_matrices(self) -> None:
        """Balances W_Q and W_K of each head, and orthonormalizes the rows of W_O.

        OV and QK, including their biases, do not change.
        """
        self.fold_value_biases()
        query, key, value = (np.moveaxis(self.W_QKV[:, :, i], 1, 2) for i in range(3))  # (L, H, C, D), views
        with_bias = [np.concatenate([w, self.b_QKV[:, i, :, None]], -2) for i, w in enumerate((query, key))]
        even = FactoredMatrix(with_bias[0], with_bias[1].swapaxes(-1, -2)).make_even()
        for i, (weight, found) in enumerate(((query, even.A), (key, even.B.swapaxes(-1, -2)))):
            weight[...], self.b_QKV[:, i] = found[..., :-1, :], found[..., -1, :]
        u, s, v = FactoredMatrix(value, self.W_O).svd()
        value[...], self.W_O[...] = u * s[..., None, :], v.swapaxes(-1, -2)
