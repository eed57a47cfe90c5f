"""Distribute quantized tensors over a mesh, and compare the bytes with the original."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from formats import BY_NAME, assert_same_bytes, assert_same_tensor, rand, refusal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

PLACEMENTS = (Shard(0), Shard(1), Replicate())


def mesh_of_all() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def assert_same_buffers(got: Any, want: Any) -> None:
    """Assert equal buffers; a part of a tensor may carry a note that a whole one does not."""
    assert got.quantizer == want.quantizer
    for ours, theirs in zip(got.buffers(), want.buffers(), strict=True):
        assert_same_bytes(ours, theirs)


def round_trips(case: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Every placement, and every change of placement, keeps the bytes of rank 0's tensor."""
    mesh, rank = mesh_of_all(), dist.get_rank()
    q = BY_NAME[case].quantize(rand(*shape, seed=1), **options)
    mine = q if rank == 0 else BY_NAME[case].quantize(rand(*shape, seed=2), **options)
    for before in PLACEMENTS:
        distributed = distribute_tensor(mine, mesh, [before])
        assert type(distributed.to_local()) is type(q)
        assert_same_tensor(distributed.full_tensor(), q)
        again = DTensor.from_local(
            distributed.to_local(), mesh, [before], shape=q.shape, stride=q.stride()
        )
        assert_same_tensor(again.full_tensor(), q)
        for after in PLACEMENTS:
            moved = distributed.redistribute(mesh, [after])
            assert_same_tensor(moved.full_tensor(), q)
            wanted = distribute_tensor(q, mesh, [after], src_data_rank=None)
            assert_same_buffers(moved.to_local(), wanted.to_local())


def all_to_all_of_a_mesh(case: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """The op that DTensor uses on GPUs for a change from Shard(0) to Shard(1)."""
    mesh, size, rank = mesh_of_all(), dist.get_world_size(), dist.get_rank()
    q = BY_NAME[case].quantize(rand(*shape, seed=1), **options)
    local = distribute_tensor(q, mesh, [Shard(0)]).to_local()
    op = torch.ops._dtensor.shard_dim_alltoall
    got = op(local, 0, 1, dist.group.WORLD.group_name)
    wanted = q.chunk(size, 1)[rank].clone()
    assert_same_tensor(got, wanted)


def refusals(case: str, options: dict[str, Any], shape: tuple[int, ...], dim: int) -> str:
    """Return the message of the error that distributing a tensor raises on this rank."""
    q = BY_NAME[case].quantize(rand(*shape, seed=1), **options)
    return refusal(lambda: distribute_tensor(q, mesh_of_all(), [Shard(dim)]))
