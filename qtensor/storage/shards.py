"""Shards of weights whose codes and scales are gathered: the hooks of ``fully_shard``.

``fully_shard`` asks a rank's shard for the tensors that travel (``fsdp_pre_all_gather``), gathers
them, and asks for the whole weight (``fsdp_post_all_gather``). A shard sends one uint8 tensor that
holds its buffers one after another: on a group of one rank, torch passes on the first tensor only.
All ranks send equally many bytes, so that a shorter shard is padded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.dtensor import local_part
from qtensor.errors import UnsupportedError, fail
from qtensor.layout import Shape
from qtensor.storage import geometry
from qtensor.storage.groups import group_of_mesh
from qtensor.storage.parameter_names import names_parameter

_ALIGNMENT = 16
"""Each buffer begins at a multiple of this many bytes, so that it can be viewed as float32."""


class Shards(NamedTuple):
    """How the rows of a weight are spread over a process group.

    Attributes:
        group: the name of the group.
        rank: the rank of this process in it.
        rows: the number of rows of each rank.
    """

    group: str
    rank: int
    rows: tuple[int, ...]


class Gathered(NamedTuple):
    """What the second hook needs to know from the first.

    Attributes:
        sent: quantizer of the buffers that travel.
        quantizer: quantizer of the whole weight.
        rows: the number of rows of each rank.
        rest: the shape without the first dim.
    """

    sent: Any
    quantizer: Any
    rows: tuple[int, ...]
    rest: tuple[int, ...]


def sent_quantizer(quantizer: Any) -> Any:
    """Return the quantizer of the data that travel: rowwise, if they determine the columnwise."""
    both = quantizer.rowwise and quantizer.columnwise and not quantizer.columnwise_value
    if both and (quantizer.two_dimensional or quantizer.spec.transpose_shares_bytes):
        return quantizer.with_usage(columnwise=False)
    return quantizer


def _place(group: Any) -> str:
    return f"{group.size()} shards, Shard(0)"


def exchanged(quantizer: Any, shape: Shape, dtype: torch.dtype, device: Any, group: Any) -> Shards:
    """Return the rows of all ranks of a group, which every rank must call at the same time.

    Args:
        quantizer: of the shard of this rank.
        shape: of the shard.
        dtype: the nominal dtype.
        device: device of the group.
        group: the process group.

    Raises:
        QTensorError: on every rank, if the ranks have different quantizers, or if a shard ends
            inside of a block.
    """
    rank, rows = group.rank(), int(shape[0])
    described = f"{quantizer.canonical} {tuple(shape[1:])} {dtype}"
    of_ranks = [torch.tensor([rows, 0], device=device)]
    if group.size() > 1:
        digest = int.from_bytes(hashlib.sha256(described.encode()).digest()[:7], "big")
        own = torch.tensor([rows, digest], device=device)
        of_ranks = [torch.empty_like(own) for _ in range(group.size())]
        torch.distributed.all_gather(of_ranks, own, group=group)
        words = [int(t[1]) for t in of_ranks]
        if others := [r for r, word in enumerate(words) if word != digest]:
            fail(
                f"fully_shard ({_place(group)})",
                f"all ranks must quantize a weight alike, and ranks {others} of the group differ",
                f"{described} for the shard {tuple(shape)} here",
                "Build the model with the same recipe and formats on every rank",
            )
    all_rows = tuple([int(t[0]) for t in of_ranks])
    check_blocks(quantizer, all_rows, shape, group)
    return Shards(group.group_name, rank, all_rows)


def check_blocks(quantizer: Any, rows: Sequence[int], shape: Shape, group: Any) -> None:
    """Refuse shards that end inside of a block.

    Raises:
        QTensorError: a shard before the last ends inside of a block.
    """
    inner = math.prod(shape[1:-1])
    block = math.lcm(*[d.per for slot in quantizer.slots for d in slot.dims if d.axis == "m"])
    filled = [n for n in rows if n][:-1]
    if any([n * inner % block for n in filled]):
        fail(
            f"fully_shard[{quantizer.format}] ({_place(group)})",
            f"each shard must end at a block of {block} rows, so that the first dim of the weight "
            f"must be a multiple of {block * len(rows)}",
            f"{sum(rows)}, of which the ranks have {list(rows)}",
            f"Use another size, ranks that divide {sum(rows)} into blocks, or leave the layer out",
        )


def check_dim(dim: int, quantizer: Any) -> None:
    """Refuse a weight that ``fully_shard`` has cut along another dim than the first.

    Raises:
        UnsupportedError: ``dim`` is not 0.
    """
    if dim:
        fail(
            f"fully_shard[{quantizer.format}]",
            "codes and scales are gathered along dim 0, so that the placement must be Shard(0)",
            f"Shard({dim})",
            "Let shard_placement_fn return Shard(0) or None for this parameter",
            UnsupportedError,
        )


def _layout(quantizer: Any, shape: Shape) -> tuple[list[tuple[str, int, Any, Any]], int]:
    """Return (name, offset, shape, dtype) of each buffer in the packed bytes, and their number."""
    places, offset = [], 0
    for name, (size, dtype) in quantizer._describe_buffers(shape).items():
        places.append((name, offset, size, dtype))
        offset += -(-math.prod(size) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return places, offset


def _buffers_in(packed: Tensor, quantizer: Any, shape: Shape) -> list[Tensor]:
    """Return views of packed bytes as the buffers of a tensor of ``shape``."""
    views = []
    for _, offset, size, dtype in _layout(quantizer, shape)[0]:
        count = math.prod(size) * dtype.itemsize
        views.append(packed[offset : offset + count].view(dtype).view(size))
    return views


def pack(quantizer: Any, buffers: dict[str, Tensor], shards: Shards, rest: Shape) -> Tensor:
    """Return the bytes (n,) uint8 of a shard's buffers, equally many on every rank."""
    length = _layout(quantizer, (max(shards.rows), *rest))[1]
    device = next(iter(buffers.values())).device
    packed = torch.zeros(length, dtype=torch.uint8, device=device)
    own = _buffers_in(packed, quantizer, (shards.rows[shards.rank], *rest))
    for target, slot in zip(own, quantizer.slots, strict=True):
        source = buffers[slot.name]
        # The scales of a slice may lack padding.
        sizes = tuple([slice(min(a, b)) for a, b in zip(target.shape, source.shape, strict=True)])
        target[sizes].copy_(source[sizes])
    return packed


