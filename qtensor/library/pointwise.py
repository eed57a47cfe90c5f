"""Small ops of sequences, each rounding where its name says so: compiled code must not fuse the rounding away."""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.errors import check
from qtensor.library.define import below_autograd, leaf_op
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
    check(a.shape == b.shape and a.dtype == b.dtype, op, rule, got, "Mend one of them")


def _empty(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def _add_alloc(x: Tensor, y: Tensor) -> Tensor:
    _check_same("add", x, y)
    return _empty(x)


def _add_fill(out: Tensor, x: Tensor, y: Tensor) -> None:
    with below_autograd():
        torch.add(x, y, out=out)


ADD = leaf_op("add(Tensor x, Tensor y) -> Tensor", _add_alloc, _add_fill)
"""``x + y``."""


def add(x: Tensor, y: Tensor) -> Tensor:
    """``x + y`` of tensors that are known to fit: by the op where a tracer could fuse the rounding away."""
    return ADD(x, y) if torch.compiler.is_compiling() else torch.add(x, y)


def _scale_alloc(x: Tensor, factor: float) -> Tensor:
    check_tensor("scale", "x", x)
    return _empty(x)


def _scale_fill(out: Tensor, x: Tensor, factor: float) -> None:
    with below_autograd():
        torch.mul(x, factor, out=out)


SCALE = leaf_op("scale(Tensor x, float factor) -> Tensor", _scale_alloc, _scale_fill)
"""``x * factor``."""


def _scale_add_alloc(x: Tensor, factor: float, y: Tensor) -> Tensor:
    _check_same("scale_add", x, y)
    return _empty(x)


def _scale_add_fill(out: Tensor, x: Tensor, factor: float, y: Tensor) -> None:
    with below_autograd():
        torch.mul(x, factor, out=out).add_(y)


SCALE_ADD = leaf_op(
    "scale_add(Tensor x, float factor, Tensor y) -> Tensor", _scale_add_alloc, _scale_add_fill
)
"""``add(scale(x, factor), y)``, with both roundings."""


def _bias_add_alloc(x: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    check_tensor("bias_add", "x", x)
    rule = "the bias must have the size of the last dim"
    got = f"{tuple(bias.shape)} for {tuple(x.shape)}"
    check(bias.shape == x.shape[-1:], "bias_add", rule, got, "Mend one of them")
    return _empty(x, dtype)


def _bias_add_fill(out: Tensor, x: Tensor, bias: Tensor, dtype: torch.dtype) -> None:
    with below_autograd():
        out.copy_(x.float() + bias.float())


BIAS_ADD = leaf_op(
    "bias_add(Tensor x, Tensor bias, ScalarType dtype) -> Tensor", _bias_add_alloc, _bias_add_fill
)
"""``x + bias`` over the last dim, in float32, rounded once."""


def _dropout_alloc(x: Tensor, p: float, seed: Tensor) -> Tensor:
    check_tensor("dropout", "x", x)
    return _empty(x)


def _dropout_fill(out: Tensor, x: Tensor, p: float, seed: Tensor) -> None:
    with below_autograd():
        words = random_words(seed, x.numel(), _DROPOUT_STREAM)
        kept = words.view(x.shape) >= round(p * 2**32)
        factor = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        out.copy_(torch.where(kept, x.float() * factor, 0.0))


DROPOUT = leaf_op(
    "dropout(Tensor x, float p, Tensor seed) -> Tensor", _dropout_alloc, _dropout_fill
)
"""Zero with probability ``p`` by the random word of the element's place, else ``x / (1 - p)``; its own backward."""


def _l2_norm_alloc(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    check_tensor("l2_norm", "x", x)
    return _empty(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _l2_norm_fill(outputs: tuple[Tensor, Tensor], x: Tensor, eps: float) -> None:
    with below_autograd():
        values = x.float()
        squares = row_sums((values * values).reshape(outputs[1].numel(), x.shape[-1])).view(
            x.shape[:-1]
        )
        outputs[1].copy_(quotient(1.0, square_root(squares.clamp(min=eps))))
        outputs[0].copy_(values * outputs[1].unsqueeze(-1))


L2_NORM = leaf_op(
    "l2_norm(Tensor x, float eps) -> (Tensor y, Tensor rnorm)", _l2_norm_alloc, _l2_norm_fill
)
"""``x / sqrt(max(sum(x^2), eps))`` over the last dim, and the float32 reciprocals of the norms."""


def _l2_norm_backward_alloc(dy: Tensor, x: Tensor, rnorm: Tensor, eps: float) -> Tensor:
    _check_same("l2_norm_backward", dy, x)
    return _empty(x)


def _l2_norm_backward_fill(dx: Tensor, dy: Tensor, x: Tensor, rnorm: Tensor, eps: float) -> None:
    with below_autograd():
        values, grads, r = x.float(), dy.float(), rnorm.unsqueeze(-1)
        dots = row_sums((values * grads).reshape(rnorm.numel(), x.shape[-1])).view(*x.shape[:-1], 1)
        # Below eps the norm is a constant, and so is the factor.
        moving = torch.where(r * r * eps < 1.0, r * r * dots, 0.0)
        dx.copy_((grads - values * moving) * r)


L2_NORM_BACKWARD = leaf_op(
    "l2_norm_backward(Tensor dy, Tensor x, Tensor rnorm, float eps) -> Tensor",
    _l2_norm_backward_alloc,
    _l2_norm_backward_fill,
)
"""The gradient of ``l2_norm``."""
