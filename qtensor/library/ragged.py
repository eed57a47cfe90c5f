"""Describe ragged groups: the rows of a matrix (M, K) in ``groups`` parts of given sizes.

Each group is a matrix of its own. Its buffers lie one behind the other, flat: buffer s of all
groups is one tensor (total,), in which group i begins where those before it end. The total follows
from the sizes where they are known as numbers; where a tensor holds them, it is the largest that
any sizes with the same M and number of groups can need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, buffer_shapes, flat_bound, flat_sizes
from qtensor.core.errors import check, fail
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import QuantizerLike, parse


class Groups(NamedTuple):
    """The groups of rows of a ragged matrix, as ops take them.

    Attributes:
        sizes: rows of each group; [] with ``splits``.
        splits: int64 (groups,) on the CPU, the result of ``split_sizes`` or ``listed_sizes``;
            None with ``sizes``.
        groups: number of groups.
    """

    sizes: Shape
    splits: Tensor | None
    groups: int

    def check(self, op: str) -> None:
        """Refuse another number of sizes than ``groups``, before memory is allocated for them.

        Raises:
            QTensorError: the message names the rule.
        """
        if self.splits is None:
            fits, got = len(self.sizes) == self.groups > 0, str(list(self.sizes))
        else:
            shape, dtype = tuple(self.splits.shape), self.splits.dtype
            fits = shape == (self.groups,) and dtype is torch.int64 and self.groups > 0
            got = f"splits {dtype} {shape}"
        check(fits, op, self._rule, got, "Pass sizes, or int64 splits")

    def read(self, op: str) -> list[int]:
        """Return the sizes as numbers, of real tensors.

        Raises:
            QTensorError: another number of sizes than ``groups``, or a negative size.
        """
        self.check(op)
        sizes = list(self.sizes) if self.splits is None else self.splits.tolist()
        fits = all(type(size) is int and size >= 0 for size in sizes)
        check(fits, op, self._rule, sizes, "Pass sizes, or int64 splits")
        return sizes

    @property
    def _rule(self) -> str:
        return f"there must be {self.groups} group sizes, one for each group, none negative"


def alloc_flat(
    quantizer: QuantizerLike, shape: Shape, groups: Groups, device: torch.device
) -> list[Tensor]:
    """Allocate the flat buffers (total,) of a matrix of ``shape``; unused entries start as zeros.

    Args:
        quantizer: describes the buffers.
        shape: (M, K).
        groups: the rows of each group.
        device: of the buffers.
    """
    rows, cols = shape
    if groups.splits is None:
        totals = flat_sizes(quantizer.slots, groups.sizes, cols)
    else:
        totals = [flat_bound(slot, rows, cols, groups.groups) for slot in quantizer.slots]
    buffers = []
    for slot, total in zip(quantizer.slots, totals, strict=True):
        make = torch.zeros if slot.padded else torch.empty
        buffers.append(make(total, dtype=slot.dtype, device=device))
    return buffers


def groups_of(ragged: Operand, sizes: Sequence[int]) -> list[Operand]:
    """Return each group of a ragged operand as a matrix; its buffers are views.

    Args:
        ragged: (M, K); flat buffers in slot order, or one plain matrix.
        sizes: rows of each group.
    """
    buffers, canonical, (_, cols) = ragged
    if not canonical:
        parts = zip(sizes, buffers[0].split(list(sizes)), strict=True)
        return [Operand([part], "", (rows, cols)) for rows, part in parts]
    slots = parse(canonical).slots
    starts = [0] * len(slots)
    groups = []
    for rows in sizes:
        views = []
        for i, shape in enumerate(buffer_shapes(slots, (rows, cols))):
            count = math.prod(shape)
            views.append(buffers[i].narrow(0, starts[i], count).view(shape))
            starts[i] += count
        groups.append(Operand(views, canonical, (rows, cols)))
    return groups


def check_ragged(op: str, ragged: Operand) -> None:
    """Refuse flat buffers whose number is not that of the quantizer, or whose shape is not 2-D.

    Raises:
        QTensorError: the message names the rule.
    """
    buffers, canonical, shape = ragged
    count = len(parse(canonical).slots) if canonical else 1
    if len(shape) != 2:
        fail(op, "a ragged operand must be a matrix", tuple(shape), "Pass its shape (M, K)")
    if len(buffers) != count:
        rule = f"a ragged operand of {canonical or 'plain values'} must have {count} buffers"
        fail(op, rule, len(buffers), "Pass them in slot order")


def is_partition(sizes: Sequence[int], rows: int) -> bool:
    """Return True if no size is negative and their sum is ``rows``."""
    return not any([size < 0 for size in sizes]) and sum(sizes) == rows


def check_sizes(label: str, sizes: Sequence[int], rows: int) -> None:
    """Refuse sizes that do not split the rows.

    Raises:
        QTensorError: a negative size, or a sum that is not ``rows``.
    """
    for i, size in enumerate(sizes):
        if size < 0:
            rule = "the groups of m_splits must have zero or more rows"
            fail(f"{label} m_splits", rule, f"{size} for group {i}", "Fix m_splits")
    total = sum(sizes)
    if total != rows:
        rule = f"m_splits must sum to the rows of the input, {rows}"
        fail(f"{label} m_splits", rule, f"a sum of {total}", "Fix m_splits or the input")
