"""The C interface of the CPU kernels: load the library, hand buffers over."""

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
from qtensor.kernels.cpu.plan import ABI, FORMATS, Plan, make_plan
from qtensor.layout import Shape, buffer_shapes, rows_cols

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ONE_THREAD = 1 << 19
"""Elements below which waking a second thread costs more than it brings."""

_PLAIN = (Tensor, torch.nn.Parameter)
"""Types whose memory may be read at once. A result that a collective still fills has another one, and ops wait for it."""
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
# Arguments as entry.cpp has them. The structs hold addresses (0 for none) and sizes.
_QUANTIZE = struct.Struct("=19q")
_LINEAR = (*(_POINTER,) * 2, *(_SIZE,) * 4, *(_POINTER,) * 5, _SIZE, _POINTER, _POINTER, _SIZE)
_DEQUANTIZE = struct.Struct("=15q")


_ONE = ctypes.c_float(1.0)
_ONE_ADDRESS = ctypes.addressof(_ONE)


class Library:
    """The loaded kernels."""

    def __init__(self, path: str) -> None:
        handle = ctypes.CDLL(path)
        expected = ABI * 1000 + ctypes.sizeof(Plan)
        if handle.qt_abi() != expected:
            raise OSError(f"{path} has interface {handle.qt_abi()}, this qtensor {expected}")
        handle.qt_quantize.argtypes = handle.qt_dequantize.argtypes = (ctypes.c_char_p,)
        handle.qt_linear.argtypes = _LINEAR
        handle.qt_run.argtypes = (_POINTER, ctypes.c_char_p)
        handle.qt_delayed_begin.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
        handle.qt_record_amax.argtypes = (_POINTER, ctypes.c_char_p, _SIZE)
        handle.qt_record_gradient_amax.argtypes = (*(_POINTER,) * 3, ctypes.c_char_p, _SIZE)
        self.handle = handle
        self.run = handle.qt_run
        self.linear = handle.qt_linear
        self.quantize = handle.qt_quantize
        self.dequantize = handle.qt_dequantize


