"""Products of decoded operands in float32: the backend that serves every problem."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import by_name
from qtensor.kernels import table
from qtensor.kernels.cpu.native import Part
from qtensor.kernels.products.problem import GemmSide, Problem
from qtensor.reference.gemm import matmul, matmul_


class Reference:
    """Both operands decoded to float32, and one matmul."""

    name = "reference"
    detail = ": operands are decoded and multiplied in float32"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        """Return None: the reference serves every problem."""
        return None

    def __call__(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write ``out``; never refuses."""
        problem = self.problem
        left, left_factor = _values(problem.a, a)
        right, right_factor = _values(problem.b, b)
        factor = left_factor if right_factor is None else right_factor
        if left_factor is not None and right_factor is not None:
            factor = left_factor * right_factor
        left = left.mT if problem.layout == "NT" else left
        right = right.mT if problem.layout == "TN" else right
        if out.dtype == torch.float32 and out.ndim == left.ndim == right.ndim == 2:
            matmul_(out, left, right, factor, bias)
        else:
            out.copy_(matmul(left, right, factor, bias))
        return None


@functools.cache
def _part(columnwise: bool | None, codes_only: bool) -> Part:
    return Part(columnwise=columnwise, codes_only=codes_only)


def _values(side: GemmSide, buffers: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the float32 values of an operand, and the (1,) factor that they lack, if any."""
    quantizer = side.quantizer
    if quantizer is None:
        return buffers[0].float(), None
    size = side.shape
    values = torch.empty(size, dtype=torch.float32, device=buffers[0].device)
    part = _part(side.columnwise, quantizer.per_tensor)
    if table.dequantize_(quantizer, buffers, size, values, part):
        scale = by_name(quantizer, buffers)["_scale_inv"] if quantizer.per_tensor else None
        return values, scale
    decoded = table.decode_rows(Operand(buffers, side.canonical, size), torch.float32)
    if decoded is not None:
        return decoded, None
    named = by_name(quantizer, buffers)
    if quantizer.per_tensor:
        return quantizer.decode_codes(named, size)
    return quantizer.decode(named, size, side.columnwise), None
