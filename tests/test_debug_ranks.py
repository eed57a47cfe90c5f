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


def _step(model: nn.Module) -> list[Tensor]:
    out = model(inputs(seed=dist.get_rank()))
    out.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [out.detach(), *[g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]]


def recorded(kind: str) -> tuple[bool, set[tuple[str, str]], tuple[str, ...], int]:
    """Return whether two steps equal those of a twin; what was recorded; layers; rows of a
    weight."""
    model, twin = _wrapped(kind), _wrapped(kind)
    with qtensor.debug.record(model) as log:
        got = _step(model)
    got += _step(model)
    want = _step(twin) + _step(twin)
    same = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    weight = next(r for r in log.records if (r.layer, r.role) == ("first", "weight"))
    return same, {(r.layer, r.role) for r in log.records}, log.layers, weight.shape[0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks(ranks: Ranks, kind: str) -> None:
    """The weight is seen whole; gradients of weights that FSDP2 shards do not pass autograd."""
    roles = ["input", "weight", "output", "grad_output", "grad_weight", "grad_input"]
    for same, found, layers, rows in ranks.run(recorded, kind):
        assert same
        assert layers == LAYERS
        assert rows == 64
        expected = {(layer, role) for layer in LAYERS for role in roles}
        # The input of the model needs no gradient.
        expected -= {("first", "grad_input")}
        if kind == "fsdp2":
            expected = {(layer, role) for layer, role in expected if role != "grad_weight"}
        assert found == expected
