"""Activations and their derivatives, in float32 and without the platform's math functions."""

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
"""Gated kind -> the activation of the first half of x; the second half multiplies the result."""
CLAMPED = "clamped_swiglu"
"""The gated kind whose constants are options (see ``Clamp``)."""
KINDS = (*PLAIN, *GATED, CLAMPED)

GELU_LINEAR = 1.595769166946411
"""2 sqrt(2 / pi). GELU uses sigmoid(2 u): 0.5 (1 + tanh(u)), which is equal, loses digits."""
GELU_CUBIC = 0.07135481387376785
"""GELU_LINEAR * 0.044715."""
GELU_SLOPE = 0.21406444907188416
"""3 * GELU_CUBIC."""
QGELU_SLOPE = 1.7020000219345093
BOUND = 128.0
"""Inputs are clamped to this magnitude, at which every sigmoid here is exactly 0 or 1.

The clamp keeps infinity times 0 from becoming NaN.
"""


class Clamp(NamedTuple):
    """The constants of ``clamped_swiglu``, each a float32 value.

    Attributes:
        alpha: factor of the sigmoid's argument.
        limit: upper bound of the first half, and largest magnitude of the second half.
        offset: value added to the second half.
        bound: ``BOUND / alpha``.
    """

    alpha: float
    limit: float
    offset: float
    bound: float


def _argument(x: Tensor, kind: str) -> Tensor:
    """Return the argument of the sigmoid in activation ``kind``, float32 like ``x``."""
    if kind == "gelu":
        return x * (GELU_LINEAR + GELU_CUBIC * (x * x))
    return x * QGELU_SLOPE if kind == "qgelu" else x


def _rectified(x: Tensor) -> Tensor:
    """Return max(x, 0). NaN stays NaN, and both zeros become +0."""
    return torch.where(x <= 0, 0.0, x)


def activate(x: Tensor, kind: str) -> Tensor:
    """Return an activation of ``PLAIN``, or "sigmoid", of a float32 tensor of any shape."""
    if kind == "relu":
        return _rectified(x)
    if kind == "srelu":
        rectified = _rectified(x)
        return rectified * rectified
    if kind == "sigmoid":
        return sigmoid(x).value
    # Only minus infinity times 0 can occur: at large positive x the sigmoid is 1.
    x = torch.where(x < -BOUND, -BOUND, x)
    return x * sigmoid(_argument(x, kind)).value


def derivative(x: Tensor, kind: str) -> Tensor:
    """Return the derivative of ``activate`` at float32 ``x`` of any shape."""
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
    """Return the clamped first half, its sigmoid and slope, and the factor of the second half.

    All are float32 (..., K), like ``first`` and ``second``. NaN stays NaN.
    """
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
    """Write the activation of ``x`` into ``y``.

    Args:
        y: (..., K) float32, bfloat16 or float16.
        x: (..., K), or (..., 2 K) for a gated kind; float32, bfloat16 or float16.
        kind: one of ``KINDS``.
        clamp: constants of "clamped_swiglu", None for the others.
    """
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
    """Write the gradient of the activation's input into ``dx``.

    It is dy * act'(x). For a gated kind with halves a and b of ``x``, the gradients of the halves
    are (dy * b) * act'(a) and dy * act(a).

    Args:
        dx: like ``x``.
        dy: (..., K) float32, bfloat16 or float16.
        x: (..., K), or (..., 2 K) for a gated kind; float32, bfloat16 or float16.
        kind: one of ``KINDS``.
        clamp: constants of "clamped_swiglu", None for the others.
    """
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
