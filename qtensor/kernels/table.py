"""Which kernels serve a call: the fastest that computes the same bytes, else the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.floats import KERNELS as CPU_FLOATS
from qtensor.kernels.triton.calls import dequantize_ as triton_dequantize_
from qtensor.kernels.triton.calls import quantize_ as triton_quantize_
from qtensor.kernels.triton.calls import supports as triton_supports
from qtensor.kernels.triton.float_calls import KERNELS as TRITON_FLOATS
from qtensor.layout import Shape
from qtensor.registry import transposed

QuantizeKernel = Callable[
    [Any, Sequence[Tensor], Tensor, Tensor | None, list[Tensor] | None, Tensor | None], bool
]
"""Write the buffers: (quantizer, buffers in slot order, x, scale, amax, seed) -> success.

False means that nothing was written and the reference must compute the buffers.
"""

DequantizeKernel = Callable[[Any, Sequence[Tensor], Shape, Tensor, native.Part], bool]
"""Decode into ``out``: (quantizer, buffers in slot order, shape, out, part) -> success.

False means that nothing was written and the reference must decode.
"""


@dataclass(frozen=True)
class Backend:
    """Kernels for the tensors of one device type."""

    name: str
    supports: Callable[[Any, torch.dtype], str | None]
    """Why a format and dtype are not served, or None."""
    quantize_: QuantizeKernel
    dequantize_: DequantizeKernel


BACKENDS = {
    "cpu": Backend(
        "native",
        native.supports,
        native.quantize_,
        native.dequantize_,
    ),
    "cuda": Backend("triton", triton_supports, triton_quantize_, triton_dequantize_),
}
"""Device type -> its kernels."""


FLOATS: dict[str, dict[str, Callable[..., bool]]] = {"cpu": CPU_FLOATS, "cuda": TRITON_FLOATS}
"""Kernels for plain tensors: device type -> op -> kernel.

A kernel returns False if it wrote nothing and the reference must compute the op.
"""


def floats_(name: str, device_type: str, *args: Any) -> bool:
    """Write the outputs of an op on plain tensors with a device's kernel; False if none serves."""
    kernel = FLOATS.get(device_type, {}).get(name)
    return kernel is not None and kernel(*args)


def _backend(t: Tensor) -> Backend | None:
    # The name of a device costs as much as a small tensor takes to quantize.
    return BACKENDS.get("cpu" if t.is_cpu else t.device.type)


def quantize_(
    codec: Any,
    buffers: Sequence[Tensor],
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> bool:
    """Quantize by the kernels of the device of ``x``, where they serve the call."""
    backend = _backend(x)
    return backend is not None and backend.quantize_(codec, buffers, x, scale, amax, seed)


def dequantize_(
    codec: Any,
    buffers: Sequence[Tensor],
    shape: Shape,
    out: Tensor,
    part: native.Part = native.WHOLE,
) -> bool:
    """Decode by the kernels of the device of ``out``, where they serve the call."""
    backend = _backend(out)
    return backend is not None and backend.dequantize_(codec, buffers, shape, out, part)


def decode_transposed(
    quantizer: Any, buffers: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor | None:
    """Decode a transposed weight from views of its buffers, which kernels can read.

    Args:
        quantizer: of the buffers.
        buffers: in slot order.
        shape: logical shape.
        dtype: of the result.

    Returns:
        The values, as a transposed view; None for anything else, or if no kernel decodes it.
    """
    if len(shape) != 2 or quantizer.rowwise or buffers[0].is_contiguous():
        return None
    if not serves(quantizer, dtype, buffers[0].device.type):
        return None
    twin, rows = transposed(quantizer, buffers)
    values = torch.empty(shape[::-1], dtype=dtype, device=buffers[0].device)
    return values.t() if dequantize_(twin, rows, values.shape, values) else None


def refusal(quantizer: Any, dtype: torch.dtype, device_type: str) -> str | None:
    """Return why a device type has no kernels for a format and dtype, or None."""
    backend = BACKENDS.get(device_type)
    if backend is None:
        return f"no kernels for {device_type}"
    return backend.supports(quantizer, dtype)


def serves(codec: Any, dtype: torch.dtype, device_type: str) -> bool:
    """Whether a device type has kernels for a format."""
    backend = BACKENDS.get(device_type)
    return backend is not None and backend.supports(codec, dtype) is None


def explain(codec: Any, dtype: torch.dtype, device_type: str) -> str:
    """Who quantizes a format from ``dtype`` on a device type, and why not something faster."""
    backend = BACKENDS.get(device_type)
    reason = f"no kernels for {device_type}" if backend is None else backend.supports(codec, dtype)
    if backend is None or reason is not None:
        return f"{codec.format} from {dtype} on {device_type}: reference ({reason})"
    return f"{codec.format} from {dtype} on {device_type}: {backend.name}"
