"""numpy inside; at the edge, tensors of torch for a caller that has torch.

Nothing here imports torch: a tensor can only come from a caller that has imported it already.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np


def torch_module() -> Any:
    """The module `torch` if the caller has imported it, else None."""
    return sys.modules.get("torch")


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of torch."""
    torch = torch_module()
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def has_tensor(values: Any) -> bool:
    """Whether it is a tensor, or a list or tuple that holds one."""
    return is_tensor(values) or (isinstance(values, (list, tuple)) and any(map(is_tensor, values)))


def is_live(value: Any) -> bool:
    """Whether torch's autograd follows a value: a tensor that requires a gradient, where gradients are enabled."""
    return not isinstance(value, np.ndarray) and is_tensor(value) and value.requires_grad and torch_module().is_grad_enabled()


def array(value: Any) -> np.ndarray:
    """A tensor, an array or nested lists as an array. Arrays and tensors on the CPU share memory: no copy is made."""
    if isinstance(value, np.ndarray):
        return value
    if is_tensor(value):
        value = value.detach().cpu()
        return np.asarray(value.float() if str(value.dtype) == "torch.bfloat16" else value)
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return np.from_dlpack(value)
    return np.asarray([array(one) for one in value] if has_tensor(value) else value)


def tensor(value: Any) -> Any:
    """An array as a tensor of torch that shares its memory; anything else as it is."""
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    value = np.asarray(value)
    return torch_module().from_numpy(value if value.flags.writeable else value.copy())


def live(value: Any) -> Any:
    """A live tensor itself; anything else as an array."""
    return value if is_live(value) else array(value)


def together(*values: Any) -> tuple[Any, ...]:
    """Arrays as they are, or all as tensors if one of them is live."""
    return tuple(map(tensor, values)) if any(map(is_live, values)) else values


def library(value: Any) -> Any:
    """The module whose functions take a value: torch or numpy."""
    return torch_module() if is_tensor(value) else np


def added(left: Any, right: Any) -> Any:
    """The sum of arrays or live tensors."""
    left, right = together(left, right)
    return left + right


@contextmanager
def no_gradients() -> Iterator[None]:
    """Turns autograd off, if torch is imported."""
    torch = torch_module()
    with torch.no_grad() if torch else nullcontext():
        yield


def like(example: Any, value: Any) -> Any:
    """An array, as a tensor if `example` is or holds one."""
    return tensor(value) if has_tensor(example) else value


def matching(example: Any, value: Any) -> Any:
    """A value as an array, or as a tensor if `example` is one."""
    return value if is_tensor(value) == is_tensor(example) else like(example, array(value))


def read_only(value: np.ndarray) -> np.ndarray:
    """A view that cannot be written to; as a tensor it becomes a copy."""
    view = value.view()
    view.flags.writeable = False
    return view


class Kind:
    """Type of the outputs of a model: numpy arrays or torch tensors."""

    def __init__(self, is_torch: bool) -> None:
        self.is_torch = is_torch

    @classmethod
    def chosen(cls, tensors: str | None) -> "Kind":
        """The kind of this name; by default torch if it is imported."""
        has_torch = torch_module() is not None
        if tensors not in (None, "numpy", "torch") or (tensors == "torch" and not has_torch):
            raise ValueError(f"tensors: expected 'numpy', or 'torch' after `import torch`, found {tensors!r}")
        return cls(has_torch if tensors is None else tensors == "torch")

    def out(self, value: Any) -> Any:
        """An array as the caller wants it."""
        return tensor(value) if self.is_torch else value

    @contextmanager
    def of(self, value: Any) -> Iterator[None]:
        """Tensors for as long as this lasts, if the caller gave one."""
        before, self.is_torch = self.is_torch, self.is_torch or has_tensor(value)
        try:
            yield
        finally:
            self.is_torch = before
