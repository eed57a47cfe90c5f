"""The C interface of the CPU kernels: load the library, check tensors and pass their addresses.

A function that ends in `_` returns False if the kernels do not serve a call, or if they ran out of
memory. The caller then uses the reference, which writes every element of the result.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.errors import QTensorError
from qtensor.kernels.cpu.pages import ask_for_large_pages
from qtensor.kernels.cpu.structs import ABI, FORMATS, CQuantizer, c_quantizer
from qtensor.layout import Shape, buffer_shapes, rows_cols

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ONE_THREAD = 1 << 19
"""Tensors with up to this many elements use one thread: to wake a second one costs more than it saves."""

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
"""Types of tensors whose memory native code may access at once.

The result of a collective that still runs has another type; ops on it wait for the collective.
"""
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
# Arguments as c_interface.cpp unpacks them: addresses (0 for a tensor that is absent) and sizes.
_QUANTIZE = struct.Struct("=19q")
_LINEAR = (*(_POINTER,) * 2, *(_SIZE,) * 4, *(_POINTER,) * 5, _SIZE, _POINTER, _POINTER, _SIZE)
_DEQUANTIZE = struct.Struct("=15q")


_ONE = ctypes.c_float(1.0)
_ONE_ADDRESS = ctypes.addressof(_ONE)


class Library:
    """The loaded kernels.

    Attributes:
        handle: the library, for its functions without an attribute of their own.
        run, linear, quantize, dequantize: functions of c_interface.cpp and program.cpp.

    Raises:
        OSError: the system cannot load the library, or it is not one of this version of qtensor.
    """

    def __init__(self, path: str) -> None:
        handle = ctypes.CDLL(path)
        try:
            _check_interface(path, handle)
            _declare(handle)
        except AttributeError as error:
            raise OSError(f"{path} is not a library of CPU kernels: {error}") from None
        self.handle = handle
        self.run = handle.qt_run
        self.linear = handle.qt_linear
        self.quantize = handle.qt_quantize
        self.dequantize = handle.qt_dequantize


def _check_interface(path: str, handle: ctypes.CDLL) -> None:
    expected = ABI * 1000 + ctypes.sizeof(CQuantizer)
    interface = handle.qt_abi()
    if interface != expected:
        raise OSError(f"{path} has interface {interface}, this qtensor {expected}")


def _declare(handle: ctypes.CDLL) -> None:
    """Declare the arguments of every function, so that a library without one of them is refused."""
    for name in ("qt_norm", "qt_sum_rows", "qt_activation"):
        getattr(handle, name).argtypes = (_POINTER, _SIZE)
    handle.qt_fused.argtypes = (_POINTER, _POINTER, _SIZE, ctypes.c_char_p)
    handle.qt_quantize.argtypes = handle.qt_dequantize.argtypes = (ctypes.c_char_p,)
    handle.qt_linear.argtypes = _LINEAR
    handle.qt_run.argtypes = (_POINTER, ctypes.c_char_p)
    handle.qt_delayed_begin.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    handle.qt_record_amax.argtypes = (_POINTER, ctypes.c_char_p, _SIZE)
    handle.qt_record_gradient_amax.argtypes = (*(_POINTER,) * 3, ctypes.c_char_p, _SIZE)


@functools.cache
def library() -> Library | str:
    """Return the kernels, built at the first call; or, after one warning, the reason why there are none."""
    if os.environ.get("QTENSOR_NATIVE") == "0":
        return "switched off by QTENSOR_NATIVE=0"
    try:
        return _load()
    except (QTensorError, OSError) as error:
        reason = str(error)
    warnings.warn(
        f"qtensor runs without its native CPU kernels (same bytes, many times slower): {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
    return reason


def _load() -> Library:
    # Only a process that computes needs the compiler cache.
    from qtensor.kernels.cpu import prebuilt  # noqa: PLC0415
    from qtensor.kernels.cpu.sources import choose_isa  # noqa: PLC0415

    isa = choose_isa()
    path = prebuilt.provide(isa)
    try:
        return Library(str(path))
    except OSError as error:
        try:
            replacement = prebuilt.replace(isa, path)
        except QTensorError as second:
            raise OSError(f"{error}; and it cannot be compiled again: {second}") from None
        if replacement is None:
            raise
    return Library(str(replacement))


SHARED = 8
# Index of a buffer's address in a call: data, scales, amax and the caller's amax of the rowwise
# direction, the same four of the columnwise direction, then the scales that both directions share.
_POSITIONS = {
    "_data": 0,
    "_rowwise_data": 0,
    "_rowwise_scale_inv": 1,
    "_amax_rowwise": 2,
    "_transpose": 4,
    "_columnwise_data": 4,
    "_columnwise_scale_inv": 5,
    "_amax_columnwise": 6,
    "_scale_inv": SHARED,
}


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


@dataclass(frozen=True, slots=True)
class Site:
    """The layout of a quantizer's buffers for one shape, as the kernels take it.

    Attributes:
        quantizer: the struct that the kernels read.
        address: its address.
        rows: rows of the (M, K) view.
        cols: its columns.
        slots: (slot, position among the addresses of a call, shape, dtype) of each buffer.
        scale_inv: slot of the one buffer of scales that both directions share, or None.
        factors: number of elements of that buffer.
        amax_entries: (position, number of elements) of each amax of the caller, in the order of
            `Quantizer.amax`.
        side: 0 if the value of the tensor is read from the rowwise buffers, 1 for the columnwise
            ones.
    """

    quantizer: CQuantizer
    address: int
    rows: int
    cols: int
    slots: tuple[tuple[int, int, torch.Size, torch.dtype], ...]
    scale_inv: int | None
    factors: int
    amax_entries: tuple[tuple[int, int], ...]
    side: int


_SITES: dict[tuple[str, torch.Size], Site | None] = {}
_MAX_SITES = 4096


def site_of(codec: Any, shape: Shape) -> Site | None:
    """Return the layout for a quantizer and a shape, or None if the kernels do not serve them.

    They do not serve formats outside `FORMATS` and tensors without elements.
    """
    key = codec.canonical, shape
    try:
        return _SITES[key]  # type: ignore[index]
    except KeyError:
        if len(_SITES) >= _MAX_SITES:
            _SITES.clear()
        site = _new_site(codec, shape) if codec.format in FORMATS and 0 not in shape else None
        return _SITES.setdefault(key, site)  # type: ignore[arg-type]


def _new_site(codec: Any, shape: Shape) -> Site:
    names = [slot.name for slot in codec.slots]
    sizes = [torch.Size(size) for size in buffer_shapes(codec.slots, shape)]
    shared = names.index("_scale_inv") if "_scale_inv" in names else None
    slots = tuple(
        (i, _POSITIONS[slot.name], sizes[i], slot.dtype) for i, slot in enumerate(codec.slots)
    )
    positions = [position for _, position, _, _ in slots]
    entries = (
        [torch.Size(size).numel() for size in codec.amax_shapes(shape)] if _has_amax(codec) else []
    )
    amax_positions = (3,) if shared is not None else tuple(p + 3 for p in (0, 4) if p in positions)
    side = int(0 not in positions) if shared is not None else int(codec.side() == "_columnwise")
    quantizer = c_quantizer(codec)
    rows, cols = rows_cols(shape)
    return Site(
        quantizer=quantizer,
        address=ctypes.addressof(quantizer),
        rows=rows,
        cols=cols,
        slots=slots,
        scale_inv=shared,
        factors=0 if shared is None else sizes[shared].numel(),
        amax_entries=tuple(zip(amax_positions, entries, strict=False)),
        side=side,
    )


def _has_amax(codec: Any) -> bool:
    return codec.spec.block is None or codec.spec.scale == "e4m3"


def is_plain(t: Tensor, dtype: torch.dtype) -> bool:
    """Return whether native code can access the elements of `t` as an array of `dtype`."""
    return type(t) in PLAIN_TYPES and t.dtype is dtype and t.is_cpu and t.is_contiguous()


def _pointers(site: Site, buffers: Sequence[Tensor]) -> list[int] | None:
    """Return the addresses of the buffers by position, 0 for buffers that are absent.

    None if a buffer is not that of a whole tensor: a part has no padding, and the kernels write and
        read padding.
    """
    if len(buffers) < len(site.slots):
        return None
    pointers = [0] * 9
    for slot, position, size, dtype in site.slots:
        buffer = buffers[slot]
        if buffer.shape != size or buffer.dtype is not dtype:
            return None
        if not (buffer.is_cpu and buffer.is_contiguous()):
            return None
        pointers[position] = buffer.data_ptr()
    return pointers


def supports(codec: Any, dtype: torch.dtype) -> str | None:
    """Return why the kernels do not serve a format and dtype, or None if they do."""
    if codec.format not in FORMATS:
        return f"{codec.format} has no native kernel"
    if dtype not in DTYPES:
        return f"{dtype} has no native kernel"
    kernels = library()
    return kernels if isinstance(kernels, str) else None


def quantize_(
    codec: Any,
    buffers: Sequence[Tensor],
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> bool:
    """Quantize `x` into `buffers`.

    Args:
        codec: the quantizer.
        buffers: in slot order; then the amax (1,) float32 if delayed scaling returns one.
        x: float32, bfloat16 or float16 of any shape and strides.
        scale: encode factors of the caller, float32, or None.
        amax: maxima of the caller, float32, or None.
        seed: of stochastic rounding, one int64, or None.

    Returns:
        False for arguments that need the reference's checks, and for other dtypes.
    """
    if x.dtype not in DTYPES or type(x) not in PLAIN_TYPES:
        return False
    kernels = library()
    site = site_of(codec, x.shape)
    if isinstance(kernels, str) or site is None:
        return False
    matrix = x
    if not x.is_contiguous():
        matrix = x if x.ndim == 2 else x.reshape(site.rows, site.cols)
        if matrix.stride(1) != 1 or matrix.stride(0) < site.cols:
            matrix = matrix.contiguous()
    factors = (scale, amax, seed)
    arguments = quantize_arguments(codec, buffers, x.shape, factors, matrix, x.dtype)
    return arguments is not None and bool(kernels.quantize(arguments) == 0)


def quantize_arguments(
    codec: Any,
    buffers: Sequence[Tensor],
    shape: torch.Size,
    factors: tuple[Tensor | None, list[Tensor] | None, Tensor | None],
    x: Tensor | None,
    dtype: torch.dtype,
) -> bytes | None:
    """Return the packed arguments of `qt_quantize`, or None if the kernels do not serve the call.

    Args:
        codec: the quantizer.
        buffers: in slot order; then the amax (1,) float32 if delayed scaling returns one.
        shape: of the tensor to quantize.
        factors: scale, maxima and seed, as `quantize_` takes them.
        x: the tensor, contiguous or a matrix with contiguous rows; None if the kernel computes it.
        dtype: of the tensor.
    """
    scale, amax, seed = factors
    site = site_of(codec, shape)
    pointers = None if site is None else _pointers(site, buffers)
    if site is None or pointers is None or not _add_amax(codec, site, pointers, scale, amax):
        return None
    returned_amax = None
    if codec.returns_amax and len(buffers) > len(codec.slots):
        returned_amax = buffers[-1]
        if returned_amax.numel() != 1 or not is_plain(returned_amax, torch.float32):
            return None
    for buffer in buffers:
        ask_for_large_pages(buffer)
    return _QUANTIZE.pack(
        site.address,
        0 if x is None else x.data_ptr(),
        DTYPES[dtype],
        site.rows,
        site.cols,
        site.cols if x is None or x.is_contiguous() else x.stride(0),
        torch.get_num_threads() if site.rows * site.cols > ONE_THREAD else 1,
        *pointers,
        0 if scale is None else scale.data_ptr(),
        0 if returned_amax is None else returned_amax.data_ptr(),
        0 if seed is None or not codec.stochastic_rounding else int(seed),
    )


def _add_amax(
    codec: Any,
    site: Site,
    pointers: list[int],
    scale: Tensor | None,
    amax: list[Tensor] | None,
) -> bool:
    """Add the addresses of the caller's maxima to `pointers`.

    Returns:
        False if the caller's scale or maxima are not as the kernels read them.
    """
    if scale is None:
        if codec.needs_scale:
            return False
    elif (
        site.scale_inv is None
        or scale.numel() != site.factors
        or not is_plain(scale, torch.float32)
    ):
        return False
    if amax:
        if len(amax) != len(site.amax_entries):
            return False
        for value, (position, count) in zip(amax, site.amax_entries, strict=True):
            if value.numel() != count or not is_plain(value, torch.float32):
                return False
            pointers[position] = value.data_ptr()
    return True


def dequantize_(
    codec: Any,
    buffers: Sequence[Tensor],
    shape: Shape,
    out: Tensor,
    part: Part = WHOLE,
) -> bool:
    """Decode `buffers` into `out`.

    Args:
        codec: the quantizer of the buffers.
        buffers: in slot order.
        shape: the logical shape of the whole tensor.
        out: float32, bfloat16 or float16, contiguous; holds the rows of `part` only.
        part: the rows and the direction to decode.

    Returns:
        False for parts of buffers and other dtypes, which the reference serves.
    """
    code, site = DTYPES.get(out.dtype), site_of(codec, torch.Size(shape))
    if code is None or site is None or not out.is_contiguous():
        return False
    kernels = library()
    pointers = _pointers(site, buffers)
    if isinstance(kernels, str) or pointers is None:
        return False
    side = site.side
    if part.columnwise is not None and site.scale_inv is None:
        side = int(codec.side(part.columnwise) == "_columnwise")
    count = site.rows - part.first if part.count is None else part.count
    # The kernel decodes exactly one direction.
    row = pointers[:3] if side == 0 else (0, 0, 0)
    column = pointers[4:7] if side == 1 else (0, 0, 0)
    if out.numel() != count * site.cols or not 0 <= part.first <= site.rows - count:
        return False
    ask_for_large_pages(out)
    status = kernels.dequantize(
        _DEQUANTIZE.pack(
            site.address,
            out.data_ptr(),
            code,
            site.rows,
            site.cols,
            part.first,
            count,
            torch.get_num_threads() if count * site.cols > ONE_THREAD else 1,
            *row,
            *column,
            _ONE_ADDRESS if part.codes_only else pointers[SHARED],
        )
    )
    return bool(status == 0)


def linear_(
    weight: Any,
    x: Tensor,
    factor: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
) -> bool:
    """Compute `out = x @ weight.T * factor + bias`; the rowwise buffers of the weight are decoded to bfloat16.

    Args:
        weight: its ``quantizer``, its ``buffers`` in slot order and its ``shape`` (N, K).
        x: (..., K) bfloat16, contiguous.
        factor: float32, one for each row of `x` or one for all rows; or None.
        bias: (N,) float32, or None.
        out: (..., N) float32, bfloat16 or float16, contiguous.

    Returns:
        False if the CPU has no bfloat16 dot products or the weight no kernel.
    """
    code, site = DTYPES.get(out.dtype), site_of(weight.quantizer, torch.Size(weight.shape))
    if code is None or site is None or not x.numel() or not out.is_contiguous():
        return False
    kernels = library()
    pointers = _pointers(site, weight.buffers)
    if isinstance(kernels, str) or pointers is None or not pointers[0]:
        return False
    status = kernels.linear(
        site.address,
        x.data_ptr(),
        x.numel() // site.cols,
        site.cols,
        site.rows,
        torch.get_num_threads(),
        *pointers[:3],
        pointers[SHARED],
        None if factor is None else factor.data_ptr(),
        int(factor is not None and factor.numel() > 1),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        code,
    )
    return bool(status == 0)
