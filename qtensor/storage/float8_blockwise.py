"""Define FP8 storage with float32 factors for 1x128 or 128x128 blocks."""

from __future__ import annotations

from typing import Protocol

import torch

from qtensor.core.formats import E4M3, E5M2, LEAD, Buffer, Dim, FormatSpec, K
from qtensor.storage.base import BareStorage
from qtensor.storage.tensor import QuantizedTensor


class _Options(Protocol):
    """The options of a quantizer that decide which buffers there are, and their dims."""

    block_scaling_dim: int


def _rowwise_factors(options: _Options) -> tuple[Dim, ...]:
    """Return dims: 1D (ceil(K/128), up4(M)); 2D (ceil(M/128), up4(ceil(K/128)))."""
    if options.block_scaling_dim == 1:
        return (Dim("k", per=128), Dim("m", pad=4))
    return (Dim("m", per=128), Dim("k", per=128, pad=4))


def _columnwise_factors(options: _Options) -> tuple[Dim, ...]:
    """Return dims: 1D (ceil(M/128), up4(K)); 2D (ceil(K/128), up4(ceil(M/128)))."""
    if options.block_scaling_dim == 1:
        return (Dim("m", per=128), Dim("k", pad=4))
    return (Dim("k", per=128), Dim("m", per=128, pad=4))


FLOAT8_BLOCKWISE = FormatSpec(
    name="fp8_blockwise",
    elements=(E4M3, E5M2),
    block=(1, 128),
    scale="float32",
    inner=(
        Buffer("_rowwise_data", torch.uint8, "rowwise", lambda q: (LEAD, K)),
        Buffer("_rowwise_scale_inv", torch.float32, "rowwise", _rowwise_factors),
        Buffer("_columnwise_data", torch.uint8, "columnwise", lambda q: (K, LEAD)),
        Buffer("_columnwise_scale_inv", torch.float32, "columnwise", _columnwise_factors),
    ),
)


class Float8BlockwiseTensorStorage(BareStorage, spec=FLOAT8_BLOCKWISE):
    """Hold blockwise FP8 buffers.

    Attributes:
        _rowwise_data: logical shape, uint8 element codes.
        _rowwise_scale_inv: float32; 1D (ceil(K/128), up4(M)), 2D (ceil(M/128), up4(ceil(K/128))).
        _columnwise_data: (K, *leading) uint8, codes of the transpose.
        _columnwise_scale_inv: float32; 1D (ceil(M/128), up4(K)),
            2D (ceil(K/128), up4(ceil(M/128))).
    """

    __slots__ = FLOAT8_BLOCKWISE.attributes


class Float8BlockwiseTensor(QuantizedTensor, spec=FLOAT8_BLOCKWISE):
    """Wrap blockwise FP8 buffers as a tensor; see ``Float8BlockwiseTensorStorage``.

    Any shape is legal: a partial block is padded only to compute its amax.
    """
