"""Define MXFP4 storage: E2M1 elements, one E8M0 factor for each block of 32."""

from __future__ import annotations

import torch

from qtensor.core.formats import E2M1, LEAD, Buffer, Dim, FormatSpec, K
from qtensor.storage.base import BareStorage
from qtensor.storage.mx_layout import columnwise_scales, rowwise_scales
from qtensor.storage.tensor import QuantizedTensor

MXFP4 = FormatSpec(
    name="mxfp4",
    elements=(E2M1,),
    block=(1, 32),
    scale="e8m0",
    inner=(
        Buffer("_rowwise_data", torch.uint8, "rowwise", lambda q: (LEAD, Dim("k", per=2))),
        Buffer("_rowwise_scale_inv", torch.uint8, "rowwise", rowwise_scales, tiled=True),
        Buffer("_columnwise_data", torch.uint8, "columnwise", lambda q: (Dim("m", per=2), K)),
        Buffer("_columnwise_scale_inv", torch.uint8, "columnwise", columnwise_scales, tiled=True),
    ),
)


class MXFP4TensorStorage(BareStorage, spec=MXFP4):
    """Hold MXFP4 buffers; two codes in a byte along the blocks, the even index in the low nibble.

    Attributes:
        _rowwise_data: (*leading, ceil(K/2)) uint8.
        _rowwise_scale_inv: (up128(M), up4(ceil(K/32))) uint8, E8M0 codes, zero padding.
        _columnwise_data: (ceil(M/2), K) uint8.
        _columnwise_scale_inv: (up4(ceil(M/32)), up128(K)) uint8.
    """

    __slots__ = MXFP4.attributes


class MXFP4Tensor(QuantizedTensor, spec=MXFP4):
    """Wrap MXFP4 buffers as a tensor; see ``MXFP4TensorStorage`` for the buffers.

    Any shape is legal: a partial block is padded with zeros.
    """
