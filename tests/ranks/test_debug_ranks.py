"""Recordings of sharded models: two ranks under ``fully_shard`` and under DDP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from debug_cases import block, inputs
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import qtensor
from qtensor import recipes

LAYERS = ("first", "plain", "mlp.fc1_weight", "mlp.fc2_weight")


def _wrapped(kind: str) -> nn.Module:
    model = block(recipes.MXFP8BlockScaling())
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in (model.first, model.plain, model.mlp):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _step(model: nn.Module, maxima: list[float] | None = None) -> list[Tensor]:
    out = model(inputs(seed=dist.get_rank()))
    out.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    if maxima is not None:
        plain = getattr(model, "module", model).plain.weight.grad
        part = plain.to_local() if hasattr(plain, "to_local") else plain
        maxima.append(part.abs().max().item())
    model.zero_grad()
    return [out.detach(), *[g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]]


Recorded = tuple[bool, set[tuple[str, str]], tuple[str, ...], int, list[tuple[int, int]]]


def recorded(kind: str) -> Recorded:
    """Return whether three steps equal those of a twin; what was recorded; layers; rows of a
    weight; calls and rows of its gradient in each step."""
    model, twin = _wrapped(kind), _wrapped(kind)
    maxima: list[float] = []
    with qtensor.debug.record(model) as log:
        got = []
        for _ in range(2):
            got += _step(model, maxima)
    got += _step(model)
    want = _step(twin) + _step(twin) + _step(twin)
    same = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    weight = next(r for r in log.records if (r.layer, r.role) == ("first", "weight"))
    rows = [r for r in log.records if (r.layer, r.role) == ("plain", "grad_weight")]
    found = []
    for record, amax in zip(rows, maxima, strict=True):
        assert kind == "ddp" or record.amax == amax  # DDP averages gradients later
        found.append((record.calls, record.shape[0]))
    names = {(r.layer, r.role) for r in log.records}
    return same, names, log.layers, weight.shape[0], found


@pytest.mark.parametrize(
    "kind",
    [pytest.param("ddp", marks=pytest.mark.nightly(reason="the records of fsdp2")), "fsdp2"],
)
def test_two_ranks(ranks: Ranks, kind: str) -> None:
    """The weight is seen whole. The gradient is that of the backward pass, or with FSDP2, which
    does not pass it through autograd, this rank's part of the reduced one."""
    roles = ["input", "weight", "output", "grad_output", "grad_weight", "grad_input"]
    for same, found, layers, rows, gradients in ranks.run(recorded, kind):
        assert same
        assert layers == LAYERS
        assert rows == 64
        expected = {(layer, role) for layer in LAYERS for role in roles}
        # The input of the model needs no gradient.
        expected -= {("first", "grad_input")}
        assert found == expected
        assert gradients == [(1, 32 if kind == "fsdp2" else 64)] * 2
