"""Delayed scaling in modules: which factor a step uses, histories, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from training import WIDTH, assert_same, build, compiled, region, step, twins

import qtensor
from qtensor import recipes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LARGEST = torch.tensor([448.0, 448.0, 57344.0])


def simulate(maxima, length, algorithm, margin):
    """Factors that each step uses, from maxima (steps, 3): ten lines that share nothing with the
    library.
    """
    history, scale, used = torch.zeros(length, 3), torch.ones(3), []
    for amax in maxima:
        used.append(scale)
        history[0] = amax
        top = history.amax(0) if algorithm == "max" else history[0]
        new = ((1 / top) * LARGEST) / 2.0**margin
        scale = torch.where((top > 0) & top.isfinite(), new, scale)
        history = history.roll(-1, 0)
        history[0] = 0
    return torch.stack(used)


def run(module, call, recipe, steps=5, between=None):
    """Factors in use and maxima of steps whose inputs grow and shrink."""
    used, maxima = [], []
    state = module._states["weight"].delayed
    for number in range(steps):
        g = torch.Generator().manual_seed(number)
        x = torch.randn(16, WIDTH, generator=g) * (1.0, 8.0, 0.5, 3.0, 2.0)[number % 5]
        dy = torch.randn(16, 96, generator=g) * 0.01
        x.requires_grad_()
        with region(recipe):
            y = call(x)
        used.append(state.scale.clone())
        y.backward(dy)
        found = [t.detach().abs().max() for t in (x, module.weight, dy)]
        maxima.append(torch.stack(found))
        with torch.no_grad():
            module.weight.mul_(1.25)
        module.zero_grad()
    return torch.stack(used), torch.stack(maxima)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (3, 2), (1024, 0)])
def test_the_factor_of_a_step_comes_from_the_steps_before(algorithm, length, margin):
    recipe = recipes.DelayedScaling(
        amax_history_len=length, amax_compute_algo=algorithm, margin=margin
    )
    module = build("linear")
    used, maxima = run(module, module, recipe)
    assert torch.equal(used, simulate(maxima, length, algorithm, margin))
    traced = build("linear")
    call, counter = compiled(traced)
    again, _ = run(traced, call, recipe)
    assert torch.equal(again, used)
    assert counter.frame_count == 1


def test_algorithms_of_the_caller():
    def half(history):
        return history.amax(0) * 0.5

    def factor(amax, scale, largest, recipe):
        return torch.where(amax > 0, largest / amax / 4, scale)

    for backend in (None, "aot_eager"):
        module = build("linear")
        call = module if backend is None else compiled(module, backend)[0]
        recipe = recipes.DelayedScaling(amax_compute_algo=half)
        used, maxima = run(module, call, recipe)
        expected = simulate(maxima * 0.5, 1024, "max", 0)
        assert torch.equal(used, expected)
        module = build("linear")
        call = module if backend is None else compiled(module, backend)[0]
        recipe = recipes.DelayedScaling(scaling_factor_compute_algo=factor)
        used, maxima = run(module, call, recipe, steps=2)
        assert torch.equal(used[1], LARGEST / maxima[0] / 4)


def test_microbatches_and_pipelined_backwards_keep_the_largest_gradient():
    module, recipe = build("linear"), recipes.DelayedScaling(amax_compute_algo="most_recent")
    outs = []
    for _ in range(3):
        with region(recipe):
            outs.append(module(torch.randn(16, WIDTH)))
    sizes = (0.5, 4.0, 1.0)
    for y, size in zip(outs, sizes, strict=True):
        y.backward(torch.full_like(y, size))
    with region(recipe):
        module(torch.randn(16, WIDTH))
    assert module._states["weight"].delayed.scale[2] == (1 / torch.tensor(4.0)) * 57344.0


def test_evaluation_leaves_the_state_alone():
    module, recipe = build("linear"), recipes.DelayedScaling()
    run(module, module, recipe, steps=2)
    before = copy.deepcopy(module._states["weight"].delayed.__dict__)
    module.eval()
    with torch.no_grad(), region(recipe):
        a = module(torch.ones(4, WIDTH) * 100)
        assert torch.equal(module(torch.ones(4, WIDTH) * 100), a)
    after = module._states["weight"].delayed.__dict__
    assert all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("own", [False, True])
def test_a_checkpoint_goes_on_where_it_was(own):
    recipe = recipes.DelayedScaling(amax_history_len=4)
    options = {"recipe": recipe} if own else {}
    outside = None if own else recipe

    def train(module, numbers):
        out = []
        for number in numbers:
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number)) * (
                number + 1
            )
            out.append(step(module, module, x, outside, seed=number))
        return out

    module = build("layernorm_mlp", **options)
    train(module, range(3))
    saved = copy.deepcopy(module.state_dict())
    twin = build("layernorm_mlp", seed=9, **options)
    assert twin.load_state_dict(saved).missing_keys == []
    for ours, theirs in zip(train(twin, range(3, 6)), train(module, range(3, 6)), strict=True):
        assert_same(ours, theirs)
    fresh = build("layernorm_mlp", **options)
    assert not torch.equal(train(fresh, [3])[0][0], train(twin, [3])[0][0])


def test_a_state_dict_without_the_state_loads_and_one_that_was_never_used_has_none():
    module, recipe = build("linear"), recipes.DelayedScaling()
    plain = module.state_dict()
    assert set(plain) == {"weight", "bias"}
    run(module, module, recipe, steps=2)
    assert len(module.state_dict()) == 4
    module.load_state_dict(plain)


def test_deepcopy_and_pickle_keep_the_state_and_part_ways():
    import pickle  # noqa: PLC0415 - beside deepcopy

    module, recipe = build("linear"), recipes.DelayedScaling()
    run(module, module, recipe, steps=2)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        x = torch.randn(16, WIDTH)
        original = copy.deepcopy(module)
        assert_same(step(twin, twin, x, recipe), step(original, original, x, recipe))
        ours, theirs = (m._states["weight"].delayed for m in (module, twin))
        assert ours.scale.data_ptr() != theirs.scale.data_ptr()
        assert module._states["weight"].key != twin._states["weight"].key


def test_a_recipe_of_its_own_counts_the_calls_of_the_module():
    recipe = recipes.DelayedScaling()
    own = build("linear", recipe=recipe)
    plain = build("linear")
    for number in range(3):
        x = torch.randn(16, WIDTH) * (number + 1)
        assert_same(step(own, own, x, None), step(plain, plain, x, recipe))


def test_switching_recipes_between_steps():
    module, twin = twins("linear")
    call, _ = compiled(twin)
    names = [
        recipes.DelayedScaling(),
        recipes.MXFP8BlockScaling(),
        None,
        recipes.DelayedScaling(margin=1),
    ]
    for number in range(8):
        x = torch.randn(24, WIDTH)
        recipe = names[number % 4]
        expected = step(module, module, x, recipe, seed=number)
        assert_same(step(call, twin, x, recipe, seed=number), expected)


def test_nested_regions_are_one_step():
    recipe = recipes.DelayedScaling(amax_history_len=2)
    nested, flat = twins("linear")
    for number in range(3):
        x = torch.randn(16, WIDTH) * (number + 1)
        outs = []
        with qtensor.autocast(recipe=recipe), qtensor.autocast(recipe=recipe):
            outs.append(nested(x))
        with qtensor.autocast(recipe=recipe):
            outs.append(flat(x))
        assert torch.equal(*outs)
