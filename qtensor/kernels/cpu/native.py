"""The C interface of the CPU kernels: load the library, hand buffers over."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.errors import QTensorError
from qtensor.kernels.cpu.plan import ABI, FORMATS, Plan, make_plan
from qtensor.layout import Shape, buffer_shapes, rows_cols

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ONE_THREAD = 1 << 19
"""Elements below which waking a second thread costs more than it brings."""

_PLAIN = (Tensor, torch.nn.Parameter)
"""Types whose memory may be read at once. A result that a collective still fills has another one, and ops wait for it."""
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
# Arguments after the plan, as entry.cpp has them.
_QUANTIZE = (_POINTER, _POINTER, *(_SIZE,) * 5, *(_POINTER,) * 11, _SIZE)
_DEQUANTIZE = (_POINTER, _POINTER, *(_SIZE,) * 6, *(_POINTER,) * 7)


_ONE = ctypes.c_float(1.0)
_ONE_ADDRESS = ctypes.addressof(_ONE)


class Library:
    """The loaded kernels."""

    def __init__(self, path: str) -> None:
        handle = ctypes.CDLL(path)
        expected = ABI * 1000 + ctypes.sizeof(Plan)
        if handle.qt_abi() != expected:
            raise OSError(f"{path} has interface {handle.qt_abi()}, this qtensor {expected}")
        handle.qt_quantize.argtypes = _QUANTIZE
        handle.qt_dequantize.argtypes = _DEQUANTIZE
        self.quantize = handle.qt_quantize
        self.dequantize = handle.qt_dequantize


@functools.cache
def library() -> Library | str:
    """The kernels, built at the first call; or, after one warning, why there are none."""
    if os.environ.get("QTENSOR_NATIVE") == "0":
        return "switched off by QTENSOR_NATIVE=0"
    try:
        # Only a process that computes needs the compiler cache.
        from qtensor.build import build  # noqa: PLC0415
        from qtensor.kernels.cpu.sources import choose_isa, recipe  # noqa: PLC0415

        return Library(str(build(recipe(choose_isa()))))
    except (QTensorError, OSError) as error:
        reason = str(error)
    warnings.warn(
        f"qtensor runs without its native CPU kernels (same bytes, many times slower): {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
    return reason


# Where a buffer goes among the eight of a call: data, factors, amax, given amax of rows, then of columns.
_PLACES = {
    "_data": 0,
    "_rowwise_data": 0,
    "_rowwise_scale_inv": 1,
    "_amax_rowwise": 2,
    "_transpose": 4,
    "_columnwise_data": 4,
    "_columnwise_scale_inv": 5,
    "_amax_columnwise": 6,
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


@dataclass(frozen=True)
class Binding:
    """A quantizer as the kernels take it."""

    plan: Plan
    address: int
    places: tuple[tuple[int, int], ...]
    """(slot, place) of each buffer."""
    scale_inv: int | None
    """The slot of the one buffer that both directions share."""
    given: tuple[int, ...]
    """Places of the maxima of a call, in the order of ``Quantizer.amax``."""
    reads: tuple[int, ...]
    """Places of the buffers that decoding reads."""


class _Unhashed:
    """Carries a quantizer past a cache whose key holds its canonical string: hashing one costs more than a small tensor."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


_BINDINGS: dict[str, Binding | None] = {}
"""By canonical string."""


def _bind(codec: Any) -> Binding | None:
    """None for a format that the kernels do not have."""
    try:
        return _BINDINGS[codec.canonical]
    except KeyError:
        bound = _new_binding(codec) if codec.format in FORMATS else None
        return _BINDINGS.setdefault(codec.canonical, bound)


def _new_binding(codec: Any) -> Binding:
    names = [slot.name for slot in codec.slots]
    places = tuple((i, _PLACES[name]) for i, name in enumerate(names) if name != "_scale_inv")
    plan = make_plan(codec)
    shared = names.index("_scale_inv") if "_scale_inv" in names else None
    taken = [place for _, place in places]
    if shared is not None:
        side = 0 if 0 in taken else 4
    else:
        side = 0 if codec.side() == "_rowwise" else 4
    given = (3,) if shared is not None else tuple(p + 3 for p in (0, 4) if p in taken)
    reads = tuple(place for place in taken if side <= place < side + 4)
    return Binding(plan, ctypes.addressof(plan), places, shared, given, reads)


