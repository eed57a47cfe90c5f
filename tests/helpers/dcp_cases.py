"""Save and load distributed checkpoints of quantized tensors, on some ranks of a group."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from formats import BY_NAME, assert_same_tensor, rand, refusal
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from qtensor import quantizer
from qtensor.distributed import Stager

PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def group_of(size: int) -> Any:
    """Return a mesh over the first ranks, or None on a rank outside of it; all ranks call this."""
    ranks = list(range(size))
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None, None
    return DeviceMesh.from_group(group, "cpu"), group


def quantized(case: str, options: dict[str, Any], shape: tuple[int, ...], seed: int) -> Any:
    return BY_NAME[case].quantize(rand(*shape, seed=seed), **options)


def distributed(q: Any, mesh: Any, placement: str) -> Any:
    return distribute_tensor(q, mesh, [PLACEMENTS[placement]], src_data_rank=None)


def save(folder: str, state: dict[str, Any], group: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, process_group=group)


def load(folder: str, state: dict[str, Any], group: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, process_group=group)


def reshard(
    folder: str,
    case: str,
    options: dict[str, Any],
    shape: tuple[int, ...],
    saved: tuple[int, str],
    wanted: tuple[int, str],
) -> None:
    """A checkpoint of some ranks and placement loads with the bytes of the saved tensor."""
    q, other = (quantized(case, options, shape, seed) for seed in (1, 2))
    mesh, group = group_of(saved[0])
    if mesh is not None:
        save(folder, {"w": distributed(q, mesh, saved[1]), "plain": torch.ones(3)}, group)
    dist.barrier()
    mesh, group = group_of(wanted[0])
    if mesh is None:
        return
    template = distributed(other, mesh, wanted[1])
    for _ in range(2):  # a second load into the same tensor is a load of its own
        load(folder, {"w": template}, group)
        assert_same_tensor(template.full_tensor().clone(), q)


def whole_tensors(folder: str, case: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """A tensor that is no DTensor is saved by one rank, and loads into a DTensor, and back."""
    q, other = (quantized(case, options, shape, seed) for seed in (1, 2))
    mesh, group = group_of(dist.get_world_size())
    save(folder, {"w": q}, group)
    template = distributed(other, mesh, "rows")
    load(folder, {"w": template}, group)
    assert_same_tensor(template.full_tensor().clone(), q)
    save(folder + "2", {"w": template}, group)
    state = {"w": quantized(case, options, shape, 3)}
    load(folder + "2", state, group)
    assert_same_tensor(state["w"], q)


def alone(folder: str, case: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """A checkpoint of one process loads on all ranks."""
    q, other = (quantized(case, options, shape, seed) for seed in (1, 2))
    if dist.get_rank() == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"w": q}, checkpoint_id=folder, no_dist=True)
    dist.barrier()
    mesh, group = group_of(dist.get_world_size())
    template = distributed(other, mesh, "columns")
    load(folder, {"w": template}, group)
    assert_same_tensor(template.full_tensor().clone(), q)


def asynchronous(folder: str, case: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """``async_save`` writes the tensor as it was when it was called."""
    q, other = (quantized(case, options, shape, seed) for seed in (1, 2))
    mesh, group = group_of(dist.get_world_size())
    state = {"w": distributed(q, mesh, "rows"), "whole": q.clone()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused = refusal(lambda: dcp.async_save(state, checkpoint_id=folder, process_group=group))
        assert "pass async_stager=qtensor.distributed.Stager()" in refused
        future = dcp.async_save(
            state, checkpoint_id=folder, process_group=group, async_stager=Stager()
        )
        future = getattr(future, "upload_completion", future)
    for t in (state["w"].to_local(), state["whole"]):
        for buffer in t.buffers():
            buffer.zero_()
    future.result()
    dist.barrier()
    template = {"w": distributed(other, mesh, "columns"), "whole": other.clone()}
    load(folder, template, group)
    assert_same_tensor(template["w"].full_tensor().clone(), q)
    assert_same_tensor(template["whole"], q)


def refusals(folder: str) -> dict[str, str]:
    """Return the messages of loads that cannot be exact."""
    mesh, group = group_of(dist.get_world_size())
    rank = dist.get_rank()
    x = rand(256, 256, seed=1)
    messages = {}

    def attempt(name: str, saved: Any, wanted: Any) -> None:
        save(f"{folder}/{name}", {"layer.w": saved}, group)
        try:
            load(f"{folder}/{name}", {"layer.w": wanted}, group)
            messages[name] = ""
        except BaseException as error:  # noqa: BLE001 - torch raises its own for all ranks
            messages[name] = str(error) + "".join(map(str, getattr(error, "failures", {}).values()))

    mxfp8, nvfp4, fp8 = (quantizer(name) for name in ("mxfp8", "nvfp4", "fp8"))
    attempt("format", distributed(mxfp8(x), mesh, "rows"), distributed(nvfp4(x), mesh, "rows"))
    attempt("plain", distributed(mxfp8(x), mesh, "rows"), torch.zeros(256, 256))
    own = DTensor.from_local(fp8(x * (rank + 1)), mesh, [Shard(0)])
    attempt("factors", own, fp8(torch.zeros(512, 256)))
    attempt("values", distribute_tensor(x, mesh, [Shard(0)]), fp8(torch.zeros(256, 256)))
    columns = quantizer("mxfp8", rowwise=False, columnwise=True)
    part = columns(rand(40, 64))
    attempt("blocks", columns(rand(80, 64)), DTensor.from_local(part, mesh, [Shard(0)]))
    return messages


class Interrupted(dcp.DefaultLoadPlanner):
    """Read the last shard of each tensor alone, as a load does that stops."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=plan.items[-1:])


def after_a_load_that_stopped(folder: str, case: str, options: dict[str, Any], whole: bool) -> None:
    """Another checkpoint loads into the same tensor, whatever an earlier load has left."""
    mesh, group = group_of(dist.get_world_size())
    first, second = (quantized(case, options, (256, 256), seed) for seed in (1, 2))
    second.mul_(100)
    for name, q in (("first", first), ("second", second)):
        save(f"{folder}/{name}", {"w": distributed(q, mesh, "rows")}, group)
    template = quantized(case, options, (256, 256), 3)
    state = {"w": template if whole else distributed(template, mesh, "whole")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=f"{folder}/first", process_group=group, planner=Interrupted())
    load(f"{folder}/second", state, group)
    got = state["w"] if whole else state["w"].full_tensor()
    assert_same_tensor(got.clone(), second)
