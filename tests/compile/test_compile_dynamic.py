"""One graph for all batch sizes; equal fresh quantizers share it; nothing recompiles between
steps.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from compile_helpers import Compiled, assert_same, ordinary, seeded
from formats import BY_NAME, FormatCase, formats
from torch.nn import functional

import qtensor

BATCHES = (40, 100, 130, 300)
"""Below and above the tiles of 128 rows that scales are padded to; no multiples of 16."""
BLOCKWISE_BATCHES = (140, 300, 200, 900)
"""More than one block of 128: Dynamo specialises on sizes of 1, those of inner buffers too."""
WEIGHT = (200, 72)
"""Its padded sizes differ from those of every first batch: Dynamo takes equal sizes of a first call
for one symbol.
"""
SEED = torch.tensor([7])


def batches(*cases: FormatCase) -> tuple[int, ...]:
    """Four batch sizes whose inner buffers have no size of 1."""
    return BLOCKWISE_BATCHES if any(c.name == "fp8_blockwise" for c in cases) else BATCHES


def round_trip(q, x, state):
    t = q.quantize(x, **state)
    return t, t.dequantize() + 1


@formats
@pytest.mark.parametrize("how", ["dynamic", "mark_dynamic", "automatic"])
def test_one_graph_for_four_batch_sizes(case: FormatCase, how: str):
    q = case.quantizer(columnwise=True)
    options = {"dynamic": {"dynamic": True}}.get(how, {})
    compiled = Compiled(lambda x, state: round_trip(q, x, state), **options)
    for batch in batches(case):
        x = ordinary((batch, 72), torch.bfloat16, seed=batch)
        if how == "mark_dynamic":
            torch._dynamo.mark_dynamic(x, 0)
        assert_same(compiled(x, case.call()), round_trip(q, x, case.call()))
    compiled.check_graphs(2 if how == "automatic" else 1)


@formats
def test_each_option_with_a_dynamic_batch(case: FormatCase):
    """Every option's layout arithmetic holds for symbolic sizes; (B, S, H) with two of them
    symbolic.
    """
    chosen = [case.quantizer(columnwise=True, **options) for options in case.each_option()]

    def region(x, state, seed):
        return [round_trip(q, x, {**state, **seeded(q, seed)}) for q in chosen]

    compiled = Compiled(region)
    for shape in ((4, 40, 72), (5, 50, 72), (3, 64, 72), (7, 33, 72)):
        x = ordinary(shape, seed=shape[0])
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        assert_same(compiled(x, case.call(), SEED), region(x, case.call(), SEED))
    compiled.check_graphs(1)


@formats
def test_quantized_input_with_a_dynamic_batch(case: FormatCase):
    """Sizes are no part of the flatten context: the inner buffers bring them."""
    q = case.quantizer()
    weight = q.quantize(ordinary(WEIGHT, seed=1), **case.call())

    def region(t, weight):
        return t.dequantize() * 2, functional.linear(t, weight)

    compiled = Compiled(region, dynamic=True)
    for batch in batches(case):
        t = q.quantize(ordinary((batch, 72), seed=batch), **case.call())
        assert_same(compiled(t, weight), region(t, weight))
    compiled.check_graphs(1)


def test_a_batch_within_one_block_costs_one_more_graph():
    """The documented limit of the batches above: a factor's dim of 1 is a constant to Dynamo,
    once.
    """
    q = BY_NAME["fp8_blockwise"].quantizer(columnwise=True)
    compiled = Compiled(lambda x: round_trip(q, x, {}))
    for batch, graphs in ((40, 1), (100, 1), (300, 2), (700, 2), (70, 2)):
        x = ordinary((batch, 72), seed=batch)
        torch._dynamo.mark_dynamic(x, 0)
        assert_same(compiled(x), round_trip(q, x, {}))
        compiled.check_graphs(graphs)


def test_dynamic_batch_under_inductor():
    """Inductor's own wrapper computes the buffers' sizes; one region holds all formats."""
    cases = [BY_NAME[name] for name in qtensor.formats()]
    chosen = [case.quantizer(columnwise=True) for case in cases]

    def region(x, scale):
        return [round_trip(q, x, {"scale": scale} if q.needs_scale else {}) for q in chosen]

    compiled = Compiled(region, "inductor", dynamic=True)
    scale = torch.tensor([4.0])
    for batch in batches(*cases):
        x = ordinary((batch, 72), torch.bfloat16, seed=batch)
        assert_same(compiled(x, scale), region(x, scale))
    compiled.check_graphs(1)


def changed_once(q: qtensor.Quantizer, case: FormatCase) -> list[qtensor.Quantizer]:
    """Quantizers that differ from ``q`` in one field each."""
    return [
        dataclasses.replace(q, **{name: values[1]})
        for name, values in case.options.items()
        if values[1] != getattr(q, name)
    ] + [q.with_usage(columnwise=True)]


@formats
def test_equal_quantizers_share_a_graph(case: FormatCase):
    """As arguments: equal values, however made, take the same graph; each other value one more."""

    def region(x, q, state, seed):
        return round_trip(q, x, {**state, **seeded(q, seed)})

    x = ordinary((33, 72))
    compiled = Compiled(region)
    q = case.quantizer()
    equal = [q, type(q)(), type(q)(), dataclasses.replace(q)]
    assert len({id(e) for e in equal}) == len(equal)
    equal.append(qtensor.quantizer(q))
    for e in equal:
        assert_same(compiled(x, e, case.call(), SEED), region(x, q, case.call(), SEED))
    compiled.check_graphs(1)
    # ``e4m3_max`` and ``err_mode`` are read with 4over6 only, yet they are values: they too make
    # another graph.
    others = changed_once(q, case)[:6]
    for count, other in enumerate(others, start=2):
        for e in (other, dataclasses.replace(other)):
            assert_same(compiled(x, e, case.call(), SEED), region(x, e, case.call(), SEED))
            compiled.check_graphs(count)
    assert_same(compiled(x, case.quantizer(), case.call(), SEED), region(x, q, case.call(), SEED))
    compiled.check_graphs(1 + len(others))


@formats
def test_five_steps_without_a_recompile(case: FormatCase):
    """Each step makes its quantizers and tensors anew, in the region, outside, and as a closure's
    cell.
    """
    held = {"q": case.quantizer()}

    def step(x, q, t, state):
        inner = qtensor.quantizer(q.format, columnwise=True)
        return (
            round_trip(q, x, state),
            round_trip(inner, x, state),
            round_trip(held["q"], x, state),
            functional.linear(x, t),
        )

    compiled = Compiled(step)
    for i in range(5):
        held["q"] = case.quantizer()
        q = case.quantizer(columnwise=True)
        t = case.quantizer().quantize(ordinary((48, 72), seed=i), **case.call())
        args = (ordinary((33, 72), seed=10 + i), q, t, case.call())
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_same(compiled(*args), step(*args))
    compiled.check_graphs(1)


@formats
def test_another_tensor_recompiles_once(case: FormatCase):
    """What a graph depends on is guarded: nominal dtype, usages, quantizer; values and scales are
    not.
    """
    compiled = Compiled(lambda t: t.dequantize())
    x = ordinary((33, 72))
    kinds = [
        case.quantize(x),
        case.quantize(x.bfloat16()),
        case.quantize(x, columnwise=True),
        case.quantize(x, **{name: values[1] for name, values in list(case.options.items())[:1]}),
    ]
    for count, t in enumerate(kinds, start=1):
        for other in (t, t.clone(), t.detach()):
            assert_same(compiled(other), other.dequantize())
            compiled.check_graphs(count)
    for t in kinds:
        assert_same(compiled(t), t.dequantize())
    compiled.check_graphs(len(kinds))
