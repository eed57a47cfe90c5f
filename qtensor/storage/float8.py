"""Define FP8 storage: one float32 factor for the tensor, a row or a column."""

from __future__ import annotations

from typing import Protocol

import torch

from qtensor.core.formats import E4M3, E5M2, LEAD, ONE, Buffer, Dim, FormatSpec, K, M
from qtensor.storage.base import BareStorage
from qtensor.storage.tensor import QuantizedTensor


class _Options(Protocol):
    """The options of a quantizer that decide which buffers there are, and their dims."""

    per_tensor: bool
    axis: int


def _factors(options: _Options) -> tuple[Dim, ...]:
    """Return the dims of the factors: (1,) for the tensor, (M, 1) for rows, (1, K) for columns."""
    if options.per_tensor:
        return (ONE,)
    return (M, ONE) if options.axis == -1 else (ONE, K)


FLOAT8 = FormatSpec(
    name="fp8",
    elements=(E4M3, E5M2),
    block=None,
    scale="float32",
    inner=(
        Buffer("_data", torch.uint8, "rowwise", lambda q: (LEAD, K)),
        Buffer("_transpose", torch.uint8, "columnwise", lambda q: (K, LEAD)),
        Buffer("_scale_inv", torch.float32, "both", _factors),
    ),
    transpose_shares_bytes=True,
)


class Float8TensorStorage(BareStorage, spec=FLOAT8):
    """Hold FP8 buffers.

    Attributes:
        _data: logical shape, uint8 element codes (rowwise).
        _transpose: (K, *leading) uint8, the same codes (columnwise).
        _scale_inv: float32 decode factors: (1,) for the tensor, (M, 1) per row, (1, K) per column.
    """

    __slots__ = FLOAT8.attributes


class Float8Tensor(QuantizedTensor, spec=FLOAT8):
    """Wrap FP8 buffers as a tensor; see ``Float8TensorStorage`` for the buffers.

    Any shape is legal, and nothing is padded.
    """
