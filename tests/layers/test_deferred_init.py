"""Modules built without data (meta), and filled later: the idioms of torch, of FSDP and of
transformers.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch_process
from torch import nn
from training import assert_same

import qtensor
from qtensor import ops, recipes

WIDTH = 32
MAKE = {
    "Linear": lambda: qtensor.Linear(WIDTH, WIDTH),
    "LayerNormLinear": lambda: qtensor.LayerNormLinear(WIDTH, WIDTH),
    "LayerNormMLP": lambda: qtensor.LayerNormMLP(WIDTH, 64, activation="swiglu"),
    "GroupedLinear": lambda: qtensor.GroupedLinear(2, WIDTH, WIDTH),
    "Sequential": lambda: ops.Sequential(
        ops.RMSNorm(WIDTH),
        ops.Linear(WIDTH, WIDTH),
        ops.Dropout(0.5),
        ops.Quantize("fp8", forward=False, backward=True),
    ),
    "ops.GroupedLinear": lambda: ops.Sequential(ops.GroupedLinear(2, WIDTH, WIDTH)),
}
RECIPES = {
    "plain": None,
    "delayed": recipes.DelayedScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}
each_module = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def steps(module, recipe, count=2):
    """Outputs and gradients of steps under one seed."""
    torch.manual_seed(0)
    results = []
    for i in range(count):
        x = torch.randn(32, WIDTH).mul_(2.0**i).requires_grad_()
        more = (torch.tensor([8, 24]),) if "Grouped" in repr(module) else ()
        with qtensor.autocast(enabled=recipe is not None, recipe=recipe and recipe()):
            y = module(x, *more)
        (y * torch.arange(1, WIDTH + 1)).sum().backward()
        results += [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]
    return results


def build(make, idiom):
    if idiom == "default device":
        before = torch.get_default_device()
        torch.set_default_device("meta")
        try:
            return make()
        finally:
            torch.set_default_device(before if before.type != "cpu" else None)
    with torch.device("meta"):
        return make()


def fill(module, source, idiom):
    if idiom == "assign":
        state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
        module.load_state_dict(state, assign=True)
        for parameter in module.parameters():
            parameter.requires_grad_()
        return
    module.to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    module.load_state_dict(source.state_dict())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("idiom", ["to_empty", "assign", "default device"])
@each_module
def test_a_module_filled_later_computes_as_its_source(make, idiom, recipe):
    source, module = make(), build(make, idiom)
    assert all(parameter.is_meta for parameter in module.parameters())
    fill(module, source, idiom)
    # Memory that nobody wrote would differ from one step to the next.
    junk = [torch.randint(0, 2**31, (n,)) for n in (1, 2, 3) * 16]
    del junk
    assert_same(steps(module, recipe), steps(source, recipe))


@each_module
def test_counters_are_on_the_cpu_with_values(make):
    def counters(module):
        for part in module.modules():
            for state in getattr(part, "_states", {}).values():
                delayed = state.delayed
                own = (delayed.steps, delayed.cell_step, delayed.own_step)
                yield from (state.report, state.draws, delayed.scale, *own)
            if isinstance(getattr(part, "draws", None), torch.Tensor):
                yield part.draws

    found = list(counters(build(make, "assign")))
    assert found
    for tensor, same in zip(found, counters(make()), strict=True):
        assert tensor.device.type == "cpu"
        assert tensor.shape == same.shape


@each_module
def test_reset_parameters_initialises(make):
    module = build(make, "to_empty").to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    steps(module, recipes.DelayedScaling)


def test_a_parameter_replaced_in_place_of_the_module():
    """accelerate writes to ``_parameters`` itself."""
    source = qtensor.Linear(WIDTH, WIDTH)
    with torch.device("meta"):
        model = nn.Sequential(qtensor.Linear(WIDTH, WIDTH))
    for name, parameter in source.named_parameters():
        model[0]._parameters[name] = nn.Parameter(parameter.detach().clone())
    model.to("cpu")
    assert_same(steps(model, recipes.DelayedScaling), steps(source, recipes.DelayedScaling))


@pytest.mark.parametrize("converted", [False, True])
def test_a_converted_model_without_data(converted):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        if converted:
            qtensor.convert_(model, recipes.DelayedScaling())
    if not converted:
        qtensor.convert_(model, recipes.DelayedScaling())
    source = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    fill(model, source, "assign")
    twin = copy.deepcopy(source)
    qtensor.convert_(twin, recipes.DelayedScaling())
    x = torch.randn(32, WIDTH)
    assert torch.equal(model(x), twin(x))


def test_the_first_use_of_the_kernels_below_another_default_device():
    """Nothing that they keep from their first use is a meta tensor."""
    script = (
        "import warnings, torch, qtensor\n"
        "warnings.simplefilter('error')\n"
        "torch.set_default_device('meta')\n"
        "layer = qtensor.Linear(32, 32, device='cpu', recipe=qtensor.recipes.MXFP8BlockScaling())\n"
        "y = layer(torch.ones(8, 32, device='cpu'))\n"
        "assert y.device.type == 'cpu' and y.isfinite().all()\n"
    )
    torch_process.run(script)
