"""Products of few rows with a quantized weight on a CPU: decoding of text, small batches."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.native import MOST_ROWS, Rows
from qtensor.kernels.gemm import tiles
from qtensor.kernels.gemm.problem import GemmSide, Problem
from qtensor.kernels.gemm.tiles import decoded, rows_of_both, rows_quantizer
from qtensor.layout import rows_cols

SMALL = 1 << 16
"""A weight of at most this many elements is left to programs of small calls and the reference,
which have one order of sums between them."""


class FewRows:
    """Up to `MOST_ROWS` rows, multiplied with the codes of a weight that is read once.

    The order of the sums is a contract (docs/numerics.md): it is the same for every number of rows
    and threads and every instruction set.
    """

    name = "few_rows"
    detail = ": the weight is read once, in a fixed order of sums"

    def __init__(self, problem: Problem) -> None:
        self.mirrored = _mirrored(problem)
        self.problem = self.mirrored or problem

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        """Return why this backend does not serve a problem, or None."""
        return _refusal(_mirrored(problem) or problem)

    def __call__(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write ``out`` (..., N); or return why these tensors cannot be taken."""
        if self.mirrored is None:
            return self._multiply(out, a, b, bias)
        (rows, _), (columns, _) = self.problem.a.shape, self.problem.b.shape
        x = b[0] if b[0].shape == self.problem.a.shape else b[0].t()
        result = out.view(1, -1) if rows == 1 else out.new_empty(rows, columns)
        reason = self._multiply(result, [x], a, None)
        if reason is None and rows > 1:
            out.copy_(result.t())
        return reason

    def _multiply(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        left, weight = rows_of_both(self.problem, a, b)
        factor = None
        if left.quantizer is None:
            x = a[0].reshape(rows_cols(left.shape))
            if x.stride(1) != 1 or x.stride(0) < x.shape[1]:
                x = x.contiguous()
        else:
            values, factor = decoded(left, torch.float32)
            if values is None:
                return "no kernel decodes the left operand"
            x = values
        added = None if bias is None else bias.float().expand(weight.shape[0]).contiguous()
        if native.linear_(weight, Rows(x, factor), added, out, few=True):
            return None
        return "the buffers of the quantized operand are not those of a whole tensor or of its rows"


def _mirrored(problem: Problem) -> Problem | None:
    """Return ``w @ x.T`` as ``x @ w.T`` if only the left operand is a quantized matrix."""
    a, b = problem.a, problem.b
    if a.quantizer is None or b.quantizer is not None or problem.layout == "NT" or problem.bias:
        return None
    if len(a.shape) != 2 or len(b.shape) != 2:
        return None
    rows = b.shape if problem.layout == "TN" else b.shape[::-1]
    left = GemmSide("", rows, b.dtype, None, -1)
    right = GemmSide(a.canonical, a.shape, a.dtype, None, -1)
    return dataclasses.replace(problem, a=left, b=right, layout="TN")


def _refusal(problem: Problem) -> str | None:
    reason = tiles.refusal(problem, SMALL)
    if reason is not None:
        return reason
    rows = math.prod(problem.a.shape[:-1])
    if not 0 < rows <= MOST_ROWS:
        return f"it serves 1 to {MOST_ROWS} rows; got {rows}"
    if problem.b.rotated:
        return f"the values of {problem.b.canonical} must be rotated back"
    if getattr(rows_quantizer(problem), "axis", -1) != -1:
        return f"the factors of {problem.b.canonical} run along the contraction"
    dtypes = (problem.dtype,) if problem.a.quantizer else (problem.dtype, problem.a.dtype)
    unknown = [dtype for dtype in dtypes if dtype not in native.DTYPES]
    return f"no kernel for {unknown[0]}" if unknown else None
