"""The C interface of the CPU kernels: check tensors and pass their addresses.

A function that ends in `_` returns False if the kernels do not serve a call, or if they ran out of
memory. The caller then uses the reference, which writes every element of the result.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.errors import QTensorError
from qtensor.kernels.cpu.buffers import (
    SHARED,
    BufferLayout,
    addresses,
    buffer_layout,
    has_memory,
    is_columnwise,
    is_plain,
    whole_copies,
)
from qtensor.kernels.cpu.loading import Library, do_without, serve
from qtensor.kernels.cpu.pages import ask_for_large_pages
from qtensor.kernels.cpu.structs import refusal

if TYPE_CHECKING:
    from qtensor.kernels.cpu.pieces import Pieces

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_ROWS = 64
"""Rows of `x` that `linear_` multiplies in the order of few rows: `MOST_ROWS` of few_rows.h."""
ONE_THREAD = 1 << 19
"""Tensors with up to this many elements use one thread: waking another one costs more time."""
_PRODUCTS = 4
"""So many multiplications count as one element for ``ONE_THREAD``."""
# Arguments as c_interface.cpp unpacks them: addresses (0 for a tensor that is absent) and sizes.
_QUANTIZE = struct.Struct("=21q")
_DEQUANTIZE = struct.Struct("=15q")
LINEAR = struct.Struct("=22q")
DOTS, FEW_ROWS, TILES = 0, 1, 2
"""`enum LinearKernel` of structs.h: what `linear_` multiplies with."""
PAIRS = -1
"""Whether `DOTS` and `FEW_ROWS` use dot products of bfloat16 pairs (AVX512-BF16), 0 or 1; -1 for
what is faster on this CPU. The bits are the same."""
_SIDES = {False: 1, True: 2}
"""`enum Side` of structs.h, by whether the data are columnwise."""


_ONE = ctypes.c_float(1.0)
_ONE_ADDRESS = ctypes.addressof(_ONE)


def library() -> Library | Pieces | str:
    """Return the kernels, compiled at first use; or, after one warning, why there are none."""
    kernels = _found()
    return kernels if isinstance(kernels, (Library, str)) else kernels.current()


def is_off() -> bool:
    """Return whether the user has switched the kernels off."""
    return os.environ.get("QTENSOR_NATIVE") == "0"


@functools.cache
def _found() -> Library | Pieces | str:
    if is_off():
        return "switched off by QTENSOR_NATIVE=0"
    # Only a process that computes needs the compiler cache.
    from qtensor.kernels.cpu import pieces, prebuilt  # noqa: PLC0415
    from qtensor.kernels.cpu.sources import build_spec, choose_isa, ops_build_spec  # noqa: PLC0415

    try:
        isa = choose_isa()
        path = prebuilt.find_compiled(build_spec(isa))
        if path is None and pieces.in_background():
            return pieces.Pieces(isa)
        if path is None or prebuilt.find_compiled(ops_build_spec()) is None:
            path = pieces.complete(isa, path)
        return serve(isa, path)
    except (QTensorError, OSError) as error:
        return do_without(str(error))


@dataclass(frozen=True)
class Part:
    """The part of a tensor to decode.

    Attributes:
        first: first row of the (M, K) view; with columnwise blocks, a multiple of the block.
        count: number of rows; None for all rows from `first` on.
        columnwise: the direction to read if the tensor has both; None for the quantizer's own.
        codes_only: leave out the scale of a `per_tensor` format.
    """

    first: int = 0
    count: int | None = None
    columnwise: bool | None = None
    codes_only: bool = False


WHOLE = Part()


def supports(quantizer: Any, dtype: torch.dtype) -> str | None:
    """Return why the kernels do not serve a quantizer and dtype, or None if they do."""
    if (reason := refusal(quantizer)) is not None:
        return reason
    if dtype not in DTYPES:
        return f"{dtype} has no native kernel"
    kernels = library()
    return kernels if isinstance(kernels, str) else None


def quantize_(
    quantizer: Any,
    buffers: Sequence[Tensor],
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> bool:
    """Quantize `x` into `buffers`.

    Args:
        quantizer: the quantizer.
        buffers: in slot order; then the amax (1,) float32 if delayed scaling returns one.
        x: float32, bfloat16 or float16 of any shape and strides.
        scale: encode factors of the caller, float32, or None.
        amax: maxima of the caller, float32, or None.
        seed: of stochastic rounding, one int64, or None.

    Returns:
        False for arguments that need the reference's checks, and for other dtypes.
    """
    if x.dtype not in DTYPES or not has_memory(x):
        return False
    kernels = library()
    layout = buffer_layout(quantizer, x.shape)
    if isinstance(kernels, str) or layout is None:
        return False
    matrix = x
    if not x.is_contiguous():
        matrix = x if x.ndim == 2 else x.reshape(layout.rows, layout.cols)
        if matrix.stride(1) != 1 or matrix.stride(0) < layout.cols:
            matrix = matrix.contiguous()
    factors = (scale, amax, seed)
    arguments = quantize_arguments(quantizer, buffers, x.shape, factors, matrix, x.dtype)
    return arguments is not None and bool(kernels.handle.qt_quantize(arguments) == 0)


def quantize_arguments(
    quantizer: Any,
    buffers: Sequence[Tensor],
    shape: torch.Size,
    factors: tuple[Tensor | None, list[Tensor] | None, Tensor | None],
    x: Tensor | None,
    dtype: torch.dtype,
) -> bytes | None:
    """Return the packed arguments of `qt_quantize`, or None if the kernels do not serve the call.

    Args:
        quantizer: the quantizer.
        buffers: in slot order; then the amax (1,) float32 if delayed scaling returns one.
        shape: of the tensor to quantize.
        factors: scale, maxima and seed, as `quantize_` takes them.
        x: the tensor, contiguous or a matrix with contiguous rows; None if the kernel computes it.
        dtype: of the tensor.
    """
    scale, amax, seed = factors
    layout = buffer_layout(quantizer, shape)
    pointers = None if layout is None else addresses(layout, buffers)
    if (
        layout is None
        or pointers is None
        or not _add_amax(quantizer, layout, pointers, scale, amax)
    ):
        return None
    returned_amax = None
    if quantizer.returns_amax and len(buffers) > len(quantizer.slots):
        returned_amax = buffers[-1]
        if returned_amax.numel() != 1 or not is_plain(returned_amax, torch.float32):
            return None
    for buffer in buffers:
        ask_for_large_pages(buffer)
    return _QUANTIZE.pack(
        layout.address,
        0 if x is None else x.data_ptr(),
        DTYPES[dtype],
        layout.rows,
        layout.cols,
        layout.cols if x is None or x.is_contiguous() else x.stride(0),
        torch.get_num_threads() if layout.rows * layout.cols > ONE_THREAD else 1,
        *pointers[: SHARED + 1],
        0 if scale is None else scale.data_ptr(),
        0 if returned_amax is None else returned_amax.data_ptr(),
        0 if seed is None or not quantizer.stochastic_rounding else int(seed),
        *pointers[SHARED + 1 :],
    )


def _add_amax(
    quantizer: Any,
    layout: BufferLayout,
    pointers: list[int],
    scale: Tensor | None,
    amax: list[Tensor] | None,
) -> bool:
    """Add the addresses of the caller's maxima to `pointers`.

    Returns:
        False if the caller's scale or maxima are not as the kernels read them.
    """
    if scale is None:
        if quantizer.needs_scale:
            return False
    elif (
        layout.scale_inv is None
        or scale.numel() != layout.factors
        or not is_plain(scale, torch.float32)
    ):
        return False
    if amax:
        if len(amax) != len(layout.amax_entries):
            return False
        for value, (position, count) in zip(amax, layout.amax_entries, strict=True):
            if value.numel() != count or not is_plain(value, torch.float32):
                return False
            pointers[position] = value.data_ptr()
    return True


def dequantize_(
    quantizer: Any,
    buffers: Sequence[Tensor],
    shape: Shape,
    out: Tensor,
    part: Part = WHOLE,
) -> bool:
    """Decode `buffers` into `out`.

    Args:
        quantizer: the quantizer of the buffers.
        buffers: in slot order.
        shape: the logical shape of the whole tensor.
        out: float32, bfloat16 or float16, contiguous; holds the rows of `part` only.
        part: the rows and the direction to decode.

    Returns:
        False for parts of buffers and other dtypes, which the reference serves.
    """
    code, layout = DTYPES.get(out.dtype), buffer_layout(quantizer, torch.Size(shape))
    if code is None or layout is None or not (out.is_cpu and out.is_contiguous()):
        return False
    kernels = library()
    columnwise = _reads_columnwise(quantizer, layout, part)
    pointers, copies = _addresses_to_read(layout, buffers, columnwise)
    if isinstance(kernels, str) or pointers is None:
        return False
    count = layout.rows - part.first if part.count is None else part.count
    # The kernel decodes exactly one direction.
    read = [pointers[i] for i in layout.read_positions(columnwise)]
    row, column = ((0, 0, 0), read) if columnwise else (read, (0, 0, 0))
    if out.numel() != count * layout.cols or not 0 <= part.first <= layout.rows - count:
        return False
    ask_for_large_pages(out)
    status = kernels.handle.qt_dequantize(
        _DEQUANTIZE.pack(
            layout.address,
            out.data_ptr(),
            code,
            layout.rows,
            layout.cols,
            part.first,
            count,
            torch.get_num_threads() if count * layout.cols > ONE_THREAD else 1,
            *row,
            *column,
            _ONE_ADDRESS if part.codes_only else pointers[SHARED],
        )
    )
    del copies  # The kernel has read them.
    return bool(status == 0)


def _reads_columnwise(quantizer: Any, layout: BufferLayout, part: Part) -> bool:
    """Return whether a decode of `part` reads the columnwise buffers."""
    if part.columnwise is None or layout.scale_inv is not None:
        return layout.reads_columnwise
    return is_columnwise(quantizer, part.columnwise)


def _addresses_to_read(
    layout: BufferLayout, buffers: Sequence[Tensor], columnwise: bool
) -> tuple[list[int] | None, list[Tensor] | None]:
    """Return the addresses of one direction of a tensor or a part, and the copies that they need.

    The addresses are None if no kernel reads the buffers. The caller holds the copies until its
    kernel has run.
    """
    read = (*layout.read_positions(columnwise), SHARED)
    pointers = addresses(layout, buffers, not columnwise, read)
    if pointers is not None:
        return pointers, None
    copies = whole_copies(layout, buffers, read)
    return None if copies is None else addresses(layout, copies, False, read), copies


class Rows(NamedTuple):
    """The left operand of `linear_`: x (..., K), and the factors that follow the sums.

    Attributes:
        x: bfloat16, float32 or float16, with contiguous rows.
        factor: float32, one for each row of `x` or one for all rows; or None.
    """

    x: Tensor
    factor: Tensor | None = None


def linear_(
    weight: Any,
    rows: Rows,
    bias: Tensor | None,
    out: Tensor,
    *,
    kernel: int = DOTS,
    across: Part | None = None,
) -> bool:
    """Compute `out = x @ weight.T * factor + bias`.

    Args:
        weight: its `quantizer`, its `buffers` in slot order and its `shape` (N, K), rowwise.
        rows: the left operand; bfloat16 except for `FEW_ROWS`.
        bias: (N,) float32, or None.
        out: (..., N) float32, bfloat16 or float16, contiguous.
        kernel: `DOTS` (AVX-512), `TILES` (AMX-BF16), or `FEW_ROWS`, whose sums have the order
            that docs/numerics.md states for up to `MOST_ROWS` rows.
        across: if not None, the shape of the weight is (K, N), and the values are those of this
            part, which is all of it in one direction. Not with `FEW_ROWS`.

    Returns:
        False if no kernel computes it: `DOTS` without AVX-512, `TILES` without AMX.
    """
    x, factor = rows
    code, layout = DTYPES.get(out.dtype), buffer_layout(weight.quantizer, torch.Size(weight.shape))
    if code is None or layout is None or not x.numel():
        return False
    columns, length = layout.rows, layout.cols
    columnwise = across is not None and _reads_columnwise(weight.quantizer, layout, across)
    if across is not None:
        columns, length = length, columns
    count, stride = x.numel() // length, _row_stride(x, length)
    if stride is None or not (kernel == FEW_ROWS or x.dtype is torch.bfloat16):
        return False
    if not _are_linear_operands((count, columns, length), rows, bias, out):
        return False
    kernels = library()
    pointers, copies = _addresses_to_read(layout, weight.buffers, columnwise)
    read = layout.read_positions(columnwise)
    if isinstance(kernels, str) or pointers is None or not pointers[read[0]]:
        return False
    work = max(count, _PRODUCTS) * columns * length // _PRODUCTS
    status = kernels.handle.qt_linear(
        LINEAR.pack(
            layout.address,
            0,  # x is not quantized,
            0,  # and not transposed.
            x.data_ptr(),
            DTYPES[x.dtype],
            stride,
            count,
            length,
            columns,
            torch.get_num_threads() if work > ONE_THREAD else 1,
            *(pointers[i] for i in read),
            pointers[SHARED],
            0 if factor is None else factor.data_ptr(),
            int(factor is not None and factor.numel() > 1),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            code,
            kernel,
            0 if across is None else _SIDES[columnwise],
            PAIRS,
        )
    )
    del copies  # The kernel has read them.
    return bool(status == 0)


def _row_stride(x: Tensor, length: int) -> int | None:
    """Return the stride between rows of `x`, or None if the kernels do not read `x`."""
    if x.dtype not in DTYPES or not has_memory(x):
        return None
    if x.is_contiguous():
        return length
    strided = x.ndim == 2 and x.stride(1) == 1 and x.stride(0) >= length
    return x.stride(0) if strided else None


def _are_linear_operands(
    sizes: tuple[int, int, int], rows: Rows, bias: Tensor | None, out: Tensor
) -> bool:
    """Return whether tensors have the dtypes and sizes (M, N, K) that `linear_` documents."""
    (count, columns, length), (x, factor) = sizes, rows
    return (
        is_plain(out, out.dtype)
        and x.shape[-1] == length
        and count * columns == out.numel()
        and (factor is None or (is_plain(factor, torch.float32) and factor.numel() in (1, count)))
        and (bias is None or (is_plain(bias, torch.float32) and bias.numel() == columns))
    )
