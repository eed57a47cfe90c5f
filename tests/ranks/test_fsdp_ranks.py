"""Training under ``fully_shard`` with three and four ranks, and on a mesh of 2 x 2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import RECIPES, converted, loss_of, shard, whole
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import qtensor
from qtensor.distributed import quantized_all_gather, reduce_amaxes

pytestmark = pytest.mark.nightly(reason="three or four processes; test_fsdp.py has two")
KINDS = ("plain", "stored", "gathered")
REFUSED = {("delayed", "gathered"), ("blockwise", "stored"), ("blockwise", "gathered")}
"""Delayed scaling has no codes to gather; shards of 32 rows would cut blocks of 128."""


def build(recipe: str, kind: str, **options: Any) -> Any:
    """Return a sharded model."""
    model = converted(recipe, quantized_params=kind == "stored")
    if kind == "gathered":
        quantized_all_gather(model)
    return shard(model, **options)


def same(ours: Any, theirs: Any, name: str) -> None:
    """Compare bytes; quantized weights by their buffers."""
    if isinstance(theirs, qtensor.QuantizedTensor):
        for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
        return
    assert type(ours) is torch.Tensor, name
    assert torch.equal(ours, theirs), name


def replicas_of(recipe: str, kind: str) -> list[nn.Module]:
    stored = kind == "stored"
    return [converted(recipe, quantized_params=stored) for _ in range(dist.get_world_size())]


def run_hybrid(recipe: str, kind: str) -> None:
    """Two gradients are averaged over the shards, then two such means over the replicas."""
    mesh, rank = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        dist.get_rank(),
    )
    model, replicas = build(recipe, kind, mesh=mesh), replicas_of(recipe, kind)
    everyone = [model, *replicas]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in everyone]
    for step in range(2):
        loss = loss_of(model, step, rank)
        loss.backward()
        losses = [loss_of(replica, step, r) for r, replica in enumerate(replicas)]
        for own in losses:
            own.backward()
        same(loss.detach(), losses[rank].detach(), "loss")
        for (name, ours), *own in zip(
            model.named_parameters(), *[r.parameters() for r in replicas], strict=True
        ):
            a, b, c, d = (p.grad for p in own)
            mean = ((a + b) / 2 + (c + d) / 2) / 2
            same(whole(ours.grad), mean, f"gradient of {name}")
            for p in own:
                p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if kind == "gathered":
            reduce_amaxes(model)
        for (name, ours), p in zip(model.named_parameters(), replicas[0].parameters(), strict=True):
            same(whole(ours), p.detach(), name)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [(r, k) for r in RECIPES for k in KINDS if (r, k) not in REFUSED],
)
def test_two_replicas_of_two_shards(four_ranks: Ranks, recipe: str, kind: str) -> None:
    four_ranks.run(run_hybrid, recipe, kind)


def run_bound(recipe: str, kind: str) -> None:
    """The sum of R float32 gradients is off by less than R * 2**-24 of the sum of their sizes.

    Losses, and the weights that are gathered, have the bytes of one process.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    model, replicas = build(recipe, kind), replicas_of(recipe, kind)
    loss = loss_of(model, 0, rank)
    loss.backward()
    losses = [loss_of(replica, 0, r) for r, replica in enumerate(replicas)]
    for own in losses:
        own.backward()
    same(loss.detach(), losses[rank].detach(), "loss")
    compared = 0
    for (name, ours), *own in zip(
        model.named_parameters(), *[r.parameters() for r in replicas], strict=True
    ):
        gradients = [p.grad.double() for p in own]
        error = (whole(ours.grad).double() - sum(gradients) / size).abs()
        bound = size * 2.0**-24 * sum(g.abs() for g in gradients) / size
        # The division by R rounds once more where R is no power of two.
        bound = bound + 2.0**-23 * (sum(gradients) / size).abs()
        assert (error <= bound).all(), name
        compared += int(bound.any())
    assert compared > 5


@pytest.mark.parametrize(
    ("recipe", "kind"), [*(("current", kind) for kind in KINDS), ("mxfp8", "plain")]
)
def test_gradients_of_four_ranks(four_ranks: Ranks, recipe: str, kind: str) -> None:
    four_ranks.run(run_bound, recipe, kind)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_three_ranks(three_ranks: Ranks, recipe: str) -> None:
    three_ranks.run(run_bound, recipe, "plain")
