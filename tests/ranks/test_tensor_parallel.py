"""Tensor, sequence and data parallel training on two gloo processes, against oracles by hand and
the unsharded module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compile_helpers import Compiled
from formats import assert_same_bytes
from parallel_cases import (
    LAYERS,
    LOCAL,
    RECIPES,
    SIZE,
    K,
    Layer,
    Mlp,
    N,
    Result,
    Whole,
    build,
    draws,
    mlp_layers,
    mlp_oracle,
    ones,
    oracle,
    part,
    step,
    whole,
)
from ranks import RankError, Ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import qtensor

EPS = 2.0**-24


def same(got: Result, want: Result, what: str) -> None:
    assert_same_bytes(got.y, want.y, f"{what}: output")
    assert_same_bytes(got.dx, want.dx, f"{what}: gradient of the input")
    for i, (a, b) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        assert_same_bytes(a, b, f"{what}: gradient {i}")


def within(recipe: Any, **options: Any) -> Any:
    return qtensor.autocast(enabled=recipe is not None, recipe=recipe, **options)


def fail_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def test_a_failure_on_one_rank_is_reported(ranks: Ranks) -> None:
    """The harness: no test below passes because a rank was not heard."""
    with pytest.raises(RankError, match=r"(?s)rank 1:.*only here"):
        ranks.run(fail_on_one_rank)
    assert ranks.run(dist.get_rank) == [0, 1]


# ---- every layer ---------------------------------------------------------------------------------


Member = Layer | tuple[bool, bool]
"""A layer, or an MLP as (sequence, bias)."""

EAGER: list[Member] = [*LAYERS, (False, True), (True, False), (True, True)]
MEMBERS: dict[str, list[Member]] = {
    "eager": EAGER,
    "aot_eager": [(False, True), (True, False)],
    "inductor": [(False, False), (True, True)],
}
"""Compiled code is checked on MLPs, which hold a layer of each mode."""


class Zoo(torch.nn.Module):
    """All members in one module, so that a compiler has one graph to make of them."""

    def __init__(self, members: list[Member]) -> None:
        super().__init__()
        rank, group = dist.get_rank(), dist.group.WORLD
        self.members = torch.nn.ModuleList(
            build(m, whole(m.bias), rank, group)
            if isinstance(m, Layer)
            else Mlp(*mlp_layers(*m), rank, group)
            for m in members
        )

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [member(x) for member, x in zip(self.members, inputs, strict=True)]


def run_zoo(recipe: Any, backend: str) -> list[Result]:
    """Forward and backward of every member on this rank, by one call each."""
    rank, members = dist.get_rank(), MEMBERS[backend]
    zoo = Zoo(members)
    run = zoo if backend == "eager" else Compiled(zoo, backend)
    torch.manual_seed(100 + rank)
    ends = [(m, m) if isinstance(m, Layer) else mlp_layers(*m)[0] for m in members]
    x, dys = whole(False).x, [whole(False, step=s).dy for s in (0, 1)]
    inputs = [first.inputs(x, rank).clone().requires_grad_() for first, _ in ends]
    with within(recipe):
        outputs = run(inputs)
    grads = [last.outputs(dys[first is not last], rank) for first, last in ends]
    torch.autograd.backward(outputs, grads)
    if backend != "eager":
        run.check_graphs(1)
    return [
        Result(y.detach(), x.grad, [p.grad for p in member.parameters()])
        for y, x, member in zip(outputs, inputs, zoo.members, strict=True)
    ]


@pytest.fixture(scope="module")
def zoo(ranks: Ranks) -> Callable[[str, str], list[list[Result]]]:
    """Results by rank and member, computed once."""
    known: dict[tuple[str, str], list[list[Result]]] = {}

    def results(name: str, backend: str) -> list[list[Result]]:
        if (name, backend) not in known:
            known[name, backend] = ranks.run(run_zoo, rule_of(name, backend), backend)
        return known[name, backend]

    return results


def rule_of(name: str, backend: str) -> Any:
    """In compiled code gradients are rounded to nearest.

    The partitioner may put the draw of a seed into the backward graph, so that layers draw in
    another order than in eager mode, with or without a group.
    """
    if name == "nvfp4" and backend != "eager":
        return qtensor.recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    return RECIPES[name]


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param(
            "aot_eager", marks=pytest.mark.nightly(reason="4 s; compiled blocks have them")
        ),
        pytest.param("inductor", marks=pytest.mark.nightly(reason="15 s; aot_eager has these ops")),
    ],
)
@pytest.mark.parametrize("name", RECIPES)
def test_every_layer(zoo: Any, name: str, backend: str) -> None:
    """Two ranks add two numbers, and a + b = b + a: the oracle has the bytes of sums over ranks
    too.
    """
    rule = rule_of(name, backend)
    seeds = [iter(draws(rule, rank, 2 * len(EAGER))) for rank in range(SIZE)]
    results = zoo(name, backend)
    for i, member in enumerate(MEMBERS[backend]):
        if isinstance(member, Layer):
            want = oracle(member, rule, whole(member.bias), ones(), [next(s) for s in seeds])
        else:
            turns = [[next(s) for s in seeds] for _ in range(2)]
            want = mlp_oracle(*member, rule, turns)
        for rank in range(SIZE):
            same(results[rank][i], want[rank], f"{member}, rank {rank}")


def close(got: Tensor, want: Tensor, bound: Tensor, what: str) -> None:
    """Within an error bound, element by element."""
    excess = (got.double() - want.double()).abs() - bound.double()
    assert excess.max() <= 0, f"{what}: {excess.max().item()} over the bound"


@pytest.mark.parametrize("name", LOCAL)
def test_equal_to_the_unsharded_module(zoo: Any, name: str) -> None:
    """To the order of sums: |error| <= 2 n eps sum |a||b| for each of two sums of n products; codes
    may be larger by 1/8.
    """
    results = zoo(name, "eager")
    for i, layer in enumerate(LAYERS):
        t = whole(layer.bias)
        module = qtensor.Linear(K, N, bias=layer.bias)
        module.load_state_dict({"weight": t.w} | ({"bias": t.b} if layer.bias else {}))
        with within(RECIPES[name]):
            want = step(module, module, Layer("column", False, layer.bias), t, 0, unsharded=True)
        x, dy = t.x.abs().reshape(-1, K), t.dy.abs().reshape(-1, N)
        w, b = t.w.abs(), 0 if t.b is None else t.b.abs()
        bounds = Result(
            (4 * (K + 2) * EPS * (x @ w.T + b)).view_as(t.dy),
            (4 * (N + 2) * EPS * (dy @ w)).view_as(t.x),
            [4 * (len(x) + 2) * EPS * (dy.T @ x), 2 * len(x) * EPS * dy.sum(0)],
        )
        for rank in range(SIZE):
            got, what = results[rank][i], f"{layer}, rank {rank}"
            y, y_bound = layer.outputs(want.y, rank), layer.outputs(bounds.y, rank)
            close(got.y, y, y_bound, f"{what}: output")
            dx, dx_bound = layer.inputs(want.dx, rank), layer.inputs(bounds.dx, rank)
            close(got.dx, dx, dx_bound, f"{what}: gradient of the input")
            pick = [layer.weight, layer.offset]
            for g, of, v, bound in zip(got.gradients, pick, want.gradients, bounds.gradients):  # noqa: B905
                close(g, of(v, rank), of(bound, rank), f"{what}: a parameter's gradient")


# ---- options of layers ---------------------------------------------------------------------------


CURRENT = qtensor.recipes.Float8CurrentScaling
VARIANTS: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {
    "original": (CURRENT(), {"save_original_input": True}, torch.float32),
    "bfloat16": (CURRENT(), {}, torch.bfloat16),
    "bfloat16_plain": (None, {}, torch.bfloat16),
    "delayed_wgrad": (CURRENT(), {"delay_wgrad_compute": True}, torch.float32),
    "main_grad": (CURRENT(), {"fuse_wgrad_accumulation": True}, torch.float32),
    "microbatches": (CURRENT(), {}, torch.float32),
    "override_high": (CURRENT(backward_override="high_precision"), {}, torch.float32),
    "override_dequantized": (CURRENT(backward_override="dequantized"), {}, torch.float32),
    "override_plain_input": (
        CURRENT(backward_override="dequantized", overrides={"input": None}),
        {},
        torch.float32,
    ),
}


def run_variant(name: str, layer: Layer) -> Result:
    rank = dist.get_rank()
    recipe, options, dtype = VARIANTS[name]
    t = whole(layer.bias, dtype)
    module = build(layer, t, rank, dist.group.WORLD, **options)
    if name == "main_grad":
        module.weight.main_grad = torch.zeros_like(module.weight)
    with within(recipe):
        if name == "microbatches":
            step(module, lambda x: module(x, is_first_microbatch=True), layer, t, rank)
            result = step(module, lambda x: module(x, is_first_microbatch=False), layer, t, rank)
        else:
            result = step(module, module, layer, t, rank)
    if name == "delayed_wgrad":
        assert result.gradients[0] is None
        module.backward_dw()
        result.gradients[0] = module.weight.grad
    if name == "main_grad":
        assert result.gradients[0] is None
        result.gradients[0] = module.weight.main_grad
    return result


@pytest.mark.parametrize("layer", [m for m in LAYERS if m.sequence and m.bias], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_options(ranks: Ranks, name: str, layer: Layer) -> None:
    recipe, _, dtype = VARIANTS[name]
    want = oracle(layer, recipe, whole(layer.bias, dtype), ones(), [None, None])
    for rank, got in enumerate(ranks.run(run_variant, name, layer)):
        same(got, want[rank], f"rank {rank}")


# ---- delayed scaling -----------------------------------------------------------------------------


STEPS = 4


def steps_of(bias: bool) -> list[Whole]:
    """Other inputs and gradients at each step, one weight."""
    first = whole(bias)
    return [dataclasses.replace(whole(bias, step=s), w=first.w, b=first.b) for s in range(STEPS)]


def run_delayed(
    layer: Layer, reduce: bool, backend: str, nan: int | None = None
) -> list[tuple[Result, Tensor]]:
    """(result, factors in use) of each step."""
    rank, found = dist.get_rank(), []
    tensors = steps_of(layer.bias)
    if nan is not None:
        tensors[1].x[..., nan] = torch.nan
    module = build(layer, tensors[0], rank, dist.group.WORLD)
    run = Compiled(module, backend) if backend else module
    for t in tensors:
        with within(RECIPES["delayed"], amax_reduction_group=dist.group.WORLD if reduce else None):
            result = step(module, run, layer, t, rank)
        found.append((result, module.state_dict()["_delayed_scaling.weight.scale"]))
    if backend:
        run.check_graphs(1)
    return found


ROLES = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}


def delayed_oracle(layer: Layer, reduce: bool) -> list[list[tuple[Result, Tensor]]]:
    """By step and rank: factors from the maxima of the steps before, over both ranks or the rank's
    own.
    """
    fresh = qtensor.delayed_scaling_state(4, 1)
    states = [dict.fromkeys(ROLES, fresh) for _ in range(SIZE)]
    found = []
    for t in steps_of(layer.bias):
        scales = [{role: scale for role, (_, scale) in state.items()} for state in states]
        results = oracle(layer, RECIPES["delayed"], t, scales, [None, None])
        used = [torch.cat(list(s.values())) for s in scales]
        found.append(list(zip(results, used, strict=True)))
        for role, element in ROLES.items():
            maxima = [r.amax[role] for r in results]
            for rank, state in enumerate(states):
                history, scale = state[role][0].clone(), state[role][1]
                amax = torch.maximum(*maxima) if reduce else maxima[rank]
                qtensor.record_amax_(history, amax)
                state[role] = qtensor.delayed_scaling_update(history, scale, dtype=element)
    return found


DELAYED = [(m, reduce, "") for m in LAYERS if m.bias for reduce in (True, False)]
# Compiled: with the group and a split sequence, which trace the most collectives.
DELAYED += [(m, True, "aot_eager") for m in LAYERS if m.bias and m.sequence]


@pytest.mark.parametrize(
    ("layer", "reduce", "backend"),
    DELAYED,
    ids=lambda v: {"": "eager", True: "group", False: "alone"}.get(v, str(v)),
)
def test_delayed_scaling(ranks: Ranks, layer: Layer, reduce: bool, backend: str) -> None:
    want = delayed_oracle(layer, reduce)
    results = ranks.run(run_delayed, layer, reduce, backend)
    for rank in range(SIZE):
        for s in range(STEPS):
            got, scale = results[rank][s]
            assert_same_bytes(scale, want[s][rank][1], f"step {s}, rank {rank}: factors")
            same(got, want[s][rank][0], f"step {s}, rank {rank}")
    equal = [torch.equal(results[0][s][1], results[1][s][1]) for s in range(STEPS)]
    assert equal == ([True] * STEPS if reduce else [True] + [False] * (STEPS - 1))


def quantized_input() -> tuple[Tensor, Tensor]:
    """Outputs of a column layer for the quantized rows of a rank, and of a layer for all rows."""
    x, weight = torch.randn(64, 256), torch.randn(512, 256)
    rank, group = dist.get_rank(), dist.group.WORLD
    options = {"parallel_mode": "column", "sequence_parallel": True, "tp_group": group}
    split = qtensor.Linear(256, 512, bias=False, **options)
    local = qtensor.Linear(256, 512 // SIZE, bias=False)
    with torch.no_grad(), qtensor.autocast(recipe=qtensor.recipes.MXFP8BlockScaling()):
        for layer in (split, local):
            layer.weight.copy_(weight.chunk(SIZE)[rank])
        own = qtensor.quantize(x.chunk(SIZE)[rank], "mxfp8", columnwise=True)
        return split(own), local(qtensor.quantize(x, "mxfp8", columnwise=True))


def test_a_quantized_input_is_gathered_as_its_codes(ranks: Ranks) -> None:
    for got, want in ranks.run(quantized_input):
        assert_same_bytes(got, want)


@pytest.mark.parametrize("feature", [0, -1], ids=["first", "second"])
def test_a_nan_on_one_rank_keeps_the_factors_of_both(ranks: Ranks, feature: int) -> None:
    """In a row layer the first features are the first rank's, the last the second's."""
    results = ranks.run(run_delayed, Layer("row", False, False), True, "", feature)
    first, second = ([scale for _, scale in found] for found in results)
    assert results[0][1][0].y.isnan().all()
    for s in range(STEPS):
        assert_same_bytes(first[s], second[s], f"step {s}")
        assert first[s].isfinite().all()
    assert first[2][0] == first[1][0], "the input's factor stays"


def evaluate_alone() -> Tensor | None:
    """One rank evaluates inside of a region with a group; the other does not."""
    rank, layer = dist.get_rank(), Layer("column", False, False)
    t = whole(False)
    module = build(layer, t, rank, dist.group.WORLD).eval()
    with torch.no_grad(), within(RECIPES["delayed"], amax_reduction_group=dist.group.WORLD):
        return module(t.x) if rank == 0 else None


def test_an_evaluation_on_one_rank_waits_for_nobody(ranks: Ranks) -> None:
    first, second = ranks.run(evaluate_alone)
    assert second is None
    want = oracle(
        Layer("column", False, False), RECIPES["delayed"], whole(False), ones(), [None] * 2
    )
    assert_same_bytes(first, want[0].y)


# ---- data parallel -------------------------------------------------------------------------------


def model_of(deep: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    if not deep:
        return qtensor.Linear(64, 32)
    return torch.nn.Sequential(qtensor.Linear(64, 96), torch.nn.ReLU(), qtensor.Linear(96, 32))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """256 rows: halves are whole blocks."""
    g = torch.Generator().manual_seed(50 + step)
    x, t = torch.randn(256, 64, generator=g), torch.randn(256, 32, generator=g)
    x[128:] *= 6
    return x, t


def losses(deep: bool, y: Tensor, t: Tensor) -> Tensor:
    return torch.nn.functional.mse_loss(y, t) if deep else (y * t).mean()


RATE = 0.25


def data_parallel(recipe: Any, deep: bool, backend: str = "") -> dict[str, Tensor]:
    """Three steps, each rank with its half of the batch; the state dict."""
    rank, model = dist.get_rank(), model_of(deep)
    run = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    run = DistributedDataParallel(run)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for s in range(3):
        x, t = (part(v, rank, 0) for v in batch(s))
        torch.manual_seed(10 * s + rank)
        optimizer.zero_grad()
        with within(recipe, amax_reduction_group=dist.group.WORLD):
            losses(deep, run(x), t).backward()
        optimizer.step()
    return model.state_dict()


def single_process(recipe: Any, deep: bool, parts: int) -> dict[str, Tensor]:
    """The same by one process: each step the mean gradient of ``parts`` microbatches."""
    model = model_of(deep)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for s in range(3):
        optimizer.zero_grad()
        with within(recipe):
            for i, (x, t) in enumerate(zip(*(v.chunk(parts) for v in batch(s)), strict=True)):
                torch.manual_seed(10 * s + i)
                losses(deep, model(x), t).backward()
        for p in model.parameters():
            p.grad /= parts
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "") for name in RECIPES), ("current", "aot_eager"), ("delayed", "aot_eager")],
)
def test_data_parallel(ranks: Ranks, name: str, backend: str) -> None:
    """A rank is a microbatch: equal bytes after three steps, state of delayed scaling included."""
    want = single_process(RECIPES[name], True, 2)
    results = ranks.run(data_parallel, RECIPES[name], True, backend)
    histories = [key for key in want if key.endswith("amax_history")]
    assert len(histories) == (2 if name == "delayed" else 0)
    for key in histories:
        # Row 0, of the step that has not ended, is each rank's own until the next one begins.
        rows = [found[key][0] for found in results]
        assert not torch.equal(*rows)
        for found in results:
            found[key][0] = torch.maximum(*rows)
    for rank, found in enumerate(results):
        assert found.keys() == want.keys()
        for key, value in want.items():
            assert_same_bytes(found[key], value, f"rank {rank}: {key}")


@pytest.mark.parametrize("name", LOCAL)
def test_data_parallel_on_the_joined_batch(ranks: Ranks, name: str) -> None:
    """Gradients that do not depend on the weights: the bound holds over three steps, |error| <= 4 M
    eps |dy|^T |x| each.
    """
    want = single_process(RECIPES[name], False, 1)
    x, t = (torch.stack(v).abs() for v in zip(*(batch(s) for s in range(3)), strict=True))
    weight = (
        RATE * 4 * 256 * EPS * (t.mT @ x).sum(0) / t[0].numel() + 8 * EPS * want["weight"].abs()
    )
    bias = RATE * 4 * 256 * EPS * t.sum((0, 1)) / t[0].numel() + 8 * EPS * want["bias"].abs()
    for got in ranks.run(data_parallel, RECIPES[name], False):
        close(got["weight"], want["weight"], weight, "weight")
        close(got["bias"], want["bias"], bias, "bias")


def test_data_parallel_in_high_precision_on_the_joined_batch(ranks: Ranks) -> None:
    """Two layers: sums of at most 256 products over three steps, each error below 256 eps of the
    terms.
    """
    want = single_process(None, True, 1)
    for got in ranks.run(data_parallel, None, True):
        for key, value in want.items():
            bound = 3 * 256 * EPS * value.abs().max()
            close(got[key], value, bound.expand_as(value), key)
