"""Steps of modules on the meta device and below fake tensor modes.

Programs import this file, so it imports no test helpers, which take seconds to import.
"""

from __future__ import annotations

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import qtensor
from qtensor import ops, recipes

RECIPES = {
    "high_precision": None,
    "current": recipes.Float8CurrentScaling,
    "delayed": recipes.DelayedScaling,
    "blockwise": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}
MODULES = {
    "linear": lambda: qtensor.Linear(128, 128),
    "norm_linear": lambda: qtensor.LayerNormLinear(128, 128),
    "mlp": lambda: qtensor.LayerNormMLP(128, 128),
    "grouped": lambda: qtensor.GroupedLinear(2, 128, 128),
    "sequence": lambda: ops.Sequential(*(
        ops.RMSNorm(128),
        ops.Linear(128, 256),
        ops.SwiGLU(),
        ops.Linear(128, 128),
    )),
}
CONTEXTS = {"fake": FakeTensorMode, "meta": lambda: torch.device("meta")}


def step(module, recipe):
    """Return the output of a forward and a backward pass, both under ``recipe``."""
    x = torch.randn(256, 128, requires_grad=True)
    extra = ([128, 128],) if isinstance(module, qtensor.GroupedLinear) else ()
    region = qtensor.autocast(recipe=recipe()) if recipe else contextlib.nullcontext()
    with region:
        y = module(x, *extra)
    y.sum().backward()
    assert x.grad.shape == x.shape
    return y
