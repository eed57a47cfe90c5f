"""Calls that client libraries make on parameters and modules, without these libraries."""

from __future__ import annotations

import pytest
import torch
from formats import FormatCase, assert_same_bytes, formats
from torch import nn

import qtensor


def quantized_linear(case: FormatCase) -> nn.Linear:
    layer = nn.Linear(256, 128)
    weight = case.quantize(layer.weight.detach())
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


@formats
def test_offload_a_parameter_and_bring_it_back(case: FormatCase):
    """Accelerate rebuilds parameters with ``type(old)(new, requires_grad=...)``, also on meta."""
    layer, x = quantized_linear(case), torch.randn(8, 256)
    expected, old = layer(x), layer.weight
    saved = layer.state_dict()["weight"]
    on_meta = type(old)(old.to("meta"), requires_grad=old.requires_grad).to("meta")
    layer._parameters["weight"] = on_meta
    assert on_meta.is_meta
    assert isinstance(on_meta, nn.Parameter)
    back = type(on_meta)(saved.to(on_meta.dtype), requires_grad=False).to("cpu")
    layer._parameters["weight"] = back
    assert isinstance(back, nn.Parameter)
    assert not back.requires_grad
    assert_same_bytes(layer(x), expected)


def test_a_plain_tensor_is_not_taken_for_a_quantized_one():
    """Weights that were offloaded as plain values cannot stand in for codes."""
    q = qtensor.quantize(torch.randn(32, 64), "mxfp8")
    with pytest.raises(qtensor.QTensorError, match=r"MXFP8Tensor: .*got Tensor\. Quantize it"):
        type(q)(q.dequantize(), requires_grad=False)


def test_adapters_find_converted_layers():
    """PEFT finds instances of torch.nn.Linear by class and name, and reads their attributes."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    qtensor.convert_(model, qtensor.recipes.MXFP8BlockScaling())
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert [type(module) for module in found] == [qtensor.Linear] * 2
    assert [(m.in_features, m.out_features) for m in found] == [(64, 128), (128, 64)]
