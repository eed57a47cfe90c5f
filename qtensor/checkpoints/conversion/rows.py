"""Read, quantize and decode weights in parts of whole rows, on several cores.

A part begins at a multiple of 128 rows of the (M, K) view: square blocks, padded factors and tiles
of swizzled factors are whole there, so the parts have the bytes of the whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints.checkpoint import Checkpoint
from qtensor.checkpoints.conversion.measure import ErrorSums, combined, error_sums
from qtensor.checkpoints.layout_base import Group
from qtensor.core.buffer_shapes import buffer_shapes, ceil_div, rows_cols
from qtensor.core.operand import ROW_STEP, decodes_in_rows, row_parts
from qtensor.library.dequantize import DEQUANTIZE_
from qtensor.library.quantize import QUANTIZE, QUANTIZE_, maxima_of
from qtensor.quantizers import Quantizer
from qtensor.storage.rebuild import tensor_of
from qtensor.storage.tensor import QuantizedTensor

PART = 1 << 20
"""Elements of a part, about: its float32 values fit the caches of a core."""
_ALIGNMENT = 64


class Workers:
    """Run calls on several threads; torch releases Python's lock in its kernels, and so do ours.

    Inside them torch uses one thread: with more, each small product of a part would wait for all.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or _cores()
        self._torch_threads = torch.get_num_threads()
        start = (torch.set_num_threads, (1,))
        self.pool = ThreadPoolExecutor(self.count, "qtensor-convert", *start)

    def map(self, call: Callable[[int, int], Any], bounds: Sequence[tuple[int, int]]) -> list[Any]:
        """Return ``call(start, stop)`` for each pair, in order."""
        return list(self.pool.map(lambda pair: call(*pair), bounds))

    def close(self) -> None:
        """Wait for running calls, and drop the others."""
        self.pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._torch_threads)  # for threads that start later


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parts_of(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first row, end) of each part of the (M, K) view."""
    rows, cols = rows_cols(shape)
    step = max(1, PART // max(cols, 1) // ROW_STEP) * ROW_STEP
    return [(i, min(i + step, rows)) for i in range(0, rows, step)]


def quantizes_in_rows(quantizer: Quantizer, shape: Sequence[int]) -> bool:
    """Return True if a tensor can be quantized in parts; factors along columns need all rows."""
    if not decodes_in_rows(quantizer):
        return False
    rows, _ = rows_cols(shape)
    legal: tuple[list[tuple[int, ...]], ...] = ([], [(1,)], [(rows,)], [(rows, 1)])
    return quantizer.amax_shapes(tuple(shape)) in legal


class Values(NamedTuple):
    """Give the values of a weight in parts.

    Attributes:
        shape: the logical shape.
        dtype: dtype of the values.
        bounds: the parts that ``read`` takes.
        read: (first row, end) -> a plain tensor (rows, K).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bounds: list[tuple[int, int]]
    read: Callable[[int, int], Tensor]


def plain_values(tensor: Tensor) -> Values:
    """Return the values of a plain tensor."""
    rows, cols = rows_cols(tensor.shape)
    flat = tensor.reshape(rows, cols)
    shape = tuple(tensor.shape)
    return Values(shape, tensor.dtype, parts_of(shape), lambda i, j: flat[i:j])


def our_values(tensor: QuantizedTensor, dtype: torch.dtype) -> Values:
    """Return the values of a quantized tensor by our arithmetic."""
    if tensor_of(tensor) is not tensor:
        return plain_values(tensor.dequantize(dtype))
    quantizer, shape = quantizer_of(tensor), tuple(tensor.shape)
    buffers, cols = tensor.buffers(), rows_cols(shape)[1]

    def read(start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, cols, dtype=dtype)
        part = row_parts(quantizer, buffers, shape, (start, stop))
        DEQUANTIZE_(part, quantizer.canonical, out.shape, out)
        return out

    if decodes_in_rows(quantizer):
        return Values(shape, dtype, parts_of(shape), read)
    return plain_values(tensor.dequantize(dtype))


