"""Find the buffers of single rows of a quantized tensor: the vectors along its last dim."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from qtensor.core.formats import Slot
from qtensor.core.quantizer_registry import QuantizerLike

if TYPE_CHECKING:
    from qtensor.storage.base import QuantizedTensorStorage


def has_row_factors(quantizer: QuantizerLike) -> bool:
    """Return whether no factor of a tensor serves two rows, unless it serves all of them."""
    return all(
        d.per == 1 and index == 0 and not slot.swizzled
        for slot in quantizer.slots
        for index, d in enumerate(slot.dims)
        if d.axis == "m"
    )


def by_rows(t: QuantizedTensorStorage, slot: Slot) -> Tensor:
    """Return a view (d0, ..., entries of a row) of a buffer with entries for each row."""
    buffer: Tensor = getattr(t, slot.name)
    if slot.dims[0].axis == "lead":
        return buffer
    lead = t.shape[:-1]
    return buffer[: math.prod(lead)].unflatten(0, lead)
