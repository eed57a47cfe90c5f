"""Names of arguments in public signatures: torch's own, so that ``layer(input=x)`` works."""

import inspect

import pytest
import torch

import qtensor
from qtensor import ops

SHORT = {"inp", "input_", "inputs_", "x_in"}


def _callables():
    """(name, function): every public function, and the public methods of every public class."""
    for package in (qtensor, ops):
        for name in package.__all__:
            member = getattr(package, name)
            if inspect.isclass(member):
                for method, function in inspect.getmembers(member, inspect.isfunction):
                    if not method.startswith("_") or method in ("__init__", "__call__"):
                        yield f"{name}.{method}", function
            elif inspect.isfunction(member):
                yield name, member


def test_the_input_is_called_input():
    functions = dict(_callables())
    assert {"Linear.forward", "GroupedLinear.forward", "ReLU.op_forward_compute"} <= set(functions)
    wrong = {
        name: sorted(SHORT & set(inspect.signature(function).parameters))
        for name, function in functions.items()
    }
    assert {name: short for name, short in wrong.items() if short} == {}


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_layers_take_input_by_keyword(backend):
    x = torch.randn(8, 32)
    layers = [
        qtensor.Linear(32, 32),
        qtensor.LayerNormLinear(32, 32),
        qtensor.LayerNormMLP(32, 32),
        ops.Sequential(ops.ReLU()),
    ]
    for layer in layers:
        call = torch.compile(layer, backend=backend, fullgraph=True) if backend else layer
        assert torch.equal(call(input=x), layer(x))
    grouped = qtensor.GroupedLinear(1, 32, 32)
    assert torch.equal(grouped(input=x, m_splits=[8]), grouped(x, [8]))
