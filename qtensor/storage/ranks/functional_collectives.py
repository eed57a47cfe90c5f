"""Move quantized tensors between ranks: functional collectives.

Each collective moves one tensor of bytes for each rank (``wire.py``). The handlers wait for it,
because the bytes of several ranks have to be put together; ``wait_tensor`` then has nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtensor.core.errors import check
from qtensor.storage.base import is_quantized
from qtensor.storage.ops.lazy_view import stacked
from qtensor.storage.ops.table import FUNCTIONAL, Args, Kwargs, Op, implements
from qtensor.storage.ops.views import slice_tensor
from qtensor.storage.origin import FRESH, Origin
from qtensor.storage.process_groups import Group
from qtensor.storage.ranks.wire import (
    check_alike,
    check_sender,
    compare_ranks,
    pack,
    refuse_reduction,
    unpack,
    wire_layout,
    write_into,
)
from qtensor.storage.rebuild import Q, map_buffers, same

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _wait(t: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(t)


def parts_of(rows: Tensor, like: Q, op: str) -> list[Q]:
    """Return the tensors of all ranks from their bytes, (ranks, nbytes) uint8.

    Args:
        rows: the packed bytes of each rank.
        like: a tensor with the quantizer and the shape of each part.
        op: the collective, for errors.

    Raises:
        QTensorError: the ranks have different quantizers or tensor-wide factors.
    """
    common = compare_ranks(rows, like, op)
    return [_gathered_part(row, like, like.shape, common) for row in rows.unbind()]


def _gathered_part(packed: Tensor, like: Q, shape: Sequence[int], common: Tensor) -> Q:
    # DTensor pads what it gathers, and drops the padding afterwards.
    return _received(packed, like, shape, Origin(may_be_padded=True), common)


def _received(
    packed: Tensor, like: Q, shape: Sequence[int], origin: Origin, common: Tensor | None = None
) -> Q:
    """Return the tensor that ``unpack`` finds, with memory of its own for each buffer.

    torch cannot save buffers of several dtypes in one memory.
    """
    return map_buffers(unpack(packed, like, shape, common), torch.clone, origin=origin)


@implements(FUNCTIONAL, "all_gather_into_tensor")
def _all_gather(func: Op, args: Args, kwargs: Kwargs) -> Any:
    t, size, group = args
    return _gathered(func, t, size, group)


def _gathered(func: Op, t: Q, size: int, group: Group) -> Q:
    check(
        t.ndim > 0,
        f"all_gather_into_tensor[{t._quantizer.format}]",
        "the tensor must have a dim along which parts are stacked",
        tuple(t.shape),
        "Unsqueeze it",
    )
    gathered = _wait(func(pack(t), size, group))
    return stacked(parts_of(gathered.view(size, -1), t, "all_gather_into_tensor"))


@implements(FUNCTIONAL, "all_gather_into_tensor_coalesced")
def _all_gather_coalesced(func: Op, args: Args, kwargs: Kwargs) -> list[Any]:
    tensors, size, group = args
    quantized = [t for t in tensors if is_quantized(t)]
    plain = [t for t in tensors if not is_quantized(t)]
    # gloo joins the tensors of a call, and gives other bytes if their dtypes differ.
    rows = iter(func([pack(t) for t in quantized], size, group))
    values = iter(func(plain, size, group) if plain else [])
    results = []
    for t in tensors:
        if is_quantized(t):
            parts = parts_of(_wait(next(rows)).view(size, -1), t, "all_gather_into_tensor")
            results.append(stacked(parts))
        else:
            results.append(next(values))
    return results


@implements(FUNCTIONAL, "all_gather_into_tensor_out")
def _all_gather_out(func: Op, args: Args, kwargs: Kwargs) -> Any:
    t, size, group = args
    out = kwargs["out"]
    check_alike([t, out], t, "all_gather_into_tensor", None)
    gathered = _gathered(torch.ops._c10d_functional.all_gather_into_tensor.default, t, size, group)
    return out.copy_(gathered)


@implements(FUNCTIONAL, "broadcast")
def _broadcast(func: Op, args: Args, kwargs: Kwargs) -> Any:
    t = args[0]
    received = _wait(func(pack(t), *args[1:], **kwargs))
    check_sender(received, t, "broadcast")
    return _received(received, t, t.shape, FRESH)


@implements(FUNCTIONAL, "broadcast_")
def _broadcast_(func: Op, args: Args, kwargs: Kwargs) -> Any:
    t = args[0]
    op = torch.ops._c10d_functional.broadcast.default
    write_into(t, _broadcast(op, args, kwargs), "broadcast")
    return t


def split_rows(t: Q, sizes: Sequence[int]) -> list[Q]:
    """Return the parts of ``t`` along dim 0.

    Raises:
        UnsupportedError: a part ends inside a block.
    """
    parts, start = [], 0
    for size in sizes:
        parts.append(slice_tensor(t, 0, start, start + size))
        start = start + size
    return parts


def row_parts(packed: Tensor, like: Q, sizes: Sequence[int], op: str) -> list[Q]:
    """Return the tensors that the ranks sent, one after another in ``packed``.

    Args:
        packed: flat uint8.
        like: a tensor with the quantizer and the last dims of each part.
        sizes: rows of each part.
        op: the collective, for errors.

    Raises:
        QTensorError: the ranks have different quantizers or tensor-wide factors.
    """
    shapes = [(size, *like.shape[1:]) for size in sizes]
    lengths = [wire_layout(like._quantizer, shape).nbytes for shape in shapes]
    pieces = packed.split(lengths)
    length = wire_layout(like._quantizer, like.shape).common
    common = compare_ranks(torch.stack([piece[:length] for piece in pieces]), like, op)
    return [_gathered_part(p, like, s, common) for p, s in zip(pieces, shapes, strict=True)]


@implements(FUNCTIONAL, "all_to_all_single")
def _all_to_all(func: Op, args: Args, kwargs: Kwargs) -> Any:
    t, outputs, inputs, group = args
    parts = split_rows(t, inputs)
    packed = [pack(part) for part in parts]
    like = parts[0]
    lengths = [wire_layout(like._quantizer, (size, *t.shape[1:])).nbytes for size in outputs]
    received = _wait(func(torch.cat(packed), lengths, [p.shape[0] for p in packed], group))
    return stack_rows(row_parts(received, like, outputs, "all_to_all_single"))


def stack_rows(parts: Sequence[Q]) -> Q:
    """Return the concatenation along dim 0 of parts with any number of rows."""
    filled = [part for part in parts if part.shape[0]] or list(parts[:1])
    if len(filled) == 1:
        return filled[0]
    equal = all(part.shape == filled[0].shape for part in filled)
    return stacked(filled) if equal else torch.ops.aten.cat(filled, 0)


@implements(FUNCTIONAL, "shard_dim_alltoall")
def _shard_dim_alltoall(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Gather along one dim and shard along another one, as DTensor does on GPUs."""
    t, gather_dim, shard_dim, group = args
    parts = [part.contiguous() for part in t.chunk(_size_of(group), shard_dim)]
    packed = [pack(part) for part in parts]
    lengths = [p.shape[0] for p in packed]
    exchange = torch.ops._c10d_functional.all_to_all_single
    received = _wait(exchange(torch.cat(packed), lengths, lengths, group))
    rows = received.view(len(parts), -1)
    return torch.ops.aten.cat(parts_of(rows, parts[0], "redistribute"), gather_dim)


def _size_of(group: ProcessGroup | str) -> int:
    if isinstance(group, str):
        # torch has a type of its own for names.
        return torch.distributed.distributed_c10d._get_group_size_by_name(group)  # type: ignore[arg-type]
    return group.size()


@implements(FUNCTIONAL, "wait_tensor", "_wrap_tensor_autograd")
def _wait_tensor(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Return an alias: the handlers have waited for the results already."""
    return same(args[0])


@implements(
    FUNCTIONAL,
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_out",
)
def _reduce(func: Op, args: Args, kwargs: Kwargs) -> Any:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    refuse_reduction(func, next(t for t in leaves if is_quantized(t)))
