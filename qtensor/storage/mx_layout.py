"""Define the scale dims that the MX formats share."""

from __future__ import annotations

from typing import Any

from qtensor.formats import Dim

_ALONG_M = Dim("m", per=32, pad=4)
_ALONG_K = Dim("k", per=32, pad=4)


def rowwise_scales(options: Any) -> tuple[Dim, ...]:
    """Return dims (up128(M), up4(ceil(K/32)))."""
    return (Dim("m", pad=128), _ALONG_K)


def columnwise_scales(options: Any) -> tuple[Dim, ...]:
    """Return dims (up4(ceil(M/32)), up128(K)).

    Swizzled scales keep this shape; their bytes are those of the swizzled transpose.
    """
    return (_ALONG_M, Dim("k", pad=128))
