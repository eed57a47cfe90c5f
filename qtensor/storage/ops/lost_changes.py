"""Warn if a statement ``q += change`` is lost in rounding, as a merge of small adapters is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qtensor.core.torch_state import watched

LIMIT = 0.5
"""Warn if less than this share of a change is left."""
_PIECE = 1 << 16
"""Values whose products are summed at a time: float64 copies of a whole weight would cost more."""


class WarnsOfLostChanges:
    """Gives quantized tensors ``+=`` and ``-=`` that warn if the change is mostly lost.

    Libraries merge an adapter with such a statement. Optimizers call methods such as ``add_``,
    which do not warn: the steps of training are often smaller than those of a format.
    """

    __slots__ = ()

    def __iadd__(self, other: Any) -> Any:
        """Add in place, and warn if most of what is added is lost."""
        return _changed(self, other, torch.Tensor.__iadd__, 1)

    def __isub__(self, other: Any) -> Any:
        """Subtract in place, and warn if most of what is subtracted is lost."""
        return _changed(self, other, torch.Tensor.__isub__, -1)


def _changed(q: Any, other: Any, op: Callable[[Any, Any], Any], sign: int) -> Any:
    """Return ``op(q, other)``, which adds ``sign * other`` to ``q`` in place."""
    if not isinstance(other, Tensor) or torch.compiler.is_compiling() or q.is_meta or watched():
        return op(q, other)
    with torch.no_grad():
        before = q.dequantize(torch.float32)
    result = op(q, other)
    with torch.no_grad():
        wanted = other.dequantize() if hasattr(other, "quantizer") else other
        wanted = (sign * wanted.to(before.device, torch.float32)).expand_as(before)
        kept, cosine, _ = left_of(wanted, q.dequantize(torch.float32) - before)
    left = min(kept, cosine)
    if left < LIMIT:
        text = (
            f"{'+' if sign > 0 else '-'}= [{q.quantizer.format}]: rounding leaves "
            f"{max(left, 0.0):.0%} of this change of a quantized tensor {tuple(q.shape)}, because "
            "it is small beside the steps of the format. qtensor.merge_lora_(model, "
            'method="gptq", calibration=inputs) keeps more of an adapter.'
        )
        warnings.warn(text, UserWarning, stacklevel=3)
    return result


def left_of(wanted: Tensor, real: Tensor) -> tuple[float, float, float]:
    """Return how much of a wanted change is in the real one.

    Returns:
        The projection ``<real, wanted> / <wanted, wanted>``, the cosine of both, and
        ``<wanted, wanted>``. A change of zeros is kept if nothing changes.
    """
    products = torch.zeros(2, 2, dtype=torch.float64, device=real.device)
    for piece in zip(real.flatten().split(_PIECE), wanted.flatten().split(_PIECE), strict=True):
        both = torch.stack(piece).double()
        products += both @ both.mT
    (left, product), (_, size) = products.tolist()
    if size == 0:
        return (1.0, 1.0, 0.0) if left == 0 else (0.0, 0.0, 0.0)
    cosine = product / (left * size) ** 0.5 if left > 0 else 0.0
    return product / size, cosine, size
