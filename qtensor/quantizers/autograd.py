"""Quantize a tensor with a straight-through gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from qtensor.core.buffer_shapes import Shape
from qtensor.core.dtensors import is_dtensor
from qtensor.library.quantize import QUANTIZE
from qtensor.quantizers.calls import check_call, prepare, refuse_transforms
from qtensor.quantizers.constants import constants_of
from qtensor.quantizers.dtensor_parts import quantize_parts
from qtensor.storage.origin import FRESH
from qtensor.storage.rebuild import wrap


class QuantizeFunction(torch.autograd.Function):
    """Quantize in forward; pass the gradient unchanged in backward."""

    @staticmethod
    def forward(
        x: Tensor,
        quantizer: Any,
        scale: Tensor | None,
        amax: list[Tensor] | None,
        seed: Tensor | None,
    ) -> tuple[Any, ...]:
        """Return the quantized tensor, and the amax (1,) for delayed scaling.

        Args:
            x: any shape; float32, bfloat16 or float16.
            quantizer: the quantizer.
            scale: (1,) float32 encode factor of delayed scaling, or None.
            amax: maxima that ``Quantizer.amax`` returned, reduced over a group, or None.
            seed: (1,) int64 seed of stochastic rounding, or None.
        """
        buffers = QUANTIZE(x, quantizer.canonical, scale, amax, seed)
        tensor = assembled(quantizer, buffers, x.shape, x.dtype)
        return tensor, *buffers[len(quantizer.keywords) :]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Mark everything but the tensor as not differentiable."""
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return ``grad``, of the shape of the tensor, as the gradient of ``x``."""
        return grad, None, None, None, None


def assembled(quantizer: Any, buffers: Sequence[Tensor], shape: Shape, dtype: torch.dtype) -> Any:
    """Return a quantized tensor with buffers that an op has allocated, without checks.

    Args:
        quantizer: describes the buffers; in a compiled region, a ``QuantizerConstants``.
        buffers: inner buffers in slot order; the amax of delayed scaling may follow.
        shape: the logical shape.
        dtype: the nominal dtype.
    """
    if not is_compiling():
        return wrap(quantizer.tensor_cls, shape, dtype, quantizer, buffers, FRESH)
    return _assembled(quantizer, buffers, shape, dtype)


def _assembled(constants: Any, buffers: Sequence[Tensor], shape: Shape, dtype: torch.dtype) -> Any:
    """Return the result of ``assembled`` in a compiled region."""
    named = {keyword: buffers[i] for i, keyword in enumerate(constants.keywords)}
    # Pass the string: Dynamo would rebuild a quantizer from its fields, some as symbolic floats.
    return constants.tensor_cls(shape, dtype, constants.canonical, **named)


def quantized(
    quantizer: Any,
    x: Tensor,
    scale: Tensor | None,
    generator: torch.Generator | Tensor | None,
    group: Any,
    amax: list[Tensor] | None = None,
) -> tuple[Any, ...]:
    """Return the quantized tensor, and the amax (1,) for delayed scaling.

    Args:
        quantizer: the quantizer; in a compiled region, a ``QuantizerConstants``.
        x: any shape; float32, bfloat16 or float16.
        scale: as in ``Quantizer.quantize``.
        generator: as in ``Quantizer.quantize``.
        group: the process group of ``amax_reduction_group``, or None.
        amax: the maxima, if they are known.
    """
    if not is_compiling():
        refuse_transforms(quantizer, x)
    if is_dtensor(x):
        return quantize_parts(quantizer, x, scale, generator, group, quantized)
    seed = None
    if quantizer.stochastic_rounding or generator is not None or group is not None:
        seed, amax = prepare(quantizer, x.detach(), generator, group)
    if x.requires_grad and torch.is_grad_enabled():
        return QuantizeFunction.apply(x, quantizer, scale, amax, seed)
    buffers = QUANTIZE(x, quantizer.canonical, scale, amax, seed)
    tensor = assembled(quantizer, buffers, x.shape, x.dtype)
    return tensor, *buffers[len(quantizer.keywords) :]


def quantize_traced(
    canonical: str,
    x: Any,
    scale: Tensor | None,
    generator: torch.Generator | Tensor | None,
    group: Any,
    noop_flag: Tensor | None,
) -> Any:
    """Return the quantized tensor of ``Quantizer.quantize`` without ``out``, in a compiled region.

    Args:
        canonical: canonical string of the quantizer.
        x: any shape; float32, bfloat16 or float16.
        scale: as in ``Quantizer.quantize``.
        generator: as in ``Quantizer.quantize``.
        group: the process group of ``amax_reduction_group``, or None.
        noop_flag: must be None, because there is no ``out``.
    """
    constants = constants_of(canonical)
    is_alone = scale is None and generator is None and group is None and noop_flag is None
    if is_alone and not constants.needs_more and isinstance(x, Tensor) and not x.is_nested:
        if not (x.requires_grad or is_dtensor(x)):
            # Most calls need only this line; it avoids the guards of the general path.
            return _assembled(constants, QUANTIZE(x, canonical), x.shape, x.dtype)
    else:
        check_call(constants, x, scale, noop_flag, None)
    return quantized(constants, x, scale, generator, group)[0]
