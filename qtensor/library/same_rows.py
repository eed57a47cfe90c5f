"""Define the op that compares rows of bytes, which collectives use to compare ranks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from qtensor.errors import QTensorError, this_rank
from qtensor.library.define import below_autograd, leaf_op


class SameRowsArgs(NamedTuple):
    """Arguments of the op ``same_rows``."""

    rows: Tensor
    message: str


def _allocate(args: SameRowsArgs) -> Tensor:
    if args.rows.ndim != 2:
        raise QTensorError(
            f"same_rows: rows must have two dims; got {tuple(args.rows.shape)}. Reshape them."
        )
    return args.rows.new_empty(args.rows.shape[1:])


def _fill(out: Tensor, args: SameRowsArgs) -> None:
    with below_autograd():
        rows = args.rows
        if not rows.shape[0]:
            raise QTensorError("same_rows: there must be at least one row; got none. Pass one.")
        if rows.shape[0] > 1 and not bool((rows[1:] == rows[:1]).all()):
            rank = this_rank()
            raise QTensorError(f"{args.message} This is {rank}." if rank else args.message)
        out.copy_(rows[0])


SAME_ROWS = leaf_op("same_rows", SameRowsArgs, "Tensor", _allocate, _fill)
"""Return the first row of (n, k) bytes; raise ``message`` if another row differs."""
