"""Making a tensor from another one's parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qtensor.layout import Shape

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Nominal dtypes, and those of plain GEMM operands."""

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""(op, args, kwargs) -> result: what the dispatch tables hold."""


def with_buffers(
    t: Any,
    buffers: Sequence[Tensor],
    shape: Shape | None = None,
    *,
    dtype: torch.dtype | None = None,
    quantizer: Any = None,
) -> Any:
    """A tensor or storage of the class of ``t`` around other buffers, in the slot order of ``quantizer``."""
    quantizer = t._quantizer if quantizer is None else quantizer
    named = {slot.keyword: buffer for slot, buffer in zip(quantizer.slots, buffers, strict=True)}
    return type(t)(t.shape if shape is None else shape, dtype or t.dtype, quantizer, **named)


def map_buffers(t: Any, function: Callable[[Tensor], Tensor], **changes: Any) -> Any:
    """The same tensor with ``function`` applied to each buffer."""
    return with_buffers(t, [function(b) for b in t.buffers()], **changes)
