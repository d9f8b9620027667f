"""Progress line for long loops on a terminal."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress(steps: Iterable[T], total: int, what: str, is_shown: bool = True) -> Iterator[T]:
    """Yields the steps, and prints progress to standard error.

    Prints nothing during the first second, or if standard error is not a terminal.
    """
    start = shown = time.monotonic()
    is_written = False
    try:
        for done, step in enumerate(steps):
            now = time.monotonic()
            if is_shown and now - start > 1 and now - shown > 0.1 and sys.stderr.isatty():
                print(f"\r{what}: {done} of {total}", end="", file=sys.stderr, flush=True)
                shown, is_written = now, True
            yield step
    finally:
        if is_written:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
