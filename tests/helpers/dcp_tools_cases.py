"""What torch offers around distributed checkpoints: other files, other writers, async saves."""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import distributed, group_of, load, quantized, save
from formats import assert_same_tensor, rand
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qtensor
import qtensor.distributed
from qtensor.optim import quantize_state_

WIDTH = 128
RECIPE = qtensor.recipes.DelayedScaling(amax_history_len=4)


def messages(error: BaseException) -> str:
    """Return what torch's exception says, with those of the ranks."""
    return str(error) + "".join(map(str, getattr(error, "failures", {}).values()))


def build(fmt: str, seed: int) -> tuple[nn.Module, Any]:
    """Return a sharded model with delayed scaling, whose optimizer keeps quantized state."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, WIDTH))
    qtensor.convert_(model, RECIPE)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    quantize_state_(optimizer, {"exp_avg": fmt, "exp_avg_sq": fmt})
    return model, optimizer


def step(model: nn.Module, optimizer: Any, number: int) -> list[Tensor]:
    loss = model(rand(32, WIDTH, seed=10 * number + dist.get_rank())).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach(), *(p.full_tensor().detach().clone() for p in model.parameters())]


def quantized_entries(state: Any) -> int:
    """Return the number of entries of a nested dict that are quantized."""
    if isinstance(state, dict):
        return sum(map(quantized_entries, state.values()))
    local = state.to_local() if isinstance(state, DTensor) else state
    return isinstance(local, qtensor.QuantizedTensor)


def resume(folder: str, fmt: str, asynchronous: bool) -> None:
    """The step after a resume of model and optimizer is the one that would have come."""
    model, optimizer = build(fmt, 0)
    for number in range(2):
        step(model, optimizer, number)
    parts: Any = get_state_dict(model, optimizer)
    assert quantized_entries(parts[1]) >= 4
    state = {"model": parts[0], "optimizer": parts[1]}
    if asynchronous:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # A thread saves, whose collectives must not mix with those of the next step.
            group = dist.new_group()
            stager = qtensor.distributed.Stager()
            future: Any = dcp.async_save(
                state, checkpoint_id=folder, process_group=group, async_stager=stager
            )
        wanted = step(model, optimizer, 2)  # while the files are written
        getattr(future, "upload_completion", future).result()
        dist.barrier()
    else:
        save(folder, state, None)
        wanted = step(model, optimizer, 2)
    other, fresh = build(fmt, 1)
    parts = get_state_dict(other, fresh)
    load(folder, {"model": parts[0], "optimizer": parts[1]}, None)
    set_state_dict(other, fresh, model_state_dict=parts[0], optim_state_dict=parts[1])
    assert all(map(torch.equal, step(other, fresh, 2), wanted))


def resume_on(folder: str, saved: int, wanted: int, stored: bool) -> None:
    """A training on some ranks goes on with other ones, as one process would go on.

    All ranks have one batch: the mean of equal gradients is each of them for two and four ranks.
    Three ranks therefore only load, or save what they loaded. Weights and the averages of AdamW
    are in MXFP8, whose blocks belong to one row each or to whole shards.
    """

    def build(mesh: Any, seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(WIDTH, 384), nn.ReLU(), nn.Linear(384, 384, bias=False))
        qtensor.convert_(model, qtensor.recipes.MXFP8BlockScaling(), quantized_params=stored)
        if mesh is not None:
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        quantize_state_(optimizer, {"exp_avg": "mxfp8", "exp_avg_sq": "mxfp8"})
        return model, optimizer

    def advance(model: nn.Module, optimizer: Any, number: int) -> list[Any]:
        model(rand(32, WIDTH, seed=number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return values_of(model)

    def values_of(model: nn.Module) -> list[Any]:
        found = [p.detach() for p in model.parameters()]
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in found]

    def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    one = build(None, 0)
    advance(*one, 0)
    if dist.get_rank() == 0:  # the state of one process, which the ranks of `saved` begin with
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state_of(*one), checkpoint_id=folder + "0", no_dist=True)
    dist.barrier()
    number = 1
    for size, source in ((saved, "0"), (wanted, "1")):
        mesh, group = group_of(size)
        steps = 0 if size == 3 else 1
        want = [advance(*one, number + i) for i in range(steps)]
        if mesh is not None:
            pair = build(mesh, 1)
            state = state_of(*pair)
            load(folder + source, state, group)
            set_state_dict(
                *pair, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            found = [advance(*pair, number + i) for i in range(steps)]
            want, found = want or [values_of(one[0])], found or [values_of(pair[0])]
            for ours, theirs in zip(found[-1], want[-1], strict=True):
                if isinstance(theirs, qtensor.QuantizedTensor):
                    assert_same_tensor(ours, theirs)
                else:
                    assert torch.equal(ours, theirs)
            if source == "0":
                save(folder + "1", state_of(*pair), group)
        number += steps
        dist.barrier()


def die_while_saving(folder: str, victim: int, file: str, asynchronous: bool) -> None:
    """Save twice; SIGKILL ends a rank when it opens a file of the second checkpoint.

    Args:
        victim: the rank that is killed.
        file: end of the name of the file.
        asynchronous: the second save is ``async_save``.
    """
    q = quantized("mxfp8", {}, (512, 512), 1)
    mesh, group = group_of(dist.get_world_size())
    save(f"{folder}/1", {"w": distributed(q, mesh, "rows")}, group)

    def watch(event: str, args: Any) -> None:
        if event == "open" and "/2/" in str(args[0]) and file in str(args[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == victim:
        sys.addaudithook(watch)
    state = {"w": distributed(q, mesh, "rows")}
    if not asynchronous:
        save(f"{folder}/2", state, group)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stager = qtensor.distributed.Stager()
        future: Any = dcp.async_save(
            state, checkpoint_id=f"{folder}/2", process_group=group, async_stager=stager
        )
        getattr(future, "upload_completion", future).result()


def after_the_death(folder: str) -> str:
    """Load the older checkpoint, save again, and return why the unfinished one does not load."""
    q, other = (quantized("mxfp8", {}, (512, 512), seed) for seed in (1, 2))
    mesh, group = group_of(dist.get_world_size())
    template = distributed(other, mesh, "columns")
    load(f"{folder}/1", {"w": template}, group)
    assert_same_tensor(template.full_tensor(), q)
    message = ""
    try:
        load(f"{folder}/2", {"w": template}, group)
    except BaseException as error:  # noqa: BLE001 - torch raises its own for all ranks
        message = messages(error)
    save(f"{folder}/2", {"w": distributed(other, mesh, "rows")}, group)
    load(f"{folder}/2", {"w": template}, group)
    assert_same_tensor(template.full_tensor(), other)
    return message


def files_of_torch(folder: str, case: str, options: dict[str, Any]) -> None:
    """``torch.save`` writes the part of a DTensor that a rank has."""
    q = quantized(case, options, (512, 512), 1)
    mesh, _ = group_of(dist.get_world_size())
    sharded = distributed(q, mesh, "rows")
    for weights_only in (False, True):
        file = io.BytesIO()
        torch.save({"w": sharded}, file)
        file.seek(0)
        found = torch.load(file, weights_only=weights_only)["w"]
        assert type(found) is DTensor
        assert found.placements == sharded.placements
        assert_same_tensor(found.to_local(), sharded.to_local())
        assert_same_tensor(found.full_tensor(), q)
    try:  # torch refuses before qtensor is asked
        save_file({"w": sharded}, f"{folder}/{dist.get_rank()}.safetensors")
    except RuntimeError as error:
        assert "invalid python storage" in str(error)  # noqa: PT017 - on a rank
    else:
        raise AssertionError("safetensors wrote a quantized DTensor")


def torch_file_to_shards(folder: str, case: str, options: dict[str, Any]) -> None:
    """Torch files become checkpoints by ``torch_save_to_dcp``, which load into shards."""
    import torch.distributed.checkpoint.format_utils as tools  # noqa: PLC0415 - takes a second

    q, other = (quantized(case, options, (512, 512), seed) for seed in (1, 2))
    mesh, group = group_of(dist.get_world_size())
    path = Path(folder)
    if dist.get_rank() == 0:
        torch.save({"w": q}, path / "file.pt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tools.torch_save_to_dcp(path / "file.pt", path / "checkpoint")
    dist.barrier()
    template = distributed(other, mesh, "rows")
    load(str(path / "checkpoint"), {"w": template}, group)
    assert_same_tensor(template.full_tensor(), q)


def read_torch_file(path: Path, template: Any) -> None:
    import torch.distributed.checkpoint.format_utils as tools  # noqa: PLC0415 - takes a second

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(
            {"layer.w": template},
            storage_reader=tools.BroadcastingTorchSaveReader(),
            planner=tools.DynamicMetaLoadPlanner(),
            checkpoint_id=path,
        )


def broadcast_torch_file(folder: str, case: str, options: dict[str, Any]) -> dict[str, str]:
    """Torch's reader broadcasts whole tensors; return the messages for other templates."""
    q, other = (quantized(case, options, (512, 512), seed) for seed in (1, 2))
    mesh, _ = group_of(dist.get_world_size())
    path = Path(folder) / "file.pt"
    if dist.get_rank() == 0:
        torch.save({"layer.w": q}, path)
    dist.barrier()
    read_torch_file(path, other)
    assert_same_tensor(other, q)
    found = {}
    templates = {
        "rows": distributed(other, mesh, "rows"),
        "replicated": distributed(other, mesh, "whole"),
        "format": qtensor.quantize(torch.zeros(512, 512), "mxfp4" if case == "fp8" else "fp8"),
        "plain": torch.zeros(512, 512),
    }
    for name, template in templates.items():
        try:
            read_torch_file(path, template)
        except BaseException as error:  # noqa: BLE001 - torch raises its own for all ranks
            found[name] = messages(error)
    assert not templates["format"].dequantize().any()
    if dist.get_rank() == 0:
        torch.save({"layer.w": q.dequantize()}, path)
    dist.barrier()
    try:
        read_torch_file(path, other)
    except BaseException as error:  # noqa: BLE001 - torch raises its own for all ranks
        found["values"] = messages(error)
    assert_same_tensor(other, q)
    dist.barrier()  # nobody waits in an older collective
    return found


