"""The ops ``norm``, ``norm_backward`` and ``bias_grad``."""

from __future__ import annotations

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
    check(t.ndim > 0, op, f"{name} must have a last dim", "a 0-d tensor", "Reshape it to (1,), say")


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


def _norm_alloc(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    check_norm("norm", x, weight, bias, kind, dtype)
    return torch.empty(x.shape, dtype=dtype, device=x.device), *alloc_stats(x, kind)


def _norm_fill(
    outputs: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
) -> None:
    settings = (kind, eps, zero_centered_gamma)
    if table.floats_("norm", x.device.type, outputs, x, weight, bias, settings):
        return
    with below_autograd():
        norm_(outputs, x, gain(weight, zero_centered_gamma), bias, kind, eps)


NORM = leaf_op(
    "norm(Tensor x, Tensor? weight, Tensor? bias, str kind, float eps, bool zero_centered_gamma, "
    "ScalarType dtype) -> (Tensor y, Tensor mean, Tensor rstd)",
    _norm_alloc,
    _norm_fill,
)
"""LayerNorm or RMSNorm over the last dim, and what backward needs: float32 mean ((0,) for "rmsnorm") and rstd."""


def _norm_backward_alloc(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    kind: str,
    zero_centered_gamma: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "norm_backward"
    check_norm(op, x, weight, None, kind, x.dtype)
    check_tensor(op, "dy", dy)
    if dy.shape != x.shape:
        got = f"{tuple(dy.shape)}, {tuple(x.shape)}"
        fail(op, "dy must have the shape of x", got, "Reshape it")
    for name, t in (("mean", mean), ("rstd", rstd))[kind == "rmsnorm" :]:
        if t.dtype is not torch.float32 or t.shape != x.shape[:-1]:
            rule = f"{name} must be what norm returned, float32 of the leading dims of x"
            fail(op, rule, f"{t.dtype} {tuple(t.shape)}", "Pass it as it is")
    like = dy if weight is None else weight
    size = x.shape[-1]
    dweight = like.new_empty(0 if weight is None else size)
    dbias = like.new_empty(size if bias else 0)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), dweight, dbias


def _norm_backward_fill(
    outputs: tuple[Tensor, Tensor, Tensor],
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    kind: str,
    zero_centered_gamma: bool,
    bias: bool,
) -> None:
    stats = (mean if kind == "layernorm" else None, rstd)
    arguments = (outputs, dy, x, weight, stats, zero_centered_gamma)
    if table.floats_("norm_backward", x.device.type, *arguments):
        return
    with below_autograd():
        norm_backward_(outputs, dy, x, gain(weight, zero_centered_gamma), stats)


NORM_BACKWARD = leaf_op(
    "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, str kind, "
    "bool zero_centered_gamma, bool bias) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _norm_backward_alloc,
    _norm_backward_fill,
)
"""Gradients of ``norm``; those of weight and bias are (0,) where there is none, else in the weight's dtype."""


def _bias_grad_alloc(dy: Tensor) -> Tensor:
    check_tensor("bias_grad", "dy", dy)
    return torch.empty(dy.shape[-1:], dtype=dy.dtype, device=dy.device)


def _bias_grad_fill(out: Tensor, dy: Tensor) -> None:
    if table.floats_("bias_grad", dy.device.type, out, dy):
        return
    with below_autograd():
        write_(out, column_sums(matrix(dy)))


BIAS_GRAD = leaf_op("bias_grad(Tensor dy) -> Tensor", _bias_grad_alloc, _bias_grad_fill)
"""The sum over all leading dims: float32 in a fixed order, one rounding to the dtype of ``dy``."""
