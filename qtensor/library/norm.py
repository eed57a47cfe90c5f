"""The ops ``norm``, ``norm_backward`` and ``bias_grad``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.errors import DtypeError, check, fail
from qtensor.kernels import table
from qtensor.library.define import below_autograd, leaf_op
from qtensor.reference.arithmetic import column_sums, write_
from qtensor.reference.norm import KINDS, gain, matrix, norm_, norm_backward_

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KINDS_RULE = f"kind must be {' or '.join(KINDS)}"


def check_tensor(op: str, name: str, t: Tensor) -> None:
    """Refuse what has no last dim, and dtypes other than those of the formats.

    Raises:
        DtypeError: dtype or layout.
        QTensorError: 0-d.
    """
    if t.dtype in DTYPES and t.layout is torch.strided and t.ndim:
        return
    check(
        t.dtype in DTYPES and t.layout is torch.strided,
        op,
        f"{name} must be dense, float32, bfloat16 or float16",
        f"{t.dtype}, {t.layout}",
        "Convert it first",
        DtypeError,
    )
    rule, fix = f"{name} must have a last dim", "Reshape it, for example to (1,)"
    check(t.ndim > 0, op, rule, "a 0-d tensor", fix)


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
    """What every op over a norm checks.

    Raises:
        QTensorError: kind or shapes.
        DtypeError: a dtype other than float32, bfloat16 and float16.
    """
    check(kind in KINDS, op, _KINDS_RULE, repr(kind), "Choose one of them")
    check_tensor(op, "x", x)
    _check_vector(op, "weight", weight, x.shape[-1])
    _check_vector(op, "bias", bias, x.shape[-1])
    rule = "the result's dtype must be float32, bfloat16 or float16"
    check(dtype in DTYPES, op, rule, dtype, "Ask for one of them", DtypeError)


def alloc_stats(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Mean and rstd of every row."""
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
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
    return torch.empty(args.x.shape, dtype=args.dtype, device=args.x.device), *alloc_stats(
        args.x, args.kind
    )


def _norm_fill(outputs: tuple[Tensor, Tensor, Tensor], args: NormArgs) -> None:
    settings = (args.kind, args.eps, args.zero_centered_gamma)
    if table.floats_("norm", args.x.device.type, outputs, args.x, args.weight, args.bias, settings):
        return
    with below_autograd():
        norm_(
            outputs,
            args.x,
            gain(args.weight, args.zero_centered_gamma),
            args.bias,
            args.kind,
            args.eps,
        )


NORM = leaf_op(
    "norm(Tensor x, Tensor? weight, Tensor? bias, str kind, float eps, bool zero_centered_gamma, "
    "ScalarType dtype) -> (Tensor y, Tensor mean, Tensor rstd)",
    NormArgs,
    _norm_alloc,
    _norm_fill,
)
"""Compute LayerNorm or RMSNorm over the last dim, with float32 mean and rstd for backward.

The mean is (0,) for "rmsnorm".
"""


class NormBackwardArgs(NamedTuple):
    """Arguments of the op ``norm_backward``."""

    dy: Tensor
    x: Tensor
    weight: Tensor | None
    mean: Tensor
    rstd: Tensor
    kind: str
    zero_centered_gamma: bool
    bias: bool


def _norm_backward_alloc(args: NormBackwardArgs) -> tuple[Tensor, Tensor, Tensor]:
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
    return torch.empty(args.x.shape, dtype=args.x.dtype, device=args.x.device), dweight, dbias


def _norm_backward_fill(outputs: tuple[Tensor, Tensor, Tensor], args: NormBackwardArgs) -> None:
    stats = (args.mean if args.kind == "layernorm" else None, args.rstd)
    arguments = (outputs, args.dy, args.x, args.weight, stats, args.zero_centered_gamma)
    if table.floats_("norm_backward", args.x.device.type, *arguments):
        return
    with below_autograd():
        norm_backward_(outputs, args.dy, args.x, gain(args.weight, args.zero_centered_gamma), stats)


NORM_BACKWARD = leaf_op(
    "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, str kind, "
    "bool zero_centered_gamma, bool bias) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    NormBackwardArgs,
    _norm_backward_alloc,
    _norm_backward_fill,
)
"""Compute the gradients of ``norm``; absent gradients of weight and bias are (0,)."""


class BiasGradArgs(NamedTuple):
    """Arguments of the op ``bias_grad``."""

    dy: Tensor


def _bias_grad_alloc(args: BiasGradArgs) -> Tensor:
    check_tensor("bias_grad", "dy", args.dy)
    return torch.empty(args.dy.shape[-1:], dtype=args.dy.dtype, device=args.dy.device)


def _bias_grad_fill(out: Tensor, args: BiasGradArgs) -> None:
    if table.floats_("bias_grad", args.dy.device.type, out, args.dy):
        return
    with below_autograd():
        write_(out, column_sums(matrix(args.dy)))


BIAS_GRAD = leaf_op(
    "bias_grad(Tensor dy) -> Tensor", BiasGradArgs, _bias_grad_alloc, _bias_grad_fill
)
"""The sum over all leading dims: float32 in a fixed order, one rounding to the dtype of ``dy``."""
