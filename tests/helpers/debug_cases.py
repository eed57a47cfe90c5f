"""Models that the tests of ``qtensor.debug`` record, and a step of training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import qtensor
from qtensor import recipes

WIDTH = 64


class Block(nn.Module):
    """Layers of several kinds: qtensor's, a plain one, and an activation in place."""

    def __init__(self, recipe: recipes.Recipe | None = None) -> None:
        super().__init__()
        self.first = qtensor.Linear(WIDTH, WIDTH, recipe=recipe)
        self.activation = nn.ReLU(inplace=True)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.mlp = qtensor.LayerNormMLP(WIDTH, 96, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.plain(self.activation(self.first(x))))


def block(recipe: recipes.Recipe | None = None) -> Block:
    """Return a block with parameters from a seed."""
    torch.manual_seed(1)
    return Block(recipe)


def plain_model(layers: int = 3) -> nn.Sequential:
    """Return linear layers named 0, 1, ... with parameters from a seed."""
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def inputs(rows: int = 32, seed: int = 2) -> Tensor:
    """Return an input (rows, WIDTH)."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(call: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and all gradients of one step."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    out = call(x)
    out.square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [out.detach().clone(), x.grad, *grads]


def traces(model: nn.Module) -> list[object]:
    """Return what a recording could leave behind: own attributes and hooks of all modules."""
    found: list[object] = []
    for name, module in model.named_modules():
        found.append((name, sorted(module.__dict__), module.__dict__.get("forward")))
        found.append([len(module._forward_hooks), len(module._forward_pre_hooks)])
    found += [len(p._backward_hooks or ()) for p in model.parameters()]
    return found
