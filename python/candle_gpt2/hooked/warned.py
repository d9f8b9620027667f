"""Warnings that point to the caller's line."""

import contextlib
import sys
import warnings
from pathlib import Path

# Files whose frames are skipped: this package, and contextlib, which runs its context managers.
_INSIDE = (str(Path(__file__).parent), contextlib.__file__)


def warn(message: str) -> None:
    """Warns at the nearest line outside this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
