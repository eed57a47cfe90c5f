"""``Site``: a layer that ``qtensor.debug`` records, as the layer sees it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.functional.operands import Quantized
from qtensor.storage.base import QuantizedTensorStorage


class Site(Protocol):
    """Where the tensors of a layer are recorded. ``qtensor.debug`` makes it."""

    def is_idle(self) -> bool:
        """Return whether eager code can leave out the records of this step."""

    def asks_for(self, role: str) -> bool:
        """Return whether tensors of a role are recorded."""

    def take(
        self,
        role: str,
        x: Tensor | QuantizedTensorStorage | Quantized,
        quantizer: str = "",
        scale: Tensor | None = None,
        splits: tuple[Shape, Tensor | None, int] | None = None,
        group: int | None = None,
    ) -> None:
        """Record a tensor.

        Args:
            role: "input", "weight", "output", "grad_output", "grad_input" or "grad_weight".
            x: plain or quantized.
            quantizer: canonical text with which the layer quantizes a plain tensor, or "".
            scale: (1,) or (groups,) float32, its factors under delayed scaling.
            splits: the ``Splits`` of its rows, if each group is recorded as a layer of its own.
            group: the group that the tensor belongs to.
        """


def active(site: Site | None) -> Site | None:
    """Return the site of a call; None if nobody records its tensors."""
    return None if site is None or site.is_idle() else site
