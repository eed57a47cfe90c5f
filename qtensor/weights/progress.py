"""Show how far a long run is: a function of the caller, or a line in a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Literal

Progress = Callable[[int, int, str], None]
"""Called with what is done, how much there is, and the name of the last part."""
Shown = Progress | Literal[False] | None
"""The argument ``progress``: a function; None for a line in a terminal; False for nothing."""


def progress_of(title: str, progress: Shown) -> Progress:
    """Return the function to call for the argument ``progress``.

    Args:
        title: begins the line, for example "search".
        progress: as the caller gave it. None shows a line if stderr is a terminal.
    """
    if progress is None:
        return _Line(title) if sys.stderr.isatty() else _nothing
    return progress or _nothing


def _nothing(done: int, total: int, name: str) -> None:
    """Show nothing."""


class _Line:
    """Writes one line to stderr over and over, and ends it with the last part."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._begun = time.monotonic()

    def __call__(self, done: int, total: int, name: str) -> None:
        left = (time.monotonic() - self._begun) / done * (total - done)
        text = f"qtensor {self._title}: {done} of {total}, about {left:.0f} s left, {name}"
        width = shutil.get_terminal_size().columns - 1
        # The escape clears the rest of a longer line before.
        end = "\n" if done == total else ""
        print(f"\r{text[:width]}\x1b[K", end=end, file=sys.stderr, flush=True)
