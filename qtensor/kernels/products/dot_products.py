"""Products by the dot products (AVX-512) and the bfloat16 tiles (AMX-BF16) of a CPU."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import buffer_shapes, rows_cols
from qtensor.core.formats import Slot
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import QuantizerLike, alloc_slots, parse
from qtensor.kernels import table
from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.native import Part, Rows
from qtensor.kernels.products.dequant import exact_dtypes
from qtensor.kernels.products.matrix_backend import MatrixBackend, sides_refusal
from qtensor.kernels.products.problem import GemmSide, Problem
from qtensor.kernels.products.stacks import batch_refusal, of_each
from qtensor.kernels.products.tiles import decoded
from qtensor.kernels.products.weight_rows import few_rows_refusal
from qtensor.reference.blocks import unswizzle

LEAST_SCALE = 24
"""Least E8M0 code of a factor. Values of blocks with smaller factors could be subnormal in
bfloat16, and dot products treat subnormal numbers as zero.
"""
FASTER_ROWS = 4
"""Up to so many rows, `few_rows` is faster than `amx`."""
_CHUNK = 1 << 22
"""Bytes of codes that are looked at together."""


class DotProducts(MatrixBackend):
    """Dot products with float32 sums, of a left operand that bfloat16 holds exactly.

    The right operand is decoded in the cache, the left one as a whole. Factors of rows, columns or
    tensors are applied to the sums, others to the values. If bfloat16 holds the values of the right
    operand as well, pairs may be multiplied in bfloat16 (AVX512-BF16), with the same bits.
    """

    name = "dot_products"
    kernel = native.DOTS

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        reason = _refusal(problem, _bfloat16_refusal)
        exact = " of values that bfloat16 holds"
        self.detail = exact if reason is None else f" in float32: {reason}"

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        """Return why dot products do not serve a problem, or None."""
        reason = _refusal(problem, _left_refusal)
        if reason is not None:
            return reason
        return None if is_available(native.linear_) else "no kernels for AVX-512 serve here"

    def multiply(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write a product of matrices; or return why these tensors cannot be taken."""
        sides = self.problem.a, self.problem.b
        left, right = (
            Operand(buffers, side.canonical, side.shape)
            for side, buffers in zip(sides, (a, b), strict=True)
        )
        for name, side, matrix in zip("ab", sides, (left, right), strict=True):
            if not has_normal_values(matrix, side.side):
                return f"operand {name} has blocks with factors below 2^{LEAST_SCALE - 127}"
        rows = self._rows(left)
        if rows is None:
            return "no kernel decodes the left operand"
        added = None if bias is None else bias.float().expand(out.shape[-1]).contiguous()
        # The codes of a sum lie side by side in one of these, and far apart in the other.
        lines, bands = right, right.transpose()
        is_columnwise = sides[1].side == "_columnwise"
        if self.problem.layout != "TN":
            lines, bands, is_columnwise = bands, lines, not is_columnwise
        assert lines.quantizer is not None  # noqa: S101 - refusal() has checked it
        has_lines = not is_columnwise or lines.quantizer.spec.transpose_shares_bytes
        if has_lines and native.linear_(lines, rows, added, out, kernel=self.kernel):
            return None
        part = Part(columnwise=not is_columnwise)
        if native.linear_(bands, rows, added, out, kernel=self.kernel, across=part):
            return None
        return "no kernel reads these buffers of the right operand"

    def _rows(self, left: Operand) -> Rows | None:
        """Return the left operand as bfloat16 rows (M, K), or None if no kernel decodes it."""
        side = self.problem.a
        is_columnwise = side.side == "_columnwise"
        values, factor = decoded(
            left, torch.bfloat16, columnwise=is_columnwise, contracted=side.contracted
        )
        if values is None:
            return None
        if self.problem.layout == "NT":
            values = values.t().contiguous()
        return Rows(values, factor)


class Amx(DotProducts):
    """The same by the tiles of AMX, whose sums have an order of their own (docs/numerics.md).

    Attributes:
        after: the backend that is asked before this one, if not that of the table.
    """

    name = "amx"
    kernel = native.TILES

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.after: str | None = None
        why = ""
        if os.environ.get("QTENSOR_AMX") == "0":
            self.after, why = "reference", ": QTENSOR_AMX=0"
        elif problem.sizes[1] <= FASTER_ROWS and few_rows_refusal(problem) is None:
            self.after, why = "few_rows", f": few_rows is faster up to {FASTER_ROWS} rows"
        self.detail = f" in bfloat16{why}"

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        """Return why tiles do not serve a problem, or None."""
        reason = _refusal(problem, _bfloat16_refusal)
        if reason is not None:
            return reason
        return None if is_available(native.linear_, native.TILES) else "the CPU has no AMX-BF16"


def _refusal(problem: Problem, of_values: Callable[[Problem, GemmSide], str | None]) -> str | None:
    """Return why products of a weight that is decoded in parts do not serve a problem, or None.

    Args:
        problem: the product.
        of_values: returns why the values of an operand do not fit, or None.
    """
    if problem.capability is not None or not problem.device.startswith("cpu"):
        return "it runs on CPUs"
    if problem.b.quantizer is None:
        return "the right operand is not quantized"
    if problem.batched:
        reason = batch_refusal(problem)
        if reason is not None:
            return reason
        problem = of_each(problem)
    if 0 in problem.sizes:
        return "a product without elements needs no kernel"
    return sides_refusal(problem, lambda side: of_values(problem, side) or _side_refusal(side))


