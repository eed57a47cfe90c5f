"""A layer of torch that is compiled by itself, with a quantized weight.

Dynamo skips the code of such a layer, and would compile the frames below it: ours.
"""

from __future__ import annotations

import torch
from torch import nn

import qtensor


def test_a_layer_of_torch_compiled_by_itself() -> None:
    torch.manual_seed(4)
    layer = nn.Linear(64, 32)
    weight = qtensor.quantize(torch.randn(32, 64), "mxfp8", columnwise=True)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(8, 64, requires_grad=True)
    y = layer(x)
    (wanted,) = torch.autograd.grad(y.square().sum(), x)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer.compile(backend="aot_eager")
    compiled = layer(x)
    assert torch.equal(compiled, y)
    assert torch.equal(torch.autograd.grad(compiled.square().sum(), x)[0], wanted)
    assert not torch._dynamo.utils.counters["graph_break"]
