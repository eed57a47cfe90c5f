"""Products with a large quantized weight on a CPU: decode a tile of rows, multiply, and go on.

The whole weight is never decoded at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, rows_cols
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import parse
from qtensor.kernels import table
from qtensor.kernels.cpu.native import Part
from qtensor.kernels.products.problem import Problem, global_buffer
from qtensor.kernels.products.reading import without_line_factors
from qtensor.kernels.products.weight_rows import rows_of_both, rows_refusal
from qtensor.reference.gemm import matmul

SMALL = 1 << 18
"""A weight of at most this many elements is decoded as a whole: tiles cost more than they save."""
TILE_BYTES = 16 << 20
"""Size of a tile of decoded rows: large enough that a matmul runs at its full speed."""


def is_large(shape: Shape) -> bool:
    """Return whether a shape is that of a matrix of more than ``SMALL`` elements."""
    return len(shape) == 2 and shape[0] * shape[1] > SMALL


def refusal(problem: Problem) -> str | None:
    """Return why the rows of a weight are not decoded a few at a time, or None."""
    reason = rows_refusal(problem)
    if reason is not None:
        return reason
    if not is_large(problem.b.shape):
        return f"the right operand is not a matrix of more than {SMALL} elements"
    if problem.bias is not None and len(problem.bias[0]) > 1:
        return f"the bias must be one value or one a column; got {problem.bias[0]}"
    return None


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
        quantizer, (rows, cols) = parse(weight.canonical), weight.shape
        step = max(1, min(rows, TILE_BYTES // (cols * left.dtype.itemsize)))
        tile = torch.empty((step, cols), dtype=left.dtype)
        left, result = left.reshape(rows_cols(left_rows.shape)), out.view(-1, rows)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            part = Part(first, count, columnwise=False)
            if not table.dequantize_(quantizer, weight.buffers, weight.shape, tile[:count], part):
                return "no kernel decodes these buffers of the right operand"
            product = matmul(left, tile[:count].t(), None, None)
            if factor is not None:
                product = product * factor.unsqueeze(-1)
            if bias is not None:
                product = product + bias.expand(rows)[first : first + count].float()
            result[:, first : first + count] = product
        return None


def decoded(
    matrix: Operand, dtype: torch.dtype, *, columnwise: bool = False, contracted: int = -1
) -> tuple[Tensor | None, Tensor | None]:
    """Return the values of a matrix in ``dtype``, and the factors that must still be applied.

    Args:
        matrix: (..., K), quantized or plain.
        dtype: of the values.
        columnwise: the direction that is read of a quantized matrix.
        contracted: the dim that the product sums over, -1 or -2.

    Returns:
        Values of the shape of the matrix, or None if no kernel decodes them. Factors: float32 (1,)
        or one for each line along ``contracted``; or None if the values contain all of them.
    """
    quantizer, buffers, factor = matrix.quantizer, matrix.buffers, None
    if quantizer is None:
        return buffers[0].to(dtype).contiguous(), None
    if getattr(quantizer, "axis", None) in (None, -1 if contracted == -1 else 0):
        global_name = global_buffer(quantizer, "_columnwise" if columnwise else "_rowwise")
        buffers, factor = without_line_factors(quantizer, buffers, global_name)
    values = torch.empty(tuple(matrix.shape), dtype=dtype)
    part = Part(columnwise=columnwise)
    if not table.dequantize_(quantizer, buffers, matrix.shape, values, part):
        return None, None
    return values, None if factor is None else factor.contiguous()
