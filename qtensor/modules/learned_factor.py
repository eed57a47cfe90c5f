"""``LearnedFactor``: a tensor-wide factor of a weight or an input that an optimizer changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from qtensor.core.quantizer_registry import parse
from qtensor.library.learned import LEARNED_FACTOR
from qtensor.quantizers import Quantizer
from qtensor.quantizers.call import constants_of
from qtensor.quantizers.learned import quantize_with_learned_factor
from qtensor.storage.tensor import QuantizedTensor


class LearnedFactor(nn.Module):
    """Quantize with a factor that is trained.

    Attributes:
        log2_amax: float32 (1,), the binary logarithm of the largest magnitude that is encoded. The
            amax is thus above 0 whatever an optimizer does; logarithms count as at least -40 and
            at most 100. It keeps its dtype in ``model.to(torch.bfloat16)``.
    """

    log2_amax: Tensor

    def __init__(self, quantizer: Quantizer, amax: float, device: torch.types.Device) -> None:
        super().__init__()
        self._canonical = quantizer.canonical
        start = torch.tensor([math.log2(amax)], dtype=torch.float32, device=device)
        self.log2_amax = nn.Parameter(start)

    def forward(self, x: Tensor, count: int) -> QuantizedTensor:
        """Return ``x`` quantized; ``count`` is N in the scale of the factor's gradient."""
        quantizer = constants_of(self._canonical) if is_compiling() else parse(self._canonical)
        return quantize_with_learned_factor(quantizer, x, self.log2_amax, count)

    def values(self) -> tuple[float, float]:
        """Return the amax and the decode factor, both float32 numbers, with which it quantizes."""
        with torch.no_grad():
            amax, scale_inv = LEARNED_FACTOR(self.log2_amax, self._canonical)
        return amax.item(), scale_inv.item()

    def extra_repr(self) -> str:
        """Return the format for the repr of the module."""
        return self._canonical

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move the parameter to the device to which ``fn`` moves tensors; keep its dtype."""

        def moved(tensor: Tensor) -> Tensor:
            found = cast(Tensor, fn(tensor))
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        return super()._apply(moved, recurse)
