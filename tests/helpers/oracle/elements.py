"""Narrow floating-point elements as tables of values, and the one cast into them
(docs/numerics.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

FP8_NAN_CODE = 0x7F
"""The code every NaN becomes in FP8, whatever the sign of the input NaN (a choice:
docs/numerics.md, MX names 0x7F, the general rules only "stays NaN").
"""


@dataclass(frozen=True)
class Element:
    """A sign-magnitude float with `ebits` exponent and `mbits` mantissa bits. `specials`: "none"
    (FP4, FP6), "fn" (one NaN) or "ieee".
    """

    name: str
    ebits: int
    mbits: int
    bias: int
    specials: str = "none"

    @property
    def sign_bit(self) -> int:
        """The code of minus zero."""
        return 1 << (self.ebits + self.mbits)

    def _magnitude(self, code: int) -> float:
        exponent, mantissa = divmod(code, 1 << self.mbits)
        top = (1 << self.ebits) - 1
        if self.specials == "ieee" and exponent == top:
            return float("nan") if mantissa else float("inf")
        if self.specials == "fn" and code == self.sign_bit - 1:
            return float("nan")
        if exponent == 0:
            return mantissa * 2.0 ** (1 - self.bias - self.mbits)
        return (1 + mantissa / (1 << self.mbits)) * 2.0 ** (exponent - self.bias)

    @cached_property
    def values(self) -> np.ndarray:
        """float32 value of every code, by code."""
        positive = np.array([self._magnitude(code) for code in range(self.sign_bit)], np.float32)
        return np.concatenate([positive, -positive])

    @cached_property
    def grid(self) -> np.ndarray:
        """The finite values >= 0 in float64; the index is the code."""
        positive = self.values[: self.sign_bit].astype(np.float64)
        return positive[np.isfinite(positive)]

    @property
    def max(self) -> np.float32:
        """Largest finite value."""
        return np.float32(self.grid[-1])

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value (`emax_element` of docs/numerics.md, MX)."""
        return int(np.floor(np.log2(self.grid[-1])))


ELEMENTS = {
    element.name: element
    for element in (
        Element("e4m3", 4, 3, 7, "fn"),
        Element("e5m2", 5, 2, 15, "ieee"),
        Element("e2m3", 2, 3, 1),
        Element("e3m2", 3, 2, 3),
        Element("e2m1", 2, 1, 1),
    )
}


def encode(x: np.ndarray, element: Element, keep_zero_sign: bool = True) -> np.ndarray:
    """Codes (uint8) of float32 `x`: clamp to the finite range, nearest value by search in the
    table, ties to the even code.

    NaN becomes `FP8_NAN_CODE` for FP8 and code 0 for FP6 and FP4. With `keep_zero_sign` False,
    -0.0 becomes code 0 (NVFP4); a negative number that rounds to zero keeps its sign
    either way.
    """
    assert x.dtype == np.float32, x.dtype
    isnan = np.isnan(x)
    grid = element.grid
    magnitude = np.minimum(np.where(isnan, 0.0, np.abs(x).astype(np.float64)), grid[-1])
    above = np.searchsorted(grid, magnitude, side="left")
    below = np.maximum(above - 1, 0)
    up, down = grid[above] - magnitude, magnitude - grid[below]
    take_above = (up < down) | ((up == down) & (above % 2 == 0))
    codes = np.where(take_above, above, below)
    negative = np.signbit(x) if keep_zero_sign else x < 0
    codes = codes + np.where(negative, element.sign_bit, 0)
    nan_code = 0 if element.specials == "none" else FP8_NAN_CODE
    return np.where(isnan, nan_code, codes).astype(np.uint8)


def decode(codes: np.ndarray, element: Element) -> np.ndarray:
    """float32 values of the codes."""
    return element.values[codes]
