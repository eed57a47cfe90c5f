"""A nested model for the tests of ``convert_``, and names for its layers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

import qtensor
from qtensor.recipes import MXFP8BlockScaling


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def model() -> nn.Module:
    blocks = OrderedDict(stack=nn.Sequential(Block(), Block()), head=nn.Linear(64, 24))
    return nn.Sequential(blocks)


def convert(root: nn.Module, recipe: Any = None, *args: Any, **options: Any) -> qtensor.Conversion:
    chosen = MXFP8BlockScaling() if recipe is None else recipe
    return qtensor.convert_(root, chosen, *args, **options)


def names(reports: Any) -> list[str]:
    return [r.name for r in reports]


def gradients(root: nn.Module, x: Tensor) -> list[Tensor]:
    root.zero_grad()
    y = root(x)
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in root.parameters())]


BLOCKS = ["stack.0.up", "stack.0.down", "stack.1.up", "stack.1.down"]
