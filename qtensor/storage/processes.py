"""Send quantized tensors to other processes, which share their memory.

A file of ``torch.save`` holds a part as a tensor of its own. Another process gets the part itself:
its writes reach the whole tensor here, and keep the factors that the part shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qtensor.storage.origin import Origin
from qtensor.storage.rebuild import of_parts, set_origin
from qtensor.storage.registry import lookup
from qtensor.storage.serialize import parse, rebuild, reduce, state

if TYPE_CHECKING:
    from qtensor.storage.base import QuantizedTensorStorage
    from qtensor.storage.tensor import QuantizedTensor


def share(t: QuantizedTensor) -> tuple[Any, ...]:
    """Return a function and its arguments that make ``t`` in a process which shares its memory."""
    # The other process has a memory of its own where `padded` could look for padding.
    origin = t._origin._replace(padded=None)
    if t._parts:
        context = (type(t).__qualname__, tuple(t.shape), t.dtype, t._quantizer.canonical)
        return _view, (context, origin, t._parts)
    if not origin.is_part:
        return reduce(t)
    return _part, (origin, state(t))


def _part(origin: Origin, saved: tuple[Any, ...]) -> QuantizedTensorStorage:
    part = rebuild(*saved)
    set_origin(part, origin)
    return part


def _view(context: tuple[Any, ...], origin: Origin, parts: tuple[QuantizedTensor, ...]) -> Any:
    name, shape, dtype, canonical = context
    return of_parts(lookup(name), shape, dtype, parse(canonical), parts, origin)