def _bfloat16_refusal(problem: Problem, side: GemmSide) -> str | None:
    """Return why bfloat16 does not hold the values of an operand; None if it does.

    Factors of rows and columns of the result do not count, because they are applied to the sums.
    """
    exact = exact_dtypes(problem, side)
    if isinstance(exact, str):
        return exact
    return None if torch.bfloat16 in exact else f"{side.dtype} would be rounded"


def _left_refusal(problem: Problem, side: GemmSide) -> str | None:
    """Return why bfloat16 does not hold the values of the left operand; None if it does."""
    return _bfloat16_refusal(problem, side) if side is problem.a else None


def _side_refusal(side: GemmSide) -> str | None:
    """Return why no kernel decodes an operand as these products need it, or None."""
    if side.quantizer is None:
        return None
    if side.rotated:
        return f"the values of {side.canonical} must be rotated back"
    if side.side == "_columnwise" and len(side.shape) != 2:
        return "it has columnwise data and is not a matrix"
    return table.refusal(side.quantizer, torch.bfloat16, "cpu")


def has_normal_values(matrix: Operand, side: str) -> bool:
    """Return whether every value is zero or a normal bfloat16 number times the factor of its line.

    The check reads the factors of blocks, one for 16 elements or more, without the padding. If a
    factor is too small, it also reads the codes of that block: a block of zeros is accepted.

    Args:
        matrix: (..., K), or (M, K) if columnwise data are read; a plain one is bfloat16.
        side: prefix of the buffers that are read: "_rowwise" or "_columnwise".
    """
    quantizer = matrix.quantizer
    if quantizer is None or quantizer.spec.block is None or quantizer.spec.scale == "e4m3":
        return True
    if side == "_columnwise":
        matrix = matrix.transpose()
        quantizer = matrix.quantizer
        assert quantizer is not None  # noqa: S101 - it is that of the transpose
    slot, buffer = _named(quantizer, matrix, "_rowwise_scale_inv")
    factors = _without_padding(slot, buffer, matrix)
    least = LEAST_SCALE if quantizer.spec.scale == "e8m0" else 2.0 ** (LEAST_SCALE - 127)
    if factors is None:
        return False
    if not factors.numel() or bool(factors.amin() >= least):
        return True
    small = factors < least
    return not _has_codes(quantizer, matrix, small if slot.dims[0].axis == "m" else small.t())


def _named(quantizer: QuantizerLike, matrix: Operand, name: str) -> tuple[Slot, Tensor]:
    """Return the slot of that name and its buffer."""
    pairs = zip(quantizer.slots, matrix.buffers, strict=False)
    return next((slot, buffer) for slot, buffer in pairs if slot.name == name)


def _without_padding(slot: Slot, factors: Tensor, matrix: Operand) -> Tensor | None:
    """Return the factors that stand for elements, or None where tiles of factors are not whole."""
    if slot.swizzled:
        if factors.shape[0] % 128 or factors.shape[1] % 4:
            return None
        factors = unswizzle(factors)
    dims = tuple(dataclasses.replace(dim, pad=1) for dim in slot.dims)
    (sizes,) = buffer_shapes([dataclasses.replace(slot, dims=dims)], matrix.shape)
    return factors[tuple(slice(size) for size in sizes)]


def _has_codes(quantizer: QuantizerLike, matrix: Operand, wanted: Tensor) -> bool:
    """Return whether a block that is wanted has a code other than zero.

    Args:
        quantizer: of the matrix.
        matrix: rowwise rows.
        wanted: bool (row blocks, column blocks).
    """
    assert quantizer.spec.block is not None  # noqa: S101 - the caller has checked it
    slot, codes = _named(quantizer, matrix, "_rowwise_data")
    rows, _ = rows_cols(matrix.shape)
    codes = codes.reshape(rows, -1)
    packing = slot.dims[-1]
    width = quantizer.spec.block[1] * packing.units // packing.per
    high = -(-rows // wanted.shape[0]) if wanted.shape[0] < rows else 1
    lines = wanted.any(1).repeat_interleave(high)[:rows].nonzero().squeeze(1)
    whole = codes.shape[1] // width * width
    for part in lines.split(max(1, _CHUNK // codes.shape[1])):
        chosen = codes[part]
        blocks = [chosen[:, :whole].reshape(part.numel(), -1, width).amax(-1)]
        if whole < codes.shape[1]:
            blocks.append(chosen[:, whole:].amax(-1, keepdim=True))
        if bool(((torch.cat(blocks, 1) != 0) & wanted[part // high]).any()):
            return True
    return False


@functools.cache
def is_available(linear_: Callable[..., bool], kernel: int = native.DOTS) -> bool:
    """Return whether the CPU and the kernels have dot products, or tiles: tries one product."""
    buffers = alloc_slots(parse("fp8").slots, (1, 2), torch.device("cpu"))
    weight = Operand(buffers, "fp8", (1, 2))
    for buffer in weight.buffers:
        buffer.zero_()
    x = torch.zeros(1, 2, dtype=torch.bfloat16)
    return linear_(weight, Rows(x), None, torch.zeros(1, 1, dtype=torch.float32), kernel=kernel)
