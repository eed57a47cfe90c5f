"""The shapes of scale buffers, which the MX formats share."""

from __future__ import annotations

from qtensor.core.formats import Dim

_BLOCKS_ALONG_M = Dim("m", per=32, pad=4)
_BLOCKS_ALONG_K = Dim("k", per=32, pad=4)


def rowwise_scales(options: object) -> tuple[Dim, ...]:
    """Return the dims of rowwise scales, (up128(M), up4(ceil(K/32))), for all ``options``."""
    return (Dim("m", pad=128), _BLOCKS_ALONG_K)


def columnwise_scales(options: object) -> tuple[Dim, ...]:
    """Return the dims of columnwise scales, (up4(ceil(M/32)), up128(K)), for all ``options``.

    Swizzled scales keep this shape; their bytes are those of the swizzled transpose.
    """
    return (_BLOCKS_ALONG_M, Dim("k", pad=128))
