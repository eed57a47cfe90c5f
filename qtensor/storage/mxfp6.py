"""Define MXFP6 storage: E2M3 or E3M2 elements, one E8M0 factor for each block of 32."""

from __future__ import annotations

from typing import Protocol

import torch

from qtensor.core.formats import E2M3, E3M2, LEAD, Buffer, Dim, FormatSpec, K
from qtensor.storage.base import BareStorage
from qtensor.storage.mx_layout import columnwise_scales, rowwise_scales
from qtensor.storage.tensor import QuantizedTensor


class _Options(Protocol):
    """The options of a quantizer that decide which buffers there are, and their dims."""

    packed: bool


def _rowwise_codes(options: _Options) -> tuple[Dim, ...]:
    """Return dims (*leading, K): one code in a byte, or 4 codes in 3 bytes packed along K."""
    return (LEAD, Dim("k", per=4, units=3)) if options.packed else (LEAD, K)


def _columnwise_codes(options: _Options) -> tuple[Dim, ...]:
    """Return dims (*leading, K): one code in a byte, or 4 codes in 3 bytes packed along M."""
    return (Dim("m", per=4, units=3), K) if options.packed else (LEAD, K)


MXFP6 = FormatSpec(
    name="mxfp6",
    elements=(E2M3, E3M2),
    block=(1, 32),
    scale="e8m0",
    inner=(
        Buffer("_rowwise_data", torch.uint8, "rowwise", _rowwise_codes),
        Buffer("_rowwise_scale_inv", torch.uint8, "rowwise", rowwise_scales, tiled=True),
        Buffer("_columnwise_data", torch.uint8, "columnwise", _columnwise_codes),
        Buffer("_columnwise_scale_inv", torch.uint8, "columnwise", columnwise_scales, tiled=True),
    ),
)


class MXFP6TensorStorage(BareStorage, spec=MXFP6):
    """Hold MXFP6 buffers.

    Attributes:
        _rowwise_data: (*leading, K) uint8, one code in a byte; packed: (*leading, ceil(K/4) * 3).
        _rowwise_scale_inv: (up128(M), up4(ceil(K/32))) uint8, E8M0 codes, zero padding.
        _columnwise_data: (*leading, K) uint8; packed: (ceil(M/4) * 3, K).
        _columnwise_scale_inv: (up4(ceil(M/32)), up128(K)) uint8.
    """

    __slots__ = MXFP6.attributes


class MXFP6Tensor(QuantizedTensor, spec=MXFP6):
    """Wrap MXFP6 buffers as a tensor; see ``MXFP6TensorStorage`` for the buffers.

    Any shape is legal: a partial block is padded with zeros.
    """
