"""Declare what a format defines: its methods with their defaults, and the grid of its values.

Quantizing chooses the factors from the maxima of blocks, and then rounds each value to the nearest
one on the grid. Methods that choose other factors or other values build their tensors with a
``Grid``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, ceil_div, rows_cols
from qtensor.core.errors import UnsupportedError
from qtensor.core.formats import Element
from qtensor.reference.blocks import as_matrix
from qtensor.reference.elements import decode, encode_fp8_

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor


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

    def decode_codes(self, buffers: dict[str, Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
        """Return float32 element values of ``shape`` without the factor, and the (1,) factor.

        Only ``per_tensor`` formats define this method.
        """
        raise UnsupportedError(
            f"decode_codes[{self.format}]: {type(self).__qualname__} has several factors. "
            "Call decode."
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

    @property
    def learns_factor(self) -> bool:
        """Whether training can learn the tensor-wide factor: ``factor_slopes`` is defined."""
        return False

    @property
    def largest_code(self) -> float:
        """What a tensor's amax is divided by to give its decode factor."""
        raise UnsupportedError(
            f"largest_code[{self.format}]: the format has no factor of the tensor. "
            'Use "fp8" or "nvfp4".'
        )

    def factor_slopes(self, buffers: dict[str, Tensor], x: Tensor, factor: Tensor) -> Tensor:
        """Return the derivatives of the decoded values by the tensor-wide decode factor.

        Args:
            buffers: rowwise, of ``x``.
            x: what was quantized.
            factor: the decode factor, float64 (1,).

        Returns:
            float64 of the shape of ``x`` or of its (M, K) view.
        """
        raise UnsupportedError(
            f"factor_slopes[{self.format}]: the factor of this format is not learned. "
            'Use "fp8" or "nvfp4".'
        )


class Multipliers(NamedTuple):
    """What a value is multiplied by before rounding, and its element after it, one by one."""

    encode: Tensor
    inner: Tensor
    outer: Tensor | float


class Grid:
    """The grid of a weight (M, K) in the rowwise data of a quantizer.

    A factor of a block is what the format stores or computes it from: an E8M0 or E4M3 code (uint8),
    or an encode scale (float32). A factor grid is (m, k): ceil(M / rows), ceil(K / columns).

    Attributes:
        quantizer: describes the buffers.
        shape: the logical shape.
        dtype: the nominal dtype.
        matrix: the weight as a float32 matrix (M, K).
        block: (rows, columns) that share a factor.
        wide: float32 (1, 1) or (M, 1), the maxima that decide a factor of the tensor or of a row;
            formats without such a factor ignore it.
    """

    def __init__(self, quantizer: Any, weight: Tensor) -> None:
        """Keep the weight, and read its tensor-wide maxima.

        Args:
            quantizer: of the format of this class.
            weight: (..., K) float32, bfloat16 or float16, finite.
        """
        self.quantizer = quantizer
        self.shape = tuple(weight.shape)
        self.dtype = weight.dtype
        self.matrix = as_matrix(weight.detach()).float()
        self.block = self.block_of(rows_cols(self.shape))
        self.wide = self.matrix.new_ones((1, 1))

    @property
    def element(self) -> Element:
        """The element of the codes."""
        element: Element = self.quantizer.element
        return element

    # ---- what a format defines

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the (rows, columns) that share a factor in a matrix of this shape."""
        raise NotImplementedError

    def nearest(self, x: Tensor) -> Tensor:
        """Return the factors that quantizing chooses, (m, k).

        Args:
            x: float32, all rows of the matrix and the columns of some whole blocks.
        """
        raise NotImplementedError

    def multipliers(self, factors: Tensor, wide: Tensor) -> Multipliers:
        """Return the multipliers of factors, of any shape; ``wide`` has a shape that fits."""
        raise NotImplementedError

    def falling(self, factors: Tensor) -> Iterator[Tensor]:
        """Yield candidates by falling size: each one decodes to at most the values before it.

        Factors that are greater than the first candidates are never better.

        Args:
            factors: as ``nearest`` returns them, of any shape.
        """
        raise NotImplementedError

    def codes(self, scaled: Tensor) -> Tensor:
        """Return the codes, uint8, of float32 values that are multiplied already."""
        raise NotImplementedError

    def fill_(self, out: dict[str, Tensor], codes: Tensor, factors: Tensor) -> None:
        """Write codes (M, K) and factors (m, k) into the rowwise buffers."""
        raise NotImplementedError

    def take(self, buffers: dict[str, Tensor]) -> Tensor:
        """Return the factors (m, k) of rowwise buffers, and use their tensor-wide factor."""
        raise NotImplementedError

    # ---- what follows

    def factor_counts(self) -> tuple[int, int]:
        """Return (m, k), the shape of a factor grid."""
        rows, cols = self.block
        return ceil_div(self.matrix.shape[0], rows), ceil_div(self.matrix.shape[1], cols)

    def round(self, x: Tensor, factors: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of the nearest values, and these values as ``dequantize`` gives them.

        Args:
            x: float32.
            factors: of a shape that broadcasts to ``x``.
            wide: likewise.

        Returns:
            uint8 and float32, like ``x``.
        """
        encode, inner, outer = self.multipliers(factors, wide)
        codes = self.codes(x * encode)
        return codes, decode(codes, self.element) * inner * outer

    def values(self, codes: Tensor, factors: Tensor, wide: Tensor) -> Tensor:
        """Return the values of codes as ``dequantize`` gives them, float32; see ``round``."""
        _, inner, outer = self.multipliers(factors, wide)
        return decode(codes, self.element) * inner * outer

    def tensor(self, codes: Tensor, factors: Tensor) -> QuantizedTensor:
        """Return the quantized tensor with these codes (M, K) and factors (m, k)."""
        rowwise = self.quantizer.with_usage(rowwise=True, columnwise=False)
        named = rowwise.alloc_tensors(self.shape, device=codes.device)
        self.fill_(named, codes, factors)
        if self.quantizer.columnwise:
            named |= self.quantizer.derive(named, self.shape, "columnwise")
        buffers = [named[slot.name] for slot in self.quantizer.slots]
        tensor: QuantizedTensor = self.quantizer.assemble(buffers, self.shape, self.dtype)
        return tensor


class ScaleGrid(Grid):
    """The grid of FP8 formats, whose factor is a float32 encode scale."""

    def multipliers(self, factors: Tensor, wide: Tensor) -> Multipliers:
        """Return the scale and its reciprocal."""
        return Multipliers(factors, factors.reciprocal(), 1.0)

    def falling(self, factors: Tensor) -> Iterator[Tensor]:
        """Yield the encode scales of clipped maxima.

        With powers of two, these are all scales from ``factors`` on, down to decode factors of
        2^-126: no other one can be best. Otherwise they are 17 clipped maxima from 1 to 1/2.
        """
        powers_of_two = self.quantizer.force_pow_2_scales
        largest = 1 / torch.finfo(torch.float32).tiny
        for step in range(253) if powers_of_two else range(17):
            scale = factors * 2.0 ** (step if powers_of_two else step / 16)
            if not (scale <= largest).any():
                return
            yield torch.where(scale <= largest, scale, factors)

    def codes(self, scaled: Tensor) -> Tensor:
        """Return element codes."""
        codes = torch.empty_like(scaled, dtype=torch.uint8)
        encode_fp8_(codes, scaled, self.element)
        return codes
