"""What is measured: formats with their options, sizes, inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import qtensor

TINY = (16, 32)
MIDDLE = (1024, 1024)
LARGE = (4096, 4096)
HUGE = (8192, 8192)
SIZES = (TINY, MIDDLE, LARGE, HUGE)
DTYPES = (torch.bfloat16, torch.float32)

COLUMNWISE: Mapping[str, Any] = {"rowwise": False, "columnwise": True}
BOTH: Mapping[str, Any] = {"columnwise": True}
MORE: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "fp8_blockwise": (
        {"block_scaling_dim": 2},
        {"block_scaling_dim": 2, **BOTH},
    ),
    "mxfp8": ({"scale_mode": "floor"},),
    "mxfp6": ({"packed": True},),
    "nvfp4": (
        {"with_2d_quantization": True},
        {"stochastic_rounding": True},
        {"with_rht": True, "rht_side": "rowwise"},
        {"with_rht": True, **COLUMNWISE},
    ),
}
"""Options of a format beyond its usages."""


def quantizers(quick: bool) -> list[Any]:
    """Every registered format: rowwise, columnwise, both, then its own options. Quick: rowwise alone."""
    found = []
    for name in qtensor.formats():
        options = [{}] if quick else [{}, COLUMNWISE, BOTH, *MORE.get(name, ())]
        found += [qtensor.quantizer(name, **chosen) for chosen in options]
    return found


def weight_quantizers(quick: bool) -> list[Any]:
    """Each format as that of a weight: rowwise, and the square blocks that weights are quantized in."""
    found = [qtensor.quantizer(name) for name in qtensor.formats()]
    if not quick:
        found.append(qtensor.quantizer("fp8_blockwise", block_scaling_dim=2))
        found.append(qtensor.quantizer("nvfp4", with_2d_quantization=True))
    return found


DELAYED_SCALE = 448 / 6
"""What a history of inputs like ours asks for: the largest E4M3 value over the largest magnitude of some million normal values."""


def call_arguments(quantizer: Any) -> dict[str, Tensor]:
    """What a call of the quantizer must bring."""
    return {"scale": torch.full((1,), DELAYED_SCALE)} if quantizer.needs_scale else {}


def random_input(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal values, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def size_name(shape: tuple[int, ...]) -> str:
    """``1024x1024``."""
    return "x".join(str(n) for n in shape)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Spec:
    """One row to be measured, before anything is built for it."""

    quantizer: Any
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> str:
        """As it stands in the tables."""
        return size_name(self.shape)


def grid(quick: bool) -> list[Spec]:
    """Sizes, dtypes and quantizers. Quick: up to ``LARGE``, float32 at ``MIDDLE`` alone.

    A quick run ends with ``MIDDLE``, where it compiles the peers, and drops those rows if it runs out of time.
    """
    specs = []
    for shape in (TINY, LARGE, MIDDLE) if quick else SIZES:
        for dtype in DTYPES[: 1 if quick and shape != MIDDLE else 2]:
            specs += [Spec(quantizer, shape, dtype) for quantizer in quantizers(quick)]
    return specs
