"""One rank of two fails alone, and the other waits for it in a collective."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_tools_cases import messages
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import qtensor
from qtensor.distributed import quantized_all_gather, reduce_amaxes

LIMIT = 4
"""Seconds of the group's time limit."""


def outcome(call: Callable[[], Any]) -> str:
    """Return the text of the exception that a call raises on this rank."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - gloo's and torch's own are among them
        return f"{type(error).__name__}: {messages(error)}"
    return "none"


def fail_alone(kind: str) -> str:
    """Run a case over a group with a short time limit; return the exception of this rank."""
    group: Any = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT))
    dist.barrier()
    found = CASES[kind](group, dist.get_rank() == 1)
    dist.barrier()  # of all ranks: the group of the case is broken
    return found


def layers(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    qtensor.convert_(model, qtensor.recipes.Float8CurrentScaling(), **options)
    return model


def sharded(model: nn.Sequential, group: Any) -> nn.Sequential:
    # A mesh without this name may equal one of an earlier test, whose group torch then takes.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def amax_group(group: Any, is_wrong: bool) -> str:
    x = torch.ones(64, 64, dtype=torch.int64 if is_wrong else torch.float32)
    return outcome(lambda: qtensor.quantize(x, "fp8", amax_reduction_group=group))


def collective(group: Any, is_wrong: bool) -> str:
    q = qtensor.quantize(torch.ones(64, 64), "mxfp8")
    outputs = [torch.empty_like(q), torch.ones(64, 64) if is_wrong else torch.empty_like(q)]
    return outcome(lambda: dist.all_gather(outputs, q, group=group))


def quantized_gather(group: Any, is_wrong: bool) -> str:
    """The first layer refuses the input on one rank; the other gathers the second layer."""
    model = layers()
    quantized_all_gather(model)
    model = sharded(model, group)
    return outcome(lambda: model(torch.randn(32, 32 if is_wrong else 64)))


def stored_weights(group: Any, is_wrong: bool) -> str:
    model = sharded(layers(quantized_params=True), group)
    return outcome(lambda: model(torch.randn(32, 32 if is_wrong else 64)))


def fused_amaxes(group: Any, is_wrong: bool) -> str:
    """One rank has destroyed the group."""
    model = layers()
    quantized_all_gather(model)
    model = sharded(model, group)
    if is_wrong:
        dist.destroy_process_group(model[0].weight.device_mesh.get_group())
    return outcome(lambda: reduce_amaxes(model))


def code_gather(group: Any, is_wrong: bool) -> str:
    layer = qtensor.Linear(
        64,
        64,
        recipe=qtensor.recipes.Float8CurrentScaling(),
        parallel_mode="column",
        tp_group=group,
        sequence_parallel=True,
    )
    return outcome(lambda: layer(torch.randn(32, 32 if is_wrong else 64)))


def delayed_step(group: Any, is_wrong: bool) -> str:
    layer, recipe = qtensor.Linear(64, 64), qtensor.recipes.DelayedScaling(amax_history_len=4)

    def step() -> None:
        for _ in range(3):
            with qtensor.autocast(recipe=recipe, amax_reduction_group=group):
                layer(torch.randn(32, 64)).sum().backward()
            if is_wrong:
                dist.destroy_process_group(group)

    return outcome(step)


def checkpoint(group: Any, is_wrong: bool) -> str:
    """One rank has a template of another format. torch tells all ranks."""
    mesh = DeviceMesh.from_group(group, "cpu")
    folder: list[Any] = [None]
    if dist.get_rank() == 0:
        import tempfile  # noqa: PLC0415

        folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    saved = distribute_tensor(qtensor.quantize(torch.ones(64, 64), "fp8"), mesh, [Shard(0)])
    other = "mxfp8" if is_wrong else "fp8"
    local = qtensor.quantize(torch.zeros(32, 64), other)
    template = type(saved).from_local(local, mesh, [Shard(0)], run_check=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": saved}, checkpoint_id=folder[0], process_group=group)
        return outcome(
            lambda: dcp.load({"w": template}, checkpoint_id=folder[0], process_group=group)
        )


CASES: dict[str, Callable[[Any, bool], str]] = {
    "amax_reduction_group": amax_group,
    "all_gather": collective,
    "quantized all-gather": quantized_gather,
    "stored weights": stored_weights,
    "reduce_amaxes": fused_amaxes,
    "gather of codes": code_gather,
    "delayed scaling": delayed_step,
    "dcp.load": checkpoint,
}


def destroyed_group() -> list[str]:
    """Return the messages of calls over a group that was destroyed."""
    group: Any = dist.new_group()
    layer, recipe = qtensor.Linear(64, 64), qtensor.recipes.DelayedScaling(amax_history_len=4)
    parallel = qtensor.Linear(
        64, 64, recipe=recipe, parallel_mode="column", tp_group=group, sequence_parallel=True
    )

    def step() -> None:
        with qtensor.autocast(recipe=recipe, amax_reduction_group=group):
            layer(torch.randn(32, 64)).sum().backward()

    step()
    dist.barrier()
    dist.destroy_process_group(group)
    x = torch.randn(64, 64)
    return [
        outcome(layer.state_dict),
        outcome(step),
        outcome(lambda: qtensor.quantize(x, "fp8", amax_reduction_group=group)),
        outcome(lambda: parallel(x)),
    ]
