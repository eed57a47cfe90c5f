"""``Operand``: how layers, ops and kernels pass a tensor that a product reads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.quantizer_registry import QuantizerLike, parse, transposed


class Operand(NamedTuple):
    """A tensor that a product reads: the buffers of a quantized tensor, or one plain tensor.

    Attributes:
        buffers: in the slot order of the quantizer; the tensor itself if it is plain.
        canonical: text of the quantizer, "" for a plain tensor.
        shape: the logical shape.
    """

    buffers: list[Tensor]
    canonical: str
    shape: Shape

    @property
    def quantizer(self) -> QuantizerLike | None:
        """The quantizer; None for a plain tensor."""
        return parse(self.canonical) if self.canonical else None

    def transpose(self) -> Operand:
        """Return the transpose of a matrix; its buffers are views of these."""
        quantizer = self.quantizer
        if quantizer is None:
            return Operand([self.buffers[0].t()], "", self.shape[::-1])
        twin, buffers = transposed(quantizer, self.buffers)
        return Operand(buffers, twin.canonical, self.shape[::-1])

    def as_rows(self) -> Operand | None:
        """Return the rows (N, K) of a transposed weight (K, N), as views.

        Such an operand, the result of ``weight.t()``, has columnwise data alone: the rows of the
        weight, transposed.

        Returns:
            The operand (N, K), or None for any other operand.
        """
        quantizer = self.quantizer
        if quantizer is None or quantizer.rowwise or len(self.shape) != 2:
            return None
        return self.transpose()


def plain_operand(t: Tensor) -> Operand:
    """Return the operand of a tensor in high precision."""
    return Operand([t], "", t.shape)
