"""Compiled modules: one graph, no breaks, and the bytes of eager code."""

from __future__ import annotations

import pytest
import torch
from training import (
    RECIPES,
    WIDTH,
    assert_same,
    build,
    compiled,
    every_module,
    every_recipe,
    flat_outputs,
    region,
    step,
    twins,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SIZES = (40, 72, 104)
"""None is the size of a weight, which would give the batch that size's symbol."""


@every_module
@every_recipe
def test_training_one_graph_for_all_batch_sizes(module, recipe):
    eager, traced = twins(module)
    call, counter = compiled(traced, dynamic=True)
    chosen = RECIPES[recipe]()
    for number, size in enumerate((*SIZES, *SIZES[:2])):
        x = torch.randn(size, WIDTH)
        expected = step(eager, eager, x, chosen, seed=number)
        assert_same(step(call, traced, x, chosen, seed=number), expected)
    assert counter.frame_count == 1


@every_module
@every_recipe
def test_inference_one_graph_for_all_batch_sizes(module, recipe):
    eager, traced = (m.eval() for m in twins(module))
    call, counter = compiled(traced, dynamic=True)
    chosen = RECIPES[recipe]()
    for size in SIZES:
        x = torch.randn(2, size, WIDTH)
        with torch.no_grad(), region(chosen):
            torch.manual_seed(1)
            expected = flat_outputs(eager(x))
            torch.manual_seed(1)
            assert_same(flat_outputs(call(x)), expected)
    assert counter.frame_count == 1


ANOTHER = pytest.mark.nightly(reason="three seconds a cell; another one is by day")


@pytest.mark.parametrize(
    "module",
    [
        pytest.param("linear", marks=ANOTHER),
        "swiglu_mlp",
        pytest.param("recomputing_mlp", marks=ANOTHER),
    ],
)
@pytest.mark.parametrize(
    "recipe", [pytest.param(r, marks=() if r == "delayed" else ANOTHER) for r in RECIPES]
)
def test_inductor_gives_the_bytes_of_eager_code(module, recipe):
    eager, traced = twins(module)
    call, counter = compiled(traced, "inductor")
    chosen = RECIPES[recipe]()
    for number in range(3):
        x = torch.randn(3, 24, WIDTH)
        expected = step(eager, eager, x, chosen, seed=number)
        assert_same(step(call, traced, x, chosen, seed=number), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_recipe
def test_narrow_parameters(dtype, recipe):
    eager, traced = twins("layernorm_mlp", params_dtype=dtype)
    call, _ = compiled(traced)
    chosen = RECIPES[recipe]()
    x = torch.randn(40, WIDTH, dtype=dtype)
    assert_same(step(call, traced, x, chosen), step(eager, eager, x, chosen))


@every_recipe
def test_train_eval_train(recipe):
    eager, traced = twins("layernorm_linear")
    call, _ = compiled(traced)
    chosen = RECIPES[recipe]()
    x = torch.randn(40, WIDTH)
    for training in (True, False, True, False):
        eager.train(training), traced.train(training)
        if training:
            assert_same(step(call, traced, x, chosen), step(eager, eager, x, chosen))
            continue
        with torch.no_grad(), region(chosen):
            assert_same(flat_outputs(call(x)), flat_outputs(eager(x)))


@every_recipe
def test_the_region_inside_of_the_compiled_function(recipe):
    eager, traced = twins("layernorm_mlp")
    chosen = RECIPES[recipe]()

    def inside(x):
        with region(chosen):
            return traced(x)

    call, counter = compiled(inside)
    for number in range(3):
        x = torch.randn(40, WIDTH)
        expected = step(eager, eager, x, chosen, seed=number)
        assert_same(step(call, traced, x, None, seed=number), expected)
    assert counter.frame_count == 1


def test_equal_recipes_made_anew_share_a_graph_and_other_options_do_not():
    module = build("linear")
    call, counter = compiled(module)
    x = torch.randn(40, WIDTH)
    for _ in range(5):
        step(call, module, x, RECIPES["mxfp8"]())
    assert counter.frame_count == 1
    recipe = RECIPES["mxfp8"]()
    recipe.scale_mode = "floor"
    step(call, module, x, recipe)
    assert counter.frame_count == 2


def test_a_frozen_weight_or_input():
    for weight, inp in ((False, True), (True, False)):
        eager, traced = twins("linear")
        for m in (eager, traced):
            m.weight.requires_grad_(weight)
        call, counter = compiled(traced)
        results = []
        for m, f in ((eager, eager), (traced, call)):
            x = torch.linspace(-3, 3, 40 * WIDTH).reshape(40, WIDTH).requires_grad_(inp)
            with region(RECIPES["current"]()):
                f(x).sum().backward()
            assert (m.weight.grad is None) != weight
            assert (x.grad is None) != inp
            results.append([t for t in (x.grad, m.weight.grad, m.bias.grad) if t is not None])
        assert_same(*results)
        assert counter.frame_count == 1
