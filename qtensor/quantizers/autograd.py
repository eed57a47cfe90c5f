"""Quantize a tensor with a straight-through gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from qtensor.layout import Shape
from qtensor.library.quantize import QUANTIZE
from qtensor.quantizers.calls import check_call, prepare
from qtensor.quantizers.facts import facts_of
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
        """Return the quantized tensor, and the amax for delayed scaling."""
        buffers = QUANTIZE(x, quantizer.canonical, scale, amax, seed)
        tensor = assembled(quantizer, buffers, x.shape, x.dtype)
        return tensor, *buffers[len(quantizer.keywords) :]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Mark everything but the tensor as not differentiable."""
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of the tensor as that of the input."""
        return grad, None, None, None, None


def assembled(quantizer: Any, buffers: Sequence[Tensor], shape: Shape, dtype: torch.dtype) -> Any:
    """Return the tensor around buffers that an op has allocated, without checks.

    Args:
        quantizer: the value; in a compiled region its facts are enough.
        buffers: in slot order; the amax of delayed scaling may follow.
        shape: the logical shape.
        dtype: the nominal dtype.
    """
    if not is_compiling():
        return wrap(quantizer.tensor_cls, shape, dtype, quantizer, buffers)
    return _assembled(quantizer, buffers, shape, dtype)


def _assembled(facts: Any, buffers: Sequence[Tensor], shape: Shape, dtype: torch.dtype) -> Any:
    """``assembled`` in a compiled region."""
    named = {keyword: buffers[i] for i, keyword in enumerate(facts.keywords)}
    # Pass the text: Dynamo would rebuild the value from its fields, some as symbolic floats.
    return facts.tensor_cls(shape, dtype, facts.canonical, **named)


def quantized(
    quantizer: Any,
    x: Tensor,
    scale: Tensor | None,
    generator: torch.Generator | Tensor | None,
    group: Any,
) -> tuple[Any, ...]:
    """Return the quantized tensor, and the amax for delayed scaling."""
    seed = amax = None
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
    """Do the work of ``Quantizer.quantize`` without ``out`` in a compiled region.

    Args:
        canonical: text of the quantizer.
        x: any shape, float32, bfloat16 or float16.
        scale: as in ``Quantizer.quantize``.
        generator: as in ``Quantizer.quantize``.
        group: the process group of ``amax_reduction_group``.
        noop_flag: refused without ``out``.
    """
    facts = facts_of(canonical)
    is_alone = scale is None and generator is None and group is None and noop_flag is None
    if is_alone and not facts.needs_more and isinstance(x, Tensor) and not x.is_nested:
        if not x.requires_grad:
            # All that most calls need, once more: each name that is read is guarded.
            return _assembled(facts, QUANTIZE(x, canonical), x.shape, x.dtype)
    else:
        check_call(facts, x, scale, noop_flag, None)
    return quantized(facts, x, scale, generator, group)[0]
