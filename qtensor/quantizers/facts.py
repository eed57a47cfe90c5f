"""What a compiled region reads of a quantizer: constants that its text names.

Whatever traced code reads is guarded at every call of the graph. Dynamo would follow a quantizer through its options, slots
and class attributes, 180 guards, which take longer than a small tensor takes to quantize. It reads the canonical text alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from qtensor.library.codec import parse
from qtensor.library.constant import compile_constant


class Facts(NamedTuple):
    """What a call reads of a quantizer, by the same names."""

    canonical: str
    format: str
    needs_scale: bool
    stochastic_rounding: bool
    keywords: tuple[str, ...]
    tensor_cls: Any
    needs_more: bool
    """A call needs more than the tensor: a scale, or a seed."""


@compile_constant
def facts_of(canonical: str) -> Facts:
    """The facts of the quantizer that a canonical text names."""
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
