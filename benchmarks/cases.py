"""The cases that are measured: formats with their options, sizes, inputs."""

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
"""Options of a format other than its usages."""


def quantizers(quick: bool) -> list[Any]:
    """Return every format: rowwise, columnwise, both, then with its own options.

    Quick: rowwise only.
    """
    selected = []
    for name in qtensor.formats():
        options = [{}] if quick else [{}, COLUMNWISE, BOTH, *MORE.get(name, ())]
        selected += [qtensor.quantizer(name, **chosen) for chosen in options]
    return selected


def weight_quantizers(quick: bool) -> list[Any]:
    """Return each format for weights: rowwise, and with the square blocks that weights use."""
    selected = [qtensor.quantizer(name) for name in qtensor.formats()]
    if not quick:
        selected.append(qtensor.quantizer("fp8_blockwise", block_scaling_dim=2))
        selected.append(qtensor.quantizer("nvfp4", with_2d_quantization=True))
    return selected


DELAYED_SCALE = 448 / 6
"""The scale that delayed scaling gives for our inputs.

It is the largest E4M3 value over the largest magnitude of some million normal values.
"""


def call_arguments(quantizer: Any) -> dict[str, Tensor]:
    """Return the further arguments that a call of the quantizer needs."""
    return {"scale": torch.full((1,), DELAYED_SCALE)} if quantizer.needs_scale else {}


def random_input(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return normal values, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def size_name(shape: tuple[int, ...]) -> str:
    """Return a shape as text, for example ``1024x1024``."""
    return "x".join(str(n) for n in shape)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, for example ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Spec:
    """One row of a table, before anything is built for it."""

    quantizer: Any
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> str:
        """The name in the tables."""
        return size_name(self.shape)


def grid(quick: bool) -> list[Spec]:
    """Return the rows: sizes, dtypes and quantizers.

    Quick: up to ``LARGE``, float32 only at ``MIDDLE``.

    A quick run measures ``MIDDLE`` last, where it compiles the peers, and drops these rows if time
    runs out.
    """
    specs = []
    for shape in (TINY, LARGE, MIDDLE) if quick else SIZES:
        for dtype in DTYPES[: 1 if quick and shape != MIDDLE else 2]:
            specs += [Spec(quantizer, shape, dtype) for quantizer in quantizers(quick)]
    return specs
