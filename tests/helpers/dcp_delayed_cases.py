"""Delayed scaling in distributed checkpoints: each rank has maxima and factors of its own."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from dcp_cases import group_of, load, save
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import qtensor
import qtensor.distributed  # noqa: F401 - broadcasts and loads of several ranks need it

WIDTH = 64
RECIPE = qtensor.recipes.DelayedScaling(amax_history_len=4)


def build(mesh: Any = None, stored: bool = False, seed: int = 0) -> tuple[nn.Module, Any]:
    """Return a converted model and its optimizer; sharded over ``mesh`` if there is one."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    qtensor.convert_(model, RECIPE, quantized_params=stored)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: Any, number: int, region: Any = None) -> Tensor:
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(10 * number + rank)
    x = torch.randn(32, WIDTH, generator=g) * (1 + 3 * rank)
    with region or contextlib.nullcontext():
        loss = model(x).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def region(reduced: bool, group: Any = None) -> Any:
    if not reduced:
        return None
    return qtensor.autocast(recipe=RECIPE, amax_reduction_group=group or dist.group.WORLD)


def entries(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the state of delayed scaling as plain tensors."""
    found = {k: v for k, v in model.state_dict().items() if "_delayed_scaling" in k}
    assert len(found) == 4
    return {k: torch.tensor(v.tolist()) for k, v in found.items()}


def of_ranks(own: dict[str, Tensor], group: Any) -> list[dict[str, Tensor]]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def reshard(folder: str, sharded: bool, saved: int, wanted: int) -> None:
    """``saved`` ranks save, ``wanted`` load: equally many get their own state, others the largest
    maxima and the smallest factors. A plain layer counts all ranks of the program.
    """
    mesh, group = group_of(saved)
    if mesh is not None:
        model, optimizer = build(mesh if sharded else None)
        for number in range(2):
            step(model, optimizer, number)
        states = of_ranks(entries(model), group)
        if saved > 1:
            assert not torch.equal(*[s["0._delayed_scaling.weight.scale"] for s in states[:2]])
        save(folder, {"model": get_model_state_dict(model)}, group)
        if dist.get_rank() == 0:
            torch.save(states, folder + "/states")
    dist.barrier()
    mesh, group = group_of(wanted)
    if mesh is None:
        return
    states = torch.load(folder + "/states")
    largest = {
        key: torch.stack([s[key] for s in states]).amin(0)
        if key.endswith("scale")
        else torch.stack([s[key] for s in states]).amax(0)
        for key in states[0]
    }
    holders = wanted if sharded else dist.get_world_size()
    expected = states[dist.get_rank()] if saved == holders else largest
    model, _ = build(mesh if sharded else None, seed=1)
    template = {"model": get_model_state_dict(model)}
    for _ in range(2):  # a second load into the same template is a load of its own
        load(folder, template, group)
        for key, value in expected.items():
            assert torch.equal(template["model"][key].as_subclass(Tensor), value), key
    set_model_state_dict(model, template["model"])
    found = entries(model)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def resume(folder: str, stored: bool, reduced: bool, options: dict[str, bool]) -> None:
    """The step after a resume through the helpers is the one that would have come."""
    mesh, group = group_of(dist.get_world_size())
    full = options.get("full_state_dict", False)
    given = StateDictOptions(**options)
    setting = given
    if full and options.get("cpu_offload"):  # rank 0 alone has the values
        setting = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model, optimizer = build(mesh, stored)
    step(model, optimizer, 0, region(reduced))
    with region(reduced) or contextlib.nullcontext():
        parts: Any = get_state_dict(model, optimizer, options=given)
    if full:
        parts = copy.deepcopy(parts)  # torch returns the optimizer's own counters
    else:
        save(folder, {"model": parts[0], "optimizer": parts[1]}, group)
    wanted = (
        step(model, optimizer, 1, region(reduced)),
        [p.full_tensor() for p in model.parameters()],
    )
    other, fresh = build(mesh, stored, seed=1)
    if not full:
        parts = get_state_dict(other, fresh, options=given)
        load(folder, {"model": parts[0], "optimizer": parts[1]}, group)
    if setting is given:
        set_state_dict(
            other, fresh, model_state_dict=parts[0], optim_state_dict=parts[1], options=given
        )
    else:  # set_state_dict would skip the model on ranks without values
        set_model_state_dict(other, parts[0], options=setting)
        set_optimizer_state_dict(other, fresh, parts[1], options=setting)
    found = step(other, fresh, 1, region(reduced)), [p.full_tensor() for p in other.parameters()]
    assert torch.equal(found[0], wanted[0])
    for a, b in zip(found[1], wanted[1], strict=True):
        pairs = zip(a.buffers(), b.buffers(), strict=True) if hasattr(a, "buffers") else [(a, b)]
        assert all(torch.equal(x, y) for x, y in pairs)


def broadcast(folder: str, reduced: bool) -> None:
    """A broadcast full state dict has the state of rank 0; the file of a checkpoint has all."""
    import torch.distributed.checkpoint.format_utils as tools  # noqa: PLC0415 - takes a second

    mesh, group = group_of(dist.get_world_size())
    model, optimizer = build(mesh)
    for number in range(2):
        step(model, optimizer, number, region(reduced))
    states = of_ranks(entries(model), group)
    full = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert bool(full) == (dist.get_rank() == 0)
    setting = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    other, _ = build(mesh, seed=1)
    set_model_state_dict(other, full, options=setting)
    found = entries(other)
    for key, of_first in states[0].items():
        assert torch.equal(found[key], of_first), key
        if reduced:  # what the last step reduced is the same on all ranks; the newest row is not
            rows = slice(None) if key.endswith("scale") else slice(1, None)
            assert torch.equal(of_first[rows], states[1][key][rows]), key
    assert any(not torch.equal(a, b) for a, b in zip(*map(dict.values, states), strict=True))

    save(folder, get_model_state_dict(model), group)
    wanted = step(model, optimizer, 2, region(reduced))
    if dist.get_rank() == 0:
        tools.dcp_to_torch_save(folder, folder + "/file")
    loaded = torch.load(folder + "/file") if dist.get_rank() == 0 else {}
    other, fresh = build(mesh, seed=2)
    set_model_state_dict(other, loaded, options=setting)
    found = entries(other)
    assert all(torch.equal(found[k], v) for k, v in states[dist.get_rank()].items())
    assert torch.equal(step(other, fresh, 2, region(reduced)), wanted)


def stages(folder: str, width: int, named: bool, apart: bool) -> str:
    """``width`` ranks hold a layer with a plain weight, other ranks another layer.

    Args:
        folder: of the checkpoints.
        width: ranks that share a layer.
        named: whether ``amax_reduction_group`` names them.
        apart: whether each layer has a checkpoint of its own, which its ranks save.

    Returns:
        The message of an error of ``dcp.save``; "" if it saves.
    """
    group, _ = dist.new_subgroups(width)
    stage = dist.get_rank() // width
    where, saving = (f"{folder}/{stage}", group) if apart else (folder, dist.group.WORLD)

    def compute(layer: nn.Module, number: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(10 * number + dist.get_rank())
        x = torch.randn(32, WIDTH, generator=g) * (1 + 3 * dist.get_rank()) * (1 + number)
        layer.zero_grad()
        with region(named, group) or contextlib.nullcontext():
            y = layer(x)
            # The largest input is on the last rank, and the largest gradient on the first.
            (y.square().mean() * 100.0 ** -(dist.get_rank() % width)).backward()
        return [y.detach(), layer.weight.grad]

    def build_stage(seed: int) -> nn.Module:
        torch.manual_seed(seed + stage)
        return qtensor.Linear(WIDTH, WIDTH, recipe=RECIPE)

    layer = build_stage(0)
    for number in range(2):
        compute(layer, number)
    try:
        save(where, {f"stage{stage}": layer.state_dict()}, saving)
    except BaseException as error:  # noqa: BLE001 - torch raises its own for all ranks
        return str(error)
    wanted = compute(layer, 2)
    other = build_stage(100)
    compute(other, 0)
    template = other.state_dict()
    load(where, {f"stage{stage}": template}, saving)
    other.load_state_dict(template)
    assert all(map(torch.equal, compute(other, 2), wanted))
    return ""


def separately(stored: bool) -> None:
    """The optimizer's helper, called after that of the model, leaves the loaded weights alone."""
    mesh, _ = group_of(dist.get_world_size())
    model, optimizer = build(mesh, stored)
    step(model, optimizer, 0)
    parts = get_state_dict(model, optimizer)
    other, fresh = build(mesh, stored, seed=1)
    set_model_state_dict(other, parts[0])
    set_optimizer_state_dict(other, fresh, parts[1])
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        a, b = a.full_tensor(), b.full_tensor()
        pairs = (
            zip(a.buffers(), b.buffers(), strict=True)
            if stored and hasattr(a, "buffers")
            else [(a, b)]
        )
        assert all(torch.equal(x, y) for x, y in pairs)


def one_entry(folder: str) -> list[int]:
    """Return the rows of the saved history without and with a group: newest maxima differ."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - warns, and takes a second

    mesh, group = group_of(dist.get_world_size())
    rows = []
    for reduced in (False, True):
        model, optimizer = build(mesh)
        step(model, optimizer, 0, region(reduced))
        save(f"{folder}/{reduced}", get_model_state_dict(model), group)
        metadata = dcp.FileSystemReader(f"{folder}/{reduced}").read_metadata()
        found = metadata.state_dict_metadata["0._delayed_scaling.weight.amax_history"]
        rows.append(found.size[0])
    return rows
