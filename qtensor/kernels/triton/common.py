"""Helpers of all kernels: launches, tiles, block maxima, packing, the 128x4 scale layout.

A kernel reads a matrix (M, K) in tiles, one for each program. ``m`` and ``k`` are the global
indices of a tile's rows and columns, in int64 so that offsets do not overflow. Elements outside the
matrix read as 0 and are never written.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.core.buffer_shapes import ceil_div, rows_cols
from qtensor.core.devices import device_guard

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIDES = (
    "_rowwise_data",
    "_rowwise_scale_inv",
    "_columnwise_data",
    "_columnwise_scale_inv",
)
"""The buffers of a block format, in the order of its kernels' parameters."""
PROGRAMS = 8
"""Programs for each multiprocessor, of kernels whose programs do the work of several."""


@dataclass(frozen=True)
class LazyMatrix:
    """A matrix that kernels compute while they load it. It can stand for the tensor ``x``.

    Attributes:
        arguments: the kernel's argument in place of a pointer: a device function with the
            parameters of ``load_tile``, followed by the values that the function reads.
        shape: rows and columns.
        strides: strides of the source tensor, passed to the function.
        dtype: dtype that its values are rounded to.
        device: device of its tensors.
    """

    arguments: tuple[Any, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def stride(self) -> tuple[int, ...]:
        """Return the strides, like ``Tensor.stride``."""
        return self.strides


def float_bits(value: float) -> int:
    """Return the bits of a float32 value as an integer."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run ``programs`` programs of a kernel on the device of its first tensor.

    Fusing a product and a sum into one rounding is disabled: the reference rounds twice.
    """
    if not programs:
        return
    flat = [t for a in args for t in (a if isinstance(a, tuple) else (a,))]
    device = next(t.device for t in flat if isinstance(t, Tensor | LazyMatrix))
    args = tuple(a.arguments if isinstance(a, LazyMatrix) else a for a in args)
    with device_guard(device):
        kernel[(programs,)](*args, **constants, enable_fp_fusion=False)


def tiles(shape: Sequence[int], tile: tuple[int, int]) -> int:
    """Return the number of tiles of a matrix."""
    return ceil_div(shape[0], tile[0]) * ceil_div(shape[1], tile[1])


def resident(programs: int, device: torch.device) -> int:
    """Return how many programs to start if each can do the work of several.

    A device runs about so many at once.
    """
    return min(programs, PROGRAMS * _multiprocessors(device))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def tile_for(shape: Sequence[int], least: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """Return a tile of about 4096 elements: square, flat for few rows, tall for few columns.

    Only a few tiles are possible, because each is a separate compilation. No tile is smaller than
    ``least``, which holds whole blocks.
    """
    rows, cols = shape
    if cols <= 8 and least[1] <= 8:
        return 512, 8
    height = 1 if rows == 1 else 8 if rows <= 8 else 64
    height = max(height, least[0])
    return height, max(4096 // height, least[1])


def warps_for(directions: int) -> int:
    """Return the warps of a program that quantizes a tile of 4096 elements.

    Codes of both directions take twice the registers: with more warps, a multiprocessor still runs
    enough of them (scripts/gpu/registers.py).
    """
    return 8 if directions > 1 else 4


def raw(x: Tensor) -> Tensor:
    """Return bfloat16 as int16 bits, which every Triton target can load; other dtypes unchanged."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def as_matrix(x: Tensor) -> Tensor:
    """Return the (M, K) view of a tensor of any rank, through ``raw``; copies only if needed."""
    if isinstance(x, LazyMatrix):
        return x
    return raw(x if x.ndim == 2 else x.reshape(rows_cols(x.shape)))


@triton.jit
def to_float32(values):
    """Convert loaded values to float32, exactly; int16 holds the bits of bfloat16."""
    if values.dtype == tl.int16:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def round_bfloat16(values):
    """Return the bits of the nearest bfloat16 as int32; the upper half is not cleared.

    NaN stays NaN.
    """
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


@triton.jit
def tile_indices(rows, cols, BM: tl.constexpr, BK: tl.constexpr):
    """Return the first row and the first column (int64) of this program's tile."""
    return tile_at(tl.program_id(0), cols, BM, BK)


@triton.jit
def tile_at(index, cols, BM: tl.constexpr, BK: tl.constexpr):
    """Return the first row and the first column (int64) of a tile."""
    across = tl.maximum(tl.cdiv(cols, BK), 1)
    # The interpreter counts loops in Python's integers.
    index = tl.full([], 0, tl.int64) + index
    return index // across * BM, index % across * BK


@triton.jit
def raise_to(most_ptr, bits):
    """Raise a maximum (int32, the bits of a float32) to that of a tile of bits.

    Nothing else is ordered by it, and the end of the kernel makes it visible: an atomic of the
    default order would drop the L1 cache.
    """
    tl.atomic_max(most_ptr, tl.max(tl.max(bits, 1), 0), sem="relaxed")


@triton.jit
def offsets_2d(m, k, stride_m, stride_k):
    """Return offsets (len(m), len(k)), int64."""
    return m[:, None] * stride_m + k[None, :] * stride_k


@triton.jit
def load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k):
    """Return values (len(m), len(k)), float32, 0 outside the matrix.

    ``x_ptr`` is a pointer, or the ``arguments`` of a ``LazyMatrix``.
    """
    if hasattr(x_ptr, "dtype"):
        inside = (m < rows)[:, None] & (k < cols)[None, :]
        pointers = x_ptr + offsets_2d(m, k, stride_m, stride_k)
        return to_float32(tl.load(pointers, mask=inside, other=0))
    else:
        return x_ptr[0](x_ptr, m, k, rows, cols, stride_m, stride_k)


@triton.jit
def store_tile(out_ptr, values, m, k, rows, cols, stride_m, stride_k):
    """Write values (len(m), len(k)) inside the matrix, converted to the type of the buffer."""
    inside = (m < rows)[:, None] & (k < cols)[None, :]
    pointers = out_ptr + offsets_2d(m, k, stride_m, stride_k)
    tl.store(pointers, values.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def block_max(values, DM: tl.constexpr, DK: tl.constexpr):
    """Return the largest of each (DM, DK) block of a tile: (BM / DM, BK / DK)."""
    M: tl.constexpr = values.shape[0]
    K: tl.constexpr = values.shape[1]
    if DK > 1:
        values = tl.max(tl.reshape(values, (M, K // DK, DK)), 2)
    if DM > 1:
        values = tl.max(tl.reshape(values, (M // DM, DM, K // DK)), 1)
    return values


@triton.jit
def spread(grid, DM: tl.constexpr, DK: tl.constexpr):
    """Repeat each entry of a grid over a (DM, DK) block."""
    M: tl.constexpr = grid.shape[0]
    K: tl.constexpr = grid.shape[1]
    if DM > 1:
        grid = tl.reshape(tl.broadcast_to(grid[:, None, :], (M, DM, K)), (M * DM, K))
    if DK > 1:
        grid = tl.reshape(tl.broadcast_to(grid[:, :, None], (M * DM, K, DK)), (M * DM, K * DK))
    return grid


@triton.jit
def store_factors(out_ptr, factors, r, c, rows, cols, pitch, SWIZZLED: tl.constexpr):
    """Write factors (len(r), len(c)) of a (rows, cols) grid.

    ``pitch`` is the length of a line of the buffer, a multiple of 4.
    """
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    pointers = out_ptr + factor_offsets(r, c, pitch, SWIZZLED)
    tl.store(pointers, factors.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def factor_offsets(r, c, pitch, SWIZZLED: tl.constexpr):
    """Return offsets of factors (r, c), plain or in 128x4 tiles (docs/numerics.md)."""
    if SWIZZLED:
        across = r // 128 * (pitch // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4
        return across[:, None] + (c // 4 * 512 + c % 4)[None, :]
    else:
        return offsets_2d(r, c, pitch, 1)


@triton.jit
def round_up(n, multiple: tl.constexpr):
    """Round ``n`` up to a multiple."""
    return tl.cdiv(n, multiple) * multiple


@triton.jit
def store_codes(
    out_ptr, codes, line0, unit0, lines, groups, stride_line, stride_unit, PACK: tl.constexpr
):  # fmt: skip
    """Write int32 codes packed along the last dim: one a byte, 2 in a byte, or 4 in 3 bytes.

    Args:
        out_ptr: the buffer, uint8.
        codes: (lines of the tile, codes of the tile).
        line0: index of the first line.
        unit0: index of the first code in its line, a multiple of ``PACK``.
        lines: lines of the matrix.
        groups: groups of a line; passed by the host so that Triton knows their alignment. An
            incomplete last group is filled with code 0.
        stride_line: bytes between lines.
        stride_unit: bytes between stored bytes of a line.
        PACK: codes of a group: 1, 2 or 4.
    """
    L: tl.constexpr = codes.shape[0]
    N: tl.constexpr = codes.shape[1]
    line = line0 + tl.arange(0, L)
    group = unit0 // PACK + tl.arange(0, N // PACK)
    if PACK == 1:
        store_tile(out_ptr, codes, line, group, lines, groups, stride_line, stride_unit)
    elif PACK == 2:
        low, high = tl.split(tl.reshape(codes, (L, N // 2, 2)))
        byte = low | (high << 4)
        store_tile(out_ptr, byte, line, group, lines, groups, stride_line, stride_unit)
    else:
        even, odd = tl.split(tl.reshape(codes, (L, N // 4, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        word = first | (second << 6) | (third << 12) | (fourth << 18)
        for i in tl.static_range(3):
            byte = (word >> (8 * i)) & 0xFF
            start = out_ptr + i * stride_unit
            store_tile(start, byte, line, group, lines, groups, stride_line, 3 * stride_unit)


@triton.jit
def split_16(values):
    """Split (L, N) values into 16 tensors (L, N / 16): elements 0, 1, ... of each group of 16."""
    L: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    even, odd = tl.split(tl.reshape(values, (L, N // 16, 2, 2, 2, 2)))
    a0, a2 = tl.split(even)
    a1, a3 = tl.split(odd)
    b0, b4 = tl.split(a0)
    b1, b5 = tl.split(a1)
    b2, b6 = tl.split(a2)
    b3, b7 = tl.split(a3)
    c0, c8 = tl.split(b0)
    c1, c9 = tl.split(b1)
    c2, c10 = tl.split(b2)
    c3, c11 = tl.split(b3)
    c4, c12 = tl.split(b4)
    c5, c13 = tl.split(b5)
    c6, c14 = tl.split(b6)
    c7, c15 = tl.split(b7)
    return c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13, c14, c15


@triton.jit
def join_16(c):
    """Join 16 tensors (L, B) into (L, 16 B): the inverse of ``split_16``."""
    L: tl.constexpr = c[0].shape[0]
    B: tl.constexpr = c[0].shape[1]
    a0 = tl.join(tl.join(c[0], c[8]), tl.join(c[4], c[12]))
    a1 = tl.join(tl.join(c[1], c[9]), tl.join(c[5], c[13]))
    a2 = tl.join(tl.join(c[2], c[10]), tl.join(c[6], c[14]))
    a3 = tl.join(tl.join(c[3], c[11]), tl.join(c[7], c[15]))
    return tl.reshape(tl.join(tl.join(a0, a2), tl.join(a1, a3)), (L, B * 16))
