"""Helpers of the GroupedLinear tests: recipes, and separate layers that give the expected bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from formats import assert_same_bytes
from torch import Tensor

import qtensor
from qtensor import recipes

K, N = 64, 96


def _mixed(role: recipes.Role) -> Any:
    """Return stochastic inputs and weights with delayed gradients: every kind of live argument."""
    if role.tensor == "grad_output":
        return qtensor.Float8Quantizer(dtype="e5m2")
    return qtensor.NVFP4Quantizer(stochastic_rounding=True)


def _rows(role: recipes.Role) -> Any:
    """Return one factor for each row, so that its shape depends on the group."""
    return qtensor.Float8RowwiseQuantizer(axis=-1)


RECIPES: dict[str, Callable[[], Any]] = {
    "high_precision": lambda: None,
    "current": recipes.Float8CurrentScaling,
    "delayed": recipes.DelayedScaling,
    "delayed_recent": lambda: recipes.DelayedScaling(amax_compute_algo="most_recent", margin=1),
    "block": recipes.Float8BlockScaling,
    "block_2d": lambda: recipes.Float8BlockScaling(x_block_scaling_dim=2, grad_block_scaling_dim=2),
    "mxfp8": recipes.MXFP8BlockScaling,
    "mxfp8_2d": lambda: recipes.MXFP8BlockScaling(with_2d_quantization=True),
    "mxfp8_dequantized": lambda: recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "nvfp4": recipes.NVFP4BlockScaling,
    "nvfp4_rows": lambda: recipes.NVFP4BlockScaling(disable_rht=True, row_scaled=True),
    "nvfp4_4over6": lambda: recipes.NVFP4BlockScaling(use_4over6=True),
    "nvfp4_original": lambda: recipes.NVFP4BlockScaling(backward_override="high_precision"),
    "plain_weight": lambda: recipes.MXFP8BlockScaling(overrides={"weight": None}),
    "mxfp6": lambda: recipes.CustomRecipe(factory=_mxfp6),
    "rows": lambda: recipes.CustomRecipe(factory=_rows),
    "mixed": lambda: recipes.CustomRecipe(factory=_mixed, delayed_scaling=recipes.DelayedScaling()),
}
"""Name -> a new recipe."""


def _mxfp6(role: recipes.Role) -> Any:
    return qtensor.MXFP6Quantizer(packed=True)


MAIN = ("high_precision", "current", "delayed", "block", "mxfp8", "nvfp4")


def inputs(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return (x, dy); each row has another size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, K, generator=generator)
    x = x * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=generator).float())
    return x.to(dtype), torch.randn(rows, N, generator=generator).to(dtype)


def separate(grouped: Any, **options: Any) -> list[Any]:
    """Return one ``qtensor.Linear`` for each group, with the parameters of the group."""
    layers = []
    for i in range(grouped.num_gemms):
        bias = getattr(grouped, f"bias{i}")
        weight = getattr(grouped, f"weight{i}")
        layer = qtensor.Linear(
            K, N, bias is not None, params_dtype=weight.dtype, recipe=grouped.recipe, **options
        )
        if not isinstance(weight, qtensor.QuantizedTensor):
            with torch.no_grad():
                layer.weight.copy_(weight)
        else:
            layer.weight = torch.nn.Parameter(weight.detach().clone())
        if bias is not None:
            with torch.no_grad():
                layer.bias.copy_(bias)
        layer.weight.requires_grad_(weight.requires_grad)
        layers.append(layer)
    return layers


def run_grouped(
    module: Any, x: Tensor, dy: Tensor, m_splits: Any, seed: int = 0, **call: Any
) -> tuple[Tensor, Tensor]:
    """Return (y, gradient of x) of one forward and backward."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    y = module(x, m_splits, **call)
    y.backward(dy)
    return y.detach(), x.grad


def run_separate(
    layers: Sequence[Any], x: Tensor, dy: Tensor, sizes: Sequence[int], seed: int = 0, **call: Any
) -> tuple[Tensor, Tensor]:
    """Return (y, gradient of x) of separate layers on the parts of x."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    y = torch.cat([
        layer(part, **call) for layer, part in zip(layers, x.split(list(sizes)), strict=True)
    ])
    y.backward(dy)
    return y.detach(), x.grad


def assert_same_gradients(grouped: Any, layers: Sequence[Any]) -> None:
    """Assert that parameter gradients are equal byte for byte."""
    for i, layer in enumerate(layers):
        for name in ("weight", "bias"):
            own, other = getattr(grouped, f"{name}{i}"), getattr(layer, name)
            if other is None:
                assert own is None
            elif other.grad is None:
                assert own.grad is None
            else:
                assert_same_bytes(own.grad, other.grad, f"{name}{i}.grad")


def assert_same_pair(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Assert that two (y, dx) pairs are equal byte for byte."""
    for name, a, b in zip(("y", "dx"), got, want, strict=True):
        assert_same_bytes(a, b, name)
