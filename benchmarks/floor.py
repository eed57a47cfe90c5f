"""The lower bound of a call's time: moving the bytes that it must move, and nothing else.

The bytes are those of the input, read once, and of the outputs, written once. The bandwidth is that
of ``Tensor.copy_`` between two buffers of the size and dtype of the high-precision tensor, counting
bytes read and written. A share of 100% means that a call is as fast as such a copy of the same
number of bytes.

**Per-tensor formats read twice.** ``fp8`` and ``nvfp4`` have a scale for the whole tensor, computed
from its maximum: the first code cannot be written before the last value has been read. A tensor
larger than the cache must be read from memory a second time, so two reads are counted for these
formats. Another column shows the share with one read, which holds for a tensor that stays in the
cache or a maximum that is known. One read is counted for ``fp8_delayed``, which knows its scale in
advance, and for ``fp8_rowwise`` and row-scaled ``nvfp4``, which need the maximum of a row that
stays in the cache.

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
    """The bytes that a call must move."""

    read: int
    written: int
    reads: int = 1
    """Number of reads of the input."""

    @property
    def moved(self) -> int:
        """Bytes, with every read counted."""
        return self.reads * self.read + self.written

    @property
    def moved_once(self) -> int:
        """Bytes, with one read of the input counted."""
        return self.read + self.written


def reads(quantizer: Any, shape: tuple[int, ...]) -> int:
    """Return how often quantizing must read its input: twice for a per-tensor scale, else once."""
    if quantizer.needs_scale:
        return 1
    return 2 if (1,) in quantizer.amax_shapes(shape) else 1


def quantize_traffic(x: Tensor, q: Any) -> Traffic:
    """Return the bytes of quantizing ``x`` to ``q``."""
    return Traffic(x.nbytes, q.nbytes, reads(q.quantizer, tuple(x.shape)))


def dequantize_traffic(q: Any, dtype: torch.dtype) -> Traffic:
    """Return the bytes of reading one direction of ``q`` and writing ``dtype``."""
    return Traffic(q.nbytes, q.numel() * dtype.itemsize)


def copy_call(x: Tensor) -> Callable[[], Tensor]:
    """Return the copy that measures the bandwidth, between existing buffers."""
    source, target = x.contiguous(), torch.zeros_like(x)
    return lambda: target.copy_(source)


def copy_gbs(x: Tensor, copy_us: float) -> float:
    """Return the GB/s of that copy, counting bytes read and written."""
    return gbs(2 * x.nbytes, copy_us)


def gbs(count: float, us: float) -> float:
    """Return the GB/s for a number of bytes in a number of microseconds."""
    return count / us / 1000


def share(moved: float, us: float, bandwidth: float) -> float:
    """Return the lower bound / the time taken; ``bandwidth`` is in GB/s."""
    return gbs(moved, us) / bandwidth
