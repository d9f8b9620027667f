"""numpy inside; at the edge, tensors of torch for a caller that has torch.

Nothing here imports torch: a tensor can only come from a caller that has imported it already.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


def array(value: Any) -> np.ndarray:
    """The numbers of a tensor, an array or nested lists. Arrays and tensors on the CPU keep their memory: no copy is made."""
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


def like(example: Any, value: Any) -> Any:
    """An array, as a tensor if `example` is or holds one."""
    return tensor(value) if has_tensor(example) else value


class Kind:
    """What a model hands to its caller: arrays of numpy, or tensors of torch."""

    def __init__(self, is_torch: bool) -> None:
        self.is_torch = is_torch

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
