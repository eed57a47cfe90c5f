"""Which kernels serve a call: the fastest that computes the same bytes, else the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.attention import attention_, cache_append_, join_
from qtensor.kernels.cpu.floats import KERNELS as CPU_FLOATS
from qtensor.kernels.triton.calls import amax_ as triton_amax_
from qtensor.kernels.triton.calls import dequantize_ as triton_dequantize_
from qtensor.kernels.triton.calls import quantize_ as triton_quantize_
from qtensor.kernels.triton.calls import supports as triton_supports
from qtensor.kernels.triton.float_calls import KERNELS as TRITON_FLOATS

QuantizeKernel = Callable[
    [QuantizerLike, Sequence[Tensor], Tensor, Tensor | None, list[Tensor] | None, Tensor | None],
    bool,
]
"""A function of (quantizer, buffers in slot order, x, scale, amax, seed) that writes the buffers.

It returns False, with nothing written, if it does not serve the call.
"""

DequantizeKernel = Callable[[QuantizerLike, Sequence[Tensor], Shape, Tensor, native.Part], bool]
"""A function of (quantizer, buffers in slot order, shape, out, part) that decodes into ``out``.

It returns False, with nothing written, if it does not serve the call.
"""


AmaxKernel = Callable[[QuantizerLike, list[Tensor], Tensor], bool]
"""A function of (quantizer, outputs, x) that writes the maxima of tensor-wide factors.

It returns False, with nothing written, if it does not serve the call.
"""


@dataclass(frozen=True)
class Backend:
    """Kernels for the tensors of one device type.

    Attributes:
        name: for `explain`.
        supports: returns why the kernels do not serve a quantizer and a dtype, or None.
        quantize_: writes the buffers of a quantized tensor.
        dequantize_: decodes them.
        amax_: writes maxima, or None: the reference does.
    """

    name: str
    supports: Callable[[QuantizerLike, torch.dtype], str | None]
    quantize_: QuantizeKernel
    dequantize_: DequantizeKernel
    amax_: AmaxKernel | None = None


BACKENDS = {
    "cpu": Backend(
        "native",
        native.supports,
        native.quantize_,
        native.dequantize_,
    ),
    "cuda": Backend("triton", triton_supports, triton_quantize_, triton_dequantize_, triton_amax_),
}
"""Device type -> its kernels."""


FLOATS: dict[str, dict[str, Callable[..., bool]]] = {
    "cpu": {
        **CPU_FLOATS,
        "attention": attention_,
        "attention_part": attention_,
        "join_attention": join_,
        "cache_append": cache_append_,
    },
    "cuda": TRITON_FLOATS,
}
"""Device type -> op -> kernel over plain tensors.

A kernel returns False, with nothing written, if it does not serve the call.
"""


def floats_(name: str, device_type: str, *args: object) -> bool:
    """Write the outputs of an op over plain tensors by the kernels of a device type.

    Returns:
        False, with nothing written, if no kernel serves the call.
    """
    kernel = FLOATS.get(device_type, {}).get(name)
    return kernel is not None and kernel(*args)


def _backend(t: Tensor) -> Backend | None:
    # Hot path: the name of a device is slow to make.
    return BACKENDS.get("cpu" if t.is_cpu else t.device.type)


def quantize_(
    quantizer: QuantizerLike,
    buffers: Sequence[Tensor],
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> bool:
    """Quantize ``x`` (..., K) into ``buffers`` by the kernels of its device.

    Returns:
        False, with nothing written, if no kernel serves the call.
    """
    backend = _backend(x)
    return backend is not None and backend.quantize_(quantizer, buffers, x, scale, amax, seed)


def dequantize_(
    quantizer: QuantizerLike,
    buffers: Sequence[Tensor],
    shape: Shape,
    out: Tensor,
    part: native.Part = native.WHOLE,
) -> bool:
    """Decode ``buffers`` into ``out``, of ``shape`` or a part of it, by the kernels of its device.

    Returns:
        False, with nothing written, if no kernel serves the call.
    """
    backend = _backend(out)
    return backend is not None and backend.dequantize_(quantizer, buffers, shape, out, part)


def amax_(quantizer: QuantizerLike, outputs: list[Tensor], x: Tensor) -> bool:
    """Write the maxima of ``x`` for tensor-wide factors by the kernels of its device.

    Returns:
        False, with nothing written, if no kernel serves the call.
    """
    backend = _backend(x)
    return (
        backend is not None and backend.amax_ is not None and backend.amax_(quantizer, outputs, x)
    )


def decode_rows(matrix: Operand, dtype: torch.dtype) -> Tensor | None:
    """Decode a weight behind ``t()`` by its rows, if kernels do not read the transposed codes.

    Returns:
        The values, as a transposed view; None for any other operand, or if no kernel decodes it.
    """
    rows = matrix.as_rows()
    if rows is None or rows.quantizer is None or matrix.buffers[0].is_contiguous():
        return None
    values = torch.empty(rows.shape, dtype=dtype, device=rows.buffers[0].device)
    return values.t() if dequantize_(rows.quantizer, rows.buffers, rows.shape, values) else None


def refusal(quantizer: QuantizerLike, dtype: torch.dtype, device_type: str) -> str | None:
    """Return why a device type has no kernels for a format and dtype, or None."""
    backend = BACKENDS.get(device_type)
    if backend is None:
        return f"no kernels for {device_type}"
    return backend.supports(quantizer, dtype)


def serves(quantizer: QuantizerLike, dtype: torch.dtype, device_type: str) -> bool:
    """Return whether a device type has kernels for a quantizer and a dtype."""
    backend = BACKENDS.get(device_type)
    return backend is not None and backend.supports(quantizer, dtype) is None


def explain(quantizer: QuantizerLike, dtype: torch.dtype, device_type: str) -> str:
    """Return which kernels quantize a format on a device type, and why no faster ones do."""
    reason = refusal(quantizer, dtype, device_type)
    chosen = BACKENDS[device_type].name if reason is None else f"reference ({reason})"
    return f"{quantizer.format} from {dtype} on {device_type}: {chosen}"
