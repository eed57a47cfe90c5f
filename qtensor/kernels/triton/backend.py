"""The Triton kernels by format: what is served, and the three calls."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qtensor.kernels.triton import (
    activation,
    dequantize,
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
made_activation = fused.made_activation
made_norm = fused.made_norm
fuses = fused.serves


def supports(codec: Any, dtype: torch.dtype) -> str | None:
    """None where a quantizer is served for inputs (or decoded outputs) of ``dtype``, else the reason in one sentence."""
    module = MODULES.get(codec.format)
    if module is None:
        return f"no Triton kernel serves {codec.format}; those that do: {', '.join(MODULES)}."
    if dtype not in FLOAT_DTYPES:
        return f"Triton kernels take float32, bfloat16 and float16, not {dtype}."
    return None


def quantize_(
    codec: Any,
    out: dict[str, Tensor],
    x: Tensor,
    scale: Tensor | None = None,
    amax: list[Tensor] | None = None,
    seed: Tensor | None = None,
) -> None:
    """Write every buffer of ``out`` from ``x``: the meaning of ``Quantizer.encode_``.

    Args:
        codec: the quantizer, one that ``supports`` accepts.
        out: buffers by attribute; padding is zero and stays so.
        x: float32, bfloat16 or float16, any shape and strides.
        scale: encode factors to use (FP8), float32.
        amax: maxima to use, float32, one for each usage (NVFP4) or one (FP8).
        seed: int64 (1,) for stochastic rounding.
    """
    flat = {name: buffer.contiguous() for name, buffer in out.items()}
    MODULES[codec.format].quantize_(codec, flat, x, scale, amax, seed)
    _copy_back(out, flat)


def dequantize_(codec: Any, buffers: dict[str, Tensor], out: Tensor) -> None:
    """Write the values of ``buffers`` into ``out``: the meaning of ``Quantizer.decode``, rounded once to its dtype.

    Args:
        codec: the quantizer, one that ``supports`` accepts.
        buffers: by attribute; those of the side that ``codec.side()`` names are read.
        out: float32, bfloat16 or float16, the logical shape.
    """
    flat = out.contiguous()
    dequantize.dequantize_(codec, {n: b.contiguous() for n, b in buffers.items()}, flat)
    if flat is not out:
        out.copy_(flat)


def amax_(codec: Any, outputs: list[Tensor], x: Tensor) -> None:
    """Write what ``Quantizer.amax`` returns: float32 maxima behind tensor-wide factors, none for local ones."""
    if outputs:
        MODULES[codec.format].amax_outputs_(codec, outputs, x)


def quantize_with_amax_(
    codec: Any, out: dict[str, Tensor], x: Tensor, scale: Tensor, amax: Tensor
) -> None:
    """Delayed scaling: ``quantize_`` with ``scale``, and the maximum of |x| into ``amax`` (1,) float32, from one read."""
    flat = {name: buffer.contiguous() for name, buffer in out.items()}
    float8.quantize_with_amax_(codec, flat, x, scale, amax)
    _copy_back(out, flat)


def _copy_back(out: dict[str, Tensor], flat: dict[str, Tensor]) -> None:
    for name, buffer in out.items():
        if flat[name] is not buffer:
            buffer.copy_(flat[name])
