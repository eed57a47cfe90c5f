"""Pack the buffers of a quantized tensor into bytes that one collective can move.

The bytes of a tensor are, in this order: a hash of the quantizer and the nominal dtype, the factors
of the whole tensor, its other buffers (wide elements first, so that each part stays aligned), and
padding to a multiple of 16 bytes. Ranks compare the first two parts. The buffers have the shapes of
a newly quantized tensor, whatever slice the tensor is.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, buffer_shape
from qtensor.core.errors import UnsupportedError, fail
from qtensor.core.formats import Slot
from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.library.same_rows import SAME_ROWS
from qtensor.storage import geometry
from qtensor.storage.base import QuantizedTensorStorage, is_quantized
from qtensor.storage.ops.table import Op
from qtensor.storage.ops.write import begin_write, copy_buffer
from qtensor.storage.origin import FRESH
from qtensor.storage.rebuild import S, with_buffers

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor

ALIGNMENT = 16
HASH_BYTES = 8


class Piece(NamedTuple):
    """Where the buffer of a slot is among the packed bytes."""

    slot: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]


class WireLayout(NamedTuple):
    """Where each buffer of a tensor is among the packed bytes."""

    pieces: tuple[Piece, ...]
    common: int
    """The number of bytes that must be equal on all ranks: the hash and the shared factors."""
    nbytes: int


def is_shared(slot: Slot) -> bool:
    """Return True if the buffer of ``slot`` holds factors of the whole tensor."""
    return all(dim.axis == "one" for dim in slot.dims)


def wire_layout(quantizer: QuantizerLike, shape: Shape) -> WireLayout:
    """Return the layout of the packed bytes of a tensor of ``shape``."""
    slots = quantizer.slots
    order = sorted(
        range(len(slots)), key=lambda i: (not is_shared(slots[i]), -slots[i].dtype.itemsize)
    )
    pieces, offset, common = [], HASH_BYTES, HASH_BYTES
    for i in order:
        size = buffer_shape(slots[i].dims, shape)
        nbytes = math.prod(size) * slots[i].dtype.itemsize
        pieces.append(Piece(i, offset, nbytes, size))
        offset = offset + nbytes
        common = offset if is_shared(slots[i]) else common
    return WireLayout(tuple(pieces), common, (offset + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)


@functools.lru_cache(maxsize=1024)
def kind_number(canonical: str, dtype: torch.dtype) -> int:
    """Return a number that tells a quantizer and a nominal dtype from all others."""
    digest = hashlib.sha256(f"{canonical} {dtype}".encode()).digest()
    return int.from_bytes(digest[:HASH_BYTES], "little") >> 1


def _hash_bytes(t: QuantizedTensorStorage) -> Tensor:
    value = kind_number(t._quantizer.canonical, t.dtype)
    # A fill needs no copy from the host.
    return torch.full((1,), value, dtype=torch.int64, device=t.device).view(torch.uint8)


def as_bytes(buffer: Tensor) -> Tensor:
    """Return the bytes of a buffer as a flat tensor."""
    return buffer.contiguous().view(-1).view(torch.uint8)


def pack(t: QuantizedTensorStorage) -> Tensor:
    """Return the buffers of ``t`` as flat uint8, laid out as ``wire_layout`` says."""
    layout = wire_layout(t._quantizer, t.shape)
    buffers = geometry.whole_buffers(t)
    parts = [_hash_bytes(t), *(as_bytes(buffers[piece.slot]) for piece in layout.pieces)]
    end = HASH_BYTES + sum(piece.nbytes for piece in layout.pieces)
    parts.append(parts[0].new_zeros(layout.nbytes - end))
    return torch.cat(parts)


def unpack(packed: Tensor, like: S, shape: Shape, common: Tensor | None = None) -> S:
    """Return a tensor of ``shape`` with the quantizer of ``like`` around views of ``packed``.

    Args:
        packed: flat uint8, as ``pack`` returns.
        like: has the quantizer, the nominal dtype and the class.
        shape: the logical shape.
        common: the hash and the shared factors, as ``compare_ranks`` returns them, to use instead
            of those at the start of ``packed``.
    """
    buffers = unpacked_buffers(packed, like._quantizer, shape, common)
    return with_buffers(like, buffers, shape, origin=FRESH)


def unpacked_buffers(
    packed: Tensor, quantizer: QuantizerLike, shape: Shape, common: Tensor | None = None
) -> list[Tensor]:
    """Return views of ``packed`` as the buffers of a tensor of ``shape``, in slot order."""
    slots = quantizer.slots
    buffers: list[Any] = [None] * len(slots)
    for piece in wire_layout(quantizer, shape).pieces:
        slot = slots[piece.slot]
        source = common if common is not None and is_shared(slot) else packed
        own_bytes = source.narrow(0, piece.offset, piece.nbytes)
        buffers[piece.slot] = own_bytes.view(slot.dtype).view(piece.shape)
    return buffers


def compare_ranks(rows: Tensor, like: QuantizedTensorStorage, op: str) -> Tensor:
    """Return the hash and the shared factors, after a check that all ranks have equal ones.

    Args:
        rows: (ranks, n) uint8, at least the common bytes of each rank.
        like: a tensor with the quantizer of this rank.
        op: the collective, for errors.

    Raises:
        QTensorError: when the collective runs, if a rank differs.
    """
    quantizer = like._quantizer
    common = wire_layout(quantizer, like.shape).common
    message = (
        f"{op}[{quantizer.format}]: all ranks must have one quantizer, nominal dtype and "
        f"tensor-wide factors; got other ones on another rank than {quantizer.canonical} of "
        f"{like.dtype} here. Quantize with the maximum over ranks "
        "(qtensor.quantize(x, ..., amax_reduction_group=group)), or gather the parts as a list. "
        "Optimizers keep the factors of a DTensor's parts equal after `import qtensor.distributed`."
        if any(map(is_shared, quantizer.slots))
        else f"{op}[{quantizer.format}]: all ranks must have one quantizer and nominal dtype; got "
        f"another one on another rank than {quantizer.canonical} of {like.dtype} here. Quantize "
        "with the same format and options on every rank."
    )
    return SAME_ROWS(rows[:, :common], message)


def check_sender(packed: Tensor, like: QuantizedTensorStorage, op: str) -> None:
    """Refuse bytes of a tensor with another quantizer or nominal dtype.

    Raises:
        QTensorError: the sender has another quantizer or nominal dtype.
    """
    message = (
        f"{op}[{like._quantizer.format}]: sender and receiver must have one quantizer and nominal "
        f"dtype; got another one from the sender than {like._quantizer.canonical} of {like.dtype} "
        "here. Quantize with the same format and options on every rank."
    )
    SAME_ROWS(torch.stack([packed[:HASH_BYTES], _hash_bytes(like)]), message)


def check_alike(
    tensors: Sequence[Tensor], like: QuantizedTensorStorage, op: str, shape: Shape | None = None
) -> None:
    """Refuse tensors with another quantizer or nominal dtype than ``like``.

    Args:
        tensors: the tensors that a collective reads or writes together with ``like``.
        like: a quantized tensor.
        op: the collective, for errors.
        shape: the shape that all ``tensors`` must have; any if None.

    Raises:
        QTensorError: one is plain, or has another quantizer, nominal dtype or shape.
    """
    for t in tensors:
        fits = is_quantized(t) and t._quantizer == like._quantizer and t.dtype == like.dtype
        if not fits:
            kind = f"{t._quantizer.canonical}" if hasattr(t, "_quantizer") else "a plain tensor"
            fail(
                f"{op}[{like._quantizer.format}]",
                f"all tensors of the call must be {like._quantizer.canonical} of {like.dtype}",
                f"{kind} of {t.dtype}",
                "Allocate outputs with torch.empty_like(quantized), or dequantize all of them",
            )
        if shape is not None and tuple(t.shape) != tuple(shape):
            fail(
                f"{op}[{like._quantizer.format}]",
                f"all tensors of the call must have the shape {tuple(shape)}",
                tuple(t.shape),
                "Fix the shapes",
            )


def write_into(t: QuantizedTensor, received: QuantizedTensorStorage, op: str) -> None:
    """Copy the buffers of ``received`` into ``t``.

    Raises:
        QTensorError: ``t`` is a part of a tensor whose other values need other factors.
        UnsupportedError: a write to ``t`` would not reach the tensor that it is a part of.
    """
    shared = begin_write(t)
    for name in shared:
        if not torch.equal(getattr(t, name), getattr(received, name)):
            fail(
                f"{op}[{t._quantizer.format}]",
                f"a part of a tensor can receive values that have its factors ({name})",
                "other factors",
                "Receive into a tensor of its own, or quantize with the maximum over ranks",
                UnsupportedError,
            )
    for slot in t._quantizer.slots:
        if slot.name not in shared:
            copy_buffer(getattr(t, slot.name), getattr(received, slot.name))


def refuse_reduction(func: Op, t: QuantizedTensorStorage) -> None:
    """Raise an error, because codes of different factors cannot be added.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"{func}: a reduction needs values, and quantized tensors hold codes; got "
        f"{t._quantizer.canonical}. Reduce t.dequantize() and quantize the result, or move the "
        "codes with all_gather or all_to_all_single and add the dequantized parts."
    )