def hugging_face(folder: str) -> dict[str, str]:
    """Save and load safetensors; return the messages of those that cannot be exact."""
    mesh, _ = group_of(dist.get_world_size())
    x = rand(256, 512, seed=1)
    q = qtensor.quantize(x, "mxfp8")
    found = {}

    def attempt(name: str, state: dict[str, Any], write: bool) -> None:
        path = f"{folder}/{name}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if write:
                    writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True)
                    dcp.save(state, storage_writer=writer)
                else:
                    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path))
                found[name] = ""
            except BaseException as error:  # noqa: BLE001 - torch raises its own for all ranks
                found[name] = messages(error)

    attempt("sharded", {"layer.w": distributed(q, mesh, "rows")}, True)
    attempt("whole", {"layer.w": q}, True)
    attempt("plain", {"layer.w": distributed(x, mesh, "rows")}, True)
    assert not found["plain"]
    template = distributed(qtensor.quantize(torch.zeros(256, 512), "mxfp8"), mesh, "rows")
    attempt("plain", {"layer.w": template}, False)
    assert_same_tensor(template.full_tensor(), q)
    codes = x.to(torch.float8_e4m3fn)
    attempt("codes", {"layer.w": codes}, True)
    assert not found["codes"]
    attempt("codes", {"layer.w": template}, False)
    return found
