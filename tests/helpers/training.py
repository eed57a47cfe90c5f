"""Helpers of the module tests: recipes, modules, and one step of training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import qtensor
from qtensor import recipes

RECIPES: dict[str, Callable[[], recipes.Recipe | None]] = {
    "high_precision": lambda: None,
    "current": recipes.Float8CurrentScaling,
    "delayed": recipes.DelayedScaling,
    "blockwise": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
    "custom": lambda: recipes.CustomRecipe(factory=mixed),
}

WIDTH = 64
REDRAWN = (
    "torch 2.13: a compiled checkpointed region draws its random numbers again, for another seed "
    "than in eager code"
)


def mixed(role: recipes.Role) -> str | None:
    """Return another format for each role."""
    return {"input": "mxfp6", "weight": "mxfp4"}.get(role.tensor)


MODULES: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **o: qtensor.Linear(WIDTH, 96, **o),
    "linear_no_bias": lambda **o: qtensor.Linear(WIDTH, 96, bias=False, **o),
    "layernorm_linear": lambda **o: qtensor.LayerNormLinear(WIDTH, 96, **o),
    "rmsnorm_linear": lambda **o: qtensor.LayerNormLinear(
        WIDTH, 96, normalization="RMSNorm", return_layernorm_output=True, **o
    ),
    "layernorm_mlp": lambda **o: qtensor.LayerNormMLP(WIDTH, 96, **o),
    "swiglu_mlp": lambda **o: qtensor.LayerNormMLP(
        WIDTH, 96, normalization="RMSNorm", activation="swiglu", bias=False, **o
    ),
    "recomputing_mlp": lambda **o: qtensor.LayerNormMLP(WIDTH, 96, recompute_activation=True, **o),
}

every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_module = pytest.mark.parametrize("module", MODULES)


def region(recipe: recipes.Recipe | None) -> Any:
    """Enter autocast with a recipe, or no region at all for None."""
    return contextlib.nullcontext() if recipe is None else qtensor.autocast(recipe=recipe)


def build(module: str, seed: int = 0, **options: Any) -> nn.Module:
    """Return a module with parameters from a seed."""
    torch.manual_seed(seed)
    return MODULES[module](**options)


def twins(module: str, count: int = 2, **options: Any) -> list[nn.Module]:
    """Return two modules with equal parameters."""
    return [build(module, **options) for _ in range(count)]


def flat_outputs(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def step(
    call: Callable[..., Any],
    module: nn.Module,
    x: Tensor,
    recipe: recipes.Recipe | None,
    seed: int = 0,
    **arguments: Any,
) -> list[Tensor]:
    """Return outputs and the gradients of the input and the parameters of one forward and
    backward."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    with region(recipe):
        outs = flat_outputs(call(x, **arguments))
    weights = torch.linspace(-1, 1, outs[0].shape[-1], dtype=outs[0].dtype)
    loss = (outs[0] * weights).sum() + sum((o * o).sum() for o in outs[1:])
    loss.backward()
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    for p in module.parameters():
        p.grad = None
    return [o.detach().clone() for o in outs] + [x.grad.clone(), *grads]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Assert that two lists of tensors are equal in every bit."""
    assert len(ours) == len(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        different = int(
            (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum()
        )
        assert not different, f"tensor {i}: {different} bytes of {a.nbytes} differ"


def compiled(module: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Any:
    """Return (the compiled callable, its counter of graphs)."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(module, backend=counter, fullgraph=True, **options), counter
