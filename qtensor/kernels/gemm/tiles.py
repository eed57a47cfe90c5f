"""Products with a large quantized weight on a CPU: decode a tile of rows, multiply, and go on.

The whole weight is never decoded at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.kernels import table
from qtensor.kernels.cpu.native import Part
from qtensor.kernels.gemm.problem import Problem, global_buffer
from qtensor.layout import Shape, rows_cols
from qtensor.reference.gemm import matmul
from qtensor.reference.scaling import quotient
from qtensor.registry import QuantizerLike, parse, transposed

SMALL = 1 << 18
"""A weight of at most this many elements is decoded as a whole: tiles cost more than they save."""
TILE_BYTES = 16 << 20
"""Size of a tile of decoded rows: large enough that a matmul runs at its full speed."""


class GemmRows(NamedTuple):
    """A matrix as rows along the contraction: its quantizer (None: plain), buffers and shape."""

    quantizer: QuantizerLike | None
    buffers: list[Tensor]
    shape: Shape


def is_large(shape: Shape, least: int = SMALL) -> bool:
    """Return whether a shape is that of a matrix of more than ``least`` elements."""
    return len(shape) == 2 and shape[0] * shape[1] > least


def refusal(problem: Problem, least: int = SMALL) -> str | None:
    """Return why the rows of a weight cannot be read a few at a time, or None.

    Args:
        problem: the product.
        least: a weight has more than this many elements.
    """
    a, b = problem.a, problem.b
    if problem.capability is not None or not problem.device.startswith("cpu"):
        return "it runs on CPUs"
    if problem.layout == "NT":
        return "layout NT has no weight as its right operand"
    if b.quantizer is None:
        return "the right operand is not quantized"
    if not is_large(b.shape, least):
        return f"the right operand is not a matrix of more than {least} elements"
    if problem.bias is not None and len(problem.bias[0]) > 1:
        return f"the bias must be one value or one a column; got {problem.bias[0]}"
    if a.quantizer is not None and not a.quantizer.rowwise:
        return "the left operand has no rowwise data"
    twin = rows_quantizer(problem)
    if b.side != ("_rowwise" if problem.layout == "TN" else "_columnwise") or not twin.rowwise:
        return "the data of the right operand do not run along the contraction"
    return table.refusal(twin, torch.float32, "cpu")


def rows_quantizer(problem: Problem) -> QuantizerLike:
    """Return the quantizer of the right operand as rows along the contraction."""
    assert problem.b.quantizer is not None  # noqa: S101 - refusal() has seen to it
    return problem.b.quantizer if problem.layout == "TN" else _twin(problem.b.canonical)


def _twin(canonical: str) -> QuantizerLike:
    """Return the quantizer of the transpose of a matrix."""
    twin: QuantizerLike = parse(canonical).transpose_plan[0]
    return twin


def rows_of_both(problem: Problem, a: list[Tensor], b: list[Tensor]) -> tuple[GemmRows, GemmRows]:
    """Return both operands as rows along the contraction: (..., M, K) and (N, K)."""
    left = GemmRows(problem.a.quantizer, a, problem.a.shape)
    assert problem.b.quantizer is not None  # noqa: S101 - refusal() has seen to it
    if problem.layout == "TN":
        return left, GemmRows(problem.b.quantizer, b, problem.b.shape)
    twin, rows = transposed(problem.b.quantizer, b)
    return left, GemmRows(twin, rows, problem.b.shape[::-1])


class Tiles:
    """Tiles of rows of the weight, decoded and multiplied in float32."""

    name = "tiles"
    detail = ""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        """Return why tiles do not serve a problem, or None."""
        return refusal(problem)

    def __call__(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write ``out`` (..., N); or return why these tensors cannot be taken."""
        left_rows, weight = rows_of_both(self.problem, a, b)
        left, factor = decoded(left_rows, torch.float32)
        if left is None:
            return "no kernel decodes the left operand"
        rows, cols = weight.shape
        step = max(1, min(rows, TILE_BYTES // (cols * left.dtype.itemsize)))
        tile = torch.empty((step, cols), dtype=left.dtype)
        left, result = left.reshape(rows_cols(left_rows.shape)), out.view(-1, rows)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            part = Part(first, count, columnwise=False)
            arguments = weight.quantizer, weight.buffers, weight.shape, tile[:count], part
            if not table.dequantize_(*arguments):
                return "no kernel decodes these buffers of the right operand"
            product = matmul(left, tile[:count].t(), None, None)
            if factor is not None:
                product = product * factor.unsqueeze(-1)
            if bias is not None:
                product = product + bias.expand(rows)[first : first + count].float()
            result[:, first : first + count] = product
        return None


def decoded(matrix: GemmRows, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return the values of a matrix in ``dtype``, and the factors that must still be applied.

    Args:
        matrix: (..., K), quantized rowwise or plain.
        dtype: of the values.

    Returns:
        Values (..., K), or None if no kernel decodes them. Factors: float32 (1,) or one for each
        row, or None if the values contain all of them.
    """
    quantizer, buffers = matrix.quantizer, list(matrix.buffers)
    if quantizer is None:
        return buffers[0].to(dtype).contiguous(), None
    factor = None
    for i, slot in enumerate(quantizer.slots[: len(buffers)]):
        if slot.name == "_scale_inv" and getattr(quantizer, "axis", -1) == -1:
            factor = buffers[i].reshape(-1).contiguous()
            buffers[i] = torch.ones_like(buffers[i])
        elif slot.name == global_buffer(quantizer, "_rowwise"):
            divisor = quantizer.global_divisor  # type: ignore[attr-defined]
            factor = quotient(buffers[i], divisor).contiguous()
            buffers[i] = torch.full_like(buffers[i], divisor)
    values = torch.empty(tuple(matrix.shape), dtype=dtype)
    if not table.dequantize_(quantizer, buffers, matrix.shape, values, Part(columnwise=False)):
        return None, None
    return values, factor
