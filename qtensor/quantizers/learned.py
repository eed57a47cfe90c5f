"""Quantize with a tensor-wide factor that training learns (``prepare_qat_(learned_factors=)``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from qtensor.core.dtensors import is_dtensor
from qtensor.core.errors import UnsupportedError, fail
from qtensor.library.learned import LEARNED_FACTOR, LEARNED_FACTOR_BACKWARD
from qtensor.quantizers.call import Called, constants_of, quantize_with_factor

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from qtensor.storage.tensor import QuantizedTensor


def quantize_with_learned_factor(
    quantizer: Called, x: Tensor, log2_amax: Tensor, count: int
) -> QuantizedTensor:
    """Return a tensor whose tensor-wide factor is ``2 ** log2_amax / largest_code``.

    The gradient of ``log2_amax`` is that of Esser et al., "Learned Step Size Quantization" (2020),
    times the derivative of the factor. That of ``x`` is 0 where the factor clips a value.

    Args:
        quantizer: learns factors.
        x: any shape; float32, bfloat16 or float16; plain.
        log2_amax: float32 (1,).
        count: elements of a weight, or features of an input: N in the scale of the gradient.

    Raises:
        UnsupportedError: ``x`` is a DTensor.
        QTensorError: ``log2_amax`` has another dtype or size; on a CPU, it is not finite.
    """
    if is_dtensor(x):
        rule, fix = "a factor is learned from whole tensors", "Train without learned_factors"
        fail("prepare_qat_", rule, "a DTensor", fix, UnsupportedError)
    if log2_amax.dtype != torch.float32:
        fix = "Leave param_dtype out of MixedPrecisionPolicy, or train without learned_factors"
        fail("prepare_qat_", "learned factors stay float32", log2_amax.dtype, fix)
    called = constants_of(quantizer.canonical) if is_compiling() else quantizer
    return _LearnedFactor.apply(x, log2_amax, called, count)


def _run(x: Tensor, log2_amax: Tensor, quantizer: Called, count: int) -> QuantizedTensor:
    amax, scale_inv = LEARNED_FACTOR(log2_amax, quantizer.canonical)
    return quantize_with_factor(quantizer, x, amax, scale_inv)


class _LearnedFactor(torch.autograd.Function):
    """Quantize in forward; one op computes both gradients in backward."""

    forward = staticmethod(_run)

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Called, int], output: QuantizedTensor
    ) -> None:
        """Keep the arguments: backward quantizes again, which takes less memory than codes."""
        x, log2_amax, quantizer, count = inputs
        ctx.save_for_backward(x, log2_amax)
        ctx.canonical, ctx.count = quantizer.canonical, count  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of ``x`` and ``log2_amax``."""
        to_x, to_factor = LEARNED_FACTOR_BACKWARD(
            grad, *ctx.saved_tensors, ctx.canonical, ctx.count
        )
        return to_x, to_factor, None, None
