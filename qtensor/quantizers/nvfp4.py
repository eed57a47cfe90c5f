"""Define the NVFP4 quantizer."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from qtensor.errors import fail
from qtensor.formats import E2M1
from qtensor.layout import Shape, ceil_div, round_up, rows_cols
from qtensor.quantizers.base import Quantizer
from qtensor.quantizers.options import check_choice
from qtensor.reference import hadamard, nvfp4
from qtensor.reference.blocks import as_matrix, pad_matrix, read_scales, spread, write_scales_
from qtensor.reference.elements import decode_pairs, pack_pairs, unpack_pairs
from qtensor.reference.philox import random_bytes
from qtensor.storage.nvfp4 import NVFP4, NVFP4Tensor, NVFP4TensorStorage

SIDES = ("_rowwise", "_columnwise")


@dataclass(frozen=True, kw_only=True)
class NVFP4Quantizer(Quantizer):
    """Quantize to NVFP4: E2M1 elements, an E4M3 factor for 16, a float32 factor for the tensor.

    Any shape is legal: a partial block is padded with zeros, and the result is cropped. NaN becomes
    0, because the element has no NaN. An inf counts as the largest finite float32. Columnwise data
    come from quantizing the transpose of the input.

    Attributes:
        with_2d_quantization: use 16x16 blocks; one direction is then the other transposed.
        with_rht: rotate the data of one direction along its blocks, by a random Hadamard transform
            of size 16. Decoding rotates back.
        rht_side: the rotated direction: "columnwise" (along M, for wgrad), or "rowwise", as in a
            transposed tensor. If that usage is absent, nothing is rotated.
        with_random_sign_mask: use the random signs of the rotation; False makes every sign +1.
        stochastic_rounding: round at random with ``generator=`` of the call; the mean over draws
            is the value.
        row_scaled: use a float32 factor for each row (columnwise: for each column) instead of one
            for the tensor.
        use_4over6: map each block's maximum to 6 or to 4, whichever has the smaller error.
        e4m3_max: largest factor of a block: 448, or 256 (the default with ``use_4over6``). 0 stands
            for the default. ``dataclasses.replace(q, use_4over6=True)`` keeps the number of ``q``;
            ``qtensor.quantizer(q, use_4over6=True)`` computes the default again.
        err_mode: the error that ``use_4over6`` compares: "mae" or "mse".
        swizzled: store the factors in 128x4 tiles, as block-scaled GEMMs read them.
    """

    with_2d_quantization: bool = False
    with_rht: bool = False
    rht_side: str = "columnwise"
    with_random_sign_mask: bool = True
    stochastic_rounding: bool = False  # type: ignore[misc]
    row_scaled: bool = False
    use_4over6: bool = False
    e4m3_max: float = 0.0
    err_mode: str = "mae"
    swizzled: bool = False

    format = "nvfp4"
    spec = NVFP4
    tensor_cls = NVFP4Tensor
    storage_cls = NVFP4TensorStorage

    def __post_init__(self) -> None:
        plain = type(self.e4m3_max) in (int, float) and type(self.use_4over6) is bool
        if plain and self.e4m3_max == 0:
            object.__setattr__(self, "e4m3_max", self._default("e4m3_max", 0.0))
        super().__post_init__()
        check_choice(self, "e4m3_max", (448.0, 256.0))
        check_choice(self, "err_mode", ("mae", "mse"))
        check_choice(self, "rht_side", ("columnwise", "rowwise"))
        clashes = (
            ("row_scaled", ("with_rht", "with_2d_quantization", "stochastic_rounding")),
            ("with_2d_quantization", ("with_rht",)),
            ("use_4over6", ("stochastic_rounding",)),
        )
        for option, others in clashes:
            for other in others:
                if getattr(self, option) and getattr(self, other):
                    fail(
                        "quantizer[nvfp4]",
                        f"{option} and {other} exclude each other",
                        "both",
                        "Drop one of them",
                    )

    def _default(self, name: str, value: Any) -> Any:
        """Return the default of an option; for ``e4m3_max``, it depends on ``use_4over6``."""
        if name == "e4m3_max":
            return 256.0 if self.use_4over6 else 448.0
        return value

    def _transposed_options(self) -> dict[str, Any]:
        """Return the options that a transpose changes; the rotated direction is one of them."""
        options = super()._transposed_options()
        if self.with_rht:
            options["rht_side"] = "columnwise" if self.rht_side == "rowwise" else "rowwise"
        return options

    @property
    def two_dimensional(self) -> bool:
        """Return True for 16x16 blocks."""
        return self.with_2d_quantization

    def without_square_blocks(self) -> Self:
        """Return the quantizer with 1-D blocks and the same buffers."""
        return (
            dataclasses.replace(self, with_2d_quantization=False)
            if self.with_2d_quantization
            else self
        )

    @property
    def factors_are_local(self) -> bool:
        """Return False if the data that ``dequantize`` reads are rotated."""
        return not self._rotated(self.side())

    def _rotated(self, direction: str) -> bool:
        return self.with_rht and direction == f"_{self.rht_side}"

    def stored_factors(self, buffers: dict[str, Tensor]) -> dict[str, Any]:
        """Return the maxima that decide the tensor-wide factors."""
        return {
            "amax": [
                buffers[f"_amax{direction}"]
                for direction in SIDES
                if f"_amax{direction}" in buffers
            ]
        }

    @functools.cached_property
    def _recipe(self) -> nvfp4.NVFP4Options:
        rows = nvfp4.BLOCK if self.with_2d_quantization else 1
        return nvfp4.NVFP4Options(
            rows, self.e4m3_max, self.use_4over6, self.err_mode, self.row_scaled
        )

    def _sources(self, x: Tensor) -> dict[str, Tensor]:
        """Return the float32 matrix, without NaN, that each direction quantizes."""
        matrix = as_matrix(x).float()
        sources = {}
        for direction, source in (("_rowwise", matrix), ("_columnwise", matrix.t())):
            if not getattr(self, direction[1:]):
                continue
            if self._rotated(direction):
                padded = pad_matrix(source, 1, hadamard.SIZE)
                source = hadamard.rotate(padded, self.with_random_sign_mask, x.dtype)
            sources[direction] = source.nan_to_num(nan=0.0)
        return sources

    def amax(self, x: Tensor) -> list[Tensor]:
        """Return the float32 maxima of each usage after the rotation; see ``amax_shapes``."""
        return [nvfp4.amax(source, self.row_scaled) for source in self._sources(x).values()]

    def amax_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        """Return (1,) for each usage; if row-scaled, (M,) for rowwise and (K,) for columnwise."""
        rows, cols = rows_cols(shape)
        sizes = ((rows, self.rowwise), (cols, self.columnwise))
        return [(size if self.row_scaled else 1,) for size, wanted in sizes if wanted]

    def encode_(
        self,
        out: dict[str, Tensor],
        x: Tensor,
        scale: Tensor | None,
        amax: list[Tensor] | None,
        seed: Tensor | None,
    ) -> None:
        """Write the codes, factors and maxima of each usage from ``x``."""
        sources = self._sources(x)
        reduced = dict(zip(sources, amax, strict=True)) if amax else {}
        shared = None
        for direction, source in sources.items():
            if not self.with_2d_quantization:
                noise = self._noise(seed, source, direction)
                codes, scales, maximum = nvfp4.encode(
                    source, self._recipe, reduced.get(direction), noise
                )
            else:
                if shared is None:
                    # Both sides share one draw and one choice for a block, so that one is the other
                    # transposed.
                    matrix = source if direction == "_rowwise" else source.t()
                    noise = self._noise(seed, matrix, "_rowwise")
                    shared = nvfp4.encode(matrix, self._recipe, reduced.get(direction), noise)
                codes, scales, maximum = shared
                if direction == "_columnwise":
                    codes, scales = codes.t(), scales.t()
                scales = spread(scales, nvfp4.BLOCK, 1, (source.shape[0], scales.shape[1]))
            out[f"_amax{direction}"].copy_(reduced.get(direction, maximum))
            self._write(out, direction, codes, scales)

    def _noise(self, seed: Tensor | None, source: Tensor, direction: str) -> Tensor | None:
        if not self.stochastic_rounding:
            return None
        if seed is None:
            fail(
                "quantize[nvfp4]",
                "stochastic rounding needs a seed",
                "none",
                "Call the quantizer, which draws one, or pass seed=, an int64 tensor of shape (1,)",
            )
        return random_bytes(seed.to(source.device), source.numel(), SIDES.index(direction)).view(
            source.shape
        )

    def _write(self, out: dict[str, Tensor], direction: str, codes: Tensor, scales: Tensor) -> None:
        data, scale_out = out[f"{direction}_data"], out[f"{direction}_scale_inv"]
        data.copy_(pack_pairs(codes).reshape(data.shape))
        write_scales_(scale_out, scales, self.swizzled)

    def decode(
        self, buffers: dict[str, Tensor], shape: Shape, columnwise: bool | None = None
    ) -> Tensor:
        """Return ``fp4 * float(s) * (A / (6 * e4m3_max))``; rotated data are rotated back."""
        direction = self.side(columnwise)
        rows, cols = rows_cols(shape)
        lines, length = (rows, cols) if direction == "_rowwise" else (cols, rows)
        count = round_up(length, hadamard.SIZE) if self._rotated(direction) else length
        data = buffers[f"{direction}_data"].reshape(lines, ceil_div(count, 2))
        scales = read_scales(buffers[f"{direction}_scale_inv"], self.swizzled)
        values = decode_pairs(data, E2M1, count)
        # A 16x16 block stores its factor once in each row, so it decodes as 1x16 blocks.
        values = nvfp4.decode(values, scales, buffers[f"_amax{direction}"], 1, self.e4m3_max)
        if self._rotated(direction):
            values = hadamard.rotate_back(values, self.with_random_sign_mask)[:, :length]
        return (values if direction == "_rowwise" else values.t()).reshape(shape)

    def derive(
        self, buffers: dict[str, Tensor], shape: Shape, usage: str
    ) -> dict[str, Tensor] | None:
        """Return the buffers of ``usage``, the other direction transposed; None for 1-D blocks."""
        if not self.with_2d_quantization:
            return None
        source, target = (
            ("_rowwise", "_columnwise") if usage == "columnwise" else ("_columnwise", "_rowwise")
        )
        rows, cols = rows_cols(shape)
        lines, count = (rows, cols) if usage == "columnwise" else (cols, rows)
        only = self.with_usage(rowwise=usage == "rowwise", columnwise=usage == "columnwise")
        named = only.alloc_tensors(shape, device=buffers[f"{source}_data"].device)
        packed = buffers[f"{source}_data"].reshape(lines, ceil_div(count, 2))
        codes = unpack_pairs(packed, count).t()
        scales = read_scales(buffers[f"{source}_scale_inv"], self.swizzled)
        grid = scales[: lines : nvfp4.BLOCK, : ceil_div(count, nvfp4.BLOCK)].t()
        self._write(named, target, codes, spread(grid, nvfp4.BLOCK, 1, (count, grid.shape[1])))
        named[f"_amax{target}"].copy_(buffers[f"_amax{source}"])
        return named
