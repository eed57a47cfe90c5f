"""ALiBi: scores become smaller with the distance between a query and a key."""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.core.errors import check
from qtensor.functional.attention.masks import Lengths, MaskOptions, positions


def default_slopes(heads: int, device: torch.device) -> Tensor:
    """Return the slopes (H,) float32 of Press et al. (2022), as in Transformer Engine.

    For n heads, a power of two, 2^(-8 i / n) for i = 1 to n. Other numbers of heads take those of
    the power of two below, then every second one of twice that power.
    """
    whole = 1 << (heads.bit_length() - 1)
    exponents = [-8.0 * i / whole for i in range(1, whole + 1)]
    exponents += [-4.0 * i / whole for i in range(1, 2 * (heads - whole), 2)]
    return torch.tensor([2.0**e for e in exponents], dtype=torch.float32, device=device)


def alibi_bias(
    label: str,
    slopes: Tensor | None,
    options: MaskOptions,
    heads: tuple[Tensor, Tensor],
    lengths: Lengths | None,
) -> Tensor:
    """Return minus the slope times the distance of positions, float32 (B or 1, H, Sq, Skv).

    Args:
        label: the module, for errors.
        slopes: (H,) or (B, H) floating; ``default_slopes`` if None.
        options: of the mask; it says whether positions count from the last key.
        heads: q (B, H, Sq, D) and k (B, G, Skv, D).
        lengths: of padded sequences.

    Raises:
        QTensorError: slopes of another shape.
    """
    q, k = heads
    if slopes is None:
        slopes = default_slopes(q.shape[1], q.device)
    rule = f"alibi_slopes must be ({q.shape[1]},) or ({q.shape[0]}, {q.shape[1]}), floating"
    fits = slopes.shape in ((q.shape[1],), tuple(q.shape[:2])) and slopes.is_floating_point()
    got = (slopes.dtype, tuple(slopes.shape))
    check(fits, label, rule, got, "Pass one slope for each head")
    at, keys = positions(options, (q.shape[2], k.shape[2]), q.device, lengths)
    distance = (at - keys).abs().float()
    return -slopes.float()[..., None, None] * distance
