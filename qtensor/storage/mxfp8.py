"""Define MXFP8 storage: E4M3 or E5M2 elements, one E8M0 factor for each block of 32."""

from __future__ import annotations

import torch

from qtensor.core.formats import E4M3, E5M2, LEAD, Buffer, FormatSpec, K
from qtensor.storage.base import BareStorage
from qtensor.storage.mx_layout import columnwise_scales, rowwise_scales
from qtensor.storage.tensor import QuantizedTensor

MXFP8 = FormatSpec(
    name="mxfp8",
    elements=(E4M3, E5M2),
    block=(1, 32),
    scale="e8m0",
    inner=(
        Buffer("_rowwise_data", torch.uint8, "rowwise", lambda q: (LEAD, K)),
        Buffer("_rowwise_scale_inv", torch.uint8, "rowwise", rowwise_scales, tiled=True),
        Buffer("_columnwise_data", torch.uint8, "columnwise", lambda q: (LEAD, K)),
        Buffer("_columnwise_scale_inv", torch.uint8, "columnwise", columnwise_scales, tiled=True),
    ),
)


class MXFP8TensorStorage(BareStorage, spec=MXFP8):
    """Hold MXFP8 buffers.

    Attributes:
        _rowwise_data: (*leading, K) uint8, element codes.
        _rowwise_scale_inv: (up128(M), up4(ceil(K/32))) uint8, E8M0 codes, zero padding.
        _columnwise_data: (*leading, K) uint8, element codes.
        _columnwise_scale_inv: (up4(ceil(M/32)), up128(K)) uint8; swizzled bytes are those of the
            swizzled transpose.
    """

    __slots__ = MXFP8.attributes


class MXFP8Tensor(QuantizedTensor, spec=MXFP8):
    """Wrap MXFP8 buffers as a tensor; see ``MXFP8TensorStorage`` for the buffers.

    Any shape is legal: a partial block is padded with zeros.
    """
