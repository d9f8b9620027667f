"""Part of an axis: a position, a range, a list."""

from typing import Any

import numpy as np

from .arrays import array, is_tensor

SliceInput = None | int | tuple[int, ...] | list[int] | slice | np.ndarray


class Slice:
    """Part of an axis. None is all of it, an int one place (the axis goes), a tuple the arguments of `slice`, a list or an array
    places or a mask."""

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
        """That part of a tensor."""
        places: list[Any] = [slice(None)] * tensor.ndim
        places[dim] = self.slice
        return tensor[tuple(places)]

    def indices(self, max_ctx: int | None = None) -> np.ndarray:
        """The places on an axis of this length."""
        if self.mode == "int":
            return np.array([self.slice], dtype=np.int64)
        if max_ctx is None:
            raise ValueError("max_ctx: the length of the axis is needed, unless the slice is one position")
        return np.arange(max_ctx, dtype=np.int64)[self.slice]

    @classmethod
    def of(cls, value: Any) -> "Slice":
        """A slice as it is, anything else as one."""
        return value if isinstance(value, Slice) else cls(value)

    @classmethod
    def unwrap(cls, slice_input: Any) -> "Slice":
        """The same, where one position keeps its axis."""
        return cls.of([slice_input] if isinstance(slice_input, int) else slice_input)

    def __repr__(self) -> str:
        return f"Slice: {self.slice} Mode: {self.mode}"
