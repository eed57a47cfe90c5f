"""Decode the integer block types of ggml to float32, with the roundings of llama.cpp.

Each function takes the blocks of a tensor, uint8 (..., bytes of a block), and returns float32
(..., elements of a block). Codes and factors of blocks are small integers and float16, so that a
code times a factor is exact in float32; a type with an offset rounds once more when it subtracts.

The super-blocks of 256 elements (``_K``) hold integer factors of runs of 16 or 32 elements, and one
or two float16 numbers that multiply these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor


def _halves(blocks: Tensor, first: int, count: int = 1) -> Tensor:
    """Return ``count`` float16 numbers that begin at a byte, as float32 (..., count)."""
    return blocks[..., first : first + 2 * count].contiguous().view(torch.float16).float()


def _low_then_high(codes: Tensor, run: int) -> Tensor:
    """Return 4-bit codes: in each run of bytes, the low nibbles of all, then the high nibbles."""
    runs = codes.unflatten(-1, (-1, run))
    return torch.stack((runs & 15, runs >> 4), -2).flatten(-3)


def _bits(codes: Tensor, width: int, run: int) -> Tensor:
    """Return codes of ``width`` bits: in each run of bytes, the lowest bits of all come first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).unsqueeze(-1)
    runs = codes.unflatten(-1, (-1, 1, run))
    return (runs >> shifts & ((1 << width) - 1)).flatten(-3)


def _q4_0(blocks: Tensor) -> Tensor:
    """Decode d * (q - 8): d float16, then 16 bytes."""
    return (_low_then_high(blocks[..., 2:], 16).float() - 8) * _halves(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    """Decode fl(d * q) + m: d and m float16, then 16 bytes."""
    return _low_then_high(blocks[..., 4:], 16).float() * _halves(blocks, 0) + _halves(blocks, 2)


def _five_bits(low: Tensor, high: Tensor) -> Tensor:
    """Return 5-bit codes as float32 from 16 bytes of nibbles and 32 bits in 4 bytes."""
    return (_low_then_high(low, 16) | _bits(high.unsqueeze(-1), 1, 1).flatten(-2) << 4).float()


def _q5_0(blocks: Tensor) -> Tensor:
    """Decode d * (q - 16): d float16, 4 bytes of fifth bits, then 16 bytes."""
    return (_five_bits(blocks[..., 6:], blocks[..., 2:6]) - 16) * _halves(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    """Decode fl(d * q) + m: d and m float16, 4 bytes of fifth bits, then 16 bytes."""
    return _five_bits(blocks[..., 8:], blocks[..., 4:8]) * _halves(blocks, 0) + _halves(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    """Decode d * q: d float16, then 32 signed bytes."""
    return blocks[..., 2:].view(torch.int8).float() * _halves(blocks, 0)


def _factors_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return fl(d * s) and fl(dmin * m) of the 8 runs of a block, float32 (..., 8, 1).

    s and m have 6 bits. Of the 12 bytes that hold them, 0 to 3 hold s of the first four runs, 4 to
    7 hold m of these, and 8 to 11 the low nibbles of s and m of the others, whose upper two bits
    are those of bytes 0 to 7.
    """
    first, second, low = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    s = torch.cat((first & 63, low & 15 | first >> 2 & 48), -1)
    m = torch.cat((second & 63, low >> 4 | second >> 2 & 48), -1)
    d, dmin = _halves(blocks, 0, 2).split(1, -1)
    return (d * s.float()).unsqueeze(-1), (dmin * m.float()).unsqueeze(-1)


def _q4_k(blocks: Tensor) -> Tensor:
    """Decode fl(fl(d * s) * q) - fl(dmin * m) in 8 runs of 32 elements."""
    factors, offsets = _factors_and_offsets(blocks)
    codes = _low_then_high(blocks[..., 16:], 32).unflatten(-1, (8, 32))
    return (factors * codes.float() - offsets).flatten(-2)


def _q5_k(blocks: Tensor) -> Tensor:
    """Decode as Q4_K, with the fifth bits of all codes in 32 bytes before the others."""
    factors, offsets = _factors_and_offsets(blocks)
    codes = _low_then_high(blocks[..., 48:], 32) | _bits(blocks[..., 16:48], 1, 32) << 4
    return (factors * codes.unflatten(-1, (8, 32)).float() - offsets).flatten(-2)


def _q6_k(blocks: Tensor) -> Tensor:
    """Decode fl(d * s) * (q - 32) in 16 runs of 16 elements; s is a signed byte."""
    low, high = blocks[..., :128], blocks[..., 128:192]
    codes = _low_then_high(low, 64) | _bits(high, 2, 32) << 4
    factors = _halves(blocks, 208) * blocks[..., 192:208].view(torch.int8).float()
    return ((codes.float() - 32).unflatten(-1, (16, 16)) * factors.unsqueeze(-1)).flatten(-2)


DECODERS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
})
"""Name of a type -> the function that decodes its blocks."""
