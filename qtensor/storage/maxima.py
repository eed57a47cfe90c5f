"""Maxima of tensors that are split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtensor.library.quantize import AMAX
from qtensor.storage.groups import max_over


def max_over_ranks(maxima: Sequence[Tensor], group: str, op: str) -> list[Tensor]:
    """Return each of some tensors as its maximum over the ranks of a group, by one collective.

    Args:
        maxima: at least one tensor; float32, of any shapes, which are the same on all ranks.
        group: name of the process group.
        op: the operation, for errors.

    Returns:
        Tensors of the shapes of ``maxima``.

    Raises:
        QTensorError: the group was destroyed.
    """
    whole, start, reduced = max_over(torch.cat([a.flatten() for a in maxima]), group, op), 0, []
    for a in maxima:
        reduced.append(whole.narrow(0, start, a.numel()).view(a.shape))
        start = start + a.numel()
    return reduced


def is_shared_by_rows(quantizer: Any) -> list[bool]:
    """Return for each maximum of the op ``amax`` whether it belongs to all rows of a tensor."""
    shapes = zip(quantizer.amax_shapes((3, 128)), quantizer.amax_shapes((5, 128)), strict=True)
    return [a == b for a, b in shapes]


def maxima_of_whole(quantizer: Any, part: Tensor, group: str, op: str) -> list[Tensor] | None:
    """Return the maxima of some rows (M, K), those that all rows share reduced over a group.

    Returns:
        The maxima as the op ``quantize`` takes them; None for a format without maxima.
    """
    maxima: list[Tensor] = AMAX(part, quantizer.canonical)
    shared = [a for a, flag in zip(maxima, is_shared_by_rows(quantizer), strict=True) if flag]
    if shared:
        for own, whole in zip(shared, max_over_ranks(shared, group, op), strict=True):
            own.copy_(whole)
    return maxima or None
