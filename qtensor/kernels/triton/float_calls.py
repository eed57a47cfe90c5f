"""Entry points of the Triton kernels for norms, activations, sums over rows and attention.

They have the signatures of ``kernels.cpu.floats`` and ``kernels.cpu.attention``. Each returns
False, and writes nothing, if it cannot serve the call; the reference then does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.kernels.fusion import Clamp, Target
from qtensor.kernels.triton.calls import backend, supports, whole, write_

_PLAIN = (Tensor, torch.nn.Parameter)


def _kernels(first: Tensor, *others: Tensor | None) -> ModuleType | None:
    """Return the Triton backend, or None if it cannot serve these tensors.

    It serves no subclasses and no tensors without elements.
    """
    kernels = backend()
    plain = all(t is None or type(t) in _PLAIN for t in (first, *others))
    return None if isinstance(kernels, str) or not plain or not first.numel() else kernels


def norm_(
    outputs: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: tuple[str, float, bool],
) -> bool:
    """Write y, mean and rstd of a norm."""
    kernels = _kernels(x, weight, bias)
    if kernels is None:
        return False
    kernels.norm_(outputs, x, weight, bias, settings)
    return True


def norm_backward_(
    outputs: tuple[Tensor, Tensor, Tensor],
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: tuple[Tensor | None, Tensor],
    zero_centered: bool,
) -> bool:
    """Write dx, dweight and dbias of a norm."""
    kernels = _kernels(x, dy, weight, *stats)
    if kernels is None:
        return False
    kernels.norm_backward_(outputs, dy, x, weight, stats, zero_centered)
    return True


def bias_grad_(out: Tensor, dy: Tensor) -> bool:
    """Write the sum of the rows of ``dy`` into ``out``."""
    kernels = _kernels(dy)
    if kernels is None:
        return False
    kernels.bias_grad_(out, dy)
    return True


def activation_(
    out: Tensor, x: Tensor, kind: str, dy: Tensor | None = None, clamp: Clamp | None = None
) -> bool:
    """Write the activation of ``x``, or the gradient of ``x`` if ``dy`` is given."""
    kernels = _kernels(x, dy)
    if kernels is None:
        return False
    kernels.activation_(out, x, kind, dy, clamp)
    return True


def norm_quantize_(
    outputs: tuple[Tensor | None, Tensor, Tensor],
    buffers: Sequence[Tensor],
    x: Tensor,
    vectors: tuple[Tensor | None, Tensor | None],
    settings: tuple[str, float, bool],
    target: Target,
) -> bool:
    """Write mean, rstd and the buffers of the quantized norm, in slot order.

    Delayed scaling has one buffer more, its amax.
    """
    kernels = _fusing(x, vectors, x.shape, outputs[0], buffers, target)
    if kernels is None:
        return False
    matrix = kernels.lazy_norm(outputs[1:], x, vectors, settings, target.dtype)
    write_(kernels, target.quantizer, buffers, matrix, target.factors)
    return True


def activation_quantize_(
    y: Tensor | None,
    buffers: Sequence[Tensor],
    x: Tensor,
    kind: str,
    target: Target,
    clamp: Clamp | None = None,
) -> bool:
    """Write the buffers of the quantized activation, in slot order.

    Delayed scaling has one buffer more, its amax.
    """
    gated = kind.endswith("glu")
    shape = (*x.shape[:-1], x.shape[-1] // (2 if gated else 1))
    kernels = _fusing(x, (), shape, y, buffers, target)
    if kernels is None:
        return False
    matrix = kernels.lazy_activation(x, kind, clamp)
    write_(kernels, target.quantizer, buffers, matrix, target.factors)
    return True


def _fusing(
    x: Tensor,
    vectors: tuple[Tensor | None, ...],
    shape: Shape,
    stored: Tensor | None,
    buffers: Sequence[Tensor],
    target: Target,
) -> ModuleType | None:
    """Return the backend if it can quantize the result without storing it, otherwise None.

    ``stored`` is the tensor for the unquantized result. If it is not None, the result is stored and
    quantized like any other tensor.
    """
    kernels = _kernels(x, *vectors)
    if (
        kernels is None
        or stored is not None
        or supports(target.quantizer, target.dtype) is not None
    ):
        return None
    if not kernels.fuses(target.quantizer):
        return None
    return kernels if whole(target.quantizer, buffers, shape) else None


def attention_(out: Tensor, args: NamedTuple) -> bool:
    """Write the attention of a call, whose result is not empty.

    Lengths and pages are read by the device alone: where a query sees a page outside the cache, or
    the length of its sequence is not legal, its result is NaN.
    """
    kernels = _kernels(out, *(t for t in args if isinstance(t, Tensor)))
    if kernels is None:
        return False
    kernels.attention_(out, args)
    return True


def cache_append_(
    rows: Sequence[tuple[Tensor, Tensor]], positions: Tensor, block_table: Tensor | None
) -> bool:
    """Write encoded rows into the buffers of a cache.

    A token whose position or page is outside the cache is not written.
    """
    kernels = _kernels(positions, block_table, *itertools.chain(*rows))
    if kernels is None:
        return False
    for source, target in rows:
        kernels.append_(source, target, positions, block_table)
    return True


def finish_product_(
    out: Tensor,
    sums: Tensor,
    row_factor: Tensor | None,
    column_factor: Tensor | None,
    bias: Tensor | None,
) -> bool:
    """Write the result of a product from its float32 sums, both contiguous, in one read.

    A bias is served if it has a number for each column.
    """
    kernels = _kernels(out, sums, row_factor, column_factor, bias)
    if kernels is None or out.dtype not in _OUTPUTS:
        return False
    if bias is not None and (bias.numel() != out.shape[-1] or bias.dtype not in _OUTPUTS):
        return False
    kernels.finish_product_(out, sums, row_factor, column_factor, bias)
    return True


_OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)


KERNELS: dict[str, Callable[..., bool]] = {
    "norm": norm_,
    "norm_backward": norm_backward_,
    "bias_grad": bias_grad_,
    "activation": activation_,
    "norm_quantize": norm_quantize_,
    "activation_quantize": activation_quantize_,
    "attention": attention_,
    "cache_append": cache_append_,
    "finish_product": finish_product_,
}
"""Op -> its kernel."""