def joined(packed: Tensor, data: Gathered) -> list[Tensor]:
    """Return new buffers of the whole weight from the bytes of all ranks, one after another."""
    parts = []
    for rows, own in zip(data.rows, packed.view(len(data.rows), -1), strict=True):
        if rows or not any(data.rows):
            shape = (rows, *data.rest)
            buffers = _buffers_in(own, data.sent, shape)
            names = dict(zip(data.sent.keywords, buffers, strict=True))
            parts.append(data.sent.storage_cls(shape, torch.float32, data.sent, **names))
    shape = (sum(data.rows), *data.rest)
    _check_shared(data, parts)
    buffers = geometry.cat_buffers(parts, 0) if len(parts) > 1 else parts[0].buffers()
    # The memory of the bytes is freed and filled again; the weight has memory of its own.
    buffers = [b.clone() if b._base is not None or len(parts) == 1 else b for b in buffers]
    if data.sent is data.quantizer:
        return buffers
    named = dict(zip([slot.name for slot in data.sent.slots], buffers, strict=True))
    derived = data.sent.derive(named, shape, "columnwise")
    named.update(derived or {})
    return [named[slot.name] for slot in data.quantizer.slots]


def _check_shared(data: Gathered, parts: Sequence[Any]) -> None:
    """Refuse shards with different factors of the whole tensor, on every rank alike.

    Raises:
        QTensorError: a factor differs.
    """
    for slot in data.sent.slots:
        if any([d.axis in ("m", "lead") for d in slot.dims]):
            continue
        first, *others = [getattr(part, slot.name) for part in parts]
        if any([not torch.equal(first, other) for other in others]):
            fail(
                f"fully_shard[{data.sent.format}] (Shard(0))",
                f"{slot.name} belongs to the whole weight {(sum(data.rows), *data.rest)}, so that "
                "it must be equal in all shards",
                [getattr(part, slot.name).flatten()[:4].tolist() for part in parts],
                "Quantize the whole weight before fully_shard, and write to its shards after the "
                "first forward",
            )


class GatheredWeight:
    """Mixin with the hooks of ``fully_shard`` for a tensor that has a quantizer.

    Attributes:
        _shards: how the rows are spread; None before the first gather.
    """

    _shards: Shards | None = None
    _name: str = ""
    """The parameter's name; if it is empty, errors search it."""
    _shard_dim: int = 0
    """The dim along which ``fully_shard`` has cut the weight."""

    def _sent_buffers(self, sent: Any, shards: Shards) -> dict[str, Tensor]:
        """Return this shard's buffers of the quantizer ``sent``, by name."""
        raise NotImplementedError

    def _whole_quantizer(self) -> Any:
        """Return the quantizer of the whole weight."""
        raise NotImplementedError

    def _known_shards(self, group: Any) -> Shards:
        """Return how the rows are spread; at the first call the ranks exchange their numbers."""
        shards, tensor = self._shards, self
        shape, dtype, device = tensor.shape, tensor.dtype, tensor.device  # type: ignore[attr-defined]
        if shards is None or shards.group != group.group_name:
            shards = exchanged(self._whole_quantizer(), shape, dtype, device, group)
            self._shards = shards
        return shards

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Gathered]:
        """Return the bytes of this rank's shard, and what the second hook needs.

        Args:
            mesh: the mesh over which the parameter is sharded, one dim.

        Raises:
            QTensorError: the ranks have different quantizers, or a shard ends inside of a block.
            UnsupportedError: the weight is not sharded along dim 0.
        """
        with names_parameter(self, self._name):
            quantizer = self._whole_quantizer()
            check_dim(self._shard_dim, quantizer)
            shards = self._known_shards(group_of_mesh(mesh, None, "fully_shard"))
            rest = tuple(self.shape[1:])  # type: ignore[attr-defined]
            sent = sent_quantizer(quantizer)
            packed = pack(sent, self._sent_buffers(sent, shards), shards, rest)
            return (packed,), Gathered(sent, quantizer, shards.rows, rest)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Gathered,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """Return the whole weight and the buffers that ``fully_shard`` frees; or fill ``out``.

        Args:
            outputs: the bytes of all ranks.
            metadata: the second result of ``fsdp_pre_all_gather``.
            param_dtype: the nominal dtype of the weight.
            out: the weight that an earlier call returned, whose buffers have memory again.

        Raises:
            QTensorError: factors of the whole tensor differ between the shards.
        """
        with torch.no_grad(), names_parameter(self, self._name):
            buffers = joined(outputs[0], metadata)
            if out is None:
                shape = (sum(metadata.rows), *metadata.rest)
                return metadata.quantizer._assemble(buffers, shape, param_dtype), tuple(buffers)
            # A weight that a parallel style has split comes as a DTensor.
            for target, buffer in zip(local_part(out).buffers(), buffers, strict=True):
                # Through .data: autograd may have saved the buffer, and its values are the same.
                target.data.copy_(buffer)
        return None