@functools.lru_cache(maxsize=4096)
def _shapes(canonical: str, shape: tuple[int, ...], codec: _Unhashed) -> tuple[torch.Size, ...]:
    return tuple(torch.Size(size) for size in buffer_shapes(codec.value.slots, shape))


def _fit(codec: Any, buffers: Sequence[Tensor], shape: Shape) -> bool:
    """Whether the buffers are those of a whole tensor: parts may lack padding, and kernels count on it."""
    expected = _shapes(codec.canonical, tuple(shape), _Unhashed(codec))
    return all(
        buffer.shape == size and buffer.is_contiguous()
        for buffer, size in zip(buffers, expected, strict=False)
    )


def _floats(t: Tensor | None, count: int) -> bool:
    """Whether a kernel can read ``count`` float32 of it."""
    return t is None or (
        type(t) in _PLAIN
        and t.dtype == torch.float32
        and t.is_cpu
        and t.numel() == count
        and t.is_contiguous()
    )


def supports(codec: Any, dtype: torch.dtype) -> str | None:
    """Why the kernels do not serve a format and dtype, or None."""
    if codec.format not in FORMATS:
        return f"{codec.format} has no native kernel"
    if dtype not in _DTYPES:
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
    code, bound = _DTYPES.get(x.dtype), _bind(codec)
    if code is None or bound is None or type(x) not in _PLAIN or not x.numel():
        return False
    kernels = library()
    if isinstance(kernels, str):
        return False
    rows, cols = rows_cols(x.shape)
    matrix = x if x.ndim == 2 else x.reshape(rows, cols)
    stride = matrix.stride(0)
    if matrix.stride(1) != 1 or stride < cols:
        matrix, stride = matrix.contiguous(), cols
    pointers: list[int | None] = [None] * 8
    if not _fit(codec, buffers, x.shape):
        return False
    for slot, place in bound.places:
        pointers[place] = buffers[slot].data_ptr()
    scale_inv = None
    if bound.scale_inv is not None:
        scale_inv = buffers[bound.scale_inv]
        if not _floats(scale, scale_inv.numel()) or (codec.needs_scale and scale is None):
            return False
    elif scale is not None:
        return False
    if amax:
        shapes = codec.amax_shapes(x.shape)
        for given, place, shape in zip(amax, bound.given, shapes, strict=True):
            if not _floats(given, shape[0] * (shape[1] if len(shape) > 1 else 1)):
                return False
            pointers[place] = given.data_ptr()
    kernels.quantize(
        bound.address,
        matrix.data_ptr(),
        code,
        rows,
        cols,
        stride,
        torch.get_num_threads() if rows * cols > ONE_THREAD else 1,
        *pointers,
        None if scale_inv is None else scale_inv.data_ptr(),
        None if scale is None else scale.data_ptr(),
        buffers[-1].data_ptr() if codec.returns_amax and len(buffers) > len(codec.slots) else None,
        0 if seed is None or not codec.stochastic_rounding else int(seed),
    )
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
    code, bound = _DTYPES.get(out.dtype), _bind(codec)
    if code is None or bound is None or not out.numel() or not out.is_contiguous():
        return False
    kernels = library()
    if isinstance(kernels, str):
        return False
    reads = bound.reads
    if part.columnwise is not None and bound.scale_inv is None:
        side = 0 if codec.side(part.columnwise) == "_rowwise" else 4
        reads = tuple(place for _, place in bound.places if side <= place < side + 4)
    pointers: list[int | None] = [None] * 8
    if not _fit(codec, buffers, shape):
        return False
    for slot, place in bound.places:
        if place in reads:
            pointers[place] = buffers[slot].data_ptr()
    rows, cols = rows_cols(shape)
    count = rows - part.first if part.count is None else part.count
    kernels.dequantize(
        bound.address,
        out.data_ptr(),
        code,
        rows,
        cols,
        part.first,
        count,
        torch.get_num_threads() if count * cols > ONE_THREAD else 1,
        pointers[0],
        pointers[1],
        pointers[2],
        pointers[4],
        pointers[5],
        pointers[6],
        _ONE_ADDRESS
        if part.codes_only
        else None
        if bound.scale_inv is None
        else buffers[bound.scale_inv].data_ptr(),
    )
    return True
