"""Layers that read one tensor draw seeds of their own in compiled code, as they do in eager
mode.
"""

from __future__ import annotations

import pytest
import torch
from compile_helpers import Compiled, assert_same, backends
from torch import nn

import qtensor
from qtensor.recipes import CustomRecipe, NVFP4BlockScaling, Role

# Dynamo makes an object of torch.autograd.Function, which torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Siblings(nn.Module):
    """Several layers on one input, such as the projections of attention."""

    def __init__(self, recipe: qtensor.recipes.Recipe):
        super().__init__()
        self.layers = nn.ModuleList(qtensor.Linear(32, 32, recipe=recipe) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x) for layer in self.layers)


def stochastic_everywhere(role: Role) -> qtensor.Quantizer:
    return qtensor.NVFP4Quantizer(stochastic_rounding=True)


RECIPES = [NVFP4BlockScaling(), CustomRecipe(factory=stochastic_everywhere)]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("recipe", RECIPES, ids=["gradients", "all_roles"])
@backends
def test_siblings_draw_their_own_seeds(recipe: qtensor.recipes.Recipe, backend: str):
    """Equal calls would be merged into one: AOTAutograd's list of random operators cannot name
    ours.
    """
    model = Siblings(recipe)
    x = torch.randn(32, 32)

    def step(forward):
        torch.manual_seed(1)
        model.zero_grad()
        y = forward(x)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters()), torch.rand(1)]

    want = step(model)
    compiled = Compiled(model, backend)
    for _ in range(2):
        assert_same(step(compiled), want)
    compiled.check_graphs(1)
