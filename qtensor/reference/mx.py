"""OCP Microscaling (MX) v1.0: blocks of 32 elements with an E8M0 scale factor."""

from __future__ import annotations

from torch import Tensor

from qtensor.core.formats import Element
from qtensor.reference.blocks import block_amax, scale_blocks, to_blocks
from qtensor.reference.elements import encode_fp8_, encode_narrow
from qtensor.reference.scaling import e8m0_code, e8m0_decode_factor, e8m0_encode_factor

BLOCK = 32


def encode_(
    codes: Tensor, x: Tensor, block: tuple[int, int], element: Element, mode: str
) -> Tensor:
    """Quantize an (M, K) matrix in (rows, cols) blocks.

    Args:
        codes: uint8 (M, K), written, one code a byte. A block with a NaN or inf gets 0x7F (FP8) or
            0 (FP6, FP4).
        x: (M, K) float32, bfloat16 or float16.
        block: (rows, cols) of a block.
        element: element type of the codes.
        mode: rounding of the scale factor: "rceil", "floor", "ceil" or "even".

    Returns:
        E8M0 codes (ceil(M / rows), ceil(K / cols)) uint8, 255 for a block with a NaN or inf.
    """
    blocks = to_blocks(x, *block)
    if not blocks.numel():
        return codes.new_zeros((blocks.shape[0], blocks.shape[2]))
    scales = e8m0_code(block_amax(blocks), element, mode)
    # The factor of code 255 is NaN, so every value of its block becomes NaN.
    element_codes_(codes, scale_blocks(blocks, e8m0_encode_factor(scales), *x.shape), element)
    return scales


def element_codes_(codes: Tensor, values: Tensor, element: Element) -> None:
    """Write float32 ``values`` as ``codes`` (uint8, same shape), one a byte; overwrites ``values``.

    NaN becomes 0 if the element has no NaN.
    """
    if element.dtype is None:
        codes.copy_(encode_narrow(values.nan_to_num_(nan=0.0), element))
    else:
        encode_fp8_(codes, values, element)


def decode(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return element values times their block factors, float32 (M, K).

    ``values`` is float32 (M, K); ``scales`` is uint8 (ceil(M / rows), ceil(K / cols)) or larger.
    """
    return scale_blocks(to_blocks(values, *block), e8m0_decode_factor(scales), *values.shape)
