"""DTensors of quantized tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import qtensor
from distributed_cells.base import ROWS, SIZE, Cell, K, mesh, part, same, spread, values
from qtensor import QuantizedTensor


def distribute(placement: Any) -> Callable[[Cell], None]:
    """Each rank gets rank 0's values, and ``from_local`` of the parts is the whole again."""

    def run(cell: Cell) -> None:
        q = cell.weight()
        distributed = spread(q if dist.get_rank() == 0 else cell.tensor(1), placement)
        local = distributed.to_local()
        same(local, part(q, placement))

        def call(local: Any) -> Any:
            return DTensor.from_local(local, mesh_, [placement]).to_local()

        mesh_ = mesh()
        with torch.no_grad():
            same(cell.run(call)(local), local)
        again = DTensor.from_local(local, mesh_, [placement], shape=q.shape, stride=q.stride())
        same(again.full_tensor(), q)

    return run


def full_tensor(placement: Any) -> Callable[[Cell], None]:
    def run(cell: Cell) -> None:
        distributed = spread(cell.weight(), placement)
        with torch.no_grad():
            same(cell.run(lambda d: d.full_tensor())(distributed), cell.weight())

    return run


def uneven(placement: Any, size: int) -> Callable[[Cell], None]:
    """Return the cell of a dim that ranks do not divide: the first part is half, rounded up."""

    def run(cell: Cell) -> None:
        shape = (size, K) if placement == Shard(0) else (ROWS, size)
        q = cell.quantize(values(*shape))
        distributed = spread(q, placement)
        half = -(-size // SIZE)
        assert distributed.to_local().shape[placement.dim] == (half, size - half)[dist.get_rank()]
        assert isinstance(distributed.to_local(), QuantizedTensor)
        with torch.no_grad():
            same(cell.run(lambda d: d.full_tensor())(distributed.clone()), q)

    return run


def redistribute(before: Any, after: Any) -> Callable[[Cell], None]:
    def run(cell: Cell) -> None:
        distributed = spread(cell.weight(), before)
        with torch.no_grad():
            moved = cell.run(lambda d: d.redistribute(placements=[after]))(distributed)
        assert moved.placements == (after,)
        same(moved.to_local(), part(cell.weight(), after))

    return run


def quantize(placement: Any) -> Callable[[Cell], None]:
    """Compare the values in both directions: a part may have notes that the whole has not."""

    def run(cell: Cell) -> None:
        with torch.no_grad():
            got = cell.run(cell.quantize)(spread(values(), placement))
        assert got.placements == (placement,)
        local, whole = got.to_local(), cell.weight()
        assert isinstance(local, QuantizedTensor)
        same(local.dequantize(), part(whole.dequantize(), placement), "rowwise")
        for t in (local, whole):
            t.update_usage(rowwise=False)
        same(local.dequantize(), part(whole.dequantize(), placement), "columnwise")

    return run


def dequantize(placement: Any) -> Callable[[Cell], None]:
    def run(cell: Cell) -> None:
        with torch.no_grad():
            got = cell.run(qtensor.dequantize)(spread(cell.weight(), placement))
        assert got.placements == (placement,)
        same(got.to_local(), part(cell.weight().dequantize(), placement))

    return run


def linear(cell: Cell) -> None:
    x, w = values(64, K), cell.weight()
    with torch.no_grad():
        call = cell.run(nn.functional.linear)
        got = call(spread(x, Replicate()), spread(w, Shard(0)))
    assert got.placements == (Shard(1),)
    same(got.full_tensor(), nn.functional.linear(x, w))


def matmul(cell: Cell) -> None:
    """The contracted dim is split: the sum of the products of the parts."""
    x, w = values(64, K), cell.weight()
    with torch.no_grad():
        got = cell.run(lambda x, w: x @ w.t())(spread(x, Shard(1)), spread(w, Shard(1)))
    a, b = [p @ q.t() for p, q in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)]
    same(got.full_tensor(), a + b)


def embedding(cell: Cell) -> None:
    w, index = cell.weight(), torch.arange(0, ROWS, 7)
    with torch.no_grad():
        call = cell.run(nn.functional.embedding)
        got = call(spread(index, Replicate()), spread(w, Shard(1)))
    same(got.full_tensor(), nn.functional.embedding(index, w))
