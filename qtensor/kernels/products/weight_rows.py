"""Read the weight of a product by rows along the contraction, and decide which products allow it.

The decisions need the description of a product, not its data.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import QuantizerLike, parse
from qtensor.kernels import table
from qtensor.kernels.cpu.native import MOST_ROWS
from qtensor.kernels.products.problem import GemmSide, Problem
from qtensor.kernels.products.stacks import batch_refusal, of_each

NOT_ADJACENT = "the codes of a row of the quantized operand are not adjacent in memory"
"""The reason why few rows of x are not multiplied with a transposed view of a weight."""


def rows_refusal(problem: Problem) -> str | None:
    """Return why the rows of a weight cannot be read a few at a time, or None."""
    a, b = problem.a, problem.b
    if problem.capability is not None or not problem.device.startswith("cpu"):
        return "it runs on CPUs"
    if problem.layout == "NT":
        return "layout NT has no weight as its right operand"
    if b.quantizer is None:
        return "the right operand is not quantized"
    if len(b.shape) != 2:
        return "the right operand is a batch of matrices"
    if a.quantizer is not None and not a.quantizer.rowwise:
        return "the left operand has no rowwise data"
    twin = rows_quantizer(problem)
    along = "_rowwise" if problem.layout == "TN" else "_columnwise"
    same_values = b.quantizer.spec.transpose_shares_bytes
    if not twin.rowwise or (b.side != along and not same_values):
        return "the data of the right operand do not run along the contraction"
    return table.refusal(twin, torch.float32, "cpu")


def few_rows_refusal(problem: Problem) -> str | None:
    """Return why a product lacks the order of sums of few rows (docs/numerics.md), or None."""
    if problem.batched and problem.layout != "NT" and problem.b.quantizer is not None:
        reason = batch_refusal(problem)
        if reason is not None:
            return reason
        problem = of_each(problem)
    problem = mirrored(problem) or problem
    reason = rows_refusal(problem)
    if reason is not None:
        return reason
    rows = math.prod(problem.a.shape[:-1])
    if not 0 < rows <= MOST_ROWS:
        return f"it serves 1 to {MOST_ROWS} rows; got {rows}"
    if 0 in problem.b.shape:
        return "the weight has no elements"
    if problem.b.rotated:
        return f"the values of {problem.b.canonical} must be rotated back"
    if getattr(rows_quantizer(problem), "axis", -1) != -1:
        return f"the factors of {problem.b.canonical} run along the contraction"
    return NOT_ADJACENT if problem.b.strided else None


def with_strides(side: GemmSide, operand: Operand) -> GemmSide:
    """Return the side of a matrix, with ``strided`` set if the codes of a sum are not adjacent."""
    if side.quantizer is None or len(side.shape) != 2:
        return side
    rows = operand if side.contracted == -1 else operand.transpose()
    rowwise = rows.quantizer is not None and rows.quantizer.rowwise
    return dataclasses.replace(side, strided=rowwise and rows.buffers[0].stride(-1) != 1)


def mirrored(problem: Problem) -> Problem | None:
    """Return ``w @ x.T`` as ``x @ w.T`` if only the left operand is a quantized matrix."""
    a, b = problem.a, problem.b
    if a.quantizer is None or b.quantizer is not None or problem.layout == "NT" or problem.bias:
        return None
    if len(a.shape) != 2 or len(b.shape) != 2:
        return None
    rows = b.shape if problem.layout == "TN" else b.shape[::-1]
    left = GemmSide("", rows, b.dtype, None, -1)
    right = GemmSide(a.canonical, a.shape, a.dtype, None, -1, a.strided)
    return dataclasses.replace(problem, a=left, b=right, layout="TN")


def rows_quantizer(problem: Problem) -> QuantizerLike:
    """Return the quantizer of the right operand as rows along the contraction."""
    assert problem.b.quantizer is not None  # noqa: S101 - refusal() has checked it
    return problem.b.quantizer if problem.layout == "TN" else _twin(problem.b.canonical)


def _twin(canonical: str) -> QuantizerLike:
    """Return the quantizer of the transpose of a matrix."""
    twin: QuantizerLike = parse(canonical).transpose_plan[0]
    return twin


def rows_of_both(problem: Problem, a: list[Tensor], b: list[Tensor]) -> tuple[Operand, Operand]:
    """Return both operands as rows along the contraction: (..., M, K) and (N, K)."""
    left = Operand(a, problem.a.canonical, problem.a.shape)
    right = Operand(b, problem.b.canonical, problem.b.shape)
    return left, right if problem.layout == "TN" else right.transpose()
