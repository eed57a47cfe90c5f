"""Pages of 2 MiB for large results: memory that is new costs a page fault each 4 KiB, which takes longer than quantizing."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

from torch import Tensor

LARGE = 4 << 20
"""Bytes from which on it is worth asking."""


@functools.cache
def _madvise() -> Any:
    """The C library's function, or None where there is none or no such advice."""
    function = getattr(ctypes.CDLL(None), "madvise", None) if _advice() is not None else None
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _advice() -> int | None:
    return getattr(mmap, "MADV_HUGEPAGE", None)


def ask_for_large_pages(t: Tensor) -> None:
    """Before a result is written: what of its memory is not there yet comes in large pages.

    Where the system does not let programs ask (``transparent_hugepage`` is neither ``madvise`` nor ``always``) nothing happens.
    """
    size = t.nbytes
    if size < LARGE or _madvise() is None:
        return
    page = mmap.PAGESIZE
    start = -(-t.data_ptr() // page) * page
    end = (t.data_ptr() + size) // page * page
    _madvise()(start, end - start, _advice())
