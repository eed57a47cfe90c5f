"""Communicate for tensor and sequence parallelism with functional collectives.

The collectives take the name of a group, can be traced and have fakes.

What a GEMM reads is quantized as one tensor. So the factors of a sequence-parallel input (column)
or gradient (row) come from the maximum over all ranks, and those of a rank's own part of a tensor
from that part. ``code_gather.py`` gathers the codes of an input or gradient instead of its values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.errors import check
from qtensor.storage.process_groups import check_group

MODES = (None, "column", "row")


class Parallel(NamedTuple):
    """How a weight is split over a group, as plain values.

    Attributes:
        group: the group's name.
        size: its number of ranks.
        mode: "column": out_features are split; "row": in_features.
        sequence: between the sharded layers activations are split along ``dim``.
        dim: a dim before the last.
    """

    group: str
    size: int
    mode: str
    sequence: bool
    dim: int = 0


def _functional(p: Parallel) -> None:
    """Load the functional collectives, and refuse a group that was destroyed."""
    # Imported late: the functional collectives take 0.1 s, and their fakes come with them.
    import torch.distributed._functional_collectives  # noqa: PLC0415

    if not torch.compiler.is_compiling():
        check_group(p.group, "tensor parallel layer")


def all_gather(x: Tensor, p: Parallel) -> Tensor:
    """Return the parts (S, ...) of all ranks, one behind the other: (size * S, ...)."""
    _functional(p)
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), p.size, p.group))


def reduce_scatter(x: Tensor, p: Parallel) -> Tensor:
    """Return this rank's part (S, ...) of the sum over ranks of ``x`` (size * S, ...).

    ``check_input`` has refused sizes that the ranks do not divide.
    """
    _functional(p)
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", p.size, p.group))


def all_reduce(x: Tensor, p: Parallel) -> Tensor:
    """Return the sum of ``x`` over ranks, in its shape."""
    _functional(p)
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", p.group))


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
        len(shape) > p.dim + 1,
        f"{label} input",
        f"sequence_parallel splits dim {p.dim}, so there must be one beside the features",
        tuple(shape),
        "Pass (sequence, ..., features), or build the layer with sequence_parallel=False",
    )
    if p.mode == "row":
        check(
            shape[p.dim] % p.size == 0,
            f"{label} output",
            f"dim {p.dim} must be a multiple of the {p.size} ranks of tp_group, which share it",
            tuple(shape[:-1]),
            "Pad the sequence",
        )


def gathers_input(p: Parallel) -> bool:
    """Return whether forward gathers the input over ranks."""
    return p.sequence and p.mode == "column"


def gathers_gradient(p: Parallel) -> bool:
    """Return whether backward gathers the gradient of the output over ranks."""
    return p.sequence and p.mode == "row"


def gather(x: Tensor, p: Parallel) -> Tensor:
    """Return the parts of all ranks, concatenated along ``p.dim``."""
    parts = all_gather(x, p)
    if p.dim == 0:
        return parts
    # (ranks * B, S, ...) -> (B, ranks, S, ...) -> (B, ranks * S, ...)
    return parts.unflatten(0, (p.size, x.shape[0])).movedim(0, p.dim).flatten(p.dim, p.dim + 1)


def scatter_sum(x: Tensor, p: Parallel) -> Tensor:
    """Return this rank's part along ``p.dim`` of the sum over ranks."""
    if p.dim == 0:
        return reduce_scatter(x, p)
    # (B, ranks * S, ...) -> (ranks, B, S, ...) -> (ranks * B, S, ...)
    apart = x.unflatten(p.dim, (p.size, x.shape[p.dim] // p.size)).movedim(p.dim, 0)
    return reduce_scatter(apart.flatten(0, 1), p)


def reduce_output(y: Tensor, p: Parallel) -> Tensor:
    """Return the output of the forward, summed over ranks if the weight's columns are split."""
    if p.mode != "row":
        return y
    return scatter_sum(y, p) if p.sequence else all_reduce(y, p)


def reduce_gradient(dx: Tensor, p: Parallel) -> Tensor:
    """Return the gradient of the input, summed over ranks if the weight's rows are split."""
    if p.mode != "column":
        return dx
    return scatter_sum(dx, p) if p.sequence else all_reduce(dx, p)
