"""Check the shape, nominal dtype and inner buffers of a new tensor."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtensor.errors import DtypeError, fail
from qtensor.formats import Slot
from qtensor.layout import Shape, buffer_shape
from qtensor.storage.rebuild import FLOATING


def as_shape(op: str, shape: Shape | int) -> tuple[int, ...]:
    """Return sizes as a tuple; a single size makes a 1-D shape, as in ``torch.empty(3)``.

    Raises:
        QTensorError: a size is not an integer, or is negative.
    """
    # Torch itself checks symbolic sizes.
    if torch.compiler.is_compiling():
        return (shape,) if isinstance(shape, int) else tuple(shape)
    try:
        sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        sizes = tuple(n if isinstance(n, torch.SymInt) else operator.index(n) for n in sizes)
    except TypeError:
        rule = "a shape is a sequence of sizes, or one size"
        fail(op, rule, repr(shape), "Pass a tuple such as (rows, columns)")
    if any(isinstance(n, int) and n < 0 for n in sizes):
        fail(op, "sizes must not be negative", repr(shape), "Fix the shape")
    return sizes


def check_nominal(op: str, dtype: object) -> None:
    """Refuse a dtype that cannot be the nominal dtype of a quantized tensor.

    Raises:
        DtypeError: ``dtype`` is not floating; the message lists the legal dtypes.
    """
    if dtype not in FLOATING:
        legal = ", ".join(str(d).removeprefix("torch.") for d in FLOATING)
        got = dtype if isinstance(dtype, torch.dtype) else repr(dtype)
        rule = f"the nominal dtype must be floating: one of {legal}"
        fail(op, rule, got, "Pass one of them, for example torch.float32", DtypeError)


def check_buffers(
    op: str, quantizer: Any, buffers: Sequence[Any], shape: tuple[int, ...], dtype: object
) -> None:
    """Refuse buffers that do not make up a tensor of ``shape``, or a part of one.

    Args:
        op: the calling op, for errors.
        quantizer: describes the buffers.
        buffers: inner buffers in slot order.
        shape: the logical shape.
        dtype: the nominal dtype.

    Raises:
        QTensorError: the number of buffers is wrong, or a buffer has a wrong dtype, layout, shape
            or device.
    """
    slots = quantizer.slots
    check_nominal(op, dtype)
    if len(buffers) != len(slots):
        needed = ", ".join(slot.name for slot in slots)
        rule = f"{quantizer.canonical} needs {len(slots)} buffers: {needed}"
        fix = "Pass the list that buffers() returns; the amax of delayed scaling is not one of them"
        fail(op, rule, len(buffers), fix)
    for slot, buffer in zip(slots, buffers, strict=True):
        if not isinstance(buffer, Tensor) or buffer.dtype != slot.dtype:
            got = buffer.dtype if isinstance(buffer, Tensor) else type(buffer).__name__
            rule = f"{slot.name} must be a {slot.dtype} tensor"
            fail(op, rule, got, "Pass the buffers in slot order", DtypeError)
        # In a compiled region sizes may be symbolic; a comparison would bind the graph to one size.
        if torch.compiler.is_compiling():
            continue
        if buffer.layout is not torch.strided or hasattr(buffer, "_quantizer"):
            kind = "a quantized one" if hasattr(buffer, "_quantizer") else buffer.layout
            fail(op, f"{slot.name} must be a dense, plain tensor", kind, "Convert it", DtypeError)
        if buffer.device != buffers[0].device:
            devices = f"{slot.name} on {buffer.device}, {slots[0].name} on {buffers[0].device}"
            fail(op, "buffers must be on one device", devices, "Move them with .to(device)")
        _check_size(op, slot, buffer, shape)


def _check_size(op: str, slot: Slot, buffer: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a buffer whose shape does not fit ``shape``; scales of a part may lack padding."""
    most, size = buffer_shape(slot.dims, shape), tuple(buffer.shape)
    unpadded = tuple(dataclasses.replace(d, pad=1) for d in slot.dims)
    least = most if slot.swizzled else buffer_shape(unpadded, shape)
    if size != most and (
        len(size) != len(most)
        or any(not a <= n <= b for a, n, b in zip(least, size, most, strict=True))
    ):
        rule = f"{slot.name} of a tensor of shape {shape} must have shape {most}"
        fail(op, rule, size, "Pass the buffers of that tensor, or its shape")
