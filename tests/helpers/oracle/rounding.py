"""Rounding to the input dtypes, exponents, and the maxima all formats share (docs/numerics.md)."""

from __future__ import annotations

import numpy as np

FLT_MAX = np.float32(np.finfo(np.float32).max)
DTYPE_MAX = {
    "float32": FLT_MAX,
    "bfloat16": np.float32((2 - 2.0**-7) * 2.0**127),
    "float16": np.float32(65504),
}


def round_to_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 `x` rounded once, to nearest even, to the values of `dtype`; overflow gives an
    infinity.
    """
    if dtype == "float32":
        return x
    precision, emin, limit = {"bfloat16": (8, -126, 2.0**128), "float16": (11, -14, 65536.0)}[dtype]
    wide = x.astype(np.float64)
    _, exponent = np.frexp(wide)
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, emin) - (precision - 1))
    rounded = np.where(np.isfinite(wide), np.rint(wide / quantum) * quantum, wide)
    rounded = np.where(np.abs(rounded) >= limit, np.copysign(np.inf, rounded), rounded)
    return np.where(np.isnan(wide), wide, rounded).astype(np.float32)


def floor_log2(x: np.ndarray) -> np.ndarray:
    """floor(log2 x), exact, for finite x > 0 (0 for x == 0)."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.where(mantissa == 0, 0, exponent - 1)


def ceil_log2(x: np.ndarray) -> np.ndarray:
    """ceil(log2 x), exact, for finite x > 0 (0 for x == 0)."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.where(mantissa == 0, 0, np.where(mantissa == 0.5, exponent - 1, exponent))


def pow2_f32(exponent: np.ndarray) -> np.ndarray:
    """float32 2^exponent, subnormals included; 2^128 is an infinity."""
    with np.errstate(over="ignore"):
        return np.ldexp(1.0, exponent).astype(np.float32)


def absmax(x: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """max |x| in float32. NaN propagates; an empty reduction gives 0."""
    return np.asarray(np.max(np.abs(x), axis=axis, initial=np.float32(0)), np.float32)
