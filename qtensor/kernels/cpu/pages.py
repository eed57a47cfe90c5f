"""Ask the system for pages of 2 MiB for large results.

New memory costs a page fault every 4 KiB, which takes longer than to quantize the 4 KiB.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

from torch import Tensor

LARGE = 4 << 20
"""Bytes from which on large pages save time."""


@functools.cache
def _madvise() -> Any:
    """Return the C function `madvise`, or None if the system lacks it or has no large pages."""
    function = getattr(ctypes.CDLL(None), "madvise", None) if _advice() is not None else None
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _advice() -> int | None:
    return getattr(mmap, "MADV_HUGEPAGE", None)


def ask_for_large_pages(t: Tensor) -> None:
    """Ask for large pages for the memory of `t`, before it is written for the first time.

    Small tensors are skipped. The call has no effect if the system does not let programs ask for
    large pages (`transparent_hugepage` is `never`).
    """
    size = t.nbytes
    if size < LARGE or _madvise() is None:
        return
    page = mmap.PAGESIZE
    start = -(-t.data_ptr() // page) * page
    end = (t.data_ptr() + size) // page * page
    _madvise()(start, end - start, _advice())
