"""``qtensor.Linear`` is a ``torch.nn.Linear`` for other libraries; other layers are not."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import qtensor
from qtensor import QTensorError, ops
from qtensor.recipes import MXFP8BlockScaling

OTHERS = [
    lambda: qtensor.LayerNormLinear(32, 64),
    lambda: qtensor.LayerNormMLP(32, 64),
    lambda: qtensor.GroupedLinear(2, 32, 64),
    lambda: ops.BasicLinear(32, 64),
    lambda: ops.Linear(32, 64),
]


def test_attributes_are_those_of_torch():
    for bias in (True, False):
        ours, theirs = qtensor.Linear(32, 64, bias), nn.Linear(32, 64, bias)
        assert isinstance(ours, nn.Linear)
        assert (ours.in_features, ours.out_features) == (32, 64)
        assert ours.weight.shape == theirs.weight.shape
        assert (ours.bias is None) == (theirs.bias is None)
        assert set(vars(theirs)) <= set(vars(ours))
        assert list(ours.state_dict()) == list(theirs.state_dict())


def test_arguments_come_in_the_order_of_torch():
    theirs = list(inspect.signature(nn.Linear).parameters)
    ours = list(inspect.signature(qtensor.Linear).parameters)
    assert ours[:4] == theirs[:4]
    layer = qtensor.Linear(32, 64, False, "cpu", torch.bfloat16)
    assert layer.weight.dtype is nn.Linear(32, 64, False, "cpu", torch.bfloat16).weight.dtype


@pytest.mark.parametrize("seed", [0, 1])
def test_initial_values_are_those_of_torch(seed):
    torch.manual_seed(seed)
    theirs = nn.Linear(32, 64)
    torch.manual_seed(seed)
    ours = qtensor.Linear(32, 64)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


@pytest.mark.parametrize("make", OTHERS)
def test_layers_that_are_more_than_a_product_are_none(make):
    layer = make()
    assert not any(isinstance(module, nn.Linear) for module in layer.modules())


def test_a_quantized_layer_is_not_converted_again():
    model = nn.Sequential(nn.Linear(32, 32), qtensor.Linear(32, 32))
    qtensor.convert_(model, MXFP8BlockScaling())
    layers = list(model)
    qtensor.convert_(model, None)
    assert list(model) == layers
    assert all(layer.recipe is None for layer in model)
    qtensor.revert_(model)
    assert [type(layer) for layer in model] == [nn.Linear] * 2
    # A bare qtensor.Linear gets the recipe; a bare nn.Linear cannot be swapped.
    qtensor.convert_(layers[0], MXFP8BlockScaling())
    assert layers[0].recipe == MXFP8BlockScaling()
    with pytest.raises(QTensorError, match="the root has none"):
        qtensor.convert_(nn.Linear(32, 32), MXFP8BlockScaling())
    with pytest.raises(QTensorError, match="the root has none"):
        qtensor.revert_(layers[0])


def test_an_adapter_around_a_converted_layer_trains():
    """As PEFT wraps what is an ``nn.Linear``."""

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base.requires_grad_(False)
            self.a = nn.Linear(base.in_features, 4, bias=False)
            self.b = nn.Linear(4, base.out_features, bias=False)

        def forward(self, x):
            return self.base_layer(x) + self.b(self.a(x))

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    qtensor.convert_(model, MXFP8BlockScaling())
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            setattr(model, name, Adapter(module))
    model(torch.randn(32, 32)).square().sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_torch_initialises_and_copies_it():
    model = nn.Sequential(qtensor.Linear(32, 32))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
    twin = copy.deepcopy(model)
    assert (twin[0].weight == 1).all()
    assert type(twin[0]) is qtensor.Linear


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: qtensor.Linear(32, 32, **options),
        lambda **options: qtensor.LayerNormLinear(32, 32, **options),
        lambda **options: qtensor.LayerNormMLP(32, 32, **options),
        lambda **options: qtensor.GroupedLinear(2, 32, 32, **options),
    ],
)
def test_two_names_of_the_dtype(make):
    for name in ("dtype", "params_dtype"):
        module = make(**{name: torch.bfloat16})
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    with pytest.raises(QTensorError, match="two names of one option"):
        make(dtype=torch.bfloat16, params_dtype=torch.bfloat16)
