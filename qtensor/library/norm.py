"""The ops ``norm``, ``norm_backward`` and ``bias_grad``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import DtypeError, check, fail
from qtensor.kernels import table
from qtensor.library.define import empty, leaf_op
from qtensor.library.quantize import INPUT_DTYPES
from qtensor.reference.arithmetic import column_sums, write_
from qtensor.reference.norm import KINDS, gain, matrix, norm_, norm_backward_

_KINDS_RULE = f"kind must be {' or '.join(KINDS)}"


def check_tensor(op: str, name: str, t: Tensor) -> None:
    """Refuse a tensor without a last dim, and dtypes other than those of the formats.

    Raises:
        DtypeError: dtype or layout.
        QTensorError: 0-d.
    """
    if t.dtype not in INPUT_DTYPES or t.layout is not torch.strided:
        rule = f"{name} must be dense, float32, bfloat16 or float16"
        fail(op, rule, f"{t.dtype}, {t.layout}", "Convert it first", DtypeError)
    if not t.ndim:
        fail(op, f"{name} must have a last dim", "a 0-d tensor", "Reshape it, for example to (1,)")


def _check_vector(op: str, name: str, t: Tensor | None, size: int) -> None:
    if t is None:
        return
    check_tensor(op, name, t)
    if t.shape != (size,):
        rule = f"{name} must have the size of the last dim"
        fail(op, rule, f"{tuple(t.shape)} for {size}", f"Pass {name} of that size")


def check_norm(
    op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, dtype: torch.dtype
) -> None:
    """Refuse arguments that no op over a norm takes: ``x`` (..., K), weight and bias (K,).

    Raises:
        QTensorError: kind or shapes.
        DtypeError: a dtype other than float32, bfloat16 and float16.
    """
    check(kind in KINDS, op, _KINDS_RULE, repr(kind), "Choose one of them")
    check_tensor(op, "x", x)
    _check_vector(op, "weight", weight, x.shape[-1])
    _check_vector(op, "bias", bias, x.shape[-1])
    rule = "the result's dtype must be float32, bfloat16 or float16"
    check(dtype in INPUT_DTYPES, op, rule, dtype, "Ask for one of them", DtypeError)


def alloc_stats(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Allocate float32 mean and rstd (...,) of rows of ``x`` (..., K); mean (0,) for rmsnorm."""
    rstd = empty(x, x.shape[:-1], torch.float32)
    return (torch.empty_like(rstd) if kind == "layernorm" else rstd.new_empty(0)), rstd


class NormArgs(NamedTuple):
    """Arguments of the op ``norm``."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    kind: str
    eps: float
    zero_centered_gamma: bool
    dtype: torch.dtype


def _norm_alloc(args: NormArgs) -> tuple[Tensor, Tensor, Tensor]:
    check_norm("norm", args.x, args.weight, args.bias, args.kind, args.dtype)
    return empty(args.x, dtype=args.dtype), *alloc_stats(args.x, args.kind)


def _norm_fill(outputs: tuple[Tensor, Tensor, Tensor], args: NormArgs) -> None:
    settings = (args.kind, args.eps, args.zero_centered_gamma)
    if table.floats_("norm", args.x.device.type, outputs, args.x, args.weight, args.bias, settings):
        return
    factor = gain(args.weight, args.zero_centered_gamma)
    norm_(outputs, args.x, factor, args.bias, args.kind, args.eps)


_OUTPUTS = "(Tensor y, Tensor mean, Tensor rstd)"
NORM = leaf_op("norm", NormArgs, _OUTPUTS, _norm_alloc, _norm_fill)
"""Compute LayerNorm or RMSNorm over the last dim of ``x`` (..., K).

``weight`` and ``bias`` are (K,). Returns y (..., K), and float32 mean and rstd (...,) for backward;
the mean is (0,) for "rmsnorm".
"""


class _NormBackwardArgs(NamedTuple):
    dy: Tensor
    x: Tensor
    weight: Tensor | None
    mean: Tensor
    rstd: Tensor
    kind: str
    zero_centered_gamma: bool
    bias: bool


def _norm_backward_alloc(args: _NormBackwardArgs) -> tuple[Tensor, Tensor, Tensor]:
    op = "norm_backward"
    check_norm(op, args.x, args.weight, None, args.kind, args.x.dtype)
    check_tensor(op, "dy", args.dy)
    if args.dy.shape != args.x.shape:
        got = f"{tuple(args.dy.shape)}, {tuple(args.x.shape)}"
        fail(op, "dy must have the shape of x", got, "Reshape it")
    for name, t in (("mean", args.mean), ("rstd", args.rstd))[args.kind == "rmsnorm" :]:
        if t.dtype is not torch.float32 or t.shape != args.x.shape[:-1]:
            rule = f"{name} must be what norm returned, float32 of the leading dims of x"
            fail(op, rule, f"{t.dtype} {tuple(t.shape)}", "Pass it as it is")
    like = args.dy if args.weight is None else args.weight
    size = args.x.shape[-1]
    dweight = like.new_empty(0 if args.weight is None else size)
    dbias = like.new_empty(size if args.bias else 0)
    return empty(args.x), dweight, dbias


def _norm_backward_fill(outputs: tuple[Tensor, Tensor, Tensor], args: _NormBackwardArgs) -> None:
    stats = (args.mean if args.kind == "layernorm" else None, args.rstd)
    arguments = (outputs, args.dy, args.x, args.weight, stats, args.zero_centered_gamma)
    if table.floats_("norm_backward", args.x.device.type, *arguments):
        return
    norm_backward_(outputs, args.dy, args.x, gain(args.weight, args.zero_centered_gamma), stats)


_GRADIENTS = "(Tensor dx, Tensor dweight, Tensor dbias)"
NORM_BACKWARD = leaf_op(
    "norm_backward", _NormBackwardArgs, _GRADIENTS, _norm_backward_alloc, _norm_backward_fill
)
"""Compute the gradients of ``norm``; absent gradients of weight and bias are (0,)."""


class BiasGradArgs(NamedTuple):
    """Arguments of the op ``bias_grad``."""

    dy: Tensor


def _bias_grad_alloc(args: BiasGradArgs) -> Tensor:
    check_tensor("bias_grad", "dy", args.dy)
    return empty(args.dy, args.dy.shape[-1:])


def _bias_grad_fill(out: Tensor, args: BiasGradArgs) -> None:
    if table.floats_("bias_grad", args.dy.device.type, out, args.dy):
        return
    write_(out, column_sums(matrix(args.dy)))


BIAS_GRAD = leaf_op("bias_grad", BiasGradArgs, "Tensor", _bias_grad_alloc, _bias_grad_fill)
"""Return the sum (N,) of ``dy`` (..., N): float32 in a fixed order, rounded once to its dtype."""
