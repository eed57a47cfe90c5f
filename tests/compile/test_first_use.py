"""The first use of a process may happen on the meta device, or below a fake tensor mode: shapes are
right, and real calls that follow have the bytes of a process that began with them.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
import torch_process
from first_use_cases import CONTEXTS, MODULES, RECIPES, step
from places import PYTHONPATH
from torch._subclasses.fake_tensor import FakeTensor

import qtensor


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_step_without_data(context, module, recipe):
    with CONTEXTS[context]():
        layer = MODULES[module]()
        for _ in range(2):
            y = step(layer, RECIPES[recipe])
    assert y.shape == (256, 128)
    gradients = [parameter.grad for parameter in layer.parameters()]
    for t in (y, *gradients):
        assert isinstance(t, FakeTensor) if context == "fake" else t.is_meta


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_step_on_meta_leaves_the_state_as_it_is(recipe):
    """A layer that is traced for shapes before it is filled begins as another one does."""
    torch.manual_seed(0)
    plain = qtensor.Linear(128, 128)
    with torch.device("meta"):
        layer = qtensor.Linear(128, 128)
        step(layer, RECIPES[recipe])
    assert int(layer._states["weight"].draws) == 0
    layer.load_state_dict(plain.state_dict(), assign=True)
    results = []
    for each in (plain, layer):
        torch.manual_seed(1)
        results.append([step(each, RECIPES[recipe]) for _ in range(3)])
    assert all(map(torch.equal, *results))


PROGRAM = """
import sys, torch, qtensor
from first_use_cases import CONTEXTS, MODULES, RECIPES, step
first, recipe = sys.argv[1:]
make = RECIPES[recipe]
if first == "explain":
    with qtensor.autocast(recipe=make()):
        assert "bytes saved" in repr(MODULES["sequence"]().explain())
elif first != "nothing":
    with CONTEXTS[first]():
        q = qtensor.quantize(torch.randn(128, 128), "nvfp4")
        torch.nn.functional.linear(torch.randn(4, 128), q)
        [step(module(), make) for module in MODULES.values()]
for module in MODULES.values():
    torch.manual_seed(0)
    layer = module()
    for _ in range(2):
        y = step(layer, make)
    print(float(y.double().sum()), *(float(p.grad.double().sum()) for p in layer.parameters()))
for name in ("fp8", "mxfp8", "nvfp4"):
    torch.manual_seed(0)
    print([int(b.view(torch.uint8).long().sum()) for b in qtensor.quantize(
        torch.randn(64, 64), name, columnwise=True).buffers()])
"""


WIDE = pytest.mark.nightly(reason="a process of its own; other cells begin without data too")


@functools.cache
def printed(first: str, recipe: str) -> str:
    """Return what the program prints in a process that has imported torch alone."""
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    return torch_process.run(PROGRAM, first, recipe, environment=environment).stdout


@pytest.mark.parametrize("recipe", [pytest.param("delayed", marks=WIDE), "mxfp8", "nvfp4"])
@pytest.mark.parametrize("first", [pytest.param("explain", marks=WIDE), "fake", "meta"])
def test_a_process_that_begins_without_data(first, recipe):
    assert printed(first, recipe) == printed("nothing", recipe)
