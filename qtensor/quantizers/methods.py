"""Declare the methods that a format defines, with their defaults."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from qtensor.errors import UnsupportedError
from qtensor.layout import Shape


class FormatMethods:
    """Declare how a format encodes, decodes and derives buffers; its quantizer overrides these."""

    format: ClassVar[str]
    """The id of the format."""

    def encode_(
        self,
        out: dict[str, Tensor],
        x: Tensor,
        scale: Tensor | None,
        amax: list[Tensor] | None,
        seed: Tensor | None,
    ) -> None:
        """Write every buffer of ``out`` from ``x``; this runs inside the op, on real tensors."""
        raise UnsupportedError(
            f"quantize[{self.format}]: {type(self).__qualname__} has no encode_. Define it."
        )

    def decode(
        self, buffers: dict[str, Tensor], shape: Shape, columnwise: bool | None = None
    ) -> Tensor:
        """Return float32 values of ``shape`` from the buffers of ``side(columnwise)``."""
        raise UnsupportedError(
            f"dequantize[{self.format}]: {type(self).__qualname__} has no decode. Define it."
        )

    def amax(self, x: Tensor) -> list[Tensor]:
        """Return the maxima that decide tensor-wide factors; [] if all factors are local."""
        return []

    def amax_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        """Return the shapes of the maxima that ``amax`` returns."""
        return []

    def derive(
        self, buffers: dict[str, Tensor], shape: Shape, usage: str
    ) -> dict[str, Tensor] | None:
        """Return buffers of ``usage``, made exactly from the other direction, or None."""
        return None
