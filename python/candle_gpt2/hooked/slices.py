"""Selection of part of an axis: a position, a range or a list."""

from typing import Any

import numpy as np

from .arrays import array, is_tensor

SliceInput = None | int | tuple[int, ...] | list[int] | slice | np.ndarray


class Slice:
    """Selection of part of an axis.

    None selects the whole axis. An int selects one position and removes the axis. A tuple contains the arguments of `slice`. A list or
    array contains positions, or is a mask.
    """

    def __init__(self, input_slice: Any = None) -> None:
        self.slice: Any
        if input_slice is None:
            self.slice, self.mode = slice(None), "identity"
        elif isinstance(input_slice, tuple):
            self.slice, self.mode = slice(*input_slice), "slice"
        elif isinstance(input_slice, slice):
            self.slice, self.mode = input_slice, "slice"
        elif isinstance(input_slice, (int, np.integer)):
            self.slice, self.mode = int(input_slice), "int"
        elif isinstance(input_slice, (list, np.ndarray)) or is_tensor(input_slice):
            self.slice, self.mode = array(input_slice), "array"
        else:
            raise ValueError(f"expected a position, a range, or a list of positions, found {input_slice!r}")

    def apply(self, tensor: Any, dim: int = 0) -> Any:
        """Applies the selection to a tensor."""
        index: list[Any] = [slice(None)] * tensor.ndim
        index[dim] = self.slice
        return tensor[tuple(index)]

    def indices(self, max_ctx: int | None = None) -> np.ndarray:
        """Returns the selected positions on an axis of length max_ctx."""
        if self.mode == "int":
            return np.array([self.slice], dtype=np.int64)
        if max_ctx is None:
            raise ValueError("max_ctx: required unless the slice is a single position")
        return np.arange(max_ctx, dtype=np.int64)[self.slice]

    @classmethod
    def of(cls, value: Any) -> "Slice":
        """Converts a value to a Slice, unless it already is one."""
        return value if isinstance(value, Slice) else cls(value)

    @classmethod
    def unwrap(cls, slice_input: Any) -> "Slice":
        """Like `of`, but a single position keeps its axis."""
        return cls.of([slice_input] if isinstance(slice_input, int) else slice_input)

    def __repr__(self) -> str:
        return f"Slice: {self.slice} Mode: {self.mode}"
