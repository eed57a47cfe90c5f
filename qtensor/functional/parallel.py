"""Tensor and sequence parallelism: functional collectives on a group's name, which trace and have fakes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.errors import check

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
    """Sum over ranks; each keeps its part of dim 0.

    Raises:
        QTensorError: dim 0 is not a multiple of the number of ranks.
    """
    _functional()
    rule = f"dim 0 must be a multiple of the {p.size} ranks of the group"
    check(x.shape[0] % p.size == 0, "reduce_scatter", rule, x.shape[0], "Pad the sequence")
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", p.size, p.group))


def all_reduce(x: Tensor, p: Parallel) -> Tensor:
    """Sum over ranks."""
    _functional()
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", p.group))


def max_over_ranks(x: Tensor, group: str) -> Tensor:
    """Maximum over ranks."""
    _functional()
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "max", group))


def gather_input(x: Tensor, p: Parallel | None) -> Tensor:
    """What the forward of a sharded layer does with its input."""
    return all_gather(x, p) if p is not None and p.sequence and p.mode == "column" else x


def reduce_output(y: Tensor, p: Parallel | None) -> Tensor:
    """What the forward does with its output, before the bias."""
    if p is None or p.mode != "row":
        return y
    return reduce_scatter(y, p) if p.sequence else all_reduce(y, p)


def gather_gradient(dy: Tensor, p: Parallel | None) -> Tensor:
    """What the backward does with the output's gradient."""
    return all_gather(dy, p) if p is not None and p.sequence and p.mode == "row" else dy


def reduce_gradient(dx: Tensor, p: Parallel | None) -> Tensor:
    """What the backward does with the input's gradient."""
    if p is None or p.mode != "column":
        return dx
    return reduce_scatter(dx, p) if p.sequence else all_reduce(dx, p)
