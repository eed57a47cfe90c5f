"""Compiled autograd over eager and compiled forwards of modules."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from training import RECIPES, WIDTH, assert_same, build, compiled, every_recipe, region

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

MODULES = ("linear", "swiglu_mlp")
SIZES = (136, 264, 392, 136, 520)
"""Above a block of 128 rows: a dimension of one factor would be a constant of the graph."""


@pytest.fixture(autouse=True)
def fresh_compiled_autograd():
    compiled_autograd.reset()
    counters.clear()
    yield
    compiled_autograd.reset()


def grads(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    found = [x.grad, *[p.grad for p in module.parameters() if p.grad is not None]]
    found = [g.clone() for g in found]
    for p in module.parameters():
        p.grad = None
    return found


def backward(call, x, recipe, seed):
    torch.manual_seed(seed)
    with region(recipe):
        y = call(x)
    (y * torch.linspace(-1, 1, y.shape[-1])).sum().backward()


def check(recipe, module, forward, how, **options):
    chosen = RECIPES[recipe]()
    if options.get("quantized_params"):
        options["recipe"] = chosen
    plain, traced = build(module, **options), build(module, **options)
    counter = CompileCounterWithBackend("aot_eager")
    call = traced if forward == "eager" else compiled(traced, "aot_eager", dynamic=True)[0]
    frames = []

    def whole(x, seed):
        with region(chosen):
            y = call(x)
        (y * torch.linspace(-1, 1, y.shape[-1])).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=how == "config"):
        if how == "config":
            # Read when torch.compile is called.
            whole = torch.compile(whole, backend=counter, dynamic=True)
        for number, size in enumerate(SIZES):
            data = torch.randn(size, WIDTH)
            x = data.clone().requires_grad_()
            backward(plain, x, chosen, number)
            expected = grads(plain, x)
            x = data.clone().requires_grad_()
            torch.manual_seed(number)
            scope = contextlib.nullcontext()
            if how == "enable":
                compiler = torch.compile(backend=counter, fullgraph=True, dynamic=True)
                scope = compiled_autograd._enable(compiler)
            with scope:
                if how == "enable":
                    backward(call, x, chosen, number)
                else:
                    whole(x, 0)
            assert_same(grads(traced, x), expected)
            frames.append(counter.frame_count)
    assert counters["compiled_autograd"]["captures"] >= 1
    assert frames[2] == frames[-1], f"graphs after each step: {frames}"


@pytest.mark.parametrize("forward", ["eager", "compiled"])
@pytest.mark.parametrize("module", MODULES)
@every_recipe
def test_enabled(recipe, module, forward):
    check(recipe, module, forward, "enable")


def test_delayed_scaling_with_a_compiled_forward():
    """Both graphs write state; the sampled cells of ``test_enabled`` may not hold this pair."""
    check("delayed", "linear", "compiled", "enable")


@every_recipe
def test_by_config(recipe):
    check(recipe, "linear", "eager", "config")


@pytest.mark.parametrize("forward", ["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["current", "blockwise", "mxfp8", "nvfp4"])
def test_quantized_parameters(recipe, forward):
    check(recipe, "linear", forward, "enable", quantized_params=True)


@pytest.mark.parametrize("forward", ["eager", "compiled"])
def test_hooks(forward):
    chosen = RECIPES["mxfp8"]()
    plain, traced = build("linear"), build("linear")
    seen = {id(plain): [], id(traced): []}
    for m in (plain, traced):
        m.weight.register_hook(lambda g: g * 2.0)
        m.bias.register_post_accumulate_grad_hook(lambda p, m=m: seen[id(m)].append(1))
    call = traced if forward == "eager" else compiled(traced)[0]
    for number in range(3):
        data = torch.randn(40, WIDTH)
        x = data.clone().requires_grad_()
        backward(plain, x, chosen, number)
        expected = grads(plain, x)
        x = data.clone().requires_grad_()
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            backward(call, x, chosen, number)
        assert_same(grads(traced, x), expected)
    assert [len(s) for s in seen.values()] == [3, 3]
