"""Maxima of tensors that are split over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtensor.core.compile_constants import compile_constant
from qtensor.core.quantizer_registry import QuantizerLike, parse
from qtensor.library.quantize import maxima_of
from qtensor.storage.origin import Split
from qtensor.storage.process_groups import max_over


def max_over_ranks(maxima: Sequence[Tensor], group: str, op: str) -> list[Tensor]:
    """Return the maximum of each tensor over the ranks of a group, by one collective.

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


@compile_constant
def amax_axes(canonical: str) -> tuple[tuple[str, ...], ...]:
    """Return, for each tensor of maxima, the axes over which one maximum goes: "m", "k" or both."""
    axes = {2: ("k",), 3: ("m",)}
    sizes = [max(size, default=1) for size in parse(canonical).amax_shapes((2, 3))]
    return tuple([axes.get(size, ("m", "k")) for size in sizes])


def is_shared_by_rows(canonical: str) -> tuple[bool, ...]:
    """Return for each tensor of maxima of the op ``amax`` whether all rows share its values."""
    return tuple(["m" in axes for axes in amax_axes(canonical)])


def maxima_of_whole(
    quantizer: QuantizerLike, part: Tensor, splits: Sequence[Split], op: str
) -> list[Tensor] | None:
    """Return the maxima that decide the factors of a rank's part; every rank must call this.

    Args:
        quantizer: of the whole tensor.
        part: (..., K), float32, bfloat16 or float16.
        splits: how the whole tensor is split over ranks.
        op: the operation, for errors.

    Returns:
        The maxima as the op ``quantize`` takes them; None for a format without maxima.

    Raises:
        QTensorError: a process group was destroyed.
    """
    maxima = maxima_of(part, quantizer.canonical)
    axes = amax_axes(quantizer.canonical)
    for split in splits:
        shared = [a for a, over in zip(maxima, axes, strict=True) if split.axis in over]
        if shared:
            for own, whole in zip(shared, max_over_ranks(shared, split.group, op), strict=True):
                own.copy_(whole)
    return maxima or None
