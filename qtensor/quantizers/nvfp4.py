"""Define the NVFP4 quantizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, ceil_div, round_up, rows_cols
from qtensor.core.errors import DtypeError, fail
from qtensor.core.formats import E2M1, E4M3
from qtensor.core.quantizer_registry import Factors
from qtensor.quantizers.base import Quantizer
from qtensor.quantizers.methods import Grid, Multipliers
from qtensor.quantizers.options import check_choice
from qtensor.reference import hadamard, nvfp4
from qtensor.reference.blocks import (
    as_matrix,
    block_amax,
    crop,
    pad_matrix,
    read_scales,
    spread,
    to_blocks,
    write_scales_,
)
from qtensor.reference.elements import (
    decode,
    decode_pairs,
    encode_narrow,
    pack_pairs,
    unpack_pairs,
)
from qtensor.reference.learned import slopes
from qtensor.reference.philox import random_bytes
from qtensor.storage.nvfp4 import NVFP4, NVFP4Tensor, NVFP4TensorStorage
from qtensor.storage.tensor import QuantizedTensor

SIDES = ("_rowwise", "_columnwise")


class NVFP4Grid(Grid):
    """The grid of NVFP4; a factor is the E4M3 code of a block. The tensor's factor is fixed."""

    def __init__(self, quantizer: Any, weight: Tensor) -> None:
        super().__init__(quantizer, weight)
        self.wide = nvfp4.amax(self.matrix, quantizer.row_scaled)[:, None]

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return (1, 16), or (16, 16)."""
        return (self.quantizer._recipe.rows, nvfp4.BLOCK)

    def nearest(self, x: Tensor) -> Tensor:
        """Return the codes that the quantizer chooses, also with ``use_4over6``."""
        return nvfp4.encode(x, self.quantizer._recipe, self.wide[:, 0])[1]

    def multipliers(self, factors: Tensor, wide: Tensor) -> Multipliers:
        """Return the multipliers of the block and of the tensor, in the order of decoding."""
        limit = self.quantizer.e4m3_max
        encode = nvfp4.encode_factor(
            factors.view(torch.float8_e4m3fn), nvfp4.global_scale(wide, limit)
        )
        return Multipliers(encode, decode(factors, E4M3), nvfp4.decode_factor(wide, limit))

    def falling(self, factors: Tensor) -> Iterator[Tensor]:
        """Yield all codes from eight above ``factors``, or from 15.

        Half of a normal factor has the code that is eight smaller. If half a factor clips nothing,
        it is never worse, as for the factors of MX. The codes of ``nearest`` are at most one below
        the first that clips nothing; the codes below 16 have no half or are not normal.
        """
        code = factors.int().add(8).clamp(min=15, max=126)
        while True:
            yield code.to(torch.uint8)
            if not code.any():
                return
            code = code.sub(1).clamp(min=0)

    def codes(self, scaled: Tensor) -> Tensor:
        """Return E2M1 codes."""
        return encode_narrow(scaled, E2M1, False)

    def fill_(self, out: dict[str, Tensor], codes: Tensor, factors: Tensor) -> None:
        """Write the packed codes, a factor for each row of a block, and the maxima."""
        amax = self.wide[:, 0]
        out["_amax_rowwise"].copy_(amax)
        if self.quantizer.with_global_scale_inv:
            factor = nvfp4.decode_factor(amax, self.quantizer.e4m3_max)
            out["_rowwise_global_scale_inv"].copy_(factor)
        scales = spread(factors, self.block[0], 1, (codes.shape[0], factors.shape[1]))
        self.quantizer._write(out, "_rowwise", codes, scales)

    def take(self, buffers: dict[str, Tensor]) -> Tensor:
        """Return the stored E4M3 codes, and use the stored maxima."""
        self.wide = buffers["_amax_rowwise"].clone()[:, None]
        scales = read_scales(buffers["_rowwise_scale_inv"], self.quantizer.swizzled)
        return crop(scales[:: self.block[0]], *self.factor_counts()).clone()


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
        with_global_scale_inv: also store the float32 factor that decodes, which is otherwise
            computed from the amax. It can then be a number that no amax gives, as in many files;
            see ``from_codes``. Quantizing writes ``amax / (6 * e4m3_max)`` into it.
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
    with_global_scale_inv: bool = False

    format = "nvfp4"
    grid_cls = NVFP4Grid
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

    def _default(self, name: str, value: object) -> object:
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

    @property
    def global_divisor(self) -> float:
        """Return the divisor that turns what ``global_buffer`` holds into the decode factor."""
        return 1.0 if self.with_global_scale_inv else 6.0 * self.e4m3_max

    def global_buffer(self, side: str) -> str:
        """Return the name of the buffer with the tensor-wide factor, or with its amax.

        Args:
            side: ``"_rowwise"`` or ``"_columnwise"``.
        """
        return f"{side}_global_scale_inv" if self.with_global_scale_inv else f"_amax{side}"

    def global_factors(self, buffers: dict[str, Tensor], side: str) -> Tensor:
        """Return the factor of the second level that decodes, float32 (1,), or one for each row."""
        factor = buffers[self.global_buffer(side)]
        # A quotient of two tensors is rounded once; this one can be traced.
        return factor / factor.new_full((1,), self.global_divisor)

    def stored_factors(self, buffers: dict[str, Tensor]) -> Factors:
        """Return the maxima that decide the tensor-wide factors."""
        return {
            "amax": [
                buffers[f"_amax{direction}"]
                for direction in SIDES
                if f"_amax{direction}" in buffers
            ]
        }

    @property
    def learns_factor(self) -> bool:
        """Return True for rowwise data rounded to nearest, with blocks' factors up to 448."""
        legal = {"with_2d_quantization", "swizzled", "with_global_scale_inv"}
        return set(self.changed_options()) <= legal

    @property
    def largest_code(self) -> float:
        """Return the largest product of an element and a block's factor."""
        return E2M1.max * self.e4m3_max

    def factor_slopes(self, buffers: dict[str, Tensor], x: Tensor, factor: Tensor) -> Tensor:
        """Return the derivatives (M, K) by the chain rule over both roundings.

        A block with the maximum m has the step ``t = factor * e4m3(m / 6 / factor)``, and decodes
        to ``t * e2m1(x / t)``.
        """
        matrix = self._sources(x)["_rowwise"]
        rows, cols = matrix.shape
        packed = buffers["_rowwise_data"].reshape(rows, ceil_div(cols, 2))
        grid = NVFP4Grid(self, matrix)
        blocks = grid.take(buffers)
        scales = decode(blocks, E4M3).double()
        maxima = block_amax(to_blocks(matrix, *grid.block)).double()
        outer = slopes(maxima / E2M1.max, scales, factor, E4M3.max)
        steps = spread(scales * factor, *grid.block, (rows, cols))
        codes = decode_pairs(packed, E2M1, cols).double()
        inner = slopes(matrix.double(), codes, steps, E2M1.max)
        return inner * spread(outer, *grid.block, (rows, cols))

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
                    # Both sides share one draw and one choice for a block: each is the transpose of
                    # the other.
                    matrix = source if direction == "_rowwise" else source.t()
                    noise = self._noise(seed, matrix, "_rowwise")
                    shared = nvfp4.encode(matrix, self._recipe, reduced.get(direction), noise)
                codes, scales, maximum = shared
                if direction == "_columnwise":
                    codes, scales = codes.t(), scales.t()
                scales = spread(scales, nvfp4.BLOCK, 1, (source.shape[0], scales.shape[1]))
            maximum = reduced.get(direction, maximum)
            out[f"_amax{direction}"].copy_(maximum)
            if self.with_global_scale_inv:
                factor = nvfp4.decode_factor(maximum, self.e4m3_max)
                out[f"{direction}_global_scale_inv"].copy_(factor)
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
        """Return ``fp4 * float(s) * factor``; rotated data are rotated back.

        The factor is the stored one, or ``A / (6 * e4m3_max)``.
        """
        direction = self.side(columnwise)
        rows, cols = rows_cols(shape)
        lines, length = (rows, cols) if direction == "_rowwise" else (cols, rows)
        count = round_up(length, hadamard.SIZE) if self._rotated(direction) else length
        data = buffers[f"{direction}_data"].reshape(lines, ceil_div(count, 2))
        scales = read_scales(buffers[f"{direction}_scale_inv"], self.swizzled)
        values = decode_pairs(data, E2M1, count)
        # A 16x16 block stores its factor once in each row, so it decodes as 1x16 blocks.
        factor = buffers[self.global_buffer(direction)]
        if not self.with_global_scale_inv:
            factor = nvfp4.decode_factor(factor, self.e4m3_max)
        values = nvfp4.decode(values, scales, factor, 1)
        if self._rotated(direction):
            values = hadamard.rotate_back(values, self.with_random_sign_mask)[:, :length]
        return (values if direction == "_rowwise" else values.t()).reshape(shape)

    def from_codes(
        self,
        codes: Tensor,
        scale_inv: Tensor,
        global_scale_inv: Tensor,
        dtype: torch.dtype,
        shape: Shape | None = None,
    ) -> QuantizedTensor:
        """Return a tensor with the codes and factors of a file, which decodes by them exactly.

        The quantizer needs ``with_global_scale_inv=True``, rowwise data only, and neither rotation
        nor 16x16 blocks. The codes are not copied. The amax, which only a write into a part
        of the tensor reads, is ``nearest_amax`` of the factor.

        Args:
            codes: uint8 (..., ceil(K/2)): two codes in a byte, the even index in the low nibble.
            scale_inv: factors of blocks of 16 along the last dim, float8_e4m3fn or their codes as
                uint8, (..., ceil(K/16)), without padding and not swizzled.
            global_scale_inv: the factor that multiplies all values, float32 () or (1,): ModelOpt's
                ``weight_scale_2``, the reciprocal of compressed-tensors' ``weight_global_scale``.
                With ``row_scaled``, one for each row of the (M, K) view, (M,).
            dtype: the nominal dtype.
            shape: the logical shape (..., K), needed if K is odd; by default K is even.

        Raises:
            QTensorError: an option of the quantizer does not fit, or a tensor has a wrong dtype or
                shape.
        """
        shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if shape is None else tuple(shape)
        rows, cols = rows_cols(shape)
        self._check_from_codes()
        factor = global_scale_inv if global_scale_inv.ndim else global_scale_inv.reshape(1)
        blocks = ceil_div(cols, nvfp4.BLOCK)
        e4m3 = (torch.float8_e4m3fn, torch.uint8)
        self._check_part("codes", codes, (torch.uint8,), (*shape[:-1], ceil_div(cols, 2)))
        self._check_part("scale_inv", scale_inv, e4m3, (*shape[:-1], blocks))
        one_each = (rows if self.row_scaled else 1,)
        self._check_part("global_scale_inv", factor, (torch.float32,), one_each)
        _, padded, _, _ = self.alloc_tensors(shape, device=codes.device).values()
        stored = scale_inv.contiguous().view(torch.uint8).reshape(rows, blocks)
        write_scales_(padded, stored, self.swizzled)
        buffers = [codes, padded, nvfp4.nearest_amax(factor, self.e4m3_max), factor]
        return self.assemble(buffers, shape, dtype)

    def _check_part(
        self, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], size: Shape
    ) -> None:
        """Refuse an argument of ``from_codes`` with another dtype or shape."""
        op = f"from_codes[{self.format}]"
        if tensor.dtype not in dtypes:
            rule = f"{name} must be {' or '.join(map(str, dtypes))}"
            fail(op, rule, tensor.dtype, "Pass the tensor as the file holds it", DtypeError)
        if tuple(tensor.shape) != tuple(size):
            rule = f"{name} must have shape {tuple(size)}"
            fix = "Pass that shape, or shape= if the logical shape is another one"
            fail(op, rule, tuple(tensor.shape), fix)

    def _check_from_codes(self) -> None:
        """Refuse options that ``from_codes`` does not take."""
        wanted = {
            "with_global_scale_inv": True,
            "rowwise": True,
            "columnwise": False,
            "with_rht": False,
            "with_2d_quantization": False,
        }
        for option, value in wanted.items():
            if getattr(self, option) is not value:
                fail(
                    f"from_codes[{self.format}]",
                    f"the quantizer must have {option}={value}",
                    self.canonical,
                    'Use qtensor.quantizer("nvfp4", with_global_scale_inv=True)',
                )

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
        if self.with_global_scale_inv:
            factor = buffers[self.global_buffer(source)]
            named[self.global_buffer(target)].copy_(factor)
        return named
