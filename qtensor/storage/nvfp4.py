"""Define NVFP4 storage: E2M1 elements, an E4M3 factor for each block of 16, float32 maxima."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from qtensor.core.formats import E2M1, LEAD, ONE, Buffer, Dim, FormatSpec, K, M
from qtensor.storage.base import BareStorage
from qtensor.storage.tensor import QuantizedTensor


class _Options(Protocol):
    """The options of a quantizer that decide which buffers there are, and their dims."""

    with_rht: bool
    rht_side: str
    row_scaled: bool
    with_global_scale_inv: bool


def _codes(options: _Options, axis: Literal["m", "k"]) -> Dim:
    """Return the packed dim of the codes: two codes in a byte.

    The rotation mixes groups of 16, so rotated data have whole groups.
    """
    direction = "rowwise" if axis == "k" else "columnwise"
    rotated = options.with_rht and options.rht_side == direction
    return Dim(axis, per=16, units=8) if rotated else Dim(axis, per=2)


def _global(options: _Options, axis: Dim) -> tuple[Dim, ...] | None:
    """Return the dims of the stored tensor-wide factors, equal to the maxima's; None if absent."""
    if not options.with_global_scale_inv:
        return None
    return (axis if options.row_scaled else ONE,)


NVFP4 = FormatSpec(
    name="nvfp4",
    elements=(E2M1,),
    block=(1, 16),
    scale="e4m3",
    inner=(
        Buffer("_rowwise_data", torch.uint8, "rowwise", lambda q: (LEAD, _codes(q, "k"))),
        Buffer(
            "_rowwise_scale_inv",
            torch.uint8,
            "rowwise",
            lambda q: (Dim("m", pad=128), Dim("k", per=16, pad=4)),
            tiled=True,
        ),
        Buffer("_amax_rowwise", torch.float32, "rowwise", lambda q: (M if q.row_scaled else ONE,)),
        Buffer("_rowwise_global_scale_inv", torch.float32, "rowwise", lambda q: _global(q, M)),
        Buffer("_columnwise_data", torch.uint8, "columnwise", lambda q: (K, _codes(q, "m"))),
        Buffer(
            "_columnwise_scale_inv",
            torch.uint8,
            "columnwise",
            lambda q: (Dim("k", pad=128), Dim("m", per=16, pad=4)),
            tiled=True,
        ),
        Buffer(
            "_amax_columnwise", torch.float32, "columnwise", lambda q: (K if q.row_scaled else ONE,)
        ),
        Buffer(
            "_columnwise_global_scale_inv", torch.float32, "columnwise", lambda q: _global(q, K)
        ),
    ),
)


class NVFP4TensorStorage(BareStorage, spec=NVFP4):
    """Hold NVFP4 buffers; two codes in a byte, the even index in the low nibble.

    Attributes:
        _rowwise_data: (*leading, ceil(K/2)) uint8; rotated: (*leading, ceil(K/16) * 8).
        _rowwise_scale_inv: (up128(M), up4(ceil(K/16))) uint8, E4M3 codes, zero padding.
        _amax_rowwise: float32 (1,), or (M,) row-scaled.
        _rowwise_global_scale_inv: float32 like ``_amax_rowwise``, with the option
            ``with_global_scale_inv``: decoding multiplies by it.
        _columnwise_data: (K, ceil(M/2)) uint8, codes of the transpose; rotated:
            (K, ceil(M/16) * 8).
        _columnwise_scale_inv: (up128(K), up4(ceil(M/16))) uint8.
        _amax_columnwise: float32 (1,), or (K,) row-scaled.
        _columnwise_global_scale_inv: as ``_rowwise_global_scale_inv``.
    """

    __slots__ = NVFP4.attributes


class NVFP4Tensor(QuantizedTensor, spec=NVFP4):
    """Wrap NVFP4 buffers as a tensor; see ``NVFP4TensorStorage`` for the buffers.

    Any shape is legal: a partial block is padded with zeros.
    """
