"""Define the base class of the MX quantizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, ceil_div, rows_cols
from qtensor.quantizers.base import Quantizer
from qtensor.quantizers.methods import Grid, Multipliers
from qtensor.quantizers.options import check_choice
from qtensor.reference import mx
from qtensor.reference.blocks import (
    as_matrix,
    block_amax,
    crop,
    read_scales,
    spread,
    to_blocks,
    write_scales_,
)
from qtensor.reference.elements import (
    decode,
    decode_pairs,
    pack_pairs,
    pack_quads,
    unpack_quads,
)
from qtensor.reference.scaling import e8m0_code, e8m0_decode_factor, e8m0_encode_factor

SCALE_MODES = ("rceil", "floor", "ceil", "even")


class MXGrid(Grid):
    """The grid of MX formats; a factor is an E8M0 code."""

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return (1, 32), or (32, 32)."""
        return (mx.BLOCK if self.quantizer.two_dimensional else 1, mx.BLOCK)

    def nearest(self, x: Tensor) -> Tensor:
        """Return the codes of the scale mode."""
        maxima = block_amax(to_blocks(x, *self.block))
        return e8m0_code(maxima, self.element, self.quantizer.scale_mode)

    def multipliers(self, factors: Tensor, wide: Tensor) -> Multipliers:
        """Return ``2^(127 - code)`` and ``2^(code - 127)``."""
        return Multipliers(e8m0_encode_factor(factors), e8m0_decode_factor(factors), 1.0)

    def falling(self, factors: Tensor) -> Iterator[Tensor]:
        """Yield all codes from the one above ``factors``.

        Doubling a factor removes the smallest values of the grid and adds greater ones alone. So
        no factor is better than the smallest one that clips nothing. The codes of all scale modes
        are at most one below that factor.
        """
        code = factors.int().add(1).clamp(max=254)
        while True:
            yield code.to(torch.uint8)
            if not code.any():
                return
            code = code.sub(1).clamp(min=0)

    def codes(self, scaled: Tensor) -> Tensor:
        """Return element codes."""
        codes = torch.empty_like(scaled, dtype=torch.uint8)
        mx.element_codes_(codes, scaled, self.element)
        return codes

    def fill_(self, out: dict[str, Tensor], codes: Tensor, factors: Tensor) -> None:
        """Write the packed codes, and a factor for each row of a block."""
        data = out["_rowwise_data"]
        data.copy_(self.quantizer._pack(codes, "_rowwise").view(data.shape))
        scales = spread(factors, self.block[0], 1, (codes.shape[0], factors.shape[1]))
        write_scales_(out["_rowwise_scale_inv"], scales, self.quantizer.swizzled)

    def take(self, buffers: dict[str, Tensor]) -> Tensor:
        """Return the stored codes of the factors."""
        scales = read_scales(buffers["_rowwise_scale_inv"], self.quantizer.swizzled)
        return crop(scales[:: self.block[0]], *self.factor_counts()).clone()


