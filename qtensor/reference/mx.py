"""OCP Microscaling (MX) v1.0: blocks of 32 with an E8M0 factor (NUMERICS section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.formats import Element
from qtensor.reference.blocks import from_blocks, to_blocks
from qtensor.reference.elements import decode_fp8, encode_fp8_, encode_narrow
from qtensor.reference.scaling import E8M0_NAN, e8m0_code, e8m0_decode_factor, e8m0_encode_factor

BLOCK = 32


def encode(x: Tensor, block: tuple[int, int], element: Element, mode: str) -> tuple[Tensor, Tensor]:
    """Quantize a float32 (M, K) matrix in ``block`` = (rows, cols) blocks.

    Returns:
        Codes (M, K) uint8, one a byte, and E8M0 codes (ceil(M / rows), ceil(K / cols)) uint8. A block with a NaN or inf
        has code 255 and data codes 0x7F (FP8) or 0 (FP6, FP4).
    """
    rows, cols = x.shape
    blocks = to_blocks(x, *block)
    if not blocks.numel():
        scales = blocks.new_zeros((blocks.shape[0], blocks.shape[2]), dtype=torch.uint8)
        return x.new_zeros((rows, cols), dtype=torch.uint8), scales
    code = e8m0_code(blocks.abs().amax((1, 3)), element, mode)
    values = from_blocks(blocks * e8m0_encode_factor(code)[:, None, :, None], rows, cols)
    codes = element_codes(values, element)
    poison = 0x7F if element.dtype is not None else 0
    bad = code == E8M0_NAN
    bad = from_blocks(bad[:, None, :, None].expand(blocks.shape), rows, cols)
    return codes.masked_fill_(bad, poison), code.to(torch.uint8)


def element_codes(values: Tensor, element: Element) -> Tensor:
    """Float32 values in the element's range to codes, one a byte."""
    if element.dtype is None:
        return encode_narrow(values, element)
    codes = torch.empty_like(values, dtype=torch.uint8)
    encode_fp8_(codes, values, element)
    return codes


def decode(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Element values (M, K) float32 times block factors; ``scales`` is uint8, (ceil(M / rows), ceil(K / cols)) or more."""
    blocks = to_blocks(values, *block)
    factors = e8m0_decode_factor(scales[: blocks.shape[0], : blocks.shape[2]])
    return from_blocks(blocks * factors[:, None, :, None], *values.shape)
