"""Entry points of the Triton backend for the table of kernels.

Triton is imported when the first tensor on a GPU arrives.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, buffer_shapes
from qtensor.core.quantizer_registry import QuantizerLike, by_name
from qtensor.core.version import install_command
from qtensor.kernels.cpu.native import WHOLE, Part

if TYPE_CHECKING:
    from qtensor.kernels.triton.common import LazyMatrix

_PLAIN = (Tensor, torch.nn.Parameter)


@functools.cache
def backend() -> ModuleType | str:
    """Return the Triton backend, or the reason why it cannot be used."""
    if os.environ.get("QTENSOR_TRITON") == "0":
        return "switched off by QTENSOR_TRITON=0"
    try:
        # Importing Triton takes a second, and only GPUs need it.
        return importlib.import_module("qtensor.kernels.triton.backend")
    except ImportError as error:
        return f"Triton cannot be imported ({error}); {install_command('triton')}"


def supports(quantizer: QuantizerLike, dtype: torch.dtype) -> str | None:
    """Return why the kernels do not serve a format and dtype, or None if they do."""
    kernels = backend()
    return kernels if isinstance(kernels, str) else kernels.supports(quantizer, dtype)


def quantize_(
    quantizer: QuantizerLike,
    buffers: Sequence[Tensor],
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> bool:
    """Write the buffers of ``quantizer`` from ``x``.

    ``buffers`` is in slot order, followed by the amax that delayed scaling returns.

    Returns:
        False, with nothing written, if the call is not served.
    """
    kernels = backend()
    if isinstance(kernels, str) or supports(quantizer, x.dtype) is not None:
        return False
    if not x.numel() or type(x) not in _PLAIN or not whole(quantizer, buffers, x.shape):
        return False
    write_(kernels, quantizer, buffers, x, (scale, amax, seed))
    return True


def write_(
    kernels: ModuleType,
    quantizer: QuantizerLike,
    buffers: Sequence[Tensor],
    x: Tensor | LazyMatrix,
    inputs: tuple[Tensor | None, list[Tensor] | None, Tensor | None],
) -> None:
    """Write the buffers from ``x``, a tensor or a ``LazyMatrix``.

    ``inputs`` holds scale, amax and seed, each possibly None.
    """
    scale, amax, seed = inputs
    named = by_name(quantizer, buffers)
    if quantizer.returns_amax and len(buffers) > len(quantizer.slots) and scale is not None:
        kernels.quantize_with_amax_(quantizer, named, x, scale, buffers[-1])
    else:
        kernels.quantize_(quantizer, named, x, scale, amax, seed)


def amax_(quantizer: QuantizerLike, outputs: list[Tensor], x: Tensor) -> bool:
    """Write what ``Quantizer.amax`` returns: the maxima of ``x`` for tensor-wide factors.

    Returns:
        False, with nothing written, if the call is not served.
    """
    kernels = backend()
    if isinstance(kernels, str) or supports(quantizer, x.dtype) is not None:
        return False
    if not x.numel() or type(x) not in _PLAIN:
        return False
    kernels.amax_(quantizer, outputs, x)
    return True


def dequantize_(
    quantizer: QuantizerLike,
    buffers: Sequence[Tensor],
    shape: Shape,
    out: Tensor,
    part: Part = WHOLE,
) -> bool:
    """Decode ``buffers`` (in slot order) into ``out``.

    Returns:
        False, with nothing written, for other dtypes and for parts of tensors.
    """
    kernels = backend()
    if isinstance(kernels, str) or part != WHOLE or supports(quantizer, out.dtype) is not None:
        return False
    if not out.numel() or not whole(quantizer, buffers, shape):
        return False
    kernels.dequantize_(quantizer, by_name(quantizer, buffers), out)
    return True


def whole(quantizer: QuantizerLike, buffers: Sequence[Tensor], shape: Shape) -> bool:
    """Return True if the buffers are those of a whole tensor.

    Views of parts have no padding, and kernels rely on it.
    """
    sizes = buffer_shapes(quantizer.slots, shape)
    return all(tuple(b.shape) == size for b, size in zip(buffers, sizes, strict=False))
