"""`FactoredMatrix`: a product of two matrices that is never materialized."""

from functools import cached_property
from typing import Any

import numpy as np

from .arrays import array, has_tensor, is_tensor, tensor


def _transposed(value: np.ndarray) -> np.ndarray:
    return value.swapaxes(-1, -2)


class FactoredMatrix:
    """Product ``A @ B`` with a small inner dimension.

    A is (…, ldim, mdim) and B is (…, mdim, rdim). Leading dimensions broadcast.
    """

    def __init__(self, A: Any, B: Any) -> None:
        self._is_torch = has_tensor([A, B])
        a, b = array(A), array(B)
        if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
            raise AssertionError(f"the last axis of A must match the second-to-last axis of B, found shapes {a.shape} and {b.shape}")
        leading = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        self._a = np.broadcast_to(a, leading + a.shape[-2:])
        self._b = np.broadcast_to(b, leading + b.shape[-2:])
        self.ldim, self.mdim, self.rdim = a.shape[-2], a.shape[-1], b.shape[-1]
        self.shape = (*leading, self.ldim, self.rdim)
        self.has_leading_dims = bool(leading)

    def _out(self, value: np.ndarray) -> Any:
        return tensor(value) if self._is_torch else value

    def _new(self, a: np.ndarray, b: np.ndarray) -> "FactoredMatrix":
        return FactoredMatrix(self._out(a), self._out(b))

    @property
    def A(self) -> Any:
        """Left factor."""
        return self._out(self._a)

    @property
    def B(self) -> Any:
        """Right factor."""
        return self._out(self._b)

    @property
    def pair(self) -> tuple[Any, Any]:
        """Both factors."""
        return self.A, self.B

    @property
    def AB(self) -> Any:
        """Product, (…, ldim, rdim)."""
        return self._out(self._a @ self._b)

    @property
    def BA(self) -> Any:
        """Product in reverse order, ``B @ A``, (…, mdim, mdim)."""
        if self.ldim != self.rdim:
            raise AssertionError(f"BA needs a square matrix, found shape {self.shape}")
        return self._out(self._b @ self._a)

    @property
    def T(self) -> "FactoredMatrix":
        """Transpose."""
        return self._new(_transposed(self._b), _transposed(self._a))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, FactoredMatrix):
            return (self @ other.A) @ other.B
        right = array(other)
        if right.ndim < 2:
            return self._out((self._a @ (self._b @ right[:, None]))[..., 0])
        if right.shape[-2] != self.rdim:
            raise AssertionError(f"{self.shape} @ {right.shape}: inner dimensions differ")
        return self._new(self._a, self._b @ right) if self.rdim > self.mdim else self._new(self._a @ self._b, right)

    # Makes an array on the left defer to __rmatmul__.
    __array_ufunc__ = None

    def __rmatmul__(self, other: Any) -> Any:
        left = array(other)
        if left.shape[-1] != self.ldim:
            raise AssertionError(f"{left.shape} @ {self.shape}: inner dimensions differ")
        if left.ndim < 2:
            return self._out((left[None] @ self._a @ self._b)[..., 0, :])
        return self._new(left @ self._a, self._b) if self.ldim > self.mdim else self._new(left, self._a @ self._b)

    def __mul__(self, scalar: Any) -> "FactoredMatrix":
        factor = array(scalar)
        if factor.size != 1:
            raise AssertionError(f"* needs a single number, found shape {factor.shape}; use @ for matrix products")
        # Use the dtype of A, because a Python number has none.
        return self._new(self._a * self._a.dtype.type(factor.item()), self._b)

    __rmul__ = __mul__

    @cached_property
    def _svd(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # SVD of the small core between two orthonormal bases.
        left, left_core = np.linalg.qr(self._a)
        right, right_core = np.linalg.qr(_transposed(self._b))
        u, s, v = np.linalg.svd(left_core @ _transposed(right_core), full_matrices=False)
        return left @ u, s, right @ _transposed(v)

    def svd(self) -> tuple[Any, Any, Any]:
        """Computes the SVD: U (…, ldim, k), S (…, k) in descending order, and V (…, rdim, k).

        The product is ``U * S @ V.T``. k is mdim, or less if a factor has fewer rows or columns.
        """
        u, s, v = self._svd
        return self._out(u), self._out(s), self._out(v)

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
        product = array(self.BA)
        return self._out(np.linalg.eigvals(product).astype(np.result_type(product, np.complex64)))

    def norm(self) -> Any:
        """Computes the Frobenius norm of each product."""
        return self._out(np.sqrt((self._svd[1] ** 2).sum(-1)))

    def make_even(self) -> "FactoredMatrix":
        """Returns the same product with the singular values split evenly between both factors."""
        u, s, v = self._svd
        root = np.sqrt(s)
        return self._new(u * root[..., None, :], root[..., :, None] * _transposed(v))

    def collapse_l(self) -> Any:
        """Returns ``S V.T``, (…, k, rdim): the product without the orthogonal factor U."""
        _, s, v = self._svd
        return self._out(s[..., :, None] * _transposed(v))

    def collapse_r(self) -> Any:
        """Returns ``U S``, (…, ldim, k): the product without the orthogonal factor V."""
        u, s, _ = self._svd
        return self._out(u * s[..., None, :])

    def get_corner(self, k: int = 3) -> Any:
        """Returns the first k rows and columns of the product."""
        return self._out(self._a[..., :k, :] @ self._b[..., :, :k])

    def unsqueeze(self, k: int) -> "FactoredMatrix":
        """Inserts a leading dimension at index k."""
        return self._new(np.expand_dims(self._a, k), np.expand_dims(self._b, k))

    def __getitem__(self, index: Any) -> "FactoredMatrix":
        """Indexes leading dimensions like an array.

        An int index of rows or columns keeps its dimension, like a range of length 1.
        """
        index = [array(one) if is_tensor(one) else one for one in (index if isinstance(index, tuple) else (index,))]
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
            return self._new(self._a[tuple(leading)], self._b[tuple(leading)])
        inside = [slice(one, one + 1 or None) if isinstance(one, (int, np.integer)) else one for one in index]
        rows, columns = [*inside, slice(None)][:2]
        return self._new(self._a[(*leading, rows)], self._b[(*leading, slice(None), columns)])

    def __repr__(self) -> str:
        return f"FactoredMatrix: Shape({self.shape}), Hidden Dim({self.mdim})"
