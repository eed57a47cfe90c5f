"""Checks of the arguments that ops share: buffers of quantized tensors, seeds and amaxes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.errors import DtypeError, fail
from qtensor.formats import Slot
from qtensor.layout import Shape, buffer_shapes
from qtensor.library.codec import Codec, parse


class _Bounds(NamedTuple):
    """The buffers that a slot allows for a logical shape.

    Attributes:
        largest: shape of the buffer of a whole tensor, padding included.
        least: the same without padding: a slice of a tensor has buffers between both.
        dtype: of the buffer.
    """

    largest: torch.Size
    least: tuple[int, ...]
    dtype: torch.dtype


def _without_padding(slot: Slot) -> Slot:
    dims = tuple(dataclasses.replace(dim, pad=1) for dim in slot.dims)
    return dataclasses.replace(slot, dims=dims)


def _bounds(slots: Sequence[Slot], shape: Shape) -> tuple[_Bounds, ...]:
    return tuple(
        _Bounds(torch.Size(largest), least, slot.dtype)
        for slot, largest, least in zip(
            slots,
            buffer_shapes(slots, shape),
            buffer_shapes([_without_padding(slot) for slot in slots], shape),
            strict=True,
        )
    )


@functools.lru_cache(maxsize=4096)
def _known_bounds(canonical: str, shape: tuple[int, ...]) -> tuple[_Bounds, ...]:
    return _bounds(parse(canonical).slots, shape)


def check_buffers(op: str, buffers: Sequence[Tensor], canonical: str, shape: Shape) -> None:
    """Refuse buffers that are not those of a tensor of ``shape``, or of a slice with that shape.

    Args:
        op: for the message.
        buffers: in slot order; (canonical "") one plain tensor of ``shape``.
        canonical: text of the quantizer, or "".
        shape: logical shape, known as numbers.

    Raises:
        QTensorError: number, shape or dtype of the buffers; the message names the first that
            differs.
    """
    if not canonical:
        if len(buffers) != 1 or buffers[0].shape != tuple(shape):
            got = [tuple(t.shape) for t in buffers]
            fail(op, f"a plain operand is one tensor of shape {tuple(shape)}", got, "Pass that")
        if not buffers[0].is_floating_point():
            rule = "a plain operand must be floating"
            fail(op, rule, buffers[0].dtype, "Convert it first", DtypeError)
        return
    bounds = _known_bounds(canonical, tuple(shape))
    if len(buffers) == len(bounds):
        for buffer, (largest, _, dtype) in zip(buffers, bounds, strict=True):
            if buffer.shape != largest or buffer.dtype is not dtype:
                break
        else:
            return
    _check_slices(f"{op}[{parse(canonical).format}]", buffers, bounds)


def _check_slices(op: str, buffers: Sequence[Tensor], bounds: Sequence[_Bounds]) -> None:
    if len(buffers) != len(bounds):
        rule = f"the quantizer has {len(bounds)} buffers"
        fail(op, rule, len(buffers), "Pass tensor.buffers()")
    for buffer, (largest, least, dtype) in zip(buffers, bounds, strict=True):
        fits = buffer.ndim == len(largest) and all(
            low <= size <= high
            for low, size, high in zip(least, buffer.shape, largest, strict=True)
        )
        if not fits or buffer.dtype is not dtype:
            rule = f"a buffer must be {dtype} of shape {tuple(largest)}"
            got = f"{buffer.dtype} {tuple(buffer.shape)}"
            fail(op, rule, got, "Pass the buffers of one tensor, and its shape")


def check_one(
    op: str, name: str, tensor: Tensor | None, dtype: torch.dtype | None, count: int = 1
) -> None:
    """Refuse a ``tensor`` that does not hold ``count`` values of ``dtype`` (None: of any).

    No tensor at all passes.

    Raises:
        QTensorError: the message names the argument.
    """
    if tensor is not None and (tensor.numel() != count or dtype not in (None, tensor.dtype)):
        rule = f"{name} must hold {count} value{'s' * (count > 1)}{f' of {dtype}' * bool(dtype)}"
        fail(op, rule, f"{tensor.dtype} {tuple(tensor.shape)}", f"Pass such a {name}")


def check_seed(op: str, codec: Codec, seed: Tensor | None, count: int = 1) -> None:
    """Refuse stochastic rounding without a seed, which kernels would round in different ways.

    Raises:
        QTensorError: no seed, or one of another dtype or size.
    """
    if seed is None:
        if codec.stochastic_rounding:
            rule = "stochastic rounding needs a seed"
            fix = "Pass seed=torch.ops.qtensor.random_seed(x)"
            fail(f"{op}[{codec.format}]", rule, "no seed", fix)
        return
    check_one(f"{op}[{codec.format}]", "seed", seed, torch.int64, count)


def check_factors(
    op: str, codec: Codec, shape: Shape, scale: Tensor | None, amax: Sequence[Tensor] | None
) -> None:
    """Refuse a scale or maxima of another number than the factors of a tensor of ``shape``.

    Kernels would read outside them, and the reference would leave factors unwritten. Formats whose
    factors come from the values alone ignore both arguments.

    Raises:
        QTensorError: the message names the argument.
    """
    fits = scale is not None and scale.numel() == 1 and scale.dtype is torch.float32
    if fits and codec.per_tensor and not amax:
        return  # Calls of delayed scaling end here, so that the check costs them little.
    counts = [math.prod(size) for size in codec.amax_shapes(shape)]
    if not counts:
        return
    name = f"{op}[{codec.format}]"
    if codec.spec.block is None:
        check_one(name, "scale", scale, torch.float32, counts[0])
    if not amax:
        return
    if len(amax) != len(counts):
        rule = f"amax must hold {len(counts)} tensor{'s' * (len(counts) > 1)}"
        fail(name, rule, len(amax), "Pass the result of torch.ops.qtensor.amax")
    for value, count in zip(amax, counts, strict=True):
        check_one(name, "amax", value, torch.float32, count)
