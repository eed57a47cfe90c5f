"""Quantizers as the kernels of a format see them: with the options of that format."""

from __future__ import annotations

from typing import Protocol

from qtensor.core.quantizer_registry import QuantizerLike


class Float8Like(QuantizerLike, Protocol):
    """A quantizer of FP8 with factors of rows or blocks, which come from the values."""

    amax_epsilon: float
    """The least maximum of values that share a factor."""
    force_pow_2_scales: bool
    """Factors are powers of two."""


class MXLike(QuantizerLike, Protocol):
    """A quantizer of MXFP8, MXFP6 or MXFP4."""

    scale_mode: str
    """How a factor is rounded to a power of two."""
    swizzled: bool
    """Factors are stored in tiles of 128x4."""
    with_2d_quantization: bool
    """Blocks are square."""


class NVFP4Like(QuantizerLike, Protocol):
    """A quantizer of NVFP4."""

    e4m3_max: float
    """The largest factor of a block."""
    err_mode: str
    """The error that ``use_4over6`` makes small: "mae" or "mse"."""
    rht_side: str
    """The direction that is rotated: "rowwise" or "columnwise"."""
    row_scaled: bool
    """Each row has a maximum of its own."""
    swizzled: bool
    """Factors are stored in tiles of 128x4."""
    use_4over6: bool
    """The maximum of a block is encoded as 4 or as 6."""
    with_global_scale_inv: bool
    """The factor of the whole tensor is stored beside its maximum."""
    with_random_sign_mask: bool
    """The rotation also changes signs."""
    with_rht: bool
    """Values are rotated, 16 at a time."""

    @property
    def global_divisor(self) -> float:
        """The divisor that turns what ``global_buffer`` holds into the decode factor."""

    def global_buffer(self, side: str) -> str:
        """Return the name of the buffer that decides the factor of the whole tensor."""
