"""``qtensor.debug.record`` sees weight gradients that do not pass through autograd."""

from __future__ import annotations

import pytest
import torch
from training import RECIPES, WIDTH, build, compiled, region

import qtensor
from qtensor import recipes

_WIDE = pytest.mark.nightly(reason="the eager cells and the graph of the other option")
WEIGHTS = {"linear": ("weight",), "layernorm_mlp": ("fc1_weight", "fc2_weight")}


def step(call, seed):
    """One forward and backward pass."""
    torch.manual_seed(seed)
    with region(RECIPES["mxfp8"]()):
        call(torch.randn(40, WIDTH)).square().sum().backward()


def amaxes(log, step=0):
    """Layer -> maximum and calls of the records of weight gradients."""
    rows = [r for r in log.records if r.role == "grad_weight" and r.step == step]
    assert len({r.layer for r in rows}) == len(rows)
    return {r.layer: (r.amax, r.calls) for r in rows}


def with_main_grads(module, names):
    """The module, with a ``main_grad`` of each weight."""
    for name in names:
        getattr(module, name).main_grad = torch.full(getattr(module, name).shape, 3.0)
    return module


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("option", "backend"),
    [
        ("fuse", None),
        ("delay", None),
        ("both", None),
        pytest.param("fuse", "inductor", marks=_WIDE),
        ("fuse", "aot_eager"),
        pytest.param("delay", "aot_eager", marks=_WIDE),
        pytest.param("both", "aot_eager", marks=_WIDE),
        pytest.param("both", "inductor", marks=_WIDE),
    ],
)
@pytest.mark.parametrize("module", WEIGHTS)
def test_gradients_beside_autograd(module, option, backend):
    """The records are those of the same layer whose gradients pass through autograd.

    A twin that is not recorded has the same gradients, and adds no record.
    """
    names = WEIGHTS[module]
    plain = build(module)
    with qtensor.debug.record(plain) as expected:
        for seed in range(3):
            step(plain, seed)
    options = {
        "fuse_wgrad_accumulation": option != "delay",
        "delay_wgrad_compute": option != "fuse",
    }
    layer, twin = (with_main_grads(build(module, **options), names) for _ in range(2))
    call = layer if backend is None else compiled(layer, backend)[0]
    other = twin if backend is None else compiled(twin, backend)[0]
    with qtensor.debug.record(layer) as log:
        for seed in range(3):
            for model, run in ((layer, call), (twin, other)):
                step(run, seed)
                if option != "fuse":
                    model.backward_dw()
    for i in range(3):
        want, got = amaxes(expected, i), amaxes(log, i)
        assert len(got) == len(names)
        assert got == {name: (pytest.approx(a, rel=1e-5), c) for name, (a, c) in want.items()}
    for name in names:
        ours, theirs = getattr(layer, name), getattr(twin, name)
        kind = "grad" if option == "delay" else "main_grad"
        assert torch.equal(getattr(ours, kind), getattr(theirs, kind))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("option", "backend"),
    [
        ("fuse_wgrad_accumulation", None),
        ("delay_wgrad_compute", None),
        ("fuse_wgrad_accumulation", "aot_eager"),
        pytest.param("delay_wgrad_compute", "aot_eager", marks=_WIDE),
    ],
)
def test_gradients_of_groups(option, backend):
    """Each expert's gradient has a record; a frozen expert has none."""
    torch.manual_seed(0)
    recipe = recipes.MXFP8BlockScaling()
    layer = qtensor.GroupedLinear(3, WIDTH, 32, recipe=recipe, **{option: True})
    weights = [f"weight{i}" for i in range(3)]
    with_main_grads(layer, weights)
    layer.weight1.requires_grad_(False)
    x = torch.randn(48, WIDTH)
    call = layer if backend is None else compiled(layer, backend)[0]
    with qtensor.debug.record(layer) as log:
        call(x, [16, 8, 24]).square().sum().backward()
        if option == "delay_wgrad_compute":
            layer.backward_dw()
    assert set(amaxes(log)) == {"weight0", "weight2"}
    for i in (0, 2):
        weight = getattr(layer, f"weight{i}")
        grad = weight.main_grad - 3 if option == "fuse_wgrad_accumulation" else weight.grad
        assert amaxes(log)[f"weight{i}"] == (pytest.approx(grad.abs().max().item(), rel=1e-5), 1)


def test_a_new_main_grad_is_found():
    layer = with_main_grads(build("linear", fuse_wgrad_accumulation=True), ["weight"])
    with qtensor.debug.record(layer) as log:
        for seed in range(3):
            with_main_grads(layer, ["weight"])
            step(layer, seed)
    assert [r.step for r in log.records if r.role == "grad_weight"] == [0, 1, 2]
