"""The ops ``activation`` and ``activation_backward``."""

from __future__ import annotations

import functools
import math
import struct
from typing import NamedTuple

from torch import Tensor

from qtensor.core.encoding import decode_call, encode_call
from qtensor.core.errors import QTensorError, check
from qtensor.kernels import table
from qtensor.library.define import empty, leaf_op
from qtensor.library.norm import check_tensor
from qtensor.reference.activation import (
    BOUND,
    CLAMPED,
    GATED,
    KINDS,
    Clamp,
    activation_,
    activation_backward_,
)

_KINDS_RULE = f"kind must be one of {', '.join(KINDS)}"
_DEFAULTS = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}
"""Constants of ``clamped_swiglu``, as in GPT-OSS."""
_NUMBERS_RULE = (
    f"{CLAMPED} takes {', '.join(f'{k}={v}' for k, v in _DEFAULTS.items())}, each at most once: "
    "numbers, alpha and limit above 0, whose product and 128 / alpha are finite in float32"
)


def _float32(value: float) -> float:
    """Return the nearest float32 value, inf beyond the largest."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _clamp_of(options: dict[str, str]) -> Clamp | None:
    """Return the constants of ``clamped_swiglu(...)``; None if it does not take the options."""
    try:
        numbers = _DEFAULTS | {name: float(number) for name, number in options.items()}
    except ValueError:
        return None
    if len(numbers) > len(_DEFAULTS):
        return None
    alpha, limit, offset = (_float32(v) for v in numbers.values())
    if not (alpha > 0 and limit > 0):
        return None
    # A quotient of float32 values in float64 rounds to the correctly rounded float32.
    clamp = Clamp(alpha, limit, offset, _float32(BOUND / alpha))
    finite = all(map(math.isfinite, (*clamp, _float32(alpha * limit))))
    return clamp if finite else None


@functools.cache
def parse_kind(kind: str) -> tuple[str, Clamp | None] | None:
    """Return (name, numbers) of a kind for ops; None if the kind or its numbers are wrong."""
    try:
        name, options = decode_call(kind.removesuffix("()"))
    except QTensorError:
        return None
    if name != CLAMPED:
        return (kind, None) if kind in KINDS else None
    clamp = _clamp_of(options)
    return None if clamp is None else (CLAMPED, clamp)


def check_kind(op: str, kind: str) -> tuple[str, Clamp | None]:
    """Return (name, numbers) of a kind.

    Raises:
        QTensorError: no such kind, or numbers that it does not take.
    """
    parsed = parse_kind(kind)
    rule = _NUMBERS_RULE if kind.startswith(f"{CLAMPED}(") else _KINDS_RULE
    check(parsed is not None, op, rule, repr(kind), "Choose one of them")
    return parsed  # type: ignore[return-value]


def is_gated(kind: str) -> bool:
    """Return True if an activation reads two halves of the last dim."""
    return kind in GATED or kind.startswith(CLAMPED)


def clamped_swiglu(alpha: float = 1.702, limit: float = 7.0, offset: float = 1.0) -> str:
    """Return the kind ``clamped_swiglu`` with its numbers, as text: ops take plain values alone.

    For the halves a and b: ``g * sigmoid(alpha * g) * (l + offset)``, g = min(a, limit), l = b
    within +-limit.

    Raises:
        QTensorError: numbers that it does not take.
    """
    numbers = {"alpha": alpha, "limit": limit, "offset": offset}
    kind = encode_call(CLAMPED, {name: repr(float(number)) for name, number in numbers.items()})
    check_kind("activation", kind)
    return kind


def activated_shape(op: str, x: Tensor, kind: str) -> tuple[int, ...]:
    """Return the shape of the activation of ``x`` (..., K): a gated kind halves the last dim.

    Raises:
        QTensorError: no such kind, 0-d, or a last dim that has no halves.
        DtypeError: dtype other than float32, bfloat16, float16.
    """
    name, _ = check_kind(op, kind)
    check_tensor(op, "x", x)
    if not is_gated(name):
        return tuple(x.shape)
    size = x.shape[-1]
    rule = f"the last dim of {name} must be even, its halves are activated and gate"
    check(size % 2 == 0, op, rule, size, "Pass both halves side by side")
    return (*x.shape[:-1], size // 2)


class ActivationArgs(NamedTuple):
    """Arguments of the op ``activation``."""

    x: Tensor
    kind: str


def _activation_alloc(args: ActivationArgs) -> Tensor:
    return empty(args.x, activated_shape("activation", args.x, args.kind))


def _activation_fill(y: Tensor, args: ActivationArgs) -> None:
    name, clamp = check_kind("activation", args.kind)
    if table.floats_("activation", args.x.device.type, y, args.x, name, None, clamp):
        return
    activation_(y, args.x, name, clamp)


ACTIVATION = leaf_op("activation", ActivationArgs, "Tensor", _activation_alloc, _activation_fill)
"""Return the activation of ``x`` (..., K): (..., K), or (..., K / 2) for a gated kind.

Kinds: gelu (by tanh), qgelu, relu, silu, srelu; gated kinds; ``clamped_swiglu``.

A gated kind multiplies act(first half) and the second half of the last dim.
"""


class _ActivationBackwardArgs(NamedTuple):
    dy: Tensor
    x: Tensor
    kind: str


def _activation_backward_alloc(args: _ActivationBackwardArgs) -> Tensor:
    op = "activation_backward"
    shape = activated_shape(op, args.x, args.kind)
    check_tensor(op, "dy", args.dy)
    rule = "dy must have the shape of the activation"
    check(args.dy.shape == shape, op, rule, f"{tuple(args.dy.shape)}, not {shape}", "Reshape it")
    return empty(args.x)


def _activation_backward_fill(dx: Tensor, args: _ActivationBackwardArgs) -> None:
    name, clamp = check_kind("activation_backward", args.kind)
    if table.floats_("activation", args.x.device.type, dx, args.x, name, args.dy, clamp):
        return
    activation_backward_(dx, args.dy, args.x, name, clamp)


ACTIVATION_BACKWARD = leaf_op(
    "activation_backward",
    _ActivationBackwardArgs,
    "Tensor",
    _activation_backward_alloc,
    _activation_backward_fill,
)
"""Return the gradient of ``x`` (..., K), in its dtype; ``dy`` has the shape of the activation."""
