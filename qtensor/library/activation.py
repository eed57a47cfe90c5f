"""The ops ``activation`` and ``activation_backward``."""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.errors import check
from qtensor.kernels import table
from qtensor.library.define import below_autograd, leaf_op
from qtensor.library.norm import check_tensor
from qtensor.reference.activation import GATED, KINDS, activation_, activation_backward_

_KINDS_RULE = f"kind must be one of {', '.join(KINDS)}"


def activated_shape(op: str, x: Tensor, kind: str) -> tuple[int, ...]:
    """The shape of the activation of ``x``: a gated kind halves the last dim.

    Raises:
        QTensorError: no such kind, 0-d, or a last dim that has no halves.
        DtypeError: dtype other than float32, bfloat16, float16.
    """
    check(kind in KINDS, op, _KINDS_RULE, repr(kind), "Choose one of them")
    check_tensor(op, "x", x)
    if kind not in GATED:
        return tuple(x.shape)
    size = x.shape[-1]
    rule = f"the last dim of {kind} must be even, its halves are activated and gate"
    check(size % 2 == 0, op, rule, size, "Pass both halves side by side")
    return (*x.shape[:-1], size // 2)


def _activation_alloc(x: Tensor, kind: str) -> Tensor:
    shape = activated_shape("activation", x, kind)
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _activation_fill(y: Tensor, x: Tensor, kind: str) -> None:
    if table.floats_("activation", x.device.type, y, x, kind):
        return
    with below_autograd():
        activation_(y, x, kind)


ACTIVATION = leaf_op(
    "activation(Tensor x, str kind) -> Tensor", _activation_alloc, _activation_fill
)
"""gelu (by tanh), qgelu, relu, silu, srelu; gated: act(first half) * second half of the last dim."""


def _activation_backward_alloc(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    op = "activation_backward"
    shape = activated_shape(op, x, kind)
    check_tensor(op, "dy", dy)
    rule = "dy must have the shape of the activation"
    check(dy.shape == shape, op, rule, f"{tuple(dy.shape)}, not {shape}", "Reshape it")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _activation_backward_fill(dx: Tensor, dy: Tensor, x: Tensor, kind: str) -> None:
    if table.floats_("activation", x.device.type, dx, x, kind, dy):
        return
    with below_autograd():
        activation_backward_(dx, dy, x, kind)


ACTIVATION_BACKWARD = leaf_op(
    "activation_backward(Tensor dy, Tensor x, str kind) -> Tensor",
    _activation_backward_alloc,
    _activation_backward_fill,
)
"""The gradient of ``x``, in its dtype."""
