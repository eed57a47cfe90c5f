"""Compare bytes by an op, which also runs in compiled code: those of ranks, or of buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import QTensorError, this_rank
from qtensor.library.define import leaf_op


class _SameRowsArgs(NamedTuple):
    rows: Tensor
    message: str


def _allocate(args: _SameRowsArgs) -> Tensor:
    if args.rows.ndim != 2:
        raise QTensorError(
            f"same_rows: rows must have two dims; got {tuple(args.rows.shape)}. Reshape them."
        )
    return args.rows.new_empty(args.rows.shape[1:])


def _fill(out: Tensor, args: _SameRowsArgs) -> None:
    rows = args.rows
    if not rows.shape[0]:
        raise QTensorError("same_rows: there must be at least one row; got none. Pass one.")
    if rows.shape[0] > 1 and not bool((rows[1:] == rows[:1]).all()):
        rank = this_rank()
        raise QTensorError(f"{args.message} This is {rank}." if rank else args.message)
    out.copy_(rows[0])


SAME_ROWS = leaf_op("same_rows", _SameRowsArgs, "Tensor", _allocate, _fill)
"""Return the first row of (n, k) bytes; raise ``message`` if another row differs."""


def has_data(buffer: Tensor) -> bool:
    """Return whether the bytes of a buffer can be read here; those of a trace cannot."""
    return type(buffer) is Tensor and not (buffer.is_meta or torch.compiler.is_compiling())


def equal_when_run(buffers: Sequence[Tensor], message: str) -> Tensor:
    """Return the first of some buffers; an op raises ``message`` if the bytes of another differ.

    The op compares bytes when it runs, so that it serves buffers of a trace, which have no data.
    """
    first = buffers[0]
    rows = torch.stack([b.contiguous().view(math.prod(b.shape)).view(torch.uint8) for b in buffers])
    return SAME_ROWS(rows, message).view(first.dtype).view(first.shape)
