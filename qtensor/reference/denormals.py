"""Keep denormal numbers while reference code runs, whatever mode the caller has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SMALLEST = 5e-324
"""The smallest positive float64: it compares equal to zero where denormals count as zero."""


@contextmanager
def denormals_kept() -> Iterator[None]:
    """Undo ``torch.set_flush_denormal(True)`` in this thread until the end of the block.

    The bytes of a quantized tensor must not depend on that mode. Native kernels do the same
    themselves.
    """
    if _SMALLEST != 0.0:
        yield
        return
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)
