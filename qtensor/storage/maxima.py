"""Maxima of tensors that are split over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from qtensor.library.quantize import AMAX


def max_over_ranks(maxima: Sequence[Tensor], group: str) -> list[Tensor]:
    """Return the maximum of each tensor over the ranks of a group, by one collective.

    A NaN counts as inf, because a maximum over ranks may lose a NaN on some of them.

    Args:
        maxima: at least one tensor; float32, of any shapes, which are the same on all ranks.
        group: name of the process group.

    Returns:
        Tensors of the shapes of ``maxima``.
    """
    # Imported here: torch.distributed's functional collectives take 0.1 s, and bring their fakes.
    import torch.distributed._functional_collectives  # noqa: PLC0415

    ops = torch.ops._c10d_functional
    flat = torch.cat([a.reshape(-1) for a in maxima]) if len(maxima) > 1 else maxima[0].reshape(-1)
    finite = flat.nan_to_num(nan=math.inf, posinf=math.inf)
    whole: Tensor = ops.wait_tensor(ops.all_reduce(finite, "max", group))
    reduced, start = [], 0
    for a in maxima:
        reduced.append(whole.narrow(0, start, a.numel()).view(a.shape))
        start = start + a.numel()
    return reduced


def is_shared_by_rows(quantizer: Any) -> list[bool]:
    """Return for each maximum of the op ``amax`` whether it belongs to all rows of a tensor."""
    shapes = zip(quantizer.amax_shapes((3, 128)), quantizer.amax_shapes((5, 128)), strict=True)
    return [a == b for a, b in shapes]


def maxima_of_whole(quantizer: Any, part: Tensor, group: str) -> list[Tensor] | None:
    """Return the maxima of some rows (M, K), those that all rows share reduced over a group.

    Returns:
        The maxima as the op ``quantize`` takes them; None for a format without maxima.
    """
    maxima: list[Tensor] = AMAX(part, quantizer.canonical)
    shared = [a for a, flag in zip(maxima, is_shared_by_rows(quantizer), strict=True) if flag]
    if shared:
        for own, whole in zip(shared, max_over_ranks(shared, group), strict=True):
            own.copy_(whole)
    return maxima or None
