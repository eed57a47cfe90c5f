"""torch's pipeline schedules, and expert parallelism by an exchange of tokens, on two ranks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from formats import assert_same_bytes
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from training import RECIPES

import qtensor

SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
STEPS, MICROBATCHES, ROWS, WIDTH = 3, 4, 32, 64
TAKES_GRADS = "input_grads" in inspect.signature(PipelineStage.__init__).parameters
"""torch 2.11 does not take example gradients. It learns their shapes without a run of the stage."""
State = dict[str, Tensor]


def block(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(qtensor.Linear(WIDTH, WIDTH), nn.GELU(), qtensor.Linear(WIDTH, WIDTH))


def batch() -> tuple[Tensor, Tensor]:
    """Microbatches whose maxima differ, so that delayed scaling must see all of them."""
    g = torch.Generator().manual_seed(5)
    sizes = torch.tensor([0.2, 4.0, 1.0, 2.0]).repeat_interleave(ROWS)[:, None]
    shape = (MICROBATCHES * ROWS, WIDTH)
    return torch.randn(shape, generator=g) * sizes, torch.randn(shape, generator=g)


def example_grads(input: Tensor | None, output: Tensor | None) -> dict[str, Any]:
    return {"input_grads": input, "output_grads": output} if TAKES_GRADS else {}


def step(blocks: list[nn.Module], recipe: str, run: Any) -> None:
    """All microbatches of a step are in one region, and so in one step of delayed scaling."""
    for p in (p for b in blocks for p in b.parameters()):
        p.grad = None
    with qtensor.autocast(recipe=RECIPES[recipe]()):
        run()
    with torch.no_grad():
        for p in (p for b in blocks for p in b.parameters()):
            p -= 0.5 * p.grad


def pipeline(recipe: str, schedule: str) -> list[State]:
    rank, stage_block = dist.get_rank(), block(dist.get_rank())
    x, target = batch()
    between = torch.zeros(ROWS, WIDTH)
    # Without examples, torch runs the stage on uninitialised memory to learn the shapes.
    stage = PipelineStage(
        stage_block,
        rank,
        2,
        torch.device("cpu"),
        input_args=between.clone().requires_grad_(rank == 1),
        output_args=between.clone().requires_grad_(),
        **example_grads(between if rank == 1 else None, between if rank == 0 else None),
    )
    runner = SCHEDULES[schedule](stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    arguments = ((x,), {}) if rank == 0 else ((), {"target": target})
    states = []
    for _ in range(STEPS):
        step([stage_block], recipe, lambda: runner.step(*arguments[0], **arguments[1]))
        states.append({k: v.clone() for k, v in stage_block.state_dict().items()})
    return states


def one_process(recipe: str) -> list[list[State]]:
    blocks, (x, target) = [block(0), block(1)], batch()

    def run() -> None:
        for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss = nn.functional.mse_loss(blocks[1](blocks[0](part)), wanted)
            loss.backward()
        for p in (p for b in blocks for p in b.parameters()):
            p.grad /= MICROBATCHES  # as the schedules do

    states: list[list[State]] = [[], []]
    for _ in range(STEPS):
        step(blocks, recipe, run)
        for rank, b in enumerate(blocks):
            states[rank].append({k: v.clone() for k, v in b.state_dict().items()})
    return states


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise", "mxfp8"])
def test_a_pipeline_has_the_bytes_of_one_process(ranks: Ranks, recipe: str, schedule: str) -> None:
    """Parameters after each step, and the factors and histories of delayed scaling."""
    want = one_process(recipe)
    for rank, states in enumerate(ranks.run(pipeline, recipe, schedule)):
        for number, (got, expected) in enumerate(zip(states, want[rank], strict=True)):
            assert got.keys() == expected.keys()
            assert any("amax_history" in key for key in got) == (recipe == "delayed")
            for key, value in expected.items():
                assert_same_bytes(got[key], value, f"rank {rank}, step {number}: {key}")


# ---- schedules that split the backward pass ------------------------------------------------------

SPLIT: dict[str, Any] = {
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
}
"""Each rank has two stages, and computes gradients of inputs and of weights at different times."""


def split_pipeline(recipe: str, schedule: str) -> list[tuple[int, State]]:
    """Return the gradients of this rank's stages, with the number of the stage."""
    rank, (x, target) = dist.get_rank(), batch()
    numbers = [rank, 3 - rank] if schedule == "ZBV" else [rank, rank + 2]
    between = torch.zeros(ROWS, WIDTH)
    stages = [
        PipelineStage(
            block(number),
            number,
            4,
            torch.device("cpu"),
            input_args=between.clone().requires_grad_(number > 0),
            output_args=between.clone().requires_grad_(),
            **example_grads(between if number > 0 else None, between if number < 3 else None),
        )
        for number in numbers
    ]
    runner = SPLIT[schedule](stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    blocks = [stage.submod for stage in stages]
    keywords = {"target": target} if 3 in numbers else {}
    results = []
    for _ in range(2):
        arguments = (x,) if rank == 0 else ()
        step(blocks, recipe, lambda a=arguments: runner.step(*a, **keywords))  # type: ignore[misc]
        results += [
            (number, {k: v.clone() for k, v in b.state_dict().items()})
            for number, b in zip(numbers, blocks, strict=True)
        ]
    return results


def split_alone(recipe: str) -> list[list[State]]:
    blocks, (x, target) = [block(number) for number in range(4)], batch()

    def run() -> None:
        for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            for b in blocks:
                part = b(part)
            nn.functional.mse_loss(part, wanted).backward()
        for p in (p for b in blocks for p in b.parameters()):
            p.grad /= MICROBATCHES  # as the schedules do

    states: list[list[State]] = []
    for _ in range(2):
        step(blocks, recipe, run)
        states.append([{k: v.clone() for k, v in b.state_dict().items()} for b in blocks])
    return states


@pytest.mark.nightly(reason="four stages; GPipe and 1F1B are in the default tier")
@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise", "mxfp8"])
def test_a_split_backward_has_the_bytes_of_one_process(
    ranks: Ranks, recipe: str, schedule: str
) -> None:
    want = split_alone(recipe)
    for rank, results in enumerate(ranks.run(split_pipeline, recipe, schedule)):
        for index, (number, got) in enumerate(results):
            expected = want[index // 2][number]
            assert got.keys() == expected.keys()
            for key, value in expected.items():
                assert_same_bytes(got[key], value, f"rank {rank}, stage {number}: {key}")


# ---- expert parallelism --------------------------------------------------------------------------

EXPERTS = 2
"""Experts of a rank."""
SENT = torch.tensor([[[32, 64], [0, 32]], [[96, 0], [32, 64]]])
"""Rows that a rank sends: [rank, to rank, expert of that rank]."""


def experts_of(rank: int) -> nn.Module:
    torch.manual_seed(10 + rank)
    return qtensor.GroupedLinear(EXPERTS, WIDTH, WIDTH, bias=False)


def tokens_of(rank: int) -> Tensor:
    """Sorted by rank and expert, as a router leaves them."""
    g = torch.Generator().manual_seed(20 + rank)
    return torch.randn(int(SENT[rank].sum()), WIDTH, generator=g)


def by_expert(pieces: list[Tensor], counts: Tensor) -> Tensor:
    """Join the pieces of all ranks, each sorted by expert, in the order of experts."""
    parts = [p.split(c.tolist()) for p, c in zip(pieces, counts, strict=True)]
    return torch.cat([parts[source][e] for e in range(EXPERTS) for source in range(2)])


def by_source(y: Tensor, counts: Tensor) -> list[Tensor]:
    """Undo ``by_expert``."""
    sizes = [int(counts[source][e]) for e in range(EXPERTS) for source in range(2)]
    parts = y.split(sizes)
    return [torch.cat([parts[2 * e + s] for e in range(EXPERTS)]) for s in range(2)]


def exchange(recipe: str) -> tuple[str, list[Tensor]]:
    rank, group = dist.get_rank(), dist.group.WORLD
    experts, x = experts_of(rank), tokens_of(rank).requires_grad_()
    outgoing, incoming = SENT[rank].sum(-1).tolist(), SENT[:, rank].sum(-1).tolist()
    with qtensor.autocast(recipe=RECIPES[recipe]()):
        received = all_to_all_single_autograd(x, incoming, outgoing, group)
        counts = SENT[:, rank]
        y = experts(by_expert(list(received.split(incoming)), counts), counts.sum(0).tolist())
        back = torch.cat(by_source(y, counts))
        result = all_to_all_single_autograd(back, outgoing, incoming, group)
    result.square().sum().backward()
    gradients = [p.grad for p in experts.parameters()]
    # torch's collective returns a tensor that waits at its first use; torch.clone is a use.
    return type(result).__name__, [result.detach().clone(), x.grad, *gradients]


def exchange_alone(recipe: str) -> list[list[Tensor]]:
    xs = [tokens_of(rank).requires_grad_() for rank in range(2)]
    experts = [experts_of(rank) for rank in range(2)]
    pieces = [x.split(SENT[r].sum(-1).tolist()) for r, x in enumerate(xs)]
    backs = []
    with qtensor.autocast(recipe=RECIPES[recipe]()):
        for owner in range(2):
            counts = SENT[:, owner]
            x = by_expert([pieces[source][owner] for source in range(2)], counts)
            backs.append(by_source(experts[owner](x, counts.sum(0).tolist()), counts))
    results = [torch.cat([backs[owner][source] for owner in range(2)]) for source in range(2)]
    sum(r.square().sum() for r in results).backward()
    return [
        [results[r].detach(), xs[r].grad, *[p.grad for p in experts[r].parameters()]]
        for r in range(2)
    ]


@pytest.mark.parametrize("recipe", ["high_precision", "current", "mxfp8"])
def test_an_exchange_of_tokens_around_experts(ranks: Ranks, recipe: str) -> None:
    """The bytes of one process that holds all experts, gradients included."""
    want = exchange_alone(recipe)
    for rank, (kind, got) in enumerate(ranks.run(exchange, recipe)):
        assert kind == "AsyncCollectiveTensor"  # as for plain experts
        for number, (a, b) in enumerate(zip(got, want[rank], strict=True)):
            assert_same_bytes(a, b, f"rank {rank}, {number}")


def direct(recipe: str) -> list[list[Tensor]]:
    """The tensor of a collective itself is a layer's input, and again after it was waited for."""
    rank, rows = dist.get_rank(), [64, 64]
    results = []
    for wait in (False, True):
        torch.manual_seed(3)
        x = tokens_of(rank)[:128].requires_grad_()
        layers = [qtensor.GroupedLinear(2, WIDTH, WIDTH), qtensor.Linear(WIDTH, WIDTH)]
        with qtensor.autocast(recipe=RECIPES[recipe]()):
            received = all_to_all_single_autograd(x, rows, rows, dist.group.WORLD)
            received = received.wait() if wait else received
            y = layers[0](received, rows) + layers[1](received)
        y.square().sum().backward()
        gradients = [p.grad for layer in layers for p in layer.parameters()]
        results.append([y.detach().clone(), x.grad, *gradients])
    return results


@pytest.mark.parametrize("recipe", ["high_precision", "current", "mxfp8", "nvfp4"])
def test_layers_read_the_tensor_of_a_collective(ranks: Ranks, recipe: str) -> None:
    for rank, (got, want) in enumerate(ranks.run(direct, recipe)):
        for number, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same_bytes(a, b, f"rank {rank}, {number}")
