"""Products of few rows with a quantized weight on a CPU: decoding of text, small batches."""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import rows_cols
from qtensor.core.operand import Operand
from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.native import Rows
from qtensor.kernels.products.matrix_backend import MatrixBackend
from qtensor.kernels.products.problem import Problem
from qtensor.kernels.products.tiles import decoded
from qtensor.kernels.products.weight_rows import (
    NOT_ADJACENT,
    few_rows_refusal,
    mirrored,
    rows_of_both,
)

_FLOAT32 = torch.float32


class FewRows(MatrixBackend):
    """Up to `MOST_ROWS` rows, multiplied with the codes of a weight that is read once.

    The order of the sums is a contract (docs/numerics.md): it is the same for every number of rows
    and threads and every instruction set.
    """

    name = "few_rows"
    detail = ": the weight is read once, in a fixed order of sums"

    def __init__(self, problem: Problem) -> None:
        self.mirrored = mirrored(problem)
        super().__init__(self.mirrored or problem)
        self.layout = problem.layout

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        """Return why this backend does not serve a problem, or None."""
        return few_rows_refusal(problem)

    def __call__(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write ``out`` (..., N); or return why these tensors cannot be taken."""
        if self.mirrored is not None:
            return self._multiply_mirrored(out, a, b[0])
        return super().__call__(out, a, b, bias)

    def _multiply_mirrored(self, out: Tensor, weight: list[Tensor], x: Tensor) -> str | None:
        (rows, _), (columns, _) = self.problem.a.shape, self.problem.b.shape
        x = x if self.layout == "TN" else x.t()
        in_place, dtype = rows == 1 and self.finishes, out.dtype if self.finishes else _FLOAT32
        result = out.view(1, -1) if in_place else out.new_empty(rows, columns, dtype=dtype)
        reason = self.multiply(result, [x], weight, None)
        if reason is None and not in_place:
            out.copy_(result.t())
        return reason

    def multiply(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write a product of matrices; or return why these tensors cannot be taken."""
        left, weight = rows_of_both(self.problem, a, b)
        rows = _rows_of(left)
        if rows is None:
            return "no kernel decodes the left operand"
        added = None if bias is None else bias.float().expand(weight.shape[0]).contiguous()
        if native.linear_(weight, rows, added, out, kernel=native.FEW_ROWS):
            return None
        return NOT_ADJACENT


def _rows_of(left: Operand) -> Rows | None:
    """Return the left operand as the kernel reads it, or None if no kernel decodes it."""
    if not left.canonical:
        x = left.buffers[0].reshape(rows_cols(left.shape))
        x = x if x.dtype in native.DTYPES else x.float()
        if x.stride(1) != 1 or x.stride(0) < x.shape[1]:
            x = x.contiguous()
        return Rows(x)
    values, factor = decoded(left, _FLOAT32)
    return None if values is None else Rows(values, factor)
