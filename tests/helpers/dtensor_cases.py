"""Distribute quantized tensors over a mesh, and compare the bytes with the original."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from formats import BY_NAME, assert_same_bytes, assert_same_tensor, rand, refusal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import qtensor.distributed  # noqa: F401 - torch broadcasts quantized tensors with it

PLACEMENTS = (Shard(0), Shard(1), Replicate())


def mesh_of_all() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def assert_same_buffers(got: Any, want: Any) -> None:
    """Assert equal buffers; a part may carry a note, and less padding, than a whole tensor."""
    assert got.quantizer == want.quantizer
    for ours, theirs in zip(got.clone().buffers(), want.clone().buffers(), strict=True):
        assert_same_bytes(ours, theirs)


def round_trips(case: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Every placement, and every change of placement, keeps the bytes of rank 0's tensor.

    A result before padding is a part; its clone is not.
    """
    mesh, rank = mesh_of_all(), dist.get_rank()
    q = BY_NAME[case].quantize(rand(*shape, seed=1), **options)
    mine = q if rank == 0 else BY_NAME[case].quantize(rand(*shape, seed=2), **options)
    for before in PLACEMENTS:
        distributed = distribute_tensor(mine, mesh, [before])
        assert type(distributed.to_local()) is type(q)
        assert_same_tensor(distributed.full_tensor().clone(), q)
        again = DTensor.from_local(
            distributed.to_local(), mesh, [before], shape=q.shape, stride=q.stride()
        )
        assert_same_tensor(again.full_tensor().clone(), q)
        for after in PLACEMENTS:
            moved = distributed.redistribute(mesh, [after])
            assert_same_tensor(moved.full_tensor().clone(), q)
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


def quantized_strided(case: str) -> str:
    """Return the error of a DTensor whose parts are not one piece each, as fully_shard makes it."""
    shape = torch.Size((128, 64))
    x = DTensor.from_local(
        rand(64, 64),
        mesh_of_all(),
        [_StridedShard(0, split_factor=2)],
        shape=shape,
        stride=(64, 1),
    )
    return refusal(lambda: BY_NAME[case].quantize(x))


def redistributed(
    case: str, options: dict[str, Any], shape: tuple[int, ...], compiled: bool
) -> None:
    """Changes of placement of a DTensor, in a graph that has no data while it is traced."""
    mesh, q = mesh_of_all(), BY_NAME[case].quantize(rand(*shape, seed=1), **options)

    def moved(t: Any, after: Any) -> Any:
        return t.redistribute(mesh, [after])

    if compiled:
        torch._dynamo.reset()
        moved = torch.compile(moved, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for before, after in ((0, Replicate()), (1, Replicate()), (0, Shard(1)), (1, Shard(0))):
            # A clone: Dynamo would slice the padded memory again, of which the part is a view.
            t = distribute_tensor(q, mesh, [Shard(before)]).clone()
            wanted = distribute_tensor(q, mesh, [after], src_data_rank=None)
            assert_same_buffers(moved(t, after).to_local(), wanted.to_local())


def cut_gathered() -> None:
    """Cut results of a gather and of a scatter inside of a block."""
    rank, size = dist.get_rank(), dist.get_world_size()
    q = BY_NAME["mxfp8"].quantize(rand(32, 64, seed=rank), columnwise=True)
    gathered = torch.distributed._functional_collectives.all_gather_tensor(q, 0, dist.group.WORLD)
    assert f"slice[mxfp8] (rank {rank} of {size}): Row slicing" in refusal(lambda: gathered[:48])
    outs = [torch.empty_like(q) for _ in range(2)]
    small = BY_NAME["mxfp8"].quantize(rand(7, 64), columnwise=True)
    padded = torch.nn.functional.pad(small, [0, 0, 0, 25])
    assert_same_bytes(padded.dequantize()[7:], torch.zeros(25, 64))
    for out, sent in zip(outs, (q, padded), strict=True):
        dist.scatter(out, [sent] * size if rank == 0 else None)
    assert "Row slicing" in refusal(lambda: outs[0][:7])
    assert_same_buffers(outs[1][:7], small)
