"""The ops of a learned tensor-wide factor: ``learned_factor``, ``learned_factor_backward``.

The parameter is the binary logarithm of the largest magnitude that is encoded (the amax), so that
the factor is positive after each step of an optimizer. One opaque op computes the gradient, so that
its sum has one order in eager and compiled code.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import DtypeError, UnsupportedError, check, fail
from qtensor.core.quantizer_registry import QuantizerLike, by_name, parse
from qtensor.library.checks import check_one
from qtensor.library.define import SymInt, empty, leaf_op
from qtensor.library.quantize import INPUT_DTYPES, QUANTIZE, check_input
from qtensor.reference.arithmetic import row_sums
from qtensor.reference.blocks import as_matrix
from qtensor.reference.scaling import quotient

LEAST_LOG2, MOST_LOG2 = -40.0, 100.0
"""Logarithms are clamped to this range: amax and decode factor are then normal float32 numbers."""

_CPU_PART, _PART = 1 << 16, 1 << 24
"""Elements of a part of the gradient: it stays in a cache of a CPU, and fills a GPU."""
_SQUARE = 16
"""Rows of a part are whole square blocks."""


class _FactorArgs(NamedTuple):
    log2_amax: Tensor
    quantizer: str


class _BackwardArgs(NamedTuple):
    grad: Tensor
    x: Tensor
    log2_amax: Tensor
    quantizer: str
    count: SymInt  # type: ignore[assignment]  # shadows tuple.count


def _learned(op: str, canonical: str, log2_amax: Tensor) -> QuantizerLike:
    quantizer = parse(canonical)
    if not quantizer.learns_factor:
        rule = "a factor is learned for fp8 and nvfp4, rowwise, with one factor for the tensor"
        fail(op, rule, canonical, 'Pass for example "nvfp4"', UnsupportedError)
    check_one(op, "log2_amax", log2_amax, torch.float32)
    return quantizer


def _factor_alloc(args: _FactorArgs) -> list[Tensor]:
    _learned("learned_factor", args.quantizer, args.log2_amax)
    return [empty(args.log2_amax, (1,)) for _ in range(2)]


def _factor_fill(results: list[Tensor], args: _FactorArgs) -> None:
    log2_amax = args.log2_amax.reshape(1)
    # Reading the value of a GPU would wait for it; there, NaN reaches the outputs of the layer.
    if log2_amax.is_cpu and not math.isfinite(log2_amax.item()):
        rule, got = "a learned factor must be finite", f"log2_amax = {log2_amax.item()}"
        fix = "Lower the learning rate, clip gradients, or resume from an earlier checkpoint"
        fail("learned_factor", rule, got, fix)
    amax, scale_inv = results
    amax.copy_(log2_amax.double().clamp(LEAST_LOG2, MOST_LOG2).exp2())
    scale_inv.copy_(quotient(amax, parse(args.quantizer).largest_code))


def _backward_alloc(args: _BackwardArgs) -> list[Tensor]:
    op = "learned_factor_backward"
    quantizer = _learned(op, args.quantizer, args.log2_amax)
    check_input(args.x, quantizer.format)
    if args.grad.dtype not in INPUT_DTYPES or args.grad.layout is not torch.strided:
        rule = "grad must be a dense float32, bfloat16 or float16 tensor"
        fail(op, rule, f"{args.grad.layout} {args.grad.dtype}", "Convert it", DtypeError)
    got = f"{tuple(args.grad.shape)} for {tuple(args.x.shape)}"
    check(args.grad.shape == args.x.shape, op, "grad has the shape of x", got, "Pass such a grad")
    check(args.count > 0, op, "count is at least 1", args.count, "Pass a number of elements")
    return [empty(args.grad), empty(args.log2_amax, (1,))]


def _backward_fill(results: list[Tensor], args: _BackwardArgs) -> None:
    quantizer = parse(args.quantizer)
    amax, scale_inv = LEARNED_FACTOR(args.log2_amax, args.quantizer)
    encode = encode_arguments(quantizer.format, amax, scale_inv)
    factor, largest = scale_inv.double(), quantizer.largest_code
    matrix, grads = as_matrix(args.x), as_matrix(args.grad)
    to_x = as_matrix(results[0])
    sums = [factor.new_zeros(0, 1)]
    # Rows are independent: a part at a time bounds the memory of the float64 values.
    count = (_CPU_PART if matrix.is_cpu else _PART) // max(matrix.shape[1], 1)
    count = max(count // _SQUARE, 1) * _SQUARE
    for first in range(0, matrix.shape[0], count):
        rows = slice(first, first + count)
        x, grad = matrix[rows], grads[rows]
        buffers = by_name(quantizer, QUANTIZE(x, args.quantizer, *encode))
        slopes = quantizer.factor_slopes(buffers, x, factor)
        sums.append(row_sums(slopes.mul_(grad)))
        to_x[rows] = torch.where(x.double().abs() < largest * factor, grad, 0)
    total = row_sums(torch.cat(sums).t()).reshape(1)
    # d factor / d log2(amax) = factor * ln(2); the paper scales the gradient by the root.
    slope = factor * math.log(2) / math.sqrt(args.count * largest)
    results[1].copy_(total * slope)


def encode_arguments(
    format: str, amax: Tensor, scale_inv: Tensor
) -> tuple[Tensor | None, list[Tensor] | None]:
    """Return the ``scale`` and the ``amax`` with which ``quantize`` uses a factor of the caller."""
    return (scale_inv.reciprocal(), None) if format == "fp8" else (None, [amax])


LEARNED_FACTOR = leaf_op("learned_factor", _FactorArgs, "Tensor[]", _factor_alloc, _factor_fill)
"""Return the amax and the decode factor, both float32 (1,), of a binary logarithm (1,)."""

LEARNED_FACTOR_BACKWARD = leaf_op(
    "learned_factor_backward", _BackwardArgs, "Tensor[]", _backward_alloc, _backward_fill
)
"""Return the gradients of ``x``, in the dtype of ``grad``, and of ``log2_amax``, float32 (1,).

The gradient of ``x`` is 0 where the tensor's factor clips. ``count`` is N of the paper's scale. The
terms of ``log2_amax`` are float64; ``row_sums`` adds those of each row, and then the rows.
"""
