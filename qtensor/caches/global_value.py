"""Derive the value that all rows of a cache share from the largest number that they hold."""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.api import Format, quantizer
from qtensor.core.errors import check
from qtensor.core.row_format import RowFormat, row_format
from qtensor.library.quantize import QUANTIZE


def global_value(fmt: Format, amax: float | Tensor) -> Tensor:
    """Return the value of a whole cache with which numbers up to ``amax`` are encoded.

    Args:
        fmt: ``"fp8"``, whose value is its ``scale_inv``, or ``"nvfp4"``, whose value is its amax.
        amax: the largest absolute value that keys, or values, are expected to have.

    Returns:
        float32 (1,), for ``k_global`` or ``v_global`` of ``KVCache``.

    Raises:
        QTensorError: the format has no such value.
    """
    form = row_format(quantizer(fmt).canonical)
    rule = "the format must have a value of the whole cache"
    check(form.divisor > 0, "global_value", rule, form.text, "Leave it out")
    return wide_value(form, torch.as_tensor(amax, dtype=torch.float32))


def wide_value(form: RowFormat, amax: Tensor) -> Tensor:
    """Return the value of a whole cache of a row format, float32 (1,)."""
    if form.factor is not None:
        return amax.reshape(1)
    wide: Tensor = QUANTIZE(amax.reshape(1, 1), form.text)[-1]
    return wide
