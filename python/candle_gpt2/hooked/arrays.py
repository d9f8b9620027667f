"""Conversions between numpy arrays and torch tensors.

The package computes with numpy and returns tensors to callers that use torch. This module never imports
torch, because only callers that have imported torch pass tensors.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np


def torch_module() -> Any:
    """Returns the module `torch` if the caller has imported it, otherwise None."""
    return sys.modules.get("torch")


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor."""
    torch = torch_module()
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def has_tensor(values: Any) -> bool:
    """Whether a value is a tensor, or a list or tuple that contains one."""
    return is_tensor(values) or (isinstance(values, (list, tuple)) and any(map(is_tensor, values)))


def is_live(value: Any) -> bool:
    """Whether torch's autograd tracks a value: it requires a gradient, and gradients are enabled."""
    return not isinstance(value, np.ndarray) and is_tensor(value) and value.requires_grad and torch_module().is_grad_enabled()


def array(value: Any) -> np.ndarray:
    """Converts a tensor, an array or nested lists to an array.

    Arrays and CPU tensors share memory with the result.
    """
    if isinstance(value, np.ndarray):
        return value
    if is_tensor(value):
        value = value.detach().cpu()
        return np.asarray(value.float() if str(value.dtype) == "torch.bfloat16" else value)
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return np.from_dlpack(value)
    return np.asarray([array(one) for one in value] if has_tensor(value) else value)


def tensor(value: Any) -> Any:
    """Converts an array to a torch tensor that shares its memory, and returns other values unchanged."""
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    value = np.asarray(value)
    return torch_module().from_numpy(value if value.flags.writeable else value.copy())


def live(value: Any) -> Any:
    """Returns a live tensor unchanged, and converts other values to arrays."""
    return value if is_live(value) else array(value)


def together(*values: Any) -> tuple[Any, ...]:
    """Returns arrays unchanged, or converts all of them to tensors if one is live."""
    return tuple(map(tensor, values)) if any(map(is_live, values)) else values


def library(value: Any) -> Any:
    """Returns the module whose functions accept a value: torch or numpy."""
    return torch_module() if is_tensor(value) else np


def added(left: Any, right: Any) -> Any:
    """Adds arrays or live tensors."""
    left, right = together(left, right)
    return left + right


@contextmanager
def no_gradients() -> Iterator[None]:
    """Disables autograd if torch is imported."""
    torch = torch_module()
    with torch.no_grad() if torch else nullcontext():
        yield


def like(example: Any, value: Any) -> Any:
    """Returns an array, converted to a tensor if `example` is or contains one."""
    return tensor(value) if has_tensor(example) else value


def matching(example: Any, value: Any) -> Any:
    """Converts a value to an array, or to a tensor if `example` is one."""
    return value if is_tensor(value) == is_tensor(example) else like(example, array(value))


def read_only(value: np.ndarray) -> np.ndarray:
    """Returns a read-only view, which becomes a copy when it is converted to a tensor."""
    view = value.view()
    view.flags.writeable = False
    return view


class Kind:
    """Output type of a model: numpy arrays or torch tensors."""

    def __init__(self, is_torch: bool) -> None:
        self.is_torch = is_torch

    @classmethod
    def chosen(cls, tensors: str | None) -> "Kind":
        """Returns the output type by name, by default torch if it is imported."""
        has_torch = torch_module() is not None
        if tensors not in (None, "numpy", "torch") or (tensors == "torch" and not has_torch):
            raise ValueError(f"tensors: expected 'numpy', or 'torch' after `import torch`, found {tensors!r}")
        return cls(has_torch if tensors is None else tensors == "torch")

    def out(self, value: Any) -> Any:
        """Converts an array to the output type."""
        return tensor(value) if self.is_torch else value

    @contextmanager
    def of(self, value: Any) -> Iterator[None]:
        """Context manager inside which outputs are tensors if `value` is or contains one."""
        before, self.is_torch = self.is_torch, self.is_torch or has_tensor(value)
        try:
            yield
        finally:
            self.is_torch = before