@functools.cache
def library() -> Library | str:
    """The kernels, built at the first call; or, after one warning, why there are none."""
    if os.environ.get("QTENSOR_NATIVE") == "0":
        return "switched off by QTENSOR_NATIVE=0"
    try:
        # Only a process that computes needs the compiler cache.
        from qtensor.kernels.cpu.prebuilt import provide  # noqa: PLC0415
        from qtensor.kernels.cpu.sources import choose_isa  # noqa: PLC0415

        return Library(str(provide(choose_isa())))
    except (QTensorError, OSError) as error:
        reason = str(error)
    warnings.warn(
        f"qtensor runs without its native CPU kernels (same bytes, many times slower): {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
    return reason


SHARED = 8
# Where a buffer goes among those of a call: data, factors, amax, given amax of rows, then of columns, then what they share.
_PLACES = {
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
    """What of a tensor to decode.

    Attributes:
        first: first row of the (M, K) view; with columnwise blocks of factors, a multiple of the block.
        count: rows; all that follow if None.
        columnwise: the direction to read where there are two; the quantizer's if None.
        codes_only: leave out the factor of a ``per_tensor`` format.
    """

    first: int = 0
    count: int | None = None
    columnwise: bool | None = None
    codes_only: bool = False


WHOLE = Part()


@dataclass(frozen=True, slots=True)
class Site:
    """A quantizer and a shape as the kernels take them."""

    plan: Plan
    address: int
    rows: int
    cols: int
    slots: tuple[tuple[int, int, torch.Size, torch.dtype], ...]
    """(slot, place, shape, dtype) of each buffer; the one that both directions share has a place of its own."""
    scale_inv: int | None
    """The slot of the one buffer that both directions share."""
    factors: int
    """Entries of that buffer."""
    given: tuple[tuple[int, int], ...]
    """(place, entries) of the maxima of a call, in the order of ``Quantizer.amax``."""
    side: int
    """Where the quantizer's value lies: 0 in the rowwise buffers, 1 in the columnwise ones."""


_SITES: dict[tuple[str, torch.Size], Site | None] = {}
_MOST_SITES = 4096


def site_of(codec: Any, shape: Shape) -> Site | None:
    """None for what the kernels do not have: other formats, and tensors without elements."""
    key = codec.canonical, shape
    try:
        return _SITES[key]  # type: ignore[index]
    except KeyError:
        if len(_SITES) >= _MOST_SITES:
            _SITES.clear()
        site = _new_site(codec, shape) if codec.format in FORMATS and 0 not in shape else None
        return _SITES.setdefault(key, site)  # type: ignore[arg-type]


def _new_site(codec: Any, shape: Shape) -> Site:
    names = [slot.name for slot in codec.slots]
    sizes = [torch.Size(size) for size in buffer_shapes(codec.slots, shape)]
    shared = names.index("_scale_inv") if "_scale_inv" in names else None
    slots = tuple(
        (i, _PLACES[slot.name], sizes[i], slot.dtype) for i, slot in enumerate(codec.slots)
    )
    taken = [place for _, place, _, _ in slots]
    entries = (
        [torch.Size(size).numel() for size in codec.amax_shapes(shape)] if _has_amax(codec) else []
    )
    places = (3,) if shared is not None else tuple(p + 3 for p in (0, 4) if p in taken)
    plan = make_plan(codec)
    rows, cols = rows_cols(shape)
    return Site(
        plan,
        ctypes.addressof(plan),
        rows,
        cols,
        slots,
        shared,
        0 if shared is None else sizes[shared].numel(),
        tuple(zip(places, entries, strict=False)),
        (0 if 0 in taken else 1) if shared is not None else int(codec.side() == "_columnwise"),
    )


def _has_amax(codec: Any) -> bool:
    return codec.spec.block is None or codec.spec.scale == "e4m3"


def _floats(t: Tensor, count: int) -> bool:
    """Whether a kernel can read ``count`` float32 of it."""
    plain = type(t) in _PLAIN and t.is_cpu and t.dtype == torch.float32
    return plain and t.numel() == count and t.is_contiguous()


def _pointers(site: Site, buffers: Sequence[Tensor]) -> list[int] | None:
    """Addresses by place, 0 for what is absent; None where a buffer is not that of a whole tensor: parts lack padding, which kernels count on."""
    pointers = [0] * 9
    for slot, place, size, dtype in site.slots:
        buffer = buffers[slot]
        if buffer.shape != size or buffer.dtype is not dtype:
            return None
        if not (buffer.is_cpu and buffer.is_contiguous()):
            return None
        pointers[place] = buffer.data_ptr()
    return pointers


def supports(codec: Any, dtype: torch.dtype) -> str | None:
    """Why the kernels do not serve a format and dtype, or None."""
    if codec.format not in FORMATS:
        return f"{codec.format} has no native kernel"
    if dtype not in DTYPES:
        return f"{dtype} has no native kernel"
    found = library()
    return found if isinstance(found, str) else None


def quantize_(
    codec: Any,
    buffers: Sequence[Tensor],
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> bool:
    """Write the buffers of ``codec`` (in slot order, and the amax that delayed scaling returns) from ``x``.

    Returns:
        False, with nothing written, where the arguments need the reference's checks or a dtype that is not served.
    """
    code, site = DTYPES.get(x.dtype), site_of(codec, x.shape)
    if code is None or site is None or type(x) not in _PLAIN:
        return False
    kernels = library()
    pointers = _pointers(site, buffers)
    if (
        isinstance(kernels, str)
        or pointers is None
        or not _take_given(codec, site, pointers, scale, amax)
    ):
        return False
    for buffer in buffers:
        ask_for_large_pages(buffer)
    cols, matrix, stride = site.cols, x, site.cols
    if not x.is_contiguous():
        matrix = x if x.ndim == 2 else x.reshape(site.rows, cols)
        stride = matrix.stride(0)
        if matrix.stride(1) != 1 or stride < cols:
            matrix, stride = matrix.contiguous(), cols
    status = kernels.quantize(
        _QUANTIZE.pack(
            site.address,
            matrix.data_ptr(),
            code,
            site.rows,
            cols,
            stride,
            torch.get_num_threads() if site.rows * cols > ONE_THREAD else 1,
            *pointers,
            0 if scale is None else scale.data_ptr(),
            buffers[-1].data_ptr() if codec.returns_amax and len(buffers) > len(codec.slots) else 0,
            0 if seed is None or not codec.stochastic_rounding else int(seed),
        )
    )
    return bool(status == 0)


def quantize_arguments(
    codec: Any,
    buffers: Sequence[Tensor],
    shape: torch.Size,
    given: tuple[Tensor | None, list[Tensor] | None, Tensor | None],
    x: Tensor | None,
    dtype: torch.dtype,
) -> bytes | None:
    """What a kernel takes that makes the tensor which it quantizes.

    Args:
        codec: the quantizer.
        buffers: in slot order, and the amax that delayed scaling returns.
        shape: of the tensor.
        given: scale, maxima and seed.
        x: where the tensor is kept, contiguous, or None.
        dtype: of the tensor.

    Returns:
        None where the kernels do not serve the call.
    """
    scale, amax, seed = given
    site = site_of(codec, shape)
    pointers = None if site is None else _pointers(site, buffers)
    if site is None or pointers is None or not _take_given(codec, site, pointers, scale, amax):
        return None
    for buffer in buffers:
        ask_for_large_pages(buffer)
    found = buffers[-1] if codec.returns_amax and len(buffers) > len(codec.slots) else None
    return _QUANTIZE.pack(
        site.address,
        0 if x is None else x.data_ptr(),
        DTYPES[dtype],
        site.rows,
        site.cols,
        site.cols,
        torch.get_num_threads() if site.rows * site.cols > ONE_THREAD else 1,
        *pointers,
        0 if scale is None else scale.data_ptr(),
        0 if found is None else found.data_ptr(),
        0 if seed is None or not codec.stochastic_rounding else int(seed),
    )


def _take_given(
    codec: Any,
    site: Site,
    pointers: list[int],
    scale: Tensor | None,
    amax: list[Tensor] | None,
) -> bool:
    """Whether factors and maxima that come with a call are as the kernels read them; adds the addresses of the maxima."""
    if scale is None:
        if codec.needs_scale:
            return False
    elif site.scale_inv is None or not _floats(scale, site.factors):
        return False
    if amax:
        if len(amax) != len(site.given):
            return False
        for value, (place, count) in zip(amax, site.given, strict=True):
            if not _floats(value, count):
                return False
            pointers[place] = value.data_ptr()
    return True


def dequantize_(
    codec: Any,
    buffers: Sequence[Tensor],
    shape: Shape,
    out: Tensor,
    part: Part = WHOLE,
) -> bool:
    """Decode ``buffers`` (in slot order) into ``out``.

    Args:
        codec: the quantizer of the buffers.
        buffers: in slot order.
        shape: the logical shape of the whole tensor.
        out: float32, bfloat16 or float16, contiguous, of the rows that ``part`` names.
        part: what to decode.

    Returns:
        False, with nothing written, for what the reference has to do.
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
    # Exactly one direction is handed over.
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
    """``out = x @ weight.T * factor + bias`` from the rowwise buffers of a weight, decoded to bfloat16 in the cache.

    Args:
        weight: its ``quantizer``, its ``buffers`` in slot order and its ``shape`` (N, K).
        x: (..., K) bfloat16, contiguous.
        factor: float32 of the rows of ``x`` (or one for all), or None.
        bias: (N,) float32, or None.
        out: (..., N), contiguous.

    Returns:
        False, with nothing written, where the CPU has no bfloat16 dot products or the weight no kernel.
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
