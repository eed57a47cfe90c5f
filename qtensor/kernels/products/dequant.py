"""Decode operands exactly to 16 bits and multiply them with torch's 16-bit matmul."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from qtensor.core.quantizer_registry import by_name
from qtensor.kernels import table
from qtensor.kernels.cpu.native import Part
from qtensor.kernels.products.problem import (
    SCALAR_FORMATS,
    GemmSide,
    Problem,
    rotations_cancel,
)
from qtensor.kernels.products.reading import without_line_factors
from qtensor.reference.gemm import matmul

_HALVES = (torch.bfloat16, torch.float16)


def exact_dtypes(problem: Problem, operand: GemmSide) -> tuple[torch.dtype, ...] | str:
    """Return the 16-bit dtypes that hold every value of an operand, or why there is none.

    Factors that are applied after the product do not count.

    E4M3 and E5M2 codes have at most 4 significant bits, products of E2M1 codes with E4M3 factors 6,
    bfloat16 8 and float16 11. A power of two as a factor keeps bits and needs the exponent range of
    bfloat16.
    """
    label, quantizer = operand.label, operand.quantizer
    if quantizer is None:
        if operand.dtype in _HALVES:
            return (operand.dtype,)
        return f"{operand.dtype} would be rounded"
    if label in SCALAR_FORMATS:
        return _HALVES
    if label == "fp8_rowwise":
        return _HALVES if operand.factors_follow else "factors run along the contraction"
    if label == "fp8_blockwise":
        if not operand.option("force_pow_2_scales"):
            return "factors of blocks that are not powers of two do not fit 16 bits"
        return (torch.bfloat16,)
    if label == "nvfp4":
        if operand.rotated and not rotations_cancel(problem):
            return "one operand alone is rotated (with_rht)"
        if operand.option("row_scaled") and not _amax_follows(operand):
            return "factors run along the contraction"
        return _HALVES
    if quantizer.spec.scale == "e8m0":
        return (torch.bfloat16,)
    return f"{label} is not known to fit 16 bits"


def _amax_follows(operand: GemmSide) -> bool:
    """Return True if the amaxes of lines belong to lines that are not contracted."""
    return (operand.side == "_rowwise") == (operand.contracted == -1)


class Dequant:
    """Multiply two operands that are decoded exactly to bfloat16 or float16.

    Sums are float32. Factors of tensors and rows, and the bias, are applied to them in float32, and
    the result is rounded once. Values whose last bit is below 2^-133, the smallest bfloat16, are
    rounded: factors of about 2^-120 and less.
    """

    name = "dequant"

    def __init__(self, problem: Problem) -> None:
        dtype = self.choose(problem)
        assert not isinstance(dtype, str)  # noqa: S101 - refusal() has checked it
        self.problem, self.dtype = problem, dtype

    @property
    def detail(self) -> str:
        """The dtype, for ``explain``."""
        return f" in {self.dtype}"

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        """Return why it does not compute the problem, or None."""
        dtype = Dequant.choose(problem)
        return dtype if isinstance(dtype, str) else None

    @staticmethod
    def choose(problem: Problem) -> torch.dtype | str:
        """Return the dtype to multiply in, or why there is none."""
        if problem.capability is None or problem.capability < (8, 0):
            return "it needs a CUDA device with bfloat16 instructions (compute capability 8.0)"
        if 0 in problem.sizes:
            return "a product without elements needs no kernel"
        dtypes = []
        for name, operand in (("a", problem.a), ("b", problem.b)):
            exact = exact_dtypes(problem, operand)
            if isinstance(exact, str):
                return f"operand {name}: {exact}"
            dtypes.append(exact)
        both = [dtype for dtype in _HALVES if all(dtype in side for side in dtypes)]
        return both[0] if both else "no 16-bit dtype holds both operands exactly"

    def __call__(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write ``out``; never refuses."""
        problem = self.problem
        left, left_factor = self._values(problem.a, a)
        right, right_factor = self._values(problem.b, b)
        left = left.mT if problem.layout == "NT" else left
        right = right.mT if problem.layout == "TN" else right
        sums = product(left, right)
        finish_(out, sums, left_factor, right_factor, bias)
        return None

    def _values(self, operand: GemmSide, buffers: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return values of the logical shape, and factors for the sums (one, or one a line)."""
        quantizer: Any = operand.quantizer
        if quantizer is None:
            return buffers[0], None
        buffers, factor = without_line_factors(quantizer, buffers, operand.global_buffer)
        if operand.rotated:
            # Rotated alike, both sides give the product of the tensors without being rotated back.
            quantizer = dataclasses.replace(quantizer, with_rht=False)
        values = torch.empty(operand.shape, dtype=self.dtype, device=buffers[0].device)
        columnwise = operand.columnwise
        if not table.dequantize_(
            quantizer, buffers, operand.shape, values, Part(columnwise=columnwise)
        ):
            values.copy_(quantizer.decode(by_name(quantizer, buffers), operand.shape, columnwise))
        return values, factor


def finish_(
    out: Tensor,
    sums: Tensor,
    row_factor: Tensor | None,
    column_factor: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Write float32 sums (..., M, N), times factors, plus a bias, rounded once.

    A factor is one number, or one for each row or column.
    """
    device = out.device.type
    if table.floats_("finish_product", device, out, sums, row_factor, column_factor, bias):
        return
    if row_factor is not None:
        many = row_factor.numel() > 1
        sums = sums * (row_factor.reshape(*sums.shape[:-1], 1) if many else row_factor)
    if column_factor is not None:
        sums = sums * column_factor
    out.copy_(sums if bias is None else sums + bias.float())


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of 16-bit operands in float32; each product of elements is exact."""
    if not a.is_cuda:
        return matmul(a.float(), b.float(), None, None)
    if b.ndim == 2:
        rows = a.reshape(a.shape[:-1].numel(), a.shape[-1])
        flat = torch.mm(rows, b, out_dtype=torch.float32)
        return flat.view(*a.shape[:-1], b.shape[-1])
    batch = a.shape[:-2]
    left, right = a.reshape(-1, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    result = torch.bmm(left, right.reshape(-1, *b.shape[-2:]), out_dtype=torch.float32)
    return result.view(*batch, *result.shape[-2:])
