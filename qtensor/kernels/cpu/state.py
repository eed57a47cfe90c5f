"""The state of delayed scaling by native code.

Each function returns False, with nothing written, if the kernels do not serve a call. The C++ code
trusts every size: these functions check all of them first.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtensor.kernels.cpu import native

_BEGIN = struct.Struct("=13qd")
"""Arguments of `qt_delayed_begin`: eight addresses, five integers, and 2 ** margin."""
_MAXIMA = struct.Struct("=2q")
"""Address and number of elements of a tensor of maxima."""
_MAX_MARGIN = 1000
"""2.0 ** margin is finite and not zero up to this absolute value."""
_ALGORITHMS = ("max", "most_recent")


@functools.lru_cache(maxsize=256)
def _packed_floats(values: tuple[float, ...]) -> bytes:
    return struct.pack(f"={len(values)}f", *values)


def _are_vectors(tensors: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Return whether native code can read and write all of `tensors` as vectors of `dtype`."""
    return all([native.is_plain(t, dtype) and t.dim() == 1 for t in tensors])


def _handle() -> Any:
    kernels = native.library()
    return None if isinstance(kernels, str) else kernels.handle


def begin_(
    outputs: tuple[Tensor, Tensor],
    state: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    advance: bool,
    options: tuple[int, str, int],
    largest: Sequence[float],
) -> bool:
    """Compute the op `delayed_begin_` (library/delayed.py) for "max" and "most_recent".

    Args:
        outputs: scales (n,) float32 and ticket (2,) int64.
        state: scale (n,) float32, history (rows, n) float32, steps (2,) int64, cell (g,) float32
            with g <= n, cell_step (1,) int64 and step (1,) int64, in this order.
        advance: begin a new step if the state has not seen this one.
        options: length of the history, algorithm and margin.
        largest: for each column, the largest finite value of its element type.
    """
    scale, history, steps, cell, cell_step, step = state
    length, algorithm, margin = options
    handle = _handle()
    columns = scale.numel()
    if (
        handle is None
        or not _are_vectors((scale, cell, outputs[0]), torch.float32)
        or not _are_vectors((steps, cell_step, step, outputs[1]), torch.int64)
        or not native.is_plain(history, torch.float32)
        or not all([math.isfinite(value) for value in largest])
        or len(largest) != columns
        or history.dim() != 2
        or history.shape[1] != columns
        or not 0 < length <= history.shape[0]
        or cell.numel() > columns
        or outputs[0].numel() != columns
        or not steps.numel() == outputs[1].numel() == 2
        or not cell_step.numel() == step.numel() == 1
        or algorithm not in _ALGORITHMS
        or abs(margin) > _MAX_MARGIN
    ):
        return False
    try:
        largest_codes = _packed_floats(tuple(largest))
    except OverflowError:  # a number beyond float32
        return False
    handle.qt_delayed_begin(
        _BEGIN.pack(
            scale.data_ptr(),
            history.data_ptr(),
            steps.data_ptr(),
            cell.data_ptr(),
            cell_step.data_ptr(),
            step.data_ptr(),
            outputs[0].data_ptr(),
            outputs[1].data_ptr(),
            advance,
            length,
            columns,
            cell.numel(),
            algorithm != "max",
            2.0**margin,
        ),
        largest_codes,
    )
    return True


def _packed_maxima(amax: Sequence[Tensor]) -> bytes:
    return b"".join([_MAXIMA.pack(t.data_ptr(), t.numel()) for t in amax])


def record_(history: Tensor, amax: Sequence[Tensor], first: int) -> bool:
    """Compute the op `record_amax_`.

    Args:
        history: (rows, n) float32; row 0 becomes the maximum of itself and `amax`.
        amax: each (k,) float32, for consecutive columns.
        first: column of the first element of `amax`.
    """
    handle = _handle()
    if handle is None or not native.is_plain(history, torch.float32):
        return False
    if not _are_vectors(amax, torch.float32):
        return False
    if history.dim() != 2 or history.shape[0] < 1 or first < 0:
        return False
    if first + sum([t.numel() for t in amax]) > history.shape[1]:
        return False
    handle.qt_record_amax(history.data_ptr() + 4 * first, _packed_maxima(amax), len(amax))
    return True


def record_gradient_(
    cell: Tensor, cell_step: Tensor, amax: Sequence[Tensor], ticket: Tensor
) -> bool:
    """Compute the op `record_gradient_amax_`.

    Args:
        cell: (g,) float32 maxima of the gradients of a step.
        cell_step: (1,) int64.
        amax: each (k,) float32; together g elements.
        ticket: (2,) int64.
    """
    handle = _handle()
    if handle is None or not _are_vectors((cell, *amax), torch.float32):
        return False
    if not _are_vectors((cell_step, ticket), torch.int64):
        return False
    if cell_step.numel() != 1 or ticket.numel() != 2:
        return False
    if sum([t.numel() for t in amax]) != cell.numel():
        return False
    handle.qt_record_gradient_amax(
        cell.data_ptr(),
        cell_step.data_ptr(),
        ticket.data_ptr(),
        _packed_maxima(amax),
        len(amax),
    )
    return True
