"""Collectives of quantized tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from distributed_cells.base import ROWS, SIZE, Cell, same


def emptied(like: Any) -> Any:
    out = torch.empty_like(like)
    for buffer in out.buffers():
        buffer.fill_(3)
    return out


def gathered(cell: Cell) -> Any:
    return torch.cat([cell.tensor(rank) for rank in range(SIZE)])


def exchanged(cell: Cell) -> Any:
    rank, half = dist.get_rank(), ROWS // SIZE
    parts = [cell.tensor(r)[rank * half : (rank + 1) * half].clone() for r in range(SIZE)]
    return torch.cat(parts)


def broadcast(cell: Cell) -> None:
    q = cell.tensor(1) if dist.get_rank() == 1 else emptied(cell.tensor(1))

    def call(q: Any) -> Any:
        dist.broadcast(q, 1)
        return q

    same(cell.run(call, whole=False)(q), cell.tensor(1))


def scatter(cell: Cell) -> None:
    rank = dist.get_rank()
    parts = [cell.tensor(r) for r in range(SIZE)] if rank == 1 else None

    def call(out: Any, parts: Any) -> Any:
        dist.scatter(out, parts, 1)
        return out

    same(cell.run(call, whole=False)(emptied(cell.tensor(0)), parts), cell.tensor(rank))


def gather(cell: Cell) -> None:
    outs = [emptied(cell.tensor(0)) for _ in range(SIZE)] if dist.get_rank() == 0 else None

    def call(q: Any, outs: Any) -> Any:
        dist.gather(q, outs, 0)
        return outs

    for source, out in enumerate(
        cell.run(call, whole=False)(cell.tensor(dist.get_rank()), outs) or []
    ):
        same(out, cell.tensor(source))


def all_gather(cell: Cell) -> None:
    outs = [emptied(cell.tensor(0)) for _ in range(SIZE)]

    def call(q: Any, outs: Any) -> Any:
        dist.all_gather(outs, q)
        return outs

    for rank, out in enumerate(cell.run(call, whole=False)(cell.tensor(dist.get_rank()), outs)):
        same(out, cell.tensor(rank))


def all_gather_into_tensor(cell: Cell) -> None:
    want = gathered(cell)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def call(q: Any, out: Any) -> Any:
        gather(out, q)
        return out

    same(cell.run(call, whole=False)(cell.tensor(dist.get_rank()), emptied(want)), want)


def all_to_all_single(cell: Cell) -> None:
    want = exchanged(cell)

    def call(q: Any, out: Any) -> Any:
        dist.all_to_all_single(out, q)
        return out

    same(cell.run(call, whole=False)(cell.tensor(dist.get_rank()), emptied(want)), want)


def send_recv(cell: Cell) -> None:
    rank = dist.get_rank()

    def call(q: Any, out: Any) -> Any:
        if rank == 0:
            dist.send(q, 1)
            dist.recv(out, 1)
        else:
            dist.recv(out, 0)
            dist.send(q, 0)
        return out

    out = cell.run(call, whole=False)(cell.tensor(rank), emptied(cell.tensor(0)))
    same(out, cell.tensor(1 - rank))


def batch_isend_irecv(cell: Cell) -> None:
    rank = dist.get_rank()

    def call(q: Any, out: Any) -> Any:
        ops = [dist.P2POp(dist.isend, q, 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    out = cell.run(call, whole=False)(cell.tensor(rank), emptied(cell.tensor(0)))
    same(out, cell.tensor(1 - rank))


def all_reduce(cell: Cell) -> None:
    def call(q: Any) -> Any:
        dist.all_reduce(q)
        return q

    cell.run(call, whole=False)(cell.tensor(0))
    raise AssertionError("codes were added")


def reduce_scatter(cell: Cell) -> None:
    def call(q: Any, out: Any) -> Any:
        dist.reduce_scatter_tensor(out, q)
        return out

    cell.run(call, whole=False)(gathered(cell), cell.tensor(0))
    raise AssertionError("codes were added")


def functional_gather(cell: Cell) -> None:
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    call = cell.run(lambda q: gather(q, 0, dist.group.WORLD))
    with torch.no_grad():
        same(call(cell.tensor(dist.get_rank())), gathered(cell))


def functional_broadcast(cell: Cell) -> None:
    call = cell.run(lambda q: functional.broadcast(q, 1, dist.group.WORLD))
    with torch.no_grad():
        same(call(cell.tensor(dist.get_rank())), cell.tensor(1))


def functional_all_to_all(cell: Cell) -> None:
    call = cell.run(lambda q: functional.all_to_all_single(q, None, None, dist.group.WORLD))
    with torch.no_grad():
        same(call(cell.tensor(dist.get_rank())), exchanged(cell))


def functional_reduce(cell: Cell) -> None:
    call = cell.run(lambda q: functional.all_reduce(q, "sum", dist.group.WORLD))
    with torch.no_grad():
        call(cell.tensor(0))
    raise AssertionError("codes were added")


def gathered_together(cell: Cell) -> None:
    new = getattr(functional, "all_gather_single_coalesced", None)
    gather = new or functional.all_gather_into_tensor_coalesced
    call = cell.run(lambda q: list(gather([q, q.clone()], dist.group.WORLD)))
    with torch.no_grad():
        for got in call(cell.tensor(dist.get_rank())):
            same(got, gathered(cell))


def all_to_all(cell: Cell) -> None:
    """Lists of tensors."""
    rank, half = dist.get_rank(), ROWS // SIZE

    def part(source: int, to: int) -> Any:
        return cell.tensor(source)[to * half : (to + 1) * half].clone()

    outs = [emptied(part(source, rank)) for source in range(SIZE)]
    dist.all_to_all(outs, [part(rank, to) for to in range(SIZE)])
    for source, out in enumerate(outs):
        same(out, part(source, rank))


REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "`reduce`": lambda q: dist.reduce(q, 0),
    "`reduce_scatter`": lambda q: dist.reduce_scatter(emptied(q), [q, q]),
    "functional `reduce_scatter_tensor`": lambda q: functional.reduce_scatter_tensor(
        q, "sum", 0, dist.group.WORLD
    ),
    "functional `all_reduce_coalesced`": lambda q: functional.all_reduce_coalesced(
        [q], "sum", dist.group.WORLD
    ),
    "functional `reduce_scatter_tensor_coalesced`": (
        lambda q: functional.reduce_scatter_tensor_coalesced([q], "sum", [0], dist.group.WORLD)
    ),
}


def reduction(call: Callable[[Any], Any]) -> Callable[[Cell], None]:
    def run(cell: Cell) -> None:
        with torch.no_grad():
            call(cell.tensor(0))
        raise AssertionError("codes were added")

    return run
