"""Activations, gated or not, and their derivatives, in float32 without a function of the platform's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.reference.arithmetic import sigmoid, write_

PLAIN = ("gelu", "qgelu", "relu", "silu", "srelu")
GATED = {
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
}
"""Gated kind -> the activation of the first half, which multiplies the second."""
CLAMPED = "clamped_swiglu"
"""A gated kind of its own, with numbers."""
KINDS = (*PLAIN, *GATED, CLAMPED)

GELU_LINEAR = 1.595769166946411
"""2 sqrt(2 / pi): 0.5 (1 + tanh(u)) = sigmoid(2 u), which does not cancel."""
GELU_CUBIC = 0.07135481387376785
"""GELU_LINEAR * 0.044715."""
GELU_SLOPE = 0.21406444907188416
"""3 * GELU_CUBIC."""
QGELU_SLOPE = 1.7020000219345093
BOUND = 128.0
"""Beyond it every sigmoid here is exactly 0 or 1; it stands for what is larger, so that infinity meets no 0."""


class Clamp(NamedTuple):
    """The numbers of ``clamped_swiglu``, each a float32 value.

    Attributes:
        alpha: factor of the sigmoid's argument.
        limit: largest value of the first half, and magnitude of the second.
        offset: added to the second half.
        bound: ``BOUND / alpha``.
    """

    alpha: float
    limit: float
    offset: float
    bound: float


def _argument(x: Tensor, kind: str) -> Tensor:
    """Of the sigmoid."""
    if kind == "gelu":
        return x * (GELU_LINEAR + GELU_CUBIC * (x * x))
    return x * QGELU_SLOPE if kind == "qgelu" else x


def _rectified(x: Tensor) -> Tensor:
    """NaN stays NaN; either zero becomes +0."""
    return torch.where(x <= 0, 0.0, x)


def activate(x: Tensor, kind: str) -> Tensor:
    """An activation of ``PLAIN``, or "sigmoid", of float32 values."""
    if kind == "relu":
        return _rectified(x)
    if kind == "srelu":
        rectified = _rectified(x)
        return rectified * rectified
    if kind == "sigmoid":
        return sigmoid(x).value
    x = torch.where(x < -BOUND, -BOUND, x)
    return x * sigmoid(_argument(x, kind)).value


def derivative(x: Tensor, kind: str) -> Tensor:
    """Of ``activate``, at float32 values."""
    if kind == "relu":
        return torch.where(x <= 0, 0.0, torch.where(x > 0, 1.0, x))
    if kind == "srelu":
        rectified = _rectified(x)
        return rectified + rectified
    if kind == "sigmoid":
        return sigmoid(x).slope
    x = torch.where(x < -BOUND, -BOUND, x)
    x = torch.where(x > BOUND, BOUND, x)
    v = _argument(x, kind)
    value, slope = sigmoid(v)
    if kind == "gelu":
        return value + (x * slope) * (GELU_LINEAR + GELU_SLOPE * (x * x))
    return value + v * slope


def _clamped(first: Tensor, second: Tensor, clamp: Clamp) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is activated, its sigmoid and that one's derivative, and the gate; NaN stays NaN."""
    gate = torch.where(first < -clamp.bound, -clamp.bound, first)
    gate = torch.where(gate > clamp.limit, clamp.limit, gate)
    linear = torch.where(second < -clamp.limit, -clamp.limit, second)
    linear = torch.where(linear > clamp.limit, clamp.limit, linear) + clamp.offset
    return gate, *sigmoid(gate * clamp.alpha), linear


def _clamped_backward_(
    dx: Tensor, grad: Tensor, halves: tuple[Tensor, Tensor], clamp: Clamp
) -> None:
    first, second = halves
    gate, value, slope, linear = _clamped(first, second, clamp)
    to_first, to_second = dx.chunk(2, dim=-1)
    derivative_ = torch.where(first > clamp.limit, 0.0, value + (gate * clamp.alpha) * slope)
    write_(to_first, (grad * linear) * derivative_)
    write_(to_second, torch.where(second.abs() > clamp.limit, 0.0, grad * (gate * value)))


def activation_(y: Tensor, x: Tensor, kind: str, clamp: Clamp | None = None) -> None:
    """Write the activation of ``x`` (..., K), or (..., 2 K) for a gated kind, into ``y`` (..., K)."""
    values = x.to(torch.float32)
    if clamp is None and kind not in GATED:
        write_(y, activate(values, kind))
        return
    first, second = values.chunk(2, dim=-1)
    if clamp is not None:
        gate, value, _, linear = _clamped(first, second, clamp)
        write_(y, (gate * value) * linear)
        return
    write_(y, activate(first, GATED[kind]) * second)


def activation_backward_(
    dx: Tensor, dy: Tensor, x: Tensor, kind: str, clamp: Clamp | None = None
) -> None:
    """Write the gradient of ``x``: dy * act'(x); gated (dy * b) * act'(a) and dy * act(a) for the halves a and b."""
    grad, values = dy.to(torch.float32), x.to(torch.float32)
    if clamp is not None:
        first, second = values.chunk(2, dim=-1)
        _clamped_backward_(dx, grad, (first, second), clamp)
        return
    if kind not in GATED:
        write_(dx, grad * derivative(values, kind))
        return
    first, second = values.chunk(2, dim=-1)
    to_first, to_second = dx.chunk(2, dim=-1)
    write_(to_first, (grad * second) * derivative(first, GATED[kind]))
    write_(to_second, grad * activate(first, GATED[kind]))
