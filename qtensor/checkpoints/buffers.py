"""Move bytes between stored tensors and the buffers of quantized tensors.

Files hold factors row-major and without padding; our buffers pad some of them with zeros, and may
hold them in tiles. The codes are shared wherever the shape allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.core.buffer_shapes import Shape, buffer_shape
from qtensor.core.errors import UnsupportedError, fail
from qtensor.core.formats import Slot
from qtensor.quantizers import Float8RowwiseQuantizer, Quantizer
from qtensor.reference.blocks import read_scales, write_scales_
from qtensor.storage.rebuild import reshaped, tensor_of
from qtensor.storage.tensor import QuantizedTensor


class Parts(NamedTuple):
    """Hold the tensors of a quantized tensor as files hold them: row-major and not padded.

    Attributes:
        codes: uint8 or float8 codes of the rowwise buffer.
        scale: factors of the blocks, (M, blocks along K) or a grid; of FP8: one, or (M, 1).
        amax: NVFP4: float32 (1,).
        factor: NVFP4 with ``with_global_scale_inv``: the decode factor, float32 (1,).
    """

    codes: Tensor
    scale: Tensor
    amax: Tensor | None = None
    factor: Tensor | None = None


_FIELDS = {
    "data": "codes",
    "rowwise_data": "codes",
    "scale_inv": "scale",
    "rowwise_scale_inv": "scale",
    "amax_rowwise": "amax",
    "rowwise_global_scale_inv": "factor",
}
"""Constructor keyword of a buffer -> field of ``Parts``."""


def kind_of(quantizer: Quantizer) -> str:
    """Return the format id of a quantizer; FP8 ids say what a factor belongs to.

    They are ``"fp8"`` for one factor, ``"fp8_rowwise"`` and ``"fp8_columns"``, and
    ``"fp8_blockwise"`` and ``"fp8_groups"`` for blocks of 128x128 and 1x128.
    """
    name = quantizer.spec.name
    if name == "fp8" and isinstance(quantizer, Float8RowwiseQuantizer):
        return "fp8_rowwise" if quantizer.axis == -1 else "fp8_columns"
    if name == "fp8_blockwise" and not quantizer.two_dimensional:
        return "fp8_groups"
    return name


def unpadded(slot: Slot, shape: Shape) -> tuple[int, ...]:
    """Return the shape of a buffer without its padding."""
    return buffer_shape(tuple(dataclasses.replace(d, pad=1) for d in slot.dims), shape)


def _columns_first(slot: Slot) -> bool:
    """Return True for a factor that our buffer holds as (blocks along K, M): FP8 in 1x128."""
    return slot.keyword == "rowwise_scale_inv" and slot.dims[0].axis == "k"


def assemble(
    quantizer: Quantizer, shape: Shape, dtype: torch.dtype, parts: Parts
) -> QuantizedTensor:
    """Return a quantized tensor around stored tensors; codes are shared where shapes allow.

    Args:
        quantizer: describes the buffers; rowwise alone.
        shape: the logical shape.
        dtype: the nominal dtype.
        parts: the stored tensors, in any shape with as many elements as the unpadded buffer has.
            float8 tensors become their codes; factors of another float dtype become float32.
    """
    buffers = []
    for slot in quantizer.slots:
        part = getattr(parts, _FIELDS.get(slot.keyword, ""), None)
        if part is None:
            rule = f"{quantizer.canonical} needs {', '.join(quantizer.keywords)}"
            fail("assemble", rule, f"no {slot.keyword}", "Pass every part; rowwise data alone")
        buffers.append(_buffer(slot, part, shape))
    return quantizer.assemble(buffers, shape, dtype)


def _buffer(slot: Slot, part: Tensor, shape: Shape) -> Tensor:
    """Return the buffer of a slot: a view of ``part``, or a padded copy."""
    if slot.dtype == torch.uint8:
        part = part.view(torch.uint8)
    elif part.dtype != slot.dtype:
        part = part.to(slot.dtype)
    exact = unpadded(slot, shape)
    if part.numel() != torch.Size(exact).numel():
        rule = f"{slot.name} of a tensor of shape {tuple(shape)} has shape {exact}"
        fail("assemble", rule, tuple(part.shape), "Check the shapes of the file")
    part = part.reshape(exact[::-1]).t() if _columns_first(slot) else part.reshape(exact)
    full = buffer_shape(slot.dims, shape)
    if full == exact and not slot.swizzled:
        return part.contiguous()
    padded = part.new_zeros(full)
    if slot.swizzled:
        write_scales_(padded, part, True)
    else:
        padded[tuple(slice(n) for n in exact)] = part
    return padded


def in_dtype(tensor: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """Return a tensor that shows a dtype; codes are shared, and stay in a mapped file."""
    if tensor.dtype == dtype:
        return tensor
    inner = tensor_of(tensor)
    shown = quantizer_of(inner).assemble(inner.buffers(), inner.shape, dtype)
    return shown if inner is tensor else reshaped(shown, tensor.shape)


def rowwise_parts(tensor: QuantizedTensor) -> Parts:
    """Return the rowwise buffers of a tensor without padding and not swizzled; codes are shared.

    Raises:
        UnsupportedError: the tensor is the weight of a convolution, of which layouts of other
            libraries know no codes.
        QTensorError: it has no rowwise data.
    """
    if (matrix := tensor_of(tensor)) is not tensor:
        rule = "layouts of other libraries hold quantized matrices"
        got = f"the weight of a convolution, {tuple(matrix.shape)} for {tuple(tensor.shape)}"
        fix = 'Write layout "qtensor", or dequantize the weight'
        fail("rowwise_parts", rule, got, fix, UnsupportedError)
    found: dict[str, Tensor] = {}
    for slot in tensor.quantizer.slots:
        if slot.keyword not in _FIELDS:
            continue
        buffer = read_scales(getattr(tensor, slot.name), slot.swizzled)
        buffer = buffer[tuple(slice(n) for n in unpadded(slot, tensor.shape))]
        found[_FIELDS[slot.keyword]] = buffer.t() if _columns_first(slot) else buffer
    if "codes" not in found:
        rule = "the tensor has rowwise data"
        fix = "Quantize it"
        fail("rowwise_parts", rule, tensor.quantizer.canonical, fix)
    return Parts(**found)


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that share no storage, which safetensors refuses."""
    seen: set[int] = set()
    done = {}
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous()
        storage = own.untyped_storage()
        if storage.nbytes() != own.nbytes or storage._cdata in seen:
            own = own.clone()
        seen.add(own.untyped_storage()._cdata)
        done[name] = own
    return done
