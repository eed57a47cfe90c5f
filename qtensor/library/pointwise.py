"""Define small ops of sequences whose rounding compiled code must not fuse away."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import check
from qtensor.library.checks import check_one
from qtensor.library.define import empty, leaf_op
from qtensor.library.norm import check_tensor
from qtensor.reference.arithmetic import row_sums, square_root
from qtensor.reference.philox import random_words
from qtensor.reference.scaling import quotient

_DROPOUT_STREAM = 2
"""0 and 1 are those of rowwise and columnwise data."""


def _check_same(op: str, a: Tensor, b: Tensor) -> None:
    check_tensor(op, "x", a)
    rule = "both tensors must have one shape and dtype"
    got = f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
    check(a.shape == b.shape and a.dtype == b.dtype, op, rule, got, "Fix one of them")


class _AddArgs(NamedTuple):
    x: Tensor
    y: Tensor


def _add_alloc(args: _AddArgs) -> Tensor:
    _check_same("add", args.x, args.y)
    return empty(args.x)


def _add_fill(out: Tensor, args: _AddArgs) -> None:
    torch.add(args.x, args.y, out=out)


ADD = leaf_op("add", _AddArgs, "Tensor", _add_alloc, _add_fill)
"""``x + y`` of two tensors (..., K)."""


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x + y``, by the op if a compiler could fuse the rounding.

    Both tensors have one shape (..., K) and dtype.
    """
    return ADD(x, y) if torch.compiler.is_compiling() else torch.add(x, y)


class _ScaleArgs(NamedTuple):
    x: Tensor
    factor: float


def _scale_alloc(args: _ScaleArgs) -> Tensor:
    check_tensor("scale", "x", args.x)
    return empty(args.x)


def _scale_fill(out: Tensor, args: _ScaleArgs) -> None:
    torch.mul(args.x, args.factor, out=out)


SCALE = leaf_op("scale", _ScaleArgs, "Tensor", _scale_alloc, _scale_fill)
"""``x * factor``, (..., K)."""


class _ScaleAddArgs(NamedTuple):
    x: Tensor
    factor: float
    y: Tensor


def _scale_add_alloc(args: _ScaleAddArgs) -> Tensor:
    _check_same("scale_add", args.x, args.y)
    return empty(args.x)


def _scale_add_fill(out: Tensor, args: _ScaleAddArgs) -> None:
    torch.mul(args.x, args.factor, out=out).add_(args.y)


SCALE_ADD = leaf_op("scale_add", _ScaleAddArgs, "Tensor", _scale_add_alloc, _scale_add_fill)
"""``add(scale(x, factor), y)``, with both roundings."""


class _BiasAddArgs(NamedTuple):
    x: Tensor
    bias: Tensor
    dtype: torch.dtype


def _bias_add_alloc(args: _BiasAddArgs) -> Tensor:
    check_tensor("bias_add", "x", args.x)
    rule = "the bias must have the size of the last dim"
    got = f"{tuple(args.bias.shape)} for {tuple(args.x.shape)}"
    check(args.bias.shape == args.x.shape[-1:], "bias_add", rule, got, "Fix one of them")
    return empty(args.x, dtype=args.dtype)


def _bias_add_fill(out: Tensor, args: _BiasAddArgs) -> None:
    out.copy_(args.x.float() + args.bias.float())


BIAS_ADD = leaf_op("bias_add", _BiasAddArgs, "Tensor", _bias_add_alloc, _bias_add_fill)
"""``x + bias``, (..., K) and (K,), in float32, rounded once."""


class _DropoutArgs(NamedTuple):
    x: Tensor
    p: float
    seed: Tensor


def _dropout_alloc(args: _DropoutArgs) -> Tensor:
    check_tensor("dropout", "x", args.x)
    check(0 <= args.p <= 1, "dropout", "p must be from 0 to 1", args.p, "Pass a probability")
    check_one("dropout", "seed", args.seed, torch.int64)
    return empty(args.x)


def _dropout_fill(out: Tensor, args: _DropoutArgs) -> None:
    words = random_words(args.seed, args.x.numel(), _DROPOUT_STREAM)
    kept = words.view(args.x.shape) >= round(args.p * 2**32)
    factor = 0.0 if args.p == 1.0 else 1.0 / (1.0 - args.p)
    out.copy_(torch.where(kept, args.x.float() * factor, 0.0))


DROPOUT = leaf_op("dropout", _DropoutArgs, "Tensor", _dropout_alloc, _dropout_fill)
"""Return 0 with probability ``p``, else ``x / (1 - p)``; the op is its own backward."""


class _L2NormArgs(NamedTuple):
    x: Tensor
    eps: float


def _l2_norm_alloc(args: _L2NormArgs) -> tuple[Tensor, Tensor]:
    check_tensor("l2_norm", "x", args.x)
    return empty(args.x), empty(args.x, args.x.shape[:-1], torch.float32)


def _l2_norm_fill(outputs: tuple[Tensor, Tensor], args: _L2NormArgs) -> None:
    values = args.x.float()
    squares = row_sums((values * values).reshape(outputs[1].numel(), args.x.shape[-1])).view(
        args.x.shape[:-1]
    )
    outputs[1].copy_(quotient(1.0, square_root(squares.clamp(min=args.eps))))
    outputs[0].copy_(values * outputs[1].unsqueeze(-1))


L2_NORM = leaf_op("l2_norm", _L2NormArgs, "(Tensor y, Tensor rnorm)", _l2_norm_alloc, _l2_norm_fill)
"""``x / sqrt(max(sum(x^2), eps))`` over the last dim, and the float32 reciprocals of the norms."""


class _L2NormBackwardArgs(NamedTuple):
    dy: Tensor
    x: Tensor
    rnorm: Tensor
    eps: float


def _l2_norm_backward_alloc(args: _L2NormBackwardArgs) -> Tensor:
    _check_same("l2_norm_backward", args.dy, args.x)
    return empty(args.x)


def _l2_norm_backward_fill(dx: Tensor, args: _L2NormBackwardArgs) -> None:
    values, grads, r = args.x.float(), args.dy.float(), args.rnorm.unsqueeze(-1)
    dots = row_sums((values * grads).reshape(args.rnorm.numel(), args.x.shape[-1])).view(
        *args.x.shape[:-1], 1
    )
    # Below eps the norm is a constant, and so is the factor.
    moving = torch.where(r * r * args.eps < 1.0, r * r * dots, 0.0)
    dx.copy_((grads - values * moving) * r)


L2_NORM_BACKWARD = leaf_op(
    "l2_norm_backward",
    _L2NormBackwardArgs,
    "Tensor",
    _l2_norm_backward_alloc,
    _l2_norm_backward_fill,
)
"""Return the gradient (..., K) of ``l2_norm`` from ``dy`` and ``x`` (..., K), ``rnorm`` (...,)."""
