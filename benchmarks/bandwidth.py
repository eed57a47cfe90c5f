"""The bandwidth of reading memory, measured by a small C++ loop that adds up all its words."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtensor.build.cache import BuildSpec, Unit, build
from qtensor.build.compilers import find_cxx
from qtensor.kernels.cpu.sources import usable_isas

SOURCE = Path(__file__).with_name("read_memory.cpp")
_FLAGS = {"avx512": ("-mavx512f",), "avx2": ("-mavx2",), "baseline": ()}


@functools.cache
def library() -> Any:
    """Return the compiled library.

    Raises:
        QTensorError: there is no C++ compiler.
    """
    isa = usable_isas()[0]
    flags = ("-std=c++17", "-O3", "-fopenmp", "-Wno-psabi", *_FLAGS[isa])
    unit = Unit(SOURCE, flags, "read_memory")
    spec = BuildSpec(f"read_memory_{isa}", (unit,), find_cxx, (), ("-fopenmp",), "read_memory", 2.0)
    handle = ctypes.CDLL(str(build(spec)))
    handle.read_memory.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    handle.read_memory.restype = ctypes.c_int64
    return handle


def read(t: Tensor) -> int:
    """Read the memory of a contiguous tensor with torch's number of threads.

    Returns:
        The sum of its 8-byte words, without the last bytes that do not fill 256.
    """
    total: int = library().read_memory(t.data_ptr(), t.nbytes, torch.get_num_threads())
    return total


def read_call(tensors: list[Tensor]) -> Callable[[], int]:
    """Return a call that reads one tensor after the other, one for each call."""
    return in_turn([functools.partial(read, t) for t in tensors])


def in_turn(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """Return a call that makes one of ``calls`` each time, so that its data leave the cache."""
    at = 0

    def call() -> Any:
        nonlocal at
        at = (at + 1) % len(calls)
        return calls[at]()

    return call
