"""Collectives as operations, and sharded blocks of them, on two gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from compile_helpers import Compiled
from ops_cases import WIDTH, data, step
from ranks import RankError, Ranks
from torch import Tensor
from training import RECIPES, assert_same

from qtensor import ops

ROWS = 64
WAYS = ("eager", "aot_eager", "inductor")


def rows_of(t: Tensor, rank: int) -> Tensor:
    return t.chunk(2)[rank].contiguous()


def run(build: Any, x: Tensor, recipe: str, way: str) -> list[Tensor]:
    torch.manual_seed(0)
    sequence = build()
    call = sequence if way == "eager" else Compiled(sequence, way)
    return step(call, sequence, x, RECIPES[recipe]())


def one(kind: str) -> ops.Sequential:
    return ops.Sequential(getattr(ops, kind)(dist.group.WORLD), ops.ConstantScale(2.0))


def collective(kind: str, way: str) -> list[Tensor]:
    return run(lambda: one(kind), data(ROWS, seed=dist.get_rank()), "high_precision", way)


@pytest.mark.parametrize(
    "way",
    [
        *WAYS[:2],
        pytest.param(WAYS[2], marks=pytest.mark.nightly(reason="aot_eager has the same ops")),
    ],
)
@pytest.mark.parametrize("kind", ["AllGather", "AllReduce", "ReduceScatter"])
def test_collectives(ranks: Ranks, kind: str, way: str) -> None:
    found = ranks.run(collective, kind, way)
    x = [data(ROWS, seed=rank) for rank in range(2)]
    dy = torch.linspace(-1, 1, WIDTH).expand(2 * ROWS, WIDTH) * 2
    for rank, (y, dx) in enumerate(found):
        if kind == "AllGather":
            expected = torch.cat(x) * 2, (dy + dy)[:ROWS]
        elif kind == "AllReduce":
            expected = (x[0] + x[1]) * 2, dy[:ROWS]
        else:
            expected = rows_of((x[0] + x[1]) * 2, rank), dy[:ROWS]
        assert_same([y, dx], [t.contiguous() for t in expected])


def block(sequence_parallel: bool, sharded: bool) -> ops.Sequential:
    """norm, column-parallel linear, gelu, row-parallel linear, by operations of their own."""
    torch.manual_seed(0)
    up, down = torch.randn(128, WIDTH) / 8, torch.randn(WIDTH, 128) / 8
    rank = dist.get_rank() if sharded else 0
    width = 64 if sharded else 128
    parts: list[Any] = [ops.RMSNorm(WIDTH)]
    if sharded and sequence_parallel:
        parts.append(ops.AllGather(dist.group.WORLD))
    first, second = ops.BasicLinear(WIDTH, width), ops.BasicLinear(width, WIDTH)
    parts += [first, ops.GELU(), second]
    if sharded:
        kind = ops.ReduceScatter if sequence_parallel else ops.AllReduce
        parts.append(kind(dist.group.WORLD))
    with torch.no_grad():
        first.weight.copy_(up.chunk(2)[rank] if sharded else up)
        second.weight.copy_(down.chunk(2, 1)[rank] if sharded else down)
    return ops.Sequential(*parts)


def sharded_block(sequence_parallel: bool, recipe: str, way: str) -> list[Tensor]:
    x = data(ROWS)
    x = rows_of(x, dist.get_rank()) if sequence_parallel else x
    return run(lambda: block(sequence_parallel, True), x, recipe, way)


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8"])
def test_a_sequence_parallel_block(ranks: Ranks, recipe: str, way: str) -> None:
    """Blocks of 32 do not cross ranks, so that quantization is that of the whole; sums differ in
    their order.
    """
    found = ranks.run(sharded_block, True, recipe, way)
    whole = run(lambda: block(True, False), data(ROWS), recipe, "eager")
    y, dx = (torch.cat([f[i] for f in found]) for i in range(2))
    up = torch.cat([f[3] for f in found])
    down = torch.cat([f[4] for f in found], 1)
    for ours, theirs in zip((y, dx, up, down), (*whole[:2], *whole[3:]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "recipe",
    [
        "high_precision",
        "delayed",
        pytest.param("current", marks=pytest.mark.nightly(reason="mxfp8 has no state either")),
        "mxfp8",
        pytest.param(
            "nvfp4",
            marks=pytest.mark.nightly(reason="test_a_sequence_parallel_block compiles mxfp8"),
        ),
    ],
)
@pytest.mark.parametrize(
    "sequence_parallel",
    [pytest.param(False, marks=pytest.mark.nightly(reason="a part of the other graph")), True],
)
def test_compiled_is_eager_bit_for_bit(ranks: Ranks, recipe: str, sequence_parallel: bool) -> None:
    eager = ranks.run(sharded_block, sequence_parallel, recipe, "eager")
    traced = ranks.run(sharded_block, sequence_parallel, recipe, "aot_eager")
    for a, b in zip(eager, traced, strict=True):
        assert_same(b, a)


def linear_with_arguments(mode: str, way: str) -> list[Tensor]:
    options = {"parallel_mode": mode, "tp_group": dist.group.WORLD}
    return run(
        lambda: ops.Sequential(ops.Linear(WIDTH, WIDTH, **options)), data(ROWS), "mxfp8", way
    )


def test_the_arguments_of_linear(ranks: Ranks) -> None:
    def whole() -> ops.Sequential:
        return ops.Sequential(ops.Linear(WIDTH, WIDTH))

    expected = run(whole, data(ROWS), "mxfp8", "eager")
    for way in WAYS[:2]:
        found = ranks.run(linear_with_arguments, "column", way)
        assert_same([torch.cat([f[0] for f in found], -1)], expected[:1])


def uneven() -> None:
    ops.Sequential(ops.GELU(), ops.ReduceScatter(dist.group.WORLD))(data(3))


def test_rows_that_do_not_divide(ranks: Ranks) -> None:
    rule = r"\(rank \d of 2\): dim 0 must be a multiple of the 2 ranks"
    message = rf"(?s)ReduceScatter \(operation 1\) input {rule}"
    with pytest.raises(RankError, match=message):
        ranks.run(uneven)


def test_a_group_of_one() -> None:
    class Alone:
        group_name = "alone"

        def size(self) -> int:
            return 1

    x = data().requires_grad_()
    for kind in (ops.AllGather, ops.AllReduce, ops.ReduceScatter):
        y = ops.Sequential(kind(Alone()), ops.ConstantScale(1.0))(x)
        assert torch.equal(y, x)
