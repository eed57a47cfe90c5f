"""A region of autocast belongs to its thread; a backward pass knows the region around it."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import qtensor
from qtensor import autocasting
from qtensor.recipes import DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling

FIRST, SECOND = MXFP8BlockScaling(), NVFP4BlockScaling(disable_stochastic_rounding=True)


def in_region(call, x, recipe):
    with qtensor.autocast(recipe=recipe):
        return call(x).detach()


def in_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def overlapping(call, x):
    """(output in the first region, in the second one, after both) of two threads that overlap.

    The first thread enters, the second one enters, the first one leaves, the second one leaves.
    """
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first():
        with qtensor.autocast(recipe=FIRST):
            first_in.set()
            assert second_in.wait(60)
            out = call(x).detach()
        first_out.set()
        return out, call(x).detach()

    def second():
        assert first_in.wait(60)
        with qtensor.autocast(recipe=SECOND):
            second_in.set()
            assert first_out.wait(60)
            return call(x).detach()

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(first), pool.submit(second)
        (in_first, behind), in_second = one.result(), two.result()
    assert torch.equal(behind, call(x))
    return in_first, in_second, call(x).detach()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_two_threads_do_not_see_each_other(backend):
    torch._dynamo.reset()
    layer, x = qtensor.Linear(64, 64), torch.randn(32, 64)
    plain, in_first, in_second = (
        layer(x).detach(),
        in_region(layer, x, FIRST),
        in_region(layer, x, SECOND),
    )
    call = layer
    if backend:
        call = torch.compile(layer, backend=backend, fullgraph=True)
        # Compiled beforehand: the guards have to tell the threads apart.
        for recipe in (FIRST, SECOND):
            in_region(call, x, recipe)
        call(x)
    for got, want in zip(overlapping(call, x), (in_first, in_second, plain), strict=True):
        assert torch.equal(got, want)


def test_a_region_inside_a_compiled_function_is_its_threads_own():
    torch._dynamo.reset()
    layer, x = qtensor.Linear(64, 64), torch.randn(32, 64)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x):
        with qtensor.autocast(recipe=FIRST):
            return layer(x)

    want, plain = in_region(layer, x, FIRST), layer(x)
    assert torch.equal(in_thread(step, x), want)
    assert torch.equal(layer(x), plain)
    with qtensor.autocast(recipe=SECOND):
        assert torch.equal(in_thread(step, x), want)
        assert torch.equal(in_thread(layer, x), plain)
        assert torch.equal(layer(x), in_region(layer, x, SECOND))


def test_a_new_thread_is_outside_of_the_regions_of_others():
    layer, x = qtensor.Linear(64, 64), torch.randn(32, 64)
    plain = layer(x)
    with qtensor.autocast(recipe=FIRST):
        assert torch.equal(in_thread(layer, x), plain)


def test_a_thread_that_begins_with_fake_tensors():
    layer, x = qtensor.Linear(64, 64), torch.randn(32, 64)

    def run():
        with FakeTensorMode():
            autocasting.active_recipe()
        return in_region(layer, x, DelayedScaling())

    want = in_region(fresh_twin(layer), x, DelayedScaling())
    assert torch.equal(in_thread(run), want)


def fresh_twin(layer):
    twin = qtensor.Linear(64, 64)
    twin.load_state_dict(layer.state_dict(), strict=False)
    return twin


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_steps_of_threads_are_different_steps(backend):
    """A layer of delayed scaling takes new factors at each region, whichever thread enters it."""
    torch._dynamo.reset()
    recipe, xs = DelayedScaling(), [torch.randn(32, 64) * 4**i for i in range(6)]
    twins = [qtensor.Linear(64, 64) for _ in range(2)]
    twins[1].load_state_dict(twins[0].state_dict())
    calls = [torch.compile(t, backend=backend, fullgraph=True) if backend else t for t in twins]

    def step(call, x):
        with qtensor.autocast(recipe=recipe):
            y = call(x)
        y.sum().backward()
        return y.detach()

    for i, x in enumerate(xs):
        got = in_thread(step, calls[1], x) if i % 2 else step(calls[1], x)
        assert torch.equal(got, step(calls[0], x))
    states = [t._states["weight"].delayed for t in twins]
    assert torch.equal(states[0].scale, states[1].scale)
    assert torch.equal(states[0].merged(), states[1].merged())


def test_two_regions_at_once_are_two_steps():
    """A region that another thread enters does not begin a step in this one."""
    layer = qtensor.Linear(64, 64)
    with qtensor.autocast(recipe=DelayedScaling()):
        layer(torch.randn(32, 64))
        before = layer._states["weight"].delayed.steps.clone()
        in_thread(in_region, qtensor.Linear(64, 64), torch.randn(32, 64), DelayedScaling())
        layer(torch.randn(32, 64))
        assert torch.equal(layer._states["weight"].delayed.steps, before)


def backward_in_a_thread(loss, monkeypatch):
    """Run backward as torch does on a GPU: in another thread, with the caller's context."""
    context = contextvars.copy_context()
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.graph.contextvars, "copy_context", lambda: context)
        in_thread(loss.backward)


@pytest.mark.parametrize("function", [qtensor.checkpoint, checkpoint])
@pytest.mark.parametrize("recipe", [FIRST, DelayedScaling()], ids=["mxfp8", "delayed"])
def test_a_backward_pass_in_another_thread_runs_the_recipe_again(function, recipe, monkeypatch):
    """On a GPU torch runs backward in a thread of its own and hands it the caller's context."""
    grads = []
    for threads in (False, True):
        torch.manual_seed(0)
        layer, x = qtensor.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
        for _ in range(2):
            with qtensor.autocast(recipe=recipe):
                seen = []

                def run(x, layer=layer, seen=seen):
                    seen.append((autocasting.active_recipe(), autocasting.is_outside()))
                    return layer(x)

                y = function(run, x, use_reentrant=False)
                loss = y.square().sum()
                if threads:
                    backward_in_a_thread(loss, monkeypatch)
                else:
                    loss.backward()
            assert seen == [(recipe.key, False)] * 2
        grads.append((layer.weight.grad, x.grad, layer._states["weight"].delayed.merged()))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
