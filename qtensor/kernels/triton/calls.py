"""The Triton kernels as the table calls them: loaded at the first tensor on a GPU."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qtensor.kernels.cpu.native import WHOLE, Part
from qtensor.layout import Shape, buffer_shapes

_PLAIN = (Tensor, torch.nn.Parameter)


@functools.cache
def backend() -> ModuleType | str:
    """The kernels, or why there are none."""
    if os.environ.get("QTENSOR_TRITON") == "0":
        return "switched off by QTENSOR_TRITON=0"
    try:
        # Triton takes a second to import, and only GPUs need it.
        return importlib.import_module("qtensor.kernels.triton.backend")
    except ImportError as error:
        return f"Triton cannot be imported ({error}); install qtensor[triton]"


def supports(codec: Any, dtype: torch.dtype) -> str | None:
    """Why the kernels do not serve a format and dtype, or None."""
    kernels = backend()
    return kernels if isinstance(kernels, str) else kernels.supports(codec, dtype)


def quantize_(
    codec: Any,
    buffers: Sequence[Tensor],
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> bool:
    """Write the buffers of ``codec`` (in slot order, and the amax that delayed scaling returns) from ``x``.

    Returns:
        False, with nothing written, for what is not served.
    """
    kernels = backend()
    if isinstance(kernels, str) or supports(codec, x.dtype) is not None:
        return False
    if not x.numel() or type(x) not in _PLAIN or not whole(codec, buffers, x.shape):
        return False
    write_(kernels, codec, buffers, x, (scale, amax, seed))
    return True


def write_(
    kernels: ModuleType,
    codec: Any,
    buffers: Sequence[Tensor],
    x: Any,
    given: tuple[Tensor | None, list[Tensor] | None, Tensor | None],
) -> None:
    """Write the buffers from ``x``, a tensor or what kernels compute as they load it; ``given``: scale, amax, seed."""
    scale, amax, seed = given
    named = _named(codec, buffers)
    if codec.returns_amax and len(buffers) > len(codec.slots) and scale is not None:
        kernels.quantize_with_amax_(codec, named, x, scale, buffers[-1])
    else:
        kernels.quantize_(codec, named, x, scale, amax, seed)


def dequantize_(
    codec: Any, buffers: Sequence[Tensor], shape: Shape, out: Tensor, part: Part = WHOLE
) -> bool:
    """Decode ``buffers`` (in slot order) into ``out``.

    Returns:
        False, with nothing written, for what is not served: other dtypes, and parts of tensors.
    """
    kernels = backend()
    if isinstance(kernels, str) or part != WHOLE or supports(codec, out.dtype) is not None:
        return False
    if not out.numel() or not whole(codec, buffers, shape):
        return False
    kernels.dequantize_(codec, _named(codec, buffers), out)
    return True


def whole(codec: Any, buffers: Sequence[Tensor], shape: Shape) -> bool:
    """Whether the buffers are those of a whole tensor: parts lack padding, which kernels count on."""
    sizes = buffer_shapes(codec.slots, shape)
    return all(tuple(b.shape) == size for b, size in zip(buffers, sizes, strict=False))


def _named(codec: Any, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    return {slot.name: buffer for slot, buffer in zip(codec.slots, buffers, strict=False)}
