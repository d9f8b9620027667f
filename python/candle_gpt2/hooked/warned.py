"""Warnings that point at the caller's line."""

import contextlib
import sys
import warnings
from pathlib import Path

# What a call may pass through: this package, and the contexts that it makes.
_INSIDE = (str(Path(__file__).parent), contextlib.__file__)


def warn(message: str) -> None:
    """Warns at the nearest line that is outside of this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
