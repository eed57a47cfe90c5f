"""Move bytes between stored tensors and the buffers of quantized tensors.

Files hold factors row-major and without padding; our buffers pad some of them with zeros, and may
hold them in tiles. The codes are shared wherever the shape allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from qtensor.errors import fail
from qtensor.formats import Slot
from qtensor.layout import Shape, buffer_shape
from qtensor.quantizers import Quantizer
from qtensor.reference.blocks import read_scales, write_scales_
from qtensor.storage.tensor import QuantizedTensor

TILE_ROWS = 128
"""Rows of a tile of swizzled factors; buffers whose first dim is padded to another number hold the
tiles of their transpose."""


def unpadded(slot: Slot, shape: Shape) -> tuple[int, ...]:
    """Return the shape of a buffer without its padding."""
    return buffer_shape(tuple(dataclasses.replace(d, pad=1) for d in slot.dims), shape)


def assemble(
    quantizer: Quantizer, shape: Shape, dtype: torch.dtype, parts: Mapping[str, Tensor]
) -> QuantizedTensor:
    """Return a quantized tensor around stored tensors.

    Args:
        quantizer: describes the buffers.
        shape: the logical shape.
        dtype: the nominal dtype.
        parts: a tensor for each buffer, by its constructor keyword (``rowwise_data``,
            ``rowwise_scale_inv``, ...), without padding and not swizzled, in the buffer's shape or
            one with as many elements. float8 tensors are viewed as their codes; factors of
            another float dtype are widened to float32.

    Raises:
        QTensorError: a part is missing or has a wrong number of elements.
    """
    buffers = []
    for slot in quantizer.slots:
        if slot.keyword not in parts:
            rule = f"{quantizer.canonical} needs {', '.join(quantizer.keywords)}"
            fail("assemble", rule, sorted(parts), "Pass every buffer")
        buffers.append(_buffer(slot, parts[slot.keyword], shape))
    return quantizer.assemble(buffers, shape, dtype)


def _buffer(slot: Slot, part: Tensor, shape: Shape) -> Tensor:
    if slot.dtype == torch.uint8:
        part = part.view(torch.uint8)
    elif part.dtype != slot.dtype:
        part = part.to(slot.dtype)
    exact = unpadded(slot, shape)
    if part.numel() != torch.Size(exact).numel():
        rule = f"{slot.name} of a tensor of shape {tuple(shape)} has shape {exact}"
        fail("assemble", rule, tuple(part.shape), "Check the shapes of the file")
    part, full = part.reshape(exact), buffer_shape(slot.dims, shape)
    if full == exact and not slot.swizzled:
        return part
    padded = part.new_zeros(full)
    if slot.swizzled:
        write_scales_(padded, part, True, transposed=slot.dims[0].pad != TILE_ROWS)
    else:
        padded[tuple(slice(n) for n in exact)] = part
    return padded


def rowwise_parts(tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Return the rowwise buffers of a tensor by keyword, without padding and not swizzled.

    Codes are shared. Also buffers that serve both usages are returned.
    """
    parts = {}
    for slot in tensor.quantizer.slots:
        if slot.usage == "columnwise":
            continue
        buffer = getattr(tensor, slot.name)
        if slot.swizzled:
            buffer = read_scales(buffer, True)
        exact = unpadded(slot, tensor.shape)
        parts[slot.keyword] = buffer[tuple(slice(n) for n in exact)]
    return parts
