"""The Triton backend: which formats and dtypes it serves, and its calls."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.kernels.triton import (
    activation,
    append,
    attention,
    dequantize,
    epilogue,
    float8,
    fused,
    mx,
    norm,
    nvfp4,
)
from qtensor.kernels.triton.common import FLOAT_DTYPES

MODULES: dict[str, ModuleType] = {
    "fp8": float8,
    "fp8_delayed": float8,
    "fp8_rowwise": float8,
    "fp8_blockwise": float8,
    "mxfp8": mx,
    "mxfp6": mx,
    "mxfp4": mx,
    "nvfp4": nvfp4,
}

activation_ = activation.activation_
norm_ = norm.norm_
norm_backward_ = norm.norm_backward_
bias_grad_ = norm.bias_grad_
attention_ = attention.attention_
append_ = append.append_
finish_product_ = epilogue.finish_product_
lazy_activation = fused.lazy_activation
lazy_norm = fused.lazy_norm
fuses = fused.serves


def supports(quantizer: QuantizerLike, dtype: torch.dtype) -> str | None:
    """Return None if a quantizer is served, otherwise the reason in one sentence.

    ``dtype`` is the dtype of the input of ``quantize_`` or of the output of ``dequantize_``.
    """
    module = MODULES.get(quantizer.format)
    if module is None:
        return f"no Triton kernel serves {quantizer.format}; those that do: {', '.join(MODULES)}."
    if dtype not in FLOAT_DTYPES:
        return f"Triton kernels take float32, bfloat16 and float16, not {dtype}."
    return None


def quantize_(
    quantizer: QuantizerLike,
    out: dict[str, Tensor],
    x: Tensor,
    scale: Tensor | None = None,
    amax: list[Tensor] | None = None,
    seed: Tensor | None = None,
) -> None:
    """Write every buffer of ``out`` from ``x``, like ``Quantizer.encode_``.

    Args:
        quantizer: a quantizer that ``supports`` accepts.
        out: buffers by attribute name; their padding is zero and stays zero.
        x: float32, bfloat16 or float16, any shape and strides.
        scale: float32 encode scales (FP8), or None to compute them.
        amax: float32 maxima, one for each usage (NVFP4) or one (FP8), or None to compute them.
        seed: int64 (1,) for stochastic rounding.
    """
    flat = {name: buffer.contiguous() for name, buffer in out.items()}
    MODULES[quantizer.format].quantize_(quantizer, flat, x, scale, amax, seed)
    _copy_back(out, flat)


def dequantize_(quantizer: QuantizerLike, buffers: dict[str, Tensor], out: Tensor) -> None:
    """Decode ``buffers`` into ``out``, rounded once to its dtype, like ``Quantizer.decode``.

    Args:
        quantizer: a quantizer that ``supports`` accepts.
        buffers: by attribute name; the direction that ``quantizer.side()`` names is read.
        out: float32, bfloat16 or float16, of the logical shape.
    """
    flat = out.contiguous()
    dequantize.dequantize_(quantizer, {n: b.contiguous() for n, b in buffers.items()}, flat)
    if flat is not out:
        out.copy_(flat)


def amax_(quantizer: QuantizerLike, outputs: list[Tensor], x: Tensor) -> None:
    """Write what ``Quantizer.amax`` returns: float32 maxima, or nothing for block scales."""
    if outputs:
        MODULES[quantizer.format].amax_outputs_(quantizer, outputs, x)


def quantize_with_amax_(
    quantizer: QuantizerLike, out: dict[str, Tensor], x: Tensor, scale: Tensor, amax: Tensor
) -> None:
    """Quantize with ``scale`` and write the maximum of |x| into ``amax`` (1,) float32, in one read.

    Delayed scaling uses this call.
    """
    flat = {name: buffer.contiguous() for name, buffer in out.items()}
    float8.quantize_with_amax_(quantizer, flat, x, scale, amax)
    _copy_back(out, flat)


def _copy_back(out: dict[str, Tensor], flat: dict[str, Tensor]) -> None:
    for name, buffer in out.items():
        if flat[name] is not buffer:
            buffer.copy_(flat[name])