def origin_values(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Values:
    """Return the values of a weight by the arithmetic of the origin."""
    group, reader = checkpoint.groups[name], checkpoint.reader
    stored = checkpoint.stored(name)
    if reader.decodes_as_ours(group, dtype) and not _has_255(stored):
        tensor = checkpoint[name]
        if isinstance(tensor, QuantizedTensor):
            return our_values(tensor, dtype)
    if len(group.shape) == 2 and reader.rows_apart(group):
        first = _stored_rows(group, stored, 0, min(ROW_STEP, group.shape[0]))
        if first is not None:
            return _origin_parts(checkpoint, group, stored, dtype)
    return plain_values(checkpoint.dense(name, dtype))


def _origin_parts(
    checkpoint: Checkpoint, group: Group, stored: dict[str, Tensor], dtype: torch.dtype
) -> Values:
    def read(start: int, stop: int) -> Tensor:
        part = _stored_rows(group, stored, start, stop)
        shape = (stop - start, group.shape[1])
        return checkpoint.decode(group._replace(shape=shape), part or {}, dtype)

    return Values(group.shape, dtype, parts_of(group.shape), read)


def _stored_rows(
    group: Group, stored: dict[str, Tensor], start: int, stop: int
) -> dict[str, Tensor] | None:
    """Return the stored tensors of some rows, or None if a shape does not tell which."""
    rows, found = group.shape[0], {}
    for role, tensor in stored.items():
        if tensor.numel() == 1:
            found[role] = tensor
        elif tensor.shape[0] == rows:
            found[role] = tensor[start:stop]
        elif rows > ROW_STEP and tensor.shape[0] == ceil_div(rows, ROW_STEP):
            found[role] = tensor[start // ROW_STEP : ceil_div(stop, ROW_STEP)]
        else:
            return None
    return found


def _has_255(stored: dict[str, Tensor]) -> bool:
    """Return True if an E8M0 factor is 255, which origins read differently."""
    scale = stored.get("scale")
    if scale is None or scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return False
    return bool((scale.view(torch.uint8) == 255).any())


class Arena:
    """Lend the memory of quantized tensors, two in turns: one is written while one is made.

    Fresh memory costs more than the arithmetic, because the system clears its pages.
    """

    def __init__(self) -> None:
        self._blocks = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._next = 0

    def buffers(self, quantizer: Quantizer, shape: Sequence[int]) -> list[Tensor]:
        """Return zeroed or uninitialized buffers of a tensor, valid until the call after next."""
        sizes = buffer_shapes(quantizer.slots, tuple(shape))
        nbytes = [
            math.prod(size) * slot.dtype.itemsize
            for slot, size in zip(quantizer.slots, sizes, strict=True)
        ]
        total = sum(ceil_div(n, _ALIGNMENT) * _ALIGNMENT for n in nbytes)
        self._next ^= 1
        if self._blocks[self._next].numel() < total:
            self._blocks[self._next] = torch.empty(0, dtype=torch.uint8)  # free it first
            self._blocks[self._next] = torch.empty(total, dtype=torch.uint8)
        found, at = [], 0
        for slot, size, n in zip(quantizer.slots, sizes, nbytes, strict=True):
            buffer = self._blocks[self._next][at : at + n].view(slot.dtype).view(size)
            found.append(buffer.zero_() if slot.padded else buffer)
            at += ceil_div(n, _ALIGNMENT) * _ALIGNMENT
        return found


def quantize_values(
    values: Values, quantizer: Quantizer, arena: Arena, workers: Workers
) -> tuple[QuantizedTensor, ErrorSums]:
    """Return a quantized tensor, with the bytes that ``quantizer.quantize`` gives, and its error.

    The quantizer is deterministic and needs no factor of the caller.
    """
    shape = values.shape
    if not quantizes_in_rows(quantizer, shape) or not math.prod(shape):
        x = torch.cat([values.read(*pair) for pair in values.bounds] or [torch.empty(0)])
        x = x.reshape(shape).to(values.dtype)
        tensor = quantizer.quantize(x)
        return tensor, error_sums(x, tensor.dequantize(torch.float32).clone())
    buffers = arena.buffers(quantizer, shape)
    amax = _amax(values, quantizer, workers)

    def one(start: int, stop: int) -> ErrorSums:
        x = values.read(start, stop)
        parts = row_parts(quantizer, buffers, shape, (start, stop))
        _quantize_part(quantizer, parts, x, amax)
        decoded = torch.empty(x.shape, dtype=torch.float32)
        DEQUANTIZE_(parts, quantizer.canonical, decoded.shape, decoded)
        return error_sums(x, decoded)

    sums = combined(workers.map(one, values.bounds))
    return quantizer.assemble(buffers, shape, values.dtype), sums


def _quantize_part(
    quantizer: Quantizer, parts: list[Tensor], x: Tensor, amax: list[Tensor] | None
) -> None:
    """Write the buffers of some rows."""
    if all(part.is_contiguous() for part in parts):
        QUANTIZE_(x, quantizer.canonical, parts, None, amax, None, None)
        return
    fresh = QUANTIZE(x, quantizer.canonical, None, amax, None)
    for part, new in zip(parts, fresh, strict=False):
        part.copy_(new[tuple(slice(n) for n in part.shape)])


def _amax(values: Values, quantizer: Quantizer, workers: Workers) -> list[Tensor] | None:
    """Return the maximum of a tensor of several parts, or None if factors belong to rows."""
    if quantizer.amax_shapes(values.shape) != [(1,)] or len(values.bounds) == 1:
        return None

    def one(start: int, stop: int) -> Tensor:
        x = values.read(start, stop)
        if not getattr(quantizer, "with_rht", False):
            low, high = torch.aminmax(x)
            largest = torch.maximum(-low, high).float().reshape(1)
            if bool(torch.isfinite(largest)):
                return largest
        found = maxima_of(x, quantizer.canonical)[0]
        return found

    return [torch.cat(workers.map(one, values.bounds)).max().reshape(1)]
