"""Ways to come by a quantized tensor that need a process group, of one rank or more.

Every rank makes the same values; see ``origins.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from origin_worlds import World, frozen, lower, upper
from origins import Origin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

RANK_ORIGINS: dict[str, Origin] = {}


def origin(function: Origin) -> Origin:
    RANK_ORIGINS[function.__name__.replace("_", " ")] = function
    return function


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def received(w: World, send: Callable[[Any, Any], None]) -> list[Any]:
    """Return a tensor that a collective has written, and the tensor that was sent."""
    sent, out = w.square(), w.square()
    send(out, sent)
    return [out, sent]


# ---- collectives


def _scatter(out: Any, sent: Any) -> None:
    dist.scatter(out, [sent] * dist.get_world_size() if dist.get_rank() == 0 else None)


@origin
def scattered(w: World) -> list[Any]:
    return received(w, _scatter)


@origin
def part_of_scattered(w: World) -> list[Any]:
    out, sent = received(w, _scatter)
    return [upper(out), out, sent]


@origin
def part_of_scattered_zeros(w: World) -> list[Any]:
    """DTensor sends rows that end with zeros, and cuts the zeros off."""
    values = w.values(2 * w.unit, 2 * w.unit).clone()
    values[w.unit :] = 0
    sent, out = w.encode(values), w.square()
    _scatter(out, sent)
    return [upper(out), out, sent]


@origin
def scattered_zeros_written_again(w: World) -> list[Any]:
    out, sent = received(w, _scatter)
    values = w.values(2 * w.unit, 2 * w.unit).clone()
    values[w.unit :] = 0
    out.copy_(values)
    return [upper(out), out, sent]


@origin
def broadcast(w: World) -> list[Any]:
    t = w.square()
    dist.broadcast(t, 0)
    return [t]


@origin
def exchanged(w: World) -> list[Any]:
    return received(w, dist.all_to_all_single)


@origin
def gathered_into_a_list(w: World) -> list[Any]:
    sent = w.square()
    outs = [w.square() for _ in range(dist.get_world_size())]
    dist.all_gather(outs, sent)
    return [*outs, sent]


@origin
def gathered_into_a_tensor(w: World) -> list[Any]:
    sent = w.square()
    out = w.tensor(dist.get_world_size() * sent.shape[0], sent.shape[1])
    dist.all_gather_into_tensor(out, sent)
    return [out, sent]


def gather(t: Any) -> Any:
    functional, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    gathered = functional.all_gather_into_tensor(t, dist.get_world_size(), group)
    return functional.wait_tensor(gathered)


@origin
def gathered(w: World) -> list[Any]:
    sent = w.square()
    return [gather(sent), sent]


@origin
def part_of_gathered(w: World) -> list[Any]:
    sent = w.square()
    whole = gather(sent)
    return [upper(whole), whole, sent]


@origin
def detached_part_of_gathered(w: World) -> list[Any]:
    sent = w.square()
    whole = gather(sent)
    return [lower(whole.detach()), whole, sent]


# ---- DTensor


def distributed(placement: Any, *views: Callable[[Any], Any]) -> Origin:
    """Return an origin: the part of this rank, then views of it."""

    def run(w: World) -> list[Any]:
        whole = w.square()
        tensors = [distribute_tensor(whole, mesh(), [placement]).to_local(), whole]
        for view in views:
            tensors.insert(0, view(tensors[0]))
        return tensors

    return run


RANK_ORIGINS |= {
    "DTensor split by rows": distributed(Shard(0)),
    "rows of a DTensor split by rows": distributed(Shard(0), lower),
    "DTensor split by columns": distributed(Shard(1)),
    "DTensor on every rank": distributed(Replicate()),
}


@origin
def moved_DTensor(w: World) -> list[Any]:
    t = distribute_tensor(w.square(), mesh(), [Shard(0)])
    moved = t.redistribute(mesh(), [Replicate()])
    return [moved.to_local(), t.to_local()]


@origin
def full_tensor_of_a_DTensor(w: World) -> list[Any]:
    t = DTensor.from_local(w.square(), mesh(), [Shard(0)])
    return [t.full_tensor(), t.to_local()]


@origin
def part_of_a_full_tensor(w: World) -> list[Any]:
    t = DTensor.from_local(w.square(), mesh(), [Shard(0)])
    whole = t.full_tensor()
    return [upper(whole), whole, t.to_local()]


@origin
def DTensor_of_a_part(w: World) -> list[Any]:
    whole = w.square()
    t = DTensor.from_local(lower(whole), mesh(), [Shard(0)])
    return [t.to_local(), whole]


@origin
def DTensor_after_an_in_place_op(w: World) -> list[Any]:
    t = distribute_tensor(w.square(), mesh(), [Shard(0)])
    t.mul_(0.5)
    return [t.to_local()]


# ---- fully_shard


def sharded(w: World, calls: int = 0) -> nn.Linear:
    """Return a layer with a frozen weight, after ``calls`` of it; the world keeps the layer."""
    weight = w.square()
    layer = nn.Linear(*weight.shape, bias=False)
    layer.weight = frozen(weight)
    fully_shard(layer, mesh=mesh())
    for _ in range(calls):
        layer(torch.ones(1, weight.shape[1]))
        layer.reshard()
    w.alive.append(layer)
    return layer


def shard_of(layer: nn.Linear) -> Any:
    """Return the tensor that optimizers write; ``to_local`` returns a view of it."""
    return layer.weight._local_tensor


@origin
def shard(w: World) -> list[Any]:
    layer = sharded(w)
    return [layer.weight.to_local(), shard_of(layer)]


@origin
def shard_after_a_call(w: World) -> list[Any]:
    layer = sharded(w, calls=1)
    return [shard_of(layer), layer.weight.to_local()]


@origin
def rows_of_a_shard(w: World) -> list[Any]:
    t = shard_of(sharded(w, calls=1))
    return [upper(t), t]


@origin
def last_rows_of_a_shard(w: World) -> list[Any]:
    t = shard_of(sharded(w, calls=1))
    return [lower(t), t]


@origin
def columns_of_a_shard(w: World) -> list[Any]:
    t = shard_of(sharded(w, calls=1))
    return [t[:, w.unit :], t]


@origin
def gathered_weight(w: World) -> list[Any]:
    layer = sharded(w, calls=1)
    t = shard_of(layer)
    layer.unshard()
    return [layer.weight, t]


@origin
def rows_of_a_gathered_weight(w: World) -> list[Any]:
    layer = sharded(w, calls=1)
    t = shard_of(layer)
    layer.unshard()
    return [upper(layer.weight), layer.weight, t]
