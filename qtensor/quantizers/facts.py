"""Read facts of a quantizer in a compiled region, as constants that its text names.

Every name that traced code reads is guarded at each call of the graph. Following a quantizer
through its options, slots and class attributes takes Dynamo 180 guards, longer than a small tensor
takes to quantize. Reading the canonical text alone takes one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from qtensor.library.codec import parse
from qtensor.library.constant import compile_constant


class Facts(NamedTuple):
    """Hold the facts of a quantizer that a call reads, under the same names."""

    canonical: str
    format: str
    needs_scale: bool
    stochastic_rounding: bool
    keywords: tuple[str, ...]
    tensor_cls: Any
    needs_more: bool
    """A call needs an argument beside the tensor: a scale, or a seed."""


@compile_constant
def facts_of(canonical: str) -> Facts:
    """Return the facts of the quantizer that a canonical text names."""
    q: Any = parse(canonical)
    needs_more = q.needs_scale or q.stochastic_rounding
    return Facts(
        q.canonical,
        q.format,
        q.needs_scale,
        q.stochastic_rounding,
        q.keywords,
        q.tensor_cls,
        needs_more,
    )
