"""Describe ragged groups: the rows of a matrix (M, K) in ``groups`` parts of given sizes.

Each group is a matrix of its own. Its buffers lie one behind the other, flat: buffer s of all
groups is one tensor (total,), in which group i begins where those before it end. The total follows
from the sizes where they are known as numbers; where a tensor holds them, it is the largest that
any sizes with the same M and number of groups can need.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qtensor.errors import fail
from qtensor.formats import Slot
from qtensor.layout import Shape, buffer_shapes, dim_size
from qtensor.library.codec import Codec, parse


def flat_sizes(slots: Sequence[Slot], sizes: Shape, cols: int) -> list[int]:
    """Entries of each flat buffer for groups of ``sizes`` rows."""
    totals: list[int] = [0] * len(slots)
    for rows in sizes:
        for i, shape in enumerate(buffer_shapes(slots, (rows, cols))):
            totals[i] = totals[i] + math.prod(shape)
    return totals


def flat_bound(slot: Slot, rows: int, cols: int, groups: int) -> int:
    """Return the entries of a flat buffer that suffice for any split of ``rows`` into ``groups``.

    A dimension over m rows grows by the same number of entries with every whole period of rows, and
    r rows more take at most those of one period. Since sum(ceil(m_i / P)) <= floor((M + groups * (P
    - 1)) / P), that many periods suffice.
    """
    count, ragged = 1, False
    for dim in slot.dims:
        if dim.axis in ("m", "lead"):
            period = dim.per * dim.pad // math.gcd(dim.units, dim.pad)
            entries = dim_size(dataclasses.replace(dim, axis="m"), period, cols)
            count = count * ((rows + groups * (period - 1)) // period * entries)
            ragged = True
        else:
            count = count * dim_size(dim, rows, cols)
    return count if ragged else count * groups


def alloc_flat(
    codec: Codec, shape: Shape, sizes: Shape | None, groups: int, device: torch.device
) -> list[Tensor]:
    """Allocate the flat buffers of a matrix of ``shape``; unused entries start as zeros.

    Args:
        codec: whose buffers.
        shape: (M, K).
        sizes: rows of each group; None: not known as numbers.
        groups: how many there are.
        device: of the buffers.
    """
    rows, cols = shape
    if sizes is None:
        totals = [flat_bound(slot, rows, cols, groups) for slot in codec.slots]
    else:
        totals = flat_sizes(codec.slots, sizes, cols)
    buffers = []
    for slot, total in zip(codec.slots, totals, strict=True):
        make = torch.zeros if slot.padded else torch.empty
        buffers.append(make(total, dtype=slot.dtype, device=device))
    return buffers


def group_buffers(
    buffers: Sequence[Tensor], quantizer: str, sizes: Sequence[int], cols: int
) -> list[list[Tensor]]:
    """The buffers of each group, as views.

    Args:
        buffers: flat ones in slot order, or (quantizer "") one plain matrix (M, K).
        quantizer: canonical text.
        sizes: rows of each group.
        cols: K.
    """
    if not quantizer:
        return [[part] for part in buffers[0].split(list(sizes))]
    slots = parse(quantizer).slots
    starts = [0] * len(slots)
    found = []
    for rows in sizes:
        views = []
        for i, shape in enumerate(buffer_shapes(slots, (rows, cols))):
            count = math.prod(shape)
            views.append(buffers[i].narrow(0, starts[i], count).view(shape))
            starts[i] += count
        found.append(views)
    return found


def read_sizes(sizes: Sequence[int], splits: Tensor | None) -> list[int]:
    """The sizes as numbers, on real tensors."""
    return list(sizes) if splits is None else splits.tolist()


def check_groups(op: str, sizes: Shape, splits: Tensor | None, groups: int) -> None:
    """Refuse sizes of another number than ``groups``, before anything is allocated for them.

    Args:
        op: for the message.
        sizes: rows of each group; [] with ``splits``.
        splits: int64 (groups,), or None.
        groups: number of groups.

    Raises:
        QTensorError: the message names the rule.
    """
    if splits is None:
        fits, got = len(sizes) == groups > 0, str(list(sizes))
    elif type(splits) is not Tensor:
        # A trace: `split_sizes` refuses a wrong number when the graph runs, as in eager code.
        return
    else:
        fits = splits.shape == (groups,) and splits.dtype is torch.int64 and groups > 0
        got = f"splits {splits.dtype} {tuple(splits.shape)}"
    rule = f"there must be {groups} group sizes, one for each group, none negative"
    if not fits:
        fail(op, rule, got, "Pass sizes, or int64 splits")


def check_ragged(op: str, buffers: Sequence[Tensor], quantizer: str, shape: Shape) -> None:
    """Refuse flat buffers whose number is not that of the quantizer, and shapes of no matrix.

    Args:
        op: for the message.
        buffers: flat ones in slot order, or (quantizer "") one plain matrix.
        quantizer: canonical text.
        shape: logical shape (M, K).

    Raises:
        QTensorError: the message names the rule.
    """
    count = len(parse(quantizer).slots) if quantizer else 1
    if len(shape) != 2:
        fail(op, "a ragged operand must be a matrix", tuple(shape), "Pass its shape (M, K)")
    if len(buffers) != count:
        rule = f"a ragged operand of {quantizer or 'plain values'} must have {count} buffers"
        fail(op, rule, len(buffers), "Pass them in slot order")


def is_partition(sizes: Sequence[int], rows: int) -> bool:
    """Whether no size is negative and they sum to the rows."""
    return not any([size < 0 for size in sizes]) and sum(sizes) == rows


def check_sizes(label: str, sizes: Sequence[int], rows: int) -> None:
    """Refuse sizes that are no partition of the rows.

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
