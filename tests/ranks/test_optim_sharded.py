"""The state of sharded parameters as quantized tensors: the bytes of one process.

Parameters that a step rounds at random, sharded and as replicas.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from formats import assert_same_bytes, assert_same_tensor, rand
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qtensor
from qtensor.optim import quantize_state_, round_parameters_
from tests.layers import test_random_parameters
from tests.layers.test_optim import run_seeded

FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "fp8_rowwise": {},
    "fp8_blockwise": {"force_pow_2_scales": False},
    "mxfp8": {},
    "mxfp6": {"packed": True},
    "nvfp4": {},
}


def build(fmt: str, rows: int, sharded: bool, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, rows, bias=False))
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = qtensor.quantizer(fmt, **FORMATS[fmt])
    quantize_state_(optimizer, {"exp_avg": found, "exp_avg_sq": found}, **options)
    return model, optimizer


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    """The ranks have equal batches, so that their mean gradient is that of one process."""
    model(rand(32, 128, seed=number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def run_steps(fmt: str, rows: int) -> None:
    ours, theirs = build(fmt, rows, True), build(fmt, rows, False)
    for number in range(3):
        for pair in (ours, theirs):
            step(*pair, number)
        for key, value in theirs[1].state[theirs[0][0].weight].items():
            own = ours[1].state[ours[0][0].weight][key]
            if key == "step":
                assert own == value
                continue
            assert isinstance(own, DTensor)
            assert isinstance(own.to_local(), qtensor.QuantizedTensor)
            assert_same_tensor(own.full_tensor(), value)
        assert_same_bytes(ours[0][0].weight.full_tensor().detach(), theirs[0][0].weight.detach())
    model, optimizer = build(fmt, rows, True)
    model.load_state_dict(ours[0].state_dict())
    optimizer.load_state_dict(ours[1].state_dict())
    for pair in ((model, optimizer), theirs):
        step(*pair, 3)
    assert_same_bytes(model[0].weight.full_tensor().detach(), theirs[0][0].weight.detach())


@pytest.mark.parametrize("fmt", FORMATS)
def test_steps_of_sharded_parameters(ranks: Ranks, fmt: str) -> None:
    ranks.run(run_steps, fmt, 256)


def run_random() -> None:
    """A rank's codes of a step follow from the seed."""
    states = []
    for _ in range(2):
        torch.manual_seed(dist.get_rank())
        model, optimizer = build("mxfp8", 256, True, stochastic_rounding=True, seed=5)
        step(model, optimizer, 0)
        states.append(optimizer.state[model[0].weight]["exp_avg_sq_sqrt"].to_local())
    assert_same_tensor(*states)
    model, optimizer = build("mxfp8", 256, True)
    step(model, optimizer, 0)
    nearest = optimizer.state[model[0].weight]["exp_avg_sq_sqrt"].to_local()
    assert not torch.equal(nearest.dequantize(), states[0].dequantize())


def test_rounding_at_random(ranks: Ranks) -> None:
    ranks.run(run_random)


def run_replicated() -> list[Tensor]:
    """Ranks whose generators differ, and whose gradients are equal, as after DDP's reduction."""
    nvfp4 = run_seeded(dist.get_rank(), range(3))[0]
    return [nvfp4, test_random_parameters.run(5, dist.get_rank(), range(3))[0]]


def test_replicas_that_round_at_random_stay_equal(ranks: Ranks) -> None:
    for first, second in zip(*ranks.run(run_replicated), strict=True):
        assert_same_tensor(second, first)


def run_random_parameters() -> None:
    """Each rank draws for the rows of its shard, from the same seed."""
    model = nn.Linear(64, 64, bias=False)
    model.weight = nn.Parameter(qtensor.quantize(rand(64, 64), "mxfp8", columnwise=True))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    round_parameters_(optimizer, seed=9)
    first = model.weight.to_local().detach().clone()
    model(rand(32, 64, seed=1)).sum().backward()
    grad = model.weight.grad.to_local().clone()
    alone = nn.Parameter(first)
    other = torch.optim.SGD([alone], lr=1.0)
    round_parameters_(other, seed=9)
    alone.grad = grad
    optimizer.step()
    other.step()
    for ours, theirs in zip(model.weight.to_local().buffers(), alone.buffers(), strict=True):
        assert_same_bytes(ours, theirs)


def test_sharded_parameters_that_round_at_random(ranks: Ranks) -> None:
    ranks.run(run_random_parameters)


def run_uneven() -> None:
    """Rows of an MX format are quantized one by one, so that shards need not be of one size."""
    model, optimizer = build("mxfp8", 97, True)
    step(model, optimizer, 0)
    alone = build("mxfp8", 97, False)
    step(*alone, 0)
    entry = optimizer.state[model[0].weight]["exp_avg"]
    wanted = alone[1].state[alone[0][0].weight]["exp_avg"].dequantize()
    own = wanted.chunk(2)[dist.get_rank()]
    assert_same_bytes(entry.to_local().dequantize(), own)


def test_shards_of_different_sizes(ranks: Ranks) -> None:
    ranks.run(run_uneven)
