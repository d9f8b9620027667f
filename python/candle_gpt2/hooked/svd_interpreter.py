"""Singular vectors of a head's or an MLP's weights, projected onto the vocabulary."""

from typing import Any

import numpy as np

from .arrays import array
from .factored_matrix import FactoredMatrix

VECTOR_TYPES = ["OV", "w_in", "w_out"]


class SVDInterpreter:
    """Interprets singular vectors of a model's weights as token directions.

    Source: "The Singular Value Decompositions of Transformer Weight Matrices are Highly Interpretable" (Beren Millidge, Sid Black).
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cfg = model.cfg

    def get_singular_vectors(
        self, vector_type: str, layer_index: int, num_vectors: int = 10, head_index: int | None = None
    ) -> Any:
        """Projects the strongest right singular vectors (C) onto the logits: (V, 1, num_vectors).

        vector_type: "OV" for the OV matrix of a head, "w_in" or "w_out" for the input or output weights of an MLP. The sign of a
        singular vector is arbitrary.
        """
        if vector_type not in VECTOR_TYPES:
            raise ValueError(f"vector_type: expected one of {VECTOR_TYPES}, found {vector_type!r}")
        for name, index, size in (("layer_index", layer_index, self.cfg.n_layers), ("head_index", head_index, self.cfg.n_heads)):
            if index is None:
                assert vector_type != "OV", "head_index: required for vector_type='OV'"
            else:
                assert 0 <= index < size, f"{name}: expected 0 to {size - 1}, found {index}"
        block = self.model.blocks[layer_index]
        if vector_type == "OV":
            directions = array(FactoredMatrix(block.attn.W_V[head_index], block.attn.W_O[head_index]).V).T
        else:
            # Include the norm's weight, which is 1 if it is folded.
            matrix = array(block.mlp.W_in).T * array(block.ln2.w) if vector_type == "w_in" else array(block.mlp.W_out)
            directions = np.linalg.svd(matrix, full_matrices=False)[2]
        return self.model.kind.out(array(self.model.W_U).T[:, None] @ directions[:num_vectors].T)
