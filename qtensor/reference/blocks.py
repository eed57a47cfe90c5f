"""Block views of (M, K) matrices, padding, and the 128x4 swizzle of scales (NUMERICS section 6)."""

from __future__ import annotations

from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from qtensor.layout import rows_cols


def as_matrix(x: Tensor) -> Tensor:
    """The (M, K) float32 view of a tensor of any rank."""
    rows, cols = rows_cols(x.shape)
    return x.reshape(rows, cols).float()


def pad_matrix(x: Tensor, rows: int, cols: int) -> Tensor:
    """``x`` (M, K) zero-padded so that its sizes are multiples of ``rows`` and ``cols``."""
    bottom, right = -x.shape[0] % rows, -x.shape[1] % cols
    return F.pad(x, (0, right, 0, bottom)) if bottom or right else x


def to_blocks(x: Tensor, rows: int, cols: int) -> Tensor:
    """(M, K) to (M / rows, rows, K / cols, cols) after zero padding."""
    return rearrange(pad_matrix(x, rows, cols), "(m r) (k c) -> m r k c", r=rows, c=cols)


def from_blocks(blocks: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of ``to_blocks``, cropped to (rows, cols)."""
    return rearrange(blocks, "m r k c -> (m r) (k c)")[:rows, :cols]


def spread(factors: Tensor, rows: int, cols: int, shape: tuple[int, int]) -> Tensor:
    """Block factors (ceil(M / rows), ceil(K / cols)) repeated to one an element, cropped to ``shape``."""
    if rows > 1:
        factors = factors.repeat_interleave(rows, 0)
    if cols > 1:
        factors = factors.repeat_interleave(cols, 1)
    return factors[: shape[0], : shape[1]]


def write_padded_(out: Tensor, values: Tensor) -> None:
    """Copy ``values`` (r, c) into the top left of ``out``; the rest of ``out`` is padding and stays zero."""
    out[: values.shape[0], : values.shape[1]].copy_(values)


def swizzle(scales: Tensor) -> Tensor:
    """(R, C) scales, R a multiple of 128 and C of 4, to 128x4 tiles stored contiguously, tiles row-major.

    Inside a tile the offset of (r, c) is ``(r % 32) * 16 + (r // 32) * 4 + c``. The shape stays (R, C).
    """
    tiles = rearrange(scales, "(tr a b) (tc c) -> tr tc b a c", a=4, b=32, c=4)
    return tiles.reshape(scales.shape)


def unswizzle(scales: Tensor) -> Tensor:
    """Inverse of ``swizzle``."""
    rows, cols = scales.shape
    tiles = scales.reshape(rows // 128, cols // 4, 32, 4, 4)
    return rearrange(tiles, "tr tc b a c -> (tr a b) (tc c)")
