"""`FactoredMatrix`: a product of two matrices that is never materialized."""

from functools import cached_property, reduce
from typing import Any

import numpy as np

from .arrays import array, is_tensor, library, matching, tensor


def _transposed(value: Any) -> Any:
    return value.swapaxes(-1, -2)


def _alike(*values: Any) -> list[Any]:
    """Converts all values to arrays or, if one is a tensor, to tensors of one dtype."""
    if not any(map(is_tensor, values)):
        return list(map(array, values))
    tensors = [one if is_tensor(one) else tensor(array(one)) for one in values]
    dtype = reduce(library(tensors[0]).promote_types, [one.dtype for one in tensors])
    return [one.to(dtype) for one in tensors]


class FactoredMatrix:
    """Product ``A @ B`` with a small inner dimension.

    A is (…, ldim, mdim) and B is (…, mdim, rdim). Leading dimensions broadcast. If either is a torch tensor, so
    are all results, and gradients pass through them.
    """

    def __init__(self, A: Any, B: Any) -> None:
        a, b = _alike(A, B)
        if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise AssertionError(f"the last axis of A must match the second-to-last axis of B, found shapes {shapes}")
        leading = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        self.A, self.B = (library(one).broadcast_to(one, (*leading, *one.shape[-2:])) for one in (a, b))
        self.ldim, self.mdim, self.rdim = a.shape[-2], a.shape[-1], b.shape[-1]
        self.shape = (*leading, self.ldim, self.rdim)
        self.has_leading_dims = bool(leading)

    @property
    def pair(self) -> tuple[Any, Any]:
        """Both factors."""
        return self.A, self.B

    @property
    def AB(self) -> Any:
        """Product, (…, ldim, rdim)."""
        return self.A @ self.B

    @property
    def BA(self) -> Any:
        """Product in reverse order, ``B @ A``, (…, mdim, mdim)."""
        if self.ldim != self.rdim:
            raise AssertionError(f"BA needs a square matrix, found shape {self.shape}")
        return self.B @ self.A

    @property
    def T(self) -> "FactoredMatrix":
        """Transpose."""
        return FactoredMatrix(_transposed(self.B), _transposed(self.A))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, FactoredMatrix):
            return (self @ other.A) @ other.B
        a, b, right = _alike(self.A, self.B, other)
        if right.ndim < 2:
            return (a @ (b @ right[:, None]))[..., 0]
        if right.shape[-2] != self.rdim:
            raise AssertionError(f"{self.shape} @ {tuple(right.shape)}: inner dimensions differ")
        return FactoredMatrix(a, b @ right) if self.rdim > self.mdim else FactoredMatrix(a @ b, right)

    # Makes an array on the left defer to __rmatmul__.
    __array_ufunc__ = None

    def __rmatmul__(self, other: Any) -> Any:
        a, b, left = _alike(self.A, self.B, other)
        if left.shape[-1] != self.ldim:
            raise AssertionError(f"{tuple(left.shape)} @ {self.shape}: inner dimensions differ")
        if left.ndim < 2:
            return (left[None] @ a @ b)[..., 0, :]
        return FactoredMatrix(left @ a, b) if self.ldim > self.mdim else FactoredMatrix(left, a @ b)

    def __mul__(self, scalar: Any) -> "FactoredMatrix":
        shape = tuple(np.shape(scalar))
        if np.prod(shape) != 1:
            raise AssertionError(f"* needs a single number, found shape {shape}; use @ for matrix products")
        # A single tensor or Python number leaves the dtype of A unchanged.
        factor = scalar.reshape(()) if is_tensor(scalar) else np.asarray(scalar).item()
        return FactoredMatrix((tensor(self.A) if is_tensor(factor) else self.A) * factor, self.B)

    __rmul__ = __mul__

    @cached_property
    def _svd(self) -> tuple[Any, Any, Any]:
        # SVD of the small core between two orthonormal bases.
        linalg = library(self.A).linalg
        left, left_core = linalg.qr(self.A)
        right, right_core = linalg.qr(_transposed(self.B))
        u, s, v = linalg.svd(left_core @ _transposed(right_core), full_matrices=False)
        return left @ u, s, right @ _transposed(v)

    def svd(self) -> tuple[Any, Any, Any]:
        """Computes the SVD: U (…, ldim, k), S (…, k) in descending order, and V (…, rdim, k).

        The product is ``U * S @ V.T``. k is mdim, or less if a factor has fewer rows or columns.
        """
        return self._svd

    @property
    def U(self) -> Any:
        """Left singular vectors, as columns."""
        return self.svd()[0]

    @property
    def S(self) -> Any:
        """Singular values."""
        return self.svd()[1]

    @property
    def V(self) -> Any:
        """Right singular vectors, as columns."""
        return self.svd()[2]

    @property
    def Vh(self) -> Any:
        """Name for V in TransformerLens 2.x."""
        return self.V

    @property
    def eigenvalues(self) -> Any:
        """Eigenvalues of BA, complex. The product's other eigenvalues are zero."""
        product = self.BA
        values = library(product).linalg.eigvals(product)
        return values if is_tensor(values) else values.astype(np.result_type(product, np.complex64))

    def norm(self) -> Any:
        """Computes the Frobenius norm of each product."""
        return (self._svd[1] ** 2).sum(-1) ** 0.5

    def make_even(self) -> "FactoredMatrix":
        """Returns the same product with the singular values split evenly between both factors."""
        u, s, v = self._svd
        root = s**0.5
        return FactoredMatrix(u * root[..., None, :], root[..., :, None] * _transposed(v))

    def collapse_l(self) -> Any:
        """Returns ``S V.T``, (…, k, rdim): the product without the orthogonal factor U."""
        _, s, v = self._svd
        return s[..., :, None] * _transposed(v)

    def collapse_r(self) -> Any:
        """Returns ``U S``, (…, ldim, k): the product without the orthogonal factor V."""
        u, s, _ = self._svd
        return u * s[..., None, :]

    def get_corner(self, k: int = 3) -> Any:
        """Returns the first k rows and columns of the product."""
        return self.A[..., :k, :] @ self.B[..., :, :k]

    def unsqueeze(self, k: int) -> "FactoredMatrix":
        """Inserts a leading dimension at index k."""
        return FactoredMatrix(*(one.unsqueeze(k) if is_tensor(one) else np.expand_dims(one, k) for one in self.pair))

    def __getitem__(self, index: Any) -> "FactoredMatrix":
        """Indexes leading dimensions like an array.

        An int index of rows or columns keeps its dimension, like a range of length 1.
        """
        index = [matching(self.A, one) if is_tensor(one) else one for one in (index if isinstance(index, tuple) else (index,))]
        count = sum(one is not None and one is not Ellipsis for one in index)
        if count > self.ndim:
            raise ValueError(f"{count} indices are too many for shape {self.shape}")
        if any(one is Ellipsis for one in index):
            at = next(i for i, one in enumerate(index) if one is Ellipsis)
            index[at : at + 1] = [slice(None)] * (self.ndim - count)
        leading: list[Any] = []
        # None adds an axis and does not consume one.
        while index and sum(one is not None for one in leading) < self.ndim - 2:
            leading.append(index.pop(0))
        if not index:
            return FactoredMatrix(self.A[tuple(leading)], self.B[tuple(leading)])
        inside = [slice(one, one + 1 or None) if isinstance(one, (int, np.integer)) else one for one in index]
        rows, columns = [*inside, slice(None)][:2]
        return FactoredMatrix(self.A[(*leading, rows)], self.B[(*leading, slice(None), columns)])

    def __repr__(self) -> str:
        return f"FactoredMatrix: Shape({self.shape}), Hidden Dim({self.mdim})"
