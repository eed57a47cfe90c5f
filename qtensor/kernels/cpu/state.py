"""The state of delayed scaling by native code. Each function is False, with nothing written, where it does not serve."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtensor.kernels.cpu import native

_BEGIN = struct.Struct("=13qd")
_NATIVE = (Tensor, torch.nn.Parameter)


@functools.lru_cache(maxsize=256)
def _floats(values: tuple[float, ...]) -> bytes:
    return struct.pack(f"={len(values)}f", *values)


def _plain(floats: Sequence[Tensor], counters: Sequence[Tensor] = ()) -> bool:
    """Whether native code can read and write them."""
    for kind, tensors in ((torch.float32, floats), (torch.int64, counters)):
        for t in tensors:
            if not (t.is_cpu and t.dtype is kind and type(t) in _NATIVE and t.is_contiguous()):
                return False
    return True


def _handle() -> Any:
    found = native.library()
    return None if isinstance(found, str) else found.handle


def begin_(
    outputs: tuple[Tensor, Tensor],
    state: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    advance: bool,
    history: tuple[int, str, int],
    largest: Sequence[float],
) -> bool:
    """``delayed_begin_`` by one of the recipe's own algorithms.

    Args:
        outputs: scales and ticket.
        state: scale, history, steps, cell, cell_step and step.
        advance: as the op has it.
        history: length, algorithm and margin.
        largest: code values.
    """
    scale, rows, steps, cell, cell_step, step = state
    length, algorithm, margin = history
    handle = _handle()
    count = scale.numel()
    if handle is None or not _plain((scale, rows, cell), (steps, cell_step, step)):
        return False
    if len(largest) != count or not 0 < length <= rows.shape[0] or rows.shape[1:] != (count,):
        return False
    handle.qt_delayed_begin(
        _BEGIN.pack(
            scale.data_ptr(),
            rows.data_ptr(),
            steps.data_ptr(),
            cell.data_ptr(),
            cell_step.data_ptr(),
            step.data_ptr(),
            outputs[0].data_ptr(),
            outputs[1].data_ptr(),
            advance,
            length,
            count,
            cell.numel(),
            algorithm != "max",
            2.0**margin,
        ),
        _floats(tuple(largest)),
    )
    return True


def _pieces(amax: Sequence[Tensor]) -> bytes:
    return b"".join([struct.pack("=2q", t.data_ptr(), t.numel()) for t in amax])


def record_(history: Tensor, amax: Sequence[Tensor], first: int) -> bool:
    """``record_amax_``."""
    handle = _handle()
    if handle is None or not _plain((history, *amax)):
        return False
    if first + sum([t.numel() for t in amax]) > history.shape[1]:
        return False
    handle.qt_record_amax(history.data_ptr() + 4 * first, _pieces(amax), len(amax))
    return True


def record_gradient_(
    cell: Tensor, cell_step: Tensor, amax: Sequence[Tensor], ticket: Tensor
) -> bool:
    """``record_gradient_amax_``."""
    handle = _handle()
    if handle is None or not _plain((cell, *amax), (cell_step, ticket)):
        return False
    if sum([t.numel() for t in amax]) != cell.numel():
        return False
    handle.qt_record_gradient_amax(
        cell.data_ptr(), cell_step.data_ptr(), ticket.data_ptr(), _pieces(amax), len(amax)
    )
    return True
