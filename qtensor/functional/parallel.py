"""Communicate for tensor and sequence parallelism with functional collectives.

The collectives take the name of a group, can be traced and have fakes.

What a GEMM reads is gathered first and quantized then, as one tensor. So the factors of a
sequence-parallel input (column) or gradient (row) come from the maximum over all ranks, and those
of a rank's own part of a tensor from that part.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.errors import check
from qtensor.layout import Shape

MODES = (None, "column", "row")


class Parallel(NamedTuple):
    """How a weight is split over a group, as plain values.

    Attributes:
        group: the group's name.
        size: its number of ranks.
        mode: "column": out_features are split; "row": in_features.
        sequence: between the sharded layers activations are split along their first dim.
    """

    group: str
    size: int
    mode: str
    sequence: bool


def _functional() -> None:
    # Imported late: the functional collectives take 0.1 s, and their fakes come with them.
    import torch.distributed._functional_collectives  # noqa: F401, PLC0415


def all_gather(x: Tensor, p: Parallel) -> Tensor:
    """(S, ...) of each rank -> (size * S, ...)."""
    _functional()
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), p.size, p.group))


def reduce_scatter(x: Tensor, p: Parallel) -> Tensor:
    """(size * S, ...) summed over ranks -> (S, ...), each rank its part.

    ``check_input`` sees to it that dim 0 divides.
    """
    _functional()
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", p.size, p.group))


def all_reduce(x: Tensor, p: Parallel) -> Tensor:
    """Return the sum of ``x`` over ranks, in its shape."""
    _functional()
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", p.group))


def max_over_ranks(x: Tensor, group: str) -> Tensor:
    """Maximum over ranks, the same on each.

    A NaN counts as inf: a maximum over ranks may lose it on some.
    """
    _functional()
    ops = torch.ops._c10d_functional
    found = x.nan_to_num(nan=math.inf, posinf=math.inf)
    return ops.wait_tensor(ops.all_reduce(found, "max", group))


def check_input(label: str, shape: Shape, p: Parallel | None) -> None:
    """Refuse an input that cannot be split along the sequence.

    Args:
        label: names the layer.
        shape: of the input on this rank.
        p: the layer's split.

    Raises:
        QTensorError: a vector, or rows that do not divide.
    """
    if p is None or not p.sequence:
        return
    check(
        len(shape) > 1,
        f"{label} input",
        "sequence_parallel splits dim 0, so there must be one beside the features",
        tuple(shape),
        "Pass (sequence, ..., features), or build the layer with sequence_parallel=False",
    )
    if p.mode == "row":
        check(
            shape[0] % p.size == 0,
            f"{label} output",
            f"dim 0 must be a multiple of the {p.size} ranks of tp_group, which share it",
            tuple(shape[:-1]),
            "Pad the sequence",
        )


def gather_input(x: Tensor, p: Parallel | None) -> Tensor:
    """Return the input of a sharded layer's forward, gathered over ranks if it is split."""
    return all_gather(x, p) if p is not None and p.sequence and p.mode == "column" else x


def reduce_output(y: Tensor, p: Parallel | None) -> Tensor:
    """Return the output of the forward, summed over ranks if the weight's columns are split."""
    if p is None or p.mode != "row":
        return y
    return reduce_scatter(y, p) if p.sequence else all_reduce(y, p)


def gather_gradient(dy: Tensor, p: Parallel | None) -> Tensor:
    """Return the gradient of the output, gathered over ranks if it is split."""
    return all_gather(dy, p) if p is not None and p.sequence and p.mode == "row" else dy


def reduce_gradient(dx: Tensor, p: Parallel | None) -> Tensor:
    """Return the gradient of the input, summed over ranks if the weight's rows are split."""
    if p is None or p.mode != "column":
        return dx
    return reduce_scatter(dx, p) if p.sequence else all_reduce(dx, p)
