"""The call of the kernel that multiplies two operands of 4- or 6-bit codes."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import ceil_div
from qtensor.core.quantizer_registry import parse
from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.buffers import has_memory, is_plain
from qtensor.kernels.cpu.structs import CQuantizer, c_quantizer

_ARGUMENTS = struct.Struct("=27q")
_ONE_THREAD = 1 << 21
"""Up to this many products of elements, one thread computes them."""
_LEAST_LINES = 4
"""Packing the right operand counts as the products of so many lines of the left one."""


class Lines(NamedTuple):
    """An operand, as lines along the contraction.

    Attributes:
        canonical: text of the quantizer.
        codes: uint8 (lines, bytes of a line), any strides.
        scales: uint8 (lines, blocks), any strides, or in whole tiles if the quantizer is swizzled;
            padding may follow both dims.
        factors: float32 (1,) or (lines,), which follow the sums; or None.
        number: of lines.
    """

    canonical: str
    codes: Tensor
    scales: Tensor
    factors: Tensor | None
    number: int


def integer_products_(a: Lines, b: Lines, length: int, bias: Tensor | None, out: Tensor) -> bool:
    """Compute `out = a @ b.T + bias`.

    Args:
        a: lines of `length` elements.
        b: the same.
        length: number of elements of a line.
        bias: (lines of b,) float32, contiguous; or None.
        out: (..., lines of b) float32, bfloat16 or float16, contiguous.

    Returns:
        False if no kernel computes it.
    """
    kernels = native.library()
    code = native.DTYPES.get(out.dtype)
    fits = is_plain(out, out.dtype) and out.numel() == a.number * b.number
    fits = fits and (bias is None or (is_plain(bias, torch.float32) and bias.numel() == b.number))
    left, right = _readable(a, length), _readable(b, length)
    if isinstance(kernels, str) or code is None or not fits or left is None or right is None:
        return False
    work = max(a.number, _LEAST_LINES) * b.number * length
    packed = _ARGUMENTS.pack(
        ctypes.addressof(_struct(a.canonical)),
        ctypes.addressof(_struct(b.canonical)),
        *_fields(left),
        *_fields(right),
        a.number,
        length,
        b.number,
        torch.get_num_threads() if work > _ONE_THREAD else 1,
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        code,
    )
    return bool(kernels.handle.qt_integer_products(packed) == 0)


@functools.lru_cache(maxsize=1024)
def _struct(canonical: str) -> CQuantizer:
    return c_quantizer(parse(canonical))


def _readable(lines: Lines, length: int) -> Lines | None:
    """Return lines whose codes lie along them or across them; None if they do not fit."""
    facts = _struct(lines.canonical)
    blocks, size = ceil_div(length, facts.block), ceil_div(length, facts.codes) * facts.bytes
    codes, scales = lines.codes, lines.scales
    if not (codes.shape[0] == lines.number <= scales.shape[0] and codes.shape[1] >= size):
        return None
    if scales.shape[1] < blocks or not all(map(_is_bytes, (codes, scales))):
        return None
    factors = lines.factors
    if factors is not None and not (
        is_plain(factors, torch.float32) and factors.numel() in (1, lines.number)
    ):
        return None
    if 1 not in _strides(codes):
        codes = codes.contiguous()
    return lines._replace(codes=codes)


def _is_bytes(t: Tensor) -> bool:
    return t.dtype is torch.uint8 and has_memory(t)


def _strides(codes: Tensor) -> Sequence[int]:
    """Return the strides of a matrix; that of a dim with one entry is 1."""
    return [
        1 if size == 1 else step for size, step in zip(codes.shape, codes.stride(), strict=True)
    ]


def _fields(lines: Lines) -> tuple[int, ...]:
    across, along = _strides(lines.codes)
    factors = lines.factors
    return (
        lines.codes.data_ptr(),
        across,
        along,
        lines.scales.data_ptr(),
        *lines.scales.stride(),
        lines.scales.shape[1] // 4 if _struct(lines.canonical).swizzled else 0,
        0 if factors is None else factors.data_ptr(),
        int(factors is not None and factors.numel() > 1),
    )
