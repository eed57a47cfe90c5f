"""The floor: how fast a call could be if it did nothing but move the bytes that it has to move.

The bytes are those of the input, read once, and of the outputs, written once; the speed is that of
``Tensor.copy_`` between two buffers of the size and dtype of the high-precision tensor, counting what
it reads and what it writes. A share of 100% is a call as fast as such a copy of as many bytes.

**Per-tensor formats read twice.** ``fp8`` and ``nvfp4`` have a factor for the whole tensor, from its
maximum: the first code cannot be written before the last value has been read. A tensor larger than the
cache has to come from memory a second time, so these formats are charged two reads; the share with one
read stands beside it (what a tensor that stays in the cache, or a maximum known from before, would allow).
``fp8_delayed`` knows its factor in advance, ``fp8_rowwise`` and row-scaled ``nvfp4`` need the maximum of a
row, which stays in the cache: one read.

Shares above 100% are possible: ``copy_`` makes the machine read each line that it overwrites, which
streaming stores avoid, and a second read may come from the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Traffic:
    """Bytes that a call must move."""

    read: int
    written: int
    reads: int = 1
    """How often the input has to be read."""

    @property
    def moved(self) -> int:
        """With every read charged."""
        return self.reads * self.read + self.written

    @property
    def moved_once(self) -> int:
        """With one read charged."""
        return self.read + self.written


def reads(quantizer: Any, shape: tuple[int, ...]) -> int:
    """How often quantizing must read its input: twice for a factor from the maximum of the whole tensor."""
    if quantizer.needs_scale:
        return 1
    return 2 if (1,) in quantizer.amax_shapes(shape) else 1


def quantize_traffic(x: Tensor, q: Any) -> Traffic:
    """Of making ``q`` from ``x``."""
    return Traffic(x.nbytes, q.nbytes, reads(q.quantizer, tuple(x.shape)))


def dequantize_traffic(q: Any, dtype: torch.dtype) -> Traffic:
    """Of reading ``q``, one direction of it, and writing ``dtype``."""
    return Traffic(q.nbytes, q.numel() * dtype.itemsize)


def copy_call(x: Tensor) -> Callable[[], Tensor]:
    """The copy that the floor is measured by, with buffers that exist."""
    source, target = x.contiguous(), torch.zeros_like(x)
    return lambda: target.copy_(source)


def copy_gbs(x: Tensor, copy_us: float) -> float:
    """GB/s of that copy, read and written."""
    return gbs(2 * x.nbytes, copy_us)


def gbs(count: float, us: float) -> float:
    """GB/s of that many bytes in that many microseconds."""
    return count / us / 1000


def share(moved: float, us: float, bandwidth: float) -> float:
    """Time of the floor / time taken; ``bandwidth`` in GB/s."""
    return gbs(moved, us) / bandwidth
