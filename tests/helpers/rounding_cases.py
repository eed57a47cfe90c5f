"""A model and inputs for the roundings of weights, and the codes that stored factors give."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

import qtensor
from qtensor.reference.blocks import read_scales
from qtensor.weights.rounding import ROUNDINGS

FORMATS = ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8", "fp8_rowwise", "fp8_blockwise")
OPTIONS = (
    "fp8(dtype=e5m2,columnwise=True)",
    "fp8(force_pow_2_scales=True)",
    "fp8_rowwise(axis=0)",
    "fp8_blockwise(block_scaling_dim=2,columnwise=True)",
    "fp8_blockwise(force_pow_2_scales=False)",
    "mxfp4(scale_mode=ceil,swizzled=True)",
    "mxfp4(with_2d_quantization=True,columnwise=True)",
    "mxfp6(packed=True,dtype=e3m2)",
    "mxfp8(dtype=e5m2,scale_mode=even)",
    "nvfp4(row_scaled=True)",
    "nvfp4(swizzled=True,with_global_scale_inv=True)",
    "nvfp4(use_4over6=True)",
    "nvfp4(with_2d_quantization=True,columnwise=True)",
)


class Block(nn.Module):
    """Two layers that share an input and one that follows; 72 columns are no whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(72, 48), nn.Linear(72, 48, bias=False)
        self.out = nn.Linear(48, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.q(x)) * self.k(x))


def make_inputs(seed: int = 1, count: int = 2) -> list[Tensor]:
    """Correlated inputs; channel 5 is always zero."""
    mix = torch.randn(9, 72, generator=torch.Generator().manual_seed(7))
    draw = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        x = torch.randn(4, 64, 9, generator=draw) @ mix
        x += 0.3 * torch.randn(4, 64, 72, generator=draw)
        x[..., 5] = 0
        batches.append(x)
    return batches


def rounded(model: nn.Module, fmt: Any, rounding: Any, **options: Any) -> Any:
    """A quantized copy; calibration inputs are passed where they are needed."""
    model = copy.deepcopy(model)
    if ROUNDINGS.get(rounding, rounding).needs_inputs:
        options.setdefault("calibration", make_inputs())
    qtensor.quantize_(model, fmt, rounding=rounding, **options)
    return model


def named_buffers(weight: Any) -> dict[str, Tensor]:
    """The buffers by their names."""
    slots = weight._quantizer.slots
    return {slot.name: b for slot, b in zip(slots, weight.buffers(), strict=True)}


def assert_same_bytes(a: Any, b: Any) -> None:
    """Both tensors have the same quantizer and bytes."""
    assert a._quantizer == b._quantizer
    others = named_buffers(b)
    for name, buffer in named_buffers(a).items():
        assert torch.equal(buffer, others[name]), name


def stored_factors(weight: Any) -> Tensor:
    """The factors of the rowwise blocks as a grid (m, k): codes, or float32 that decode."""
    quantizer, named = weight._quantizer, named_buffers(weight)
    (rows, cols), (height, width) = weight.shape, block_of(weight)
    stored = named["_scale_inv" if "_scale_inv" in named else "_rowwise_scale_inv"]
    if quantizer.format == "fp8_blockwise":
        stored = stored.t() if height == 1 else stored
    elif not quantizer.format.startswith("fp8"):
        stored = read_scales(stored, quantizer.swizzled)[::height]
    grid = stored.reshape(1, 1) if stored.ndim == 1 else stored
    return grid[: math.ceil(rows / height), : math.ceil(cols / width)]


def block_of(weight: Any) -> tuple[int, int]:
    """The rows and columns that share a factor."""
    quantizer, (rows, cols) = weight._quantizer, weight.shape
    if quantizer.format == "fp8_rowwise":
        return (1, cols) if quantizer.axis == -1 else (rows, 1)
    height, width = quantizer.spec.block or (rows, cols)
    return (width, width) if quantizer.two_dimensional else (height, width)