@dataclass(frozen=True, kw_only=True)
class MXQuantizer(Quantizer, abstract=True):
    """Quantize in blocks of 32 with an E8M0 factor.

    Any shape is legal: a partial block is padded with zeros, and the result is cropped. A block
    with a NaN or inf decodes to NaN.

    Attributes:
        dtype: the element, by name or as a torch dtype.
        scale_mode: rounding of the factor: "rceil", "floor" (the OCP specification), "ceil" or
            "even".
        with_2d_quantization: use 32x32 blocks; rowwise and columnwise data then have equal codes.
        swizzled: store the factors in 128x4 tiles, as block-scaled GEMMs read them.
    """

    dtype: str = ""
    scale_mode: str = "floor"
    with_2d_quantization: bool = False
    swizzled: bool = False

    grid_cls = MXGrid

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "scale_mode", SCALE_MODES)

    @property
    def two_dimensional(self) -> bool:
        """Return True for 32x32 blocks."""
        return self.with_2d_quantization

    def without_square_blocks(self) -> Self:
        """Return the quantizer with 1-D blocks and the same buffers."""
        return (
            dataclasses.replace(self, with_2d_quantization=False)
            if self.with_2d_quantization
            else self
        )

    def encode_(
        self,
        out: dict[str, Tensor],
        x: Tensor,
        scale: Tensor | None,
        amax: list[Tensor] | None,
        seed: Tensor | None,
    ) -> None:
        """Write the codes and factors of each usage from ``x``."""
        matrix = as_matrix(x)
        for direction, block in (("_rowwise", (1, mx.BLOCK)), ("_columnwise", (mx.BLOCK, 1))):
            if f"{direction}_data" not in out:
                continue
            data = out[f"{direction}_data"]
            packed = self._codes_per_group() != (1, 1)
            codes = (
                matrix.new_empty(matrix.shape, dtype=torch.uint8)
                if packed
                else data.view(matrix.shape)
            )
            if self.with_2d_quantization:
                square = mx.encode_(
                    codes, matrix, (mx.BLOCK, mx.BLOCK), self.element, self.scale_mode
                )
                # A square block has one factor, which each of its 1-D blocks repeats.
                rows, cols = (matrix.shape[0], square.shape[1]), (square.shape[0], matrix.shape[1])
                scales = spread(
                    square, block[1], block[0], rows if direction == "_rowwise" else cols
                )
            else:
                scales = mx.encode_(codes, matrix, block, self.element, self.scale_mode)
            if packed:
                data.copy_(self._pack(codes, direction).view(data.shape))
            write_scales_(
                out[f"{direction}_scale_inv"], scales, self.swizzled, direction == "_columnwise"
            )

    def _codes_per_group(self) -> tuple[int, int]:
        """Return the number of codes and of bytes in a packed group."""
        return (1, 1)

    def _pack(self, codes: Tensor, direction: str) -> Tensor:
        """Return (M, K) codes packed into bytes along the blocks of a direction."""
        packers = {(2, 1): pack_pairs, (4, 3): pack_quads}
        pack = packers.get(self._codes_per_group())
        if pack is None:
            return codes
        return pack(codes) if direction == "_rowwise" else pack(codes.t()).t()

    def _values(self, data: Tensor, direction: str, shape: tuple[int, int]) -> Tensor:
        """Return the float32 element values (M, K) of stored bytes."""
        group = self._codes_per_group()
        along_rows = direction == "_columnwise"
        count = shape[0] if along_rows else shape[1]
        if group == (1, 1):
            data = data.reshape(shape)
            return decode(data, self.element)
        data = (
            data.t() if along_rows else data.reshape(shape[0], ceil_div(count, group[0]) * group[1])
        )
        if group == (2, 1):
            values = decode_pairs(data, self.element, count)
        else:
            values = decode(unpack_quads(data, count), self.element)
        return values.t() if along_rows else values

    def decode(
        self, buffers: dict[str, Tensor], shape: Shape, columnwise: bool | None = None
    ) -> Tensor:
        """Return element values times factors, float32 of ``shape``."""
        direction = self.side(columnwise)
        block = (mx.BLOCK, 1) if direction == "_columnwise" else (1, mx.BLOCK)
        values = self._values(buffers[f"{direction}_data"], direction, rows_cols(shape))
        return mx.decode(
            values,
            read_scales(
                buffers[f"{direction}_scale_inv"], self.swizzled, direction == "_columnwise"
            ),
            block,
        ).reshape(shape)

    def derive(
        self, buffers: dict[str, Tensor], shape: Shape, usage: str
    ) -> dict[str, Tensor] | None:
        """Return the buffers of ``usage``, made from the other direction; None for 1-D blocks."""
        if not self.with_2d_quantization:
            return None
        source = "_columnwise" if usage == "rowwise" else "_rowwise"
        target = f"_{usage}"
        rows, cols = rows_cols(shape)
        values = self._values(buffers[f"{source}_data"], source, (rows, cols))
        only = self.with_usage(rowwise=usage == "rowwise", columnwise=usage == "columnwise")
        named = only.alloc_tensors(shape, device=values.device)
        # The element values are exact, so encoding them again gives the same codes.
        codes = values.new_empty(values.shape, dtype=torch.uint8)
        mx.element_codes_(codes, values.clone(), self.element)
        packed = self._codes_per_group() != (1, 1)
        data = named[f"{target}_data"]
        data.copy_((self._pack(codes, target) if packed else codes).reshape(data.shape))
        scales = read_scales(buffers[f"{source}_scale_inv"], self.swizzled, source == "_columnwise")
        if usage == "columnwise":
            scales = spread(
                scales[: rows : mx.BLOCK], 1, mx.BLOCK, (ceil_div(rows, mx.BLOCK), cols)
            )
        else:
            scales = spread(
                scales[:, : cols : mx.BLOCK], mx.BLOCK, 1, (rows, ceil_div(cols, mx.BLOCK))
            )
        write_scales_(named[f"{target}_scale_inv"], scales, self.swizzled, target == "_columnwise")
        return named
