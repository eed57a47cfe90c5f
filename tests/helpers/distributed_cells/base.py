"""Helpers of the cells: formats, recipes, values, comparison by bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import qtensor
import qtensor.distributed  # noqa: F401 - torch broadcasts quantized tensors with it
from qtensor import QuantizedTensor, recipes

SIZE = 2
ROWS = K = 256
"""Half of each is whole blocks of every format."""

FORMATS = qtensor.formats()
RECIPES: dict[str, Callable[[], Any]] = {
    "Float8CurrentScaling": recipes.Float8CurrentScaling,
    "DelayedScaling": lambda: recipes.DelayedScaling(amax_history_len=4),
    "Float8BlockScaling": recipes.Float8BlockScaling,
    "MXFP8BlockScaling": recipes.MXFP8BlockScaling,
    "NVFP4BlockScaling": recipes.NVFP4BlockScaling,
    "CustomRecipe (MXFP6, MXFP4)": lambda: recipes.CustomRecipe(factory=_mixed),
}
MODES = ("eager", "aot_eager")
WITH_SQUARE_BLOCKS = {
    "fp8_blockwise": {"block_scaling_dim": 2},
    "mxfp8": {"with_2d_quantization": True},
    "mxfp6": {"with_2d_quantization": True, "packed": True},
    "mxfp4": {"with_2d_quantization": True},
    "nvfp4": {"with_2d_quantization": True},
}


def _mixed(role: recipes.Role) -> str:
    return {"weight": "mxfp4"}.get(role.tensor, "mxfp6")


@dataclass(frozen=True)
class Cell:
    """The format or recipe of a cell, and its mode."""

    column: str
    mode: str

    def quantize(self, x: Tensor) -> Any:
        """Quantize in both directions."""
        call = {"scale": torch.tensor([32.0])} if self.column == "fp8_delayed" else {}
        return qtensor.quantize(x, self.column, columnwise=True, **call)

    def tensor(self, seed: int) -> Any:
        """Return a quantized (256, 256) tensor whose tensor-wide factor is that of all seeds."""
        x = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(seed))
        x[0] = x[:, 0] = 8.0
        return self.quantize(x)

    def weight(self) -> Any:
        """Return a quantized (256, 256) tensor whose halves have maxima of different size."""
        return self.quantize(values())

    def recipe(self, *, random: bool = True) -> Any:
        if self.column.startswith("NVFP4") and not random:
            return recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
        return RECIPES[self.column]()

    def run(self, function: Callable[..., Any], whole: bool = True) -> Callable[..., Any]:
        """Return the function, compiled in one piece (or in several) if the mode asks for it."""
        if self.mode == "eager":
            return function
        torch._dynamo.reset()
        return torch.compile(function, backend=self.mode, fullgraph=whole)

    def compile_(self, module: nn.Module) -> nn.Module:
        if self.mode != "eager":
            module.compile(backend=self.mode, fullgraph=True)
        return module


def values(*shape: int) -> Tensor:
    """Return values whose halves have maxima of different size along each dim."""
    x = torch.randn(*(shape or (ROWS, K)), generator=torch.Generator().manual_seed(3)) / 16
    x[: x.shape[0] // 2] *= 3
    x[..., : x.shape[-1] // 2] *= 7
    return x


def mesh() -> Any:
    return init_device_mesh("cpu", (SIZE,))


def same(got: Any, want: Any, what: str = "values") -> None:
    """Assert equal classes, dtypes, shapes and bytes.

    Raises:
        AssertionError: they differ; a quantized tensor that became a plain one is named so.
    """
    if isinstance(got, functional.AsyncCollectiveTensor):
        got = got.wait()
    if type(got) is not type(want):
        raise AssertionError(f"{what}: {type(got).__name__} instead of {type(want).__name__}")
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        raise AssertionError(f"{what}: {tuple(got.shape)} {got.dtype}, wanted {tuple(want.shape)}")
    if not isinstance(want, QuantizedTensor):
        if not torch.equal(got.detach().nan_to_num(), want.detach().nan_to_num()):
            raise AssertionError(f"{what}: {int((got != want).sum())} of {got.numel()} differ")
        return
    if got.quantizer != want.quantizer:
        raise AssertionError(f"{what}: {got.quantizer} instead of {want.quantizer}")
    for number, (a, b) in enumerate(zip(got.buffers(), want.buffers(), strict=True)):
        same(a.view(torch.uint8), b.view(torch.uint8), f"{what}: buffer {number}")


def spread(t: Any, placement: Any) -> Any:
    return distribute_tensor(t, mesh(), [placement])


def part(t: Any, placement: Any) -> Any:
    if placement.is_replicate():
        return t
    return t.chunk(SIZE, placement.dim)[dist.get_rank()].clone()


def whole(t: Any) -> Any:
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).clone()
