"""A transformer's MLP block as a sequence, beside the module."""

from __future__ import annotations

import pytest
import torch
from ops_cases import FUSED, WIDTH, data, handing_over, step  # noqa: F401 - a fixture
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import RECIPES, assert_same, every_recipe, region

import qtensor
from qtensor import ops

pytestmark = pytest.mark.usefixtures("handing_over")


class Residual(nn.Module):
    """``x + mlp(x)``."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(x)


def module_like(sequence: ops.Sequential) -> Residual:
    bias = sequence[2].bias is not None
    mlp = qtensor.LayerNormMLP(
        WIDTH, 96, normalization="RMSNorm", activation="swiglu", bias=bias
    ).to(sequence[1].weight.dtype)
    with torch.no_grad():
        mlp.layer_norm_weight.copy_(sequence[1].weight)
        for name, op in (("fc1", sequence[2]), ("fc2", sequence[4])):
            getattr(mlp, f"{name}_weight").copy_(op.weight)
            if bias:
                getattr(mlp, f"{name}_bias").copy_(op.bias)
    return Residual(mlp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mlp", "mlp_with_biases"])
@every_recipe
def test_the_results_of_the_module(name, recipe, dtype):
    sequence = FUSED[name].case.make().to(dtype)
    module = module_like(sequence)
    chosen = RECIPES[recipe]()
    for seed in range(3):
        x = data(seed=seed, dtype=dtype)
        ours = step(sequence, sequence, x, chosen, seed=seed)
        theirs = step(module, module, x, chosen, seed=seed)
        assert_same(ours, theirs)


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "qtensor":
            self.calls[func._opname] = self.calls.get(func._opname, 0) + 1
        return func(*args, **(kwargs or {}))


def counted(sequence, recipe):
    with Count() as count:
        x = data().requires_grad_()
        with region(recipe):
            y = sequence(x)
        y.sum().backward()
    calls = count.calls
    # One for each operand that is quantized by itself.
    alone = {"quantize": 1, "linear_forward": 2, "linear_backward": 1}
    calls["separate"] = sum(n * calls.get(name, 0) for name, n in alone.items())
    return calls


def test_small_sequences_do_not_hand_over(monkeypatch):
    monkeypatch.undo()
    recipe = RECIPES["mxfp8"]()
    small = counted(FUSED["mlp"].case.make(), recipe)
    assert "norm_quantize" not in small
    assert small["linear_forward"] == 2


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r not in ("high_precision", "custom")])
def test_fewer_quantize_calls_than_unfused(recipe):
    """Both inputs are quantized in the pass of the operation that makes them."""
    case, chosen = FUSED["mlp"].case, RECIPES[recipe]()
    fused, alone = counted(case.make(), chosen), counted(case.make(fuse=False), chosen)
    assert fused["norm_quantize"] == fused["activation_quantize"] == 1
    assert "norm_quantize" not in alone
    assert "activation_quantize" not in alone
    assert (fused["separate"], alone["separate"]) == (4, 6)
