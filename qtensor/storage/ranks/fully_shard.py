"""Weights whose codes and scales are gathered: the hooks of ``fully_shard``.

``fully_shard`` asks a rank's shard for the tensors that travel (``fsdp_pre_all_gather``), gathers
them, and asks for the whole weight (``fsdp_post_all_gather``). A shard sends one tensor of bytes
(``wire.py``): on a group of one rank, torch passes on the first tensor only. All ranks send equally
many bytes, so the bytes of a shorter shard end with zeros.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.dtensors import local_part
from qtensor.core.errors import QTensorError, UnsupportedError, fail
from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.library.same_rows import SAME_ROWS
from qtensor.storage import geometry
from qtensor.storage.origin import Split
from qtensor.storage.ranks.wire import (
    compare_ranks,
    kind_number,
    pack,
    unpacked_buffers,
    wire_layout,
)
from qtensor.storage.rebuild import set_origin

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from qtensor.storage.base import QuantizedTensorStorage, TensorOrStorage
    from qtensor.storage.tensor import QuantizedTensor

_OP = "fully_shard"


class Gathered(NamedTuple):
    """What the second hook needs to know from the first.

    Attributes:
        sent: quantizer of the buffers that travel.
        quantizer: quantizer of the whole weight.
        dtype: the nominal dtype of the shards.
        rows: the number of rows of each rank.
        rest: the shape without the first dim.
    """

    sent: QuantizerLike
    quantizer: QuantizerLike
    dtype: torch.dtype
    rows: tuple[int, ...]
    rest: tuple[int, ...]


def sent_quantizer(quantizer: QuantizerLike) -> QuantizerLike:
    """Return the quantizer of what is sent.

    Rowwise data suffice where columnwise data follow from them.
    """
    both = quantizer.rowwise and quantizer.columnwise and not quantizer.columnwise_value
    if both and (quantizer.two_dimensional or quantizer.spec.transpose_shares_bytes):
        return quantizer.with_usage(columnwise=False)
    return quantizer


def rows_of_ranks(
    shard: TensorOrStorage, quantizer: QuantizerLike, group: ProcessGroup
) -> tuple[int, ...]:
    """Return the number of rows of each rank of a group, in a collective of all its ranks.

    Args:
        shard: this rank's shard of a weight that is split along dim 0.
        quantizer: of the weight.
        group: the process group.

    Raises:
        QTensorError: on every rank, if the ranks have different quantizers.
    """
    rows = int(shard.shape[0])
    if group.size() == 1:
        return (rows,)
    kind = kind_number(f"{quantizer.canonical} {tuple(shard.shape[1:])}", shard.dtype)
    own = torch.tensor([rows, kind], device=shard.device)
    of_ranks = own.new_empty(group.size(), 2)
    torch.distributed.all_gather(list(of_ranks), own, group=group)
    message = (
        f"{_place(group)}: all ranks must quantize a weight alike; got another quantizer, shape or "
        f"dtype on another rank than {quantizer.canonical} {tuple(shard.shape)} {shard.dtype} "
        "here. Build the model with the same recipe and formats on every rank."
    )
    SAME_ROWS(of_ranks[:, 1:].contiguous().view(torch.uint8), message)
    return tuple([int(n) for n in of_ranks[:, 0]])


def _place(group: ProcessGroup) -> str:
    return f"{_OP} ({group.size()} shards, Shard(0))"


def gathered(
    shard: TensorOrStorage, quantizer: QuantizerLike, rows: tuple[int, ...], group: ProcessGroup
) -> Gathered:
    """Return how the shards of a weight are gathered; the result is equal on all ranks.

    Raises:
        QTensorError: a shard before the last ends inside a block.
    """
    inner = math.prod(shard.shape[1:-1])
    block = math.lcm(*[d.per for slot in quantizer.slots for d in slot.dims if d.axis == "m"])
    if any([n * inner % block for n in [n for n in rows if n][:-1]]):
        fail(
            f"{_place(group)}[{quantizer.format}]",
            f"each shard must end at a block of {block} rows: the first dim of the weight "
            f"must be a multiple of {block * len(rows)}",
            f"{sum(rows)}, of which the ranks have {list(rows)}",
            f"Use another size, ranks that divide {sum(rows)} into blocks, or leave the layer out",
        )
    return Gathered(sent_quantizer(quantizer), quantizer, shard.dtype, rows, tuple(shard.shape[1:]))


def check_dim(shape: Shape, whole: Shape, quantizer: QuantizerLike) -> None:
    """Refuse a weight that ``fully_shard`` has split along another dim than the first.

    Args:
        shape: of a rank's shard.
        whole: of the weight.
        quantizer: of the weight.

    Raises:
        UnsupportedError: the shapes differ in another dim.
    """
    cut = [d for d, (a, b) in enumerate(zip(shape, whole, strict=True)) if d and a != b]
    if cut:
        fail(
            f"{_OP}[{quantizer.format}]",
            "codes and scales are gathered along dim 0, so the placement must be Shard(0)",
            f"Shard({cut[0]})",
            "Let shard_placement_fn return Shard(0) or None for this parameter",
            UnsupportedError,
        )


def storage_of(
    quantizer: QuantizerLike, buffers: Sequence[Tensor], shape: Shape, dtype: torch.dtype
) -> QuantizedTensorStorage:
    """Return a bare storage around buffers in the slot order of ``quantizer``."""
    named = dict(zip(quantizer.keywords, buffers, strict=True))
    return quantizer.storage_cls(shape, dtype, quantizer, **named)


def sent_bytes(shard: QuantizedTensorStorage, data: Gathered) -> Tensor:
    """Return the bytes of a shard, with zeros to the length that the largest shard has."""
    length = wire_layout(data.sent, (max(data.rows), *data.rest)).nbytes
    packed = pack(shard)
    return torch.cat((packed, packed.new_zeros(length - packed.shape[0])))


def gathered_shard(
    shard: QuantizedTensorStorage, group: ProcessGroup
) -> tuple[tuple[Tensor, ...], Gathered]:
    """Return the bytes of a quantized shard, and how they are gathered.

    The shard remembers how the ranks split the weight, so that later writes find its maxima.
    """
    quantizer, origin = shard._quantizer, shard._origin
    check_dim(shard.shape, origin.shard_of or shard.shape, quantizer)
    name = group.group_name
    known = [split.rows for split in origin.split or () if split.group == name and split.rows]
    rows = known[0] if known else rows_of_ranks(shard, quantizer, group)
    if not known:
        others = [split for split in origin.split or () if split.group != name]
        split = tuple([*others, Split(name, "m", rows)])
        set_origin(shard, origin._replace(split=split))
    data = gathered(shard, quantizer, rows, group)
    buffers = [getattr(shard, slot.name) for slot in data.sent.slots]
    sent = storage_of(data.sent, buffers, shard.shape, shard.dtype)
    return (sent_bytes(sent, data),), data


def _joined(packed: Tensor, data: Gathered) -> list[Tensor]:
    """Return new buffers of the whole weight from the bytes of all ranks, one after another."""
    pieces = list(packed.view(len(data.rows), -1))
    filled = [i for i, rows in enumerate(data.rows) if rows] or [0]
    parts = []
    for i in filled:
        shape = (data.rows[i], *data.rest)
        buffers = unpacked_buffers(pieces[i], data.sent, shape)
        parts.append(storage_of(data.sent, buffers, shape, data.dtype))
    compare_ranks(torch.stack([pieces[i] for i in filled]), parts[0], _OP)
    buffers = geometry.cat_buffers(parts, 0) if len(parts) > 1 else parts[0].buffers()
    # The memory of the bytes is freed and filled again; the weight has memory of its own.
    buffers = [b.clone() if b._base is not None or len(parts) == 1 else b for b in buffers]
    if data.sent is data.quantizer:
        return buffers
    named = dict(zip(data.sent.slot_names, buffers, strict=True))
    named.update(data.sent.derive(named, (sum(data.rows), *data.rest), "columnwise") or {})
    return [named[name] for name in data.quantizer.slot_names]


@contextlib.contextmanager
def named_in_errors(name: str) -> Iterator[None]:
    """Let errors of this block begin with the name of a parameter; "" if it is not known."""
    try:
        yield
    except QTensorError as error:
        if name and name not in str(error):
            error.args = (f"{name}: {error}",)
        raise


class GatheredWeight:
    """Mixin with the hooks of ``fully_shard`` for a tensor that has a quantizer."""

    _name: str = ""
    """The parameter's name, for errors; "" if it is not known."""

    def _whole_quantizer(self) -> QuantizerLike:
        """Return the quantizer of the whole weight."""
        raise NotImplementedError

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Gathered,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
        """Return the whole weight and the buffers that ``fully_shard`` frees; or fill ``out``.

        Args:
            outputs: the bytes of all ranks.
            metadata: the second result of ``fsdp_pre_all_gather``.
            param_dtype: the nominal dtype of the weight.
            out: the weight that an earlier call returned, whose buffers have memory again.

        Raises:
            QTensorError: on every rank, if the shards have different quantizers, or different
                factors of the whole tensor.
        """
        with torch.no_grad(), named_in_errors(self._name):
            buffers = _joined(outputs[0], metadata)
            if out is None:
                shape = (sum(metadata.rows), *metadata.rest)
                return metadata.quantizer._assemble(buffers, shape, param_dtype), tuple(buffers)
            # A weight that a parallel style has split comes as a DTensor.
            for target, buffer in zip(local_part(out).buffers(), buffers, strict=True):
                # Through .data: autograd may have saved the buffer, and its values are the same.
                target.data.copy_(buffer)
        return None
