"""Read properties of a quantizer in a compiled region, as constants.

Dynamo guards every name that traced code reads, and checks the guards at each call. Reading a
quantizer's options, slots and class attributes adds 180 guards, which cost more than quantizing a
small tensor. Reading only the canonical string adds one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from qtensor.core.compile_constants import compile_constant
from qtensor.core.quantizer_registry import parse


class QuantizerConstants(NamedTuple):
    """Hold the properties of a quantizer that a call reads, under the same names."""

    canonical: str
    format: str
    needs_scale: bool
    stochastic_rounding: bool
    keywords: tuple[str, ...]
    tensor_cls: Any
    needs_more: bool
    """True if a call needs another argument than the tensor: a scale or a seed."""


@compile_constant
def constants_of(canonical: str) -> QuantizerConstants:
    """Return the properties of the quantizer with a canonical string."""
    q: Any = parse(canonical)
    needs_more = q.needs_scale or q.stochastic_rounding
    return QuantizerConstants(
        q.canonical,
        q.format,
        q.needs_scale,
        q.stochastic_rounding,
        q.keywords,
        q.tensor_cls,
        needs_more,
    )
