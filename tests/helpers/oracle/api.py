"""`quantize` and `dequantize`: one entry for all formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import fp8, mx, nvfp4
from .options import Options
from .rounding import round_to_dtype

_SCALED = ("fp8", "fp8_delayed", "fp8_rowwise")
_MX = ("mxfp8", "mxfp6", "mxfp4")


def quantize(
    x: np.ndarray,
    fmt: str,
    in_dtype: str = "float32",
    random_bits: Mapping[str, np.ndarray] | None = None,
    scale: np.ndarray | float | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """The storage attributes of `x` in `fmt`, by attribute name; only the
    usages asked for.

    `x`: float32 values that `in_dtype` can hold. `random_bits`: attribute -> one byte an element,
    for stochastic rounding. `scale`: the stored scale of fp8_delayed, which also returns "amax".
    The other options are the fields of `Options`.
    """
    x = np.ascontiguousarray(x, np.float32).reshape(np.shape(x))
    if not np.array_equal(round_to_dtype(x, in_dtype), x, equal_nan=True):
        raise ValueError(f"quantize: x holds values that {in_dtype} cannot")
    chosen = Options(in_dtype=in_dtype, random_bits=random_bits, scale=scale, **options).for_format(
        fmt
    )
    if fmt in _SCALED:
        return fp8.quantize_scaled(x, fmt, chosen)
    if fmt == "fp8_blockwise":
        return fp8.quantize_blockwise(x, chosen)
    if fmt in _MX:
        return mx.quantize_mx(x, fmt, chosen)
    if fmt == "nvfp4":
        return nvfp4.quantize_nvfp4(x, chosen)
    raise ValueError(f"quantize: unknown format {fmt!r}")


def dequantize(
    buffers: Mapping[str, np.ndarray], fmt: str, shape: tuple[int, ...], **options: Any
) -> np.ndarray:
    """float32 values of the buffers in the logical `shape`: the row-wise copy if present, else the
    column-wise one.

    The options are those given to `quantize`.
    """
    held = {name: buffer for name, buffer in buffers.items() if buffer is not None}
    chosen = Options(**options).for_format(fmt)
    if fmt in _SCALED:
        return fp8.dequantize_scaled(held, shape, chosen)
    if fmt == "fp8_blockwise":
        return fp8.dequantize_blockwise(held, shape, chosen)
    if fmt in _MX:
        return mx.dequantize_mx(held, fmt, shape, chosen)
    if fmt == "nvfp4":
        return nvfp4.dequantize_nvfp4(held, shape, chosen)
    raise ValueError(f"dequantize: unknown format {fmt!r}")
