"""Describe how vectors are stored in a cache that grows row by row: codes, and factors of each row.

A row is one vector of D values, for example the key of a token in a head. Every factor belongs to
one row, or to the whole cache, so rows can be written one at a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from qtensor.core.errors import fail
from qtensor.core.formats import Element
from qtensor.core.quantizer_registry import parse

PLAIN_FORMATS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Rows that are not quantized, by the name of their dtype."""

_MX = ("mxfp8", "mxfp6", "mxfp4")
_OPTIONS = {
    "columnwise": False,
    "swizzled": False,
    "with_2d_quantization": False,
    "with_rht": False,
    "row_scaled": False,
    "with_global_scale_inv": False,
    "stochastic_rounding": False,
    "axis": -1,
}
"""Options that a quantizer of rows must not change: factors would not belong to one row."""


@dataclass(frozen=True)
class RowFormat:
    """Describe the buffers of rows.

    Attributes:
        text: the canonical text of the quantizer, or the name of a plain dtype.
        dtype: of the buffer of codes; uint8 if the rows are quantized.
        element: of a code; None for plain rows.
        group: (codes, bytes) of a packed group.
        block: number of values that share a factor; 0 if a row or the whole cache has one factor.
        factor: dtype of the buffer of factors, or None if there is none.
        divisor: the value of the whole cache, divided by this, decodes; 0 if there is no such
            value. The value is the amax of NVFP4, or the `scale_inv` of FP8.
    """

    text: str
    dtype: torch.dtype
    element: Element | None = None
    group: tuple[int, int] = (1, 1)
    block: int = 0
    factor: torch.dtype | None = None
    divisor: float = 0.0

    @property
    def piece(self) -> int:
        """Return how many products of a score are summed before they join the others."""
        return self.block or 32

    @property
    def four_bits(self) -> bool:
        """Return whether a byte holds two codes, which decides the order of a piece."""
        return self.element is not None and self.element.bits == 4

    def entries(self, size: int) -> int:
        """Return the number of entries of a row of codes with ``size`` values."""
        codes, count = self.group
        return -(-size // codes) * count

    def size(self, entries: int) -> int:
        """Return the number of values of a row of codes with ``entries`` entries."""
        codes, count = self.group
        return entries // count * codes

    def factors(self, size: int) -> int:
        """Return the number of factors of a row with ``size`` values."""
        if self.factor is None:
            return 0
        return size // self.block if self.block else 1


@functools.lru_cache(maxsize=256)
def row_format(text: str) -> RowFormat:
    """Return the format of rows that a quantizer's canonical text or the name of a dtype describes.

    Raises:
        QTensorError: the text is not one of a quantizer, or a factor of its tensors does not belong
            to one row or to the whole tensor.
    """
    if text in PLAIN_FORMATS:
        return RowFormat(text, PLAIN_FORMATS[text])
    quantizer: Any = parse(text)
    for option, value in _OPTIONS.items():
        if getattr(quantizer, option, value) != value:
            rule = f"rows of a cache need a quantizer with {option}={value}"
            fail("row_format", rule, text, f"Leave {option} out")
    name, element = quantizer.format, quantizer.element
    if name in ("fp8", "fp8_delayed"):
        return RowFormat(text, torch.uint8, element, divisor=1.0)
    if name == "fp8_rowwise":
        return RowFormat(text, torch.uint8, element, factor=torch.float32)
    if name in _MX:
        packed = getattr(quantizer, "packed", False)
        group = (2, 1) if element.bits == 4 else (4, 3) if packed else (1, 1)
        return RowFormat(text, torch.uint8, element, group, 32, torch.uint8)
    if name == "nvfp4":
        divisor = quantizer.global_divisor
        return RowFormat(text, torch.uint8, element, (2, 1), 16, torch.uint8, divisor)
    known = ("fp8", "fp8_rowwise", *_MX, "nvfp4", *PLAIN_FORMATS)
    rule = f"the format of rows must be one of {', '.join(known)}"
    fail("row_format", rule, text, "Choose one of them")
