"""Checks of the arguments that ops share: buffers of quantized tensors, seeds and amaxes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.errors import DtypeError, check, fail
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import QuantizerLike, check_buffers


def check_operand(op: str, operand: Operand) -> None:
    """Refuse buffers that are not those of a tensor of the shape, or of a slice with that shape.

    Args:
        op: for the message.
        operand: its shape is known as numbers.

    Raises:
        QTensorError: number, shape or dtype of the buffers; the message names the first that
            differs.
    """
    buffers, _, shape = operand
    quantizer = operand.quantizer
    if quantizer is not None:
        check_buffers(f"{op}[{quantizer.format}]", quantizer, buffers, shape)
        return
    if len(buffers) != 1 or buffers[0].shape != tuple(shape):
        got = [tuple(t.shape) for t in buffers]
        fail(op, f"a plain operand is one tensor of shape {tuple(shape)}", got, "Pass that")
    if not buffers[0].is_floating_point():
        fail(op, "a plain operand must be floating", buffers[0].dtype, "Convert it", DtypeError)


def check_one(
    op: str, name: str, tensor: Tensor | None, dtype: torch.dtype | None, count: int = 1
) -> None:
    """Refuse a ``tensor`` that does not hold ``count`` values of ``dtype`` (None: of any).

    No tensor at all passes.

    Raises:
        QTensorError: the message names the argument.
    """
    if tensor is not None and (tensor.numel() != count or dtype not in (None, tensor.dtype)):
        rule = f"{name} must hold {count} value{'s' * (count > 1)}{f' of {dtype}' * bool(dtype)}"
        fail(op, rule, f"{tensor.dtype} {tuple(tensor.shape)}", f"Pass such a {name}")


def check_seed(op: str, quantizer: QuantizerLike, seed: Tensor | None, count: int = 1) -> None:
    """Refuse stochastic rounding without a seed, which kernels would round in different ways.

    Raises:
        QTensorError: no seed, or one of another dtype or size.
    """
    if seed is None:
        if quantizer.stochastic_rounding:
            rule = "stochastic rounding needs a seed"
            fix = "Pass seed=torch.ops.qtensor.random_seed(x)"
            fail(f"{op}[{quantizer.format}]", rule, "no seed", fix)
        return
    check_one(f"{op}[{quantizer.format}]", "seed", seed, torch.int64, count)


def check_factors(
    op: str,
    quantizer: QuantizerLike,
    shape: Shape,
    scale: Tensor | None,
    amax: Sequence[Tensor] | None,
) -> None:
    """Refuse a scale or maxima of another number than the factors of a tensor of ``shape``.

    Kernels would read outside them, and the reference would leave factors unwritten. Formats whose
    factors come from the values alone ignore both arguments.

    Raises:
        QTensorError: the message names the argument.
    """
    fits = scale is not None and scale.numel() == 1 and scale.dtype is torch.float32
    if fits and quantizer.per_tensor and not amax:
        return  # Calls of delayed scaling end here, so that the check costs them little.
    counts = [math.prod(size) for size in quantizer.amax_shapes(shape)]
    name = f"{op}[{quantizer.format}]"
    if counts and quantizer.spec.block is None:
        check_one(name, "scale", scale, torch.float32, counts[0])
    if counts and amax:
        rule = f"amax must hold {len(counts)} tensor{'s' * (len(counts) > 1)}"
        fix = "Pass the first results of torch.ops.qtensor.amax"
        check(len(amax) == len(counts), name, rule, len(amax), fix)
        for value, count in zip(amax, counts, strict=True):
            check_one(name, "amax", value, torch.float32, count)


_MOST_SIGNATURES = 4096


class PassedCalls:
    """The calls of an op that passed its checks, by everything that the checks read.

    A call with one new token has many arguments and little work: checking it again would take as
    long as the work.
    """

    def __init__(self) -> None:
        self._known: set[tuple[object, ...]] = set()

    def signature(self, args: Sequence[object]) -> tuple[object, ...] | None:
        """Return what checks of layouts can read, or None if a tensor is not a plain one."""
        parts: list[object] = []
        for value in args:
            if isinstance(value, Tensor):
                if type(value) is not Tensor or value.layout is not torch.strided:
                    return None
                parts += (value.dtype, value.shape, value.stride())
            else:
                parts.append(value)
        return tuple(parts)

    def __contains__(self, signature: tuple[object, ...] | None) -> bool:
        return signature in self._known

    def add(self, signature: tuple[object, ...] | None) -> None:
        """Remember a call."""
        if signature is not None:
            if len(self._known) >= _MOST_SIGNATURES:
                self._known.clear()
            self._known.add(signature)
