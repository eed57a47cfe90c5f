"""Attention by CPU kernels, in a library of their own that is built at the first call."""

from __future__ import annotations

import ctypes
import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtensor.core.errors import QTensorError
from qtensor.core.row_format import RowFormat, row_format
from qtensor.kernels.cpu.buffers import has_memory
from qtensor.kernels.cpu.native import is_off
from qtensor.kernels.cpu.structs import fields

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}
_ELEMENTS = {"e4m3": 0, "e5m2": 1, "e2m3": 2, "e3m2": 3, "e2m1": 4}
_PLAIN = {torch.bfloat16: 5, torch.float16: 6, torch.float32: 7}
_LOG2_E = 1.4426950408889634
DOTS = -1
"""Whether to use bfloat16 dot products, 0 or 1; -1 for what is faster on this CPU. The bits are the
same."""


class StoredRows(ctypes.Structure):
    """`StoredRows` of calls.h: the buffers of keys or values, and how they are stored."""

    _fields_ = [
        *fields("codes factors", ctypes.c_void_p),
        *fields("outer head token factor_outer factor_head factor_token", ctypes.c_int64),
        *fields("element packed block factor_id stored", ctypes.c_int64),
        *fields("size factor_count pieces", ctypes.c_int64),
    ]


class AttentionCall(ctypes.Structure):
    """`AttentionCall` of calls.h."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        *fields("q_dtype q_batch q_head q_query", ctypes.c_int64),
        *fields("out sums", ctypes.c_void_p),
        *fields("batch heads groups queries", ctypes.c_int64),
        *fields("k v", StoredRows),
        ("table", ctypes.c_void_p),
        *fields("table_stride page pages capacity", ctypes.c_int64),
        *fields("lengths positions first", ctypes.c_void_p),
        *fields("causal window", ctypes.c_int64),
        ("mask", ctypes.c_void_p),
        *fields(
            "mask_dtype mask_batch mask_head mask_query mask_token mask_tokens", ctypes.c_int64
        ),
        ("sinks", ctypes.c_void_p),
        *fields("sink_batch sink_head sink_query threads dots", ctypes.c_int64),
        *fields("pre cap post", ctypes.c_double),
    ]


class AppendedRows(ctypes.Structure):
    """`AppendedRows` of calls.h: encoded rows, and the buffer that takes them."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        *fields("source_stride width", ctypes.c_int64),
        ("target", ctypes.c_void_p),
        *fields("outer head token", ctypes.c_int64),
    ]


class AppendCall(ctypes.Structure):
    """`AppendCall` of calls.h."""

    _fields_ = [
        *fields("positions table", ctypes.c_void_p),
        *fields("table_stride page pages capacity batch heads tokens count", ctypes.c_int64),
        ("rows", AppendedRows * 4),
    ]


@functools.cache
def library() -> Any:
    """Return the kernels of attention, built at the first call; None if there are none."""
    if is_off():
        return None
    # Only a process that computes needs the compiler cache.
    from qtensor.kernels.cpu import prebuilt, sources  # noqa: PLC0415

    spec = sources.attention_build_spec(sources.choose_isa())
    try:
        handle = ctypes.CDLL(str(prebuilt.provide_one(spec)))
        sizes = ctypes.sizeof(AttentionCall), ctypes.sizeof(AppendCall)
        if (handle.qt_attention_abi() - 1000, handle.qt_append_abi() - 1000) != sizes:
            raise OSError("the library of attention is not one of this version of qtensor")
    except (QTensorError, OSError, AttributeError) as error:
        warnings.warn(
            f"attention runs without its native kernels (same bytes, many times slower): {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    handle.qt_attention.argtypes = handle.qt_cache_append.argtypes = (ctypes.c_void_p,)
    handle.qt_join.argtypes = (ctypes.c_void_p,) * 5
    return handle


def _serves(*tensors: Tensor | None) -> bool:
    return all(t is None or has_memory(t) for t in tensors)


def _byte_strides(t: Tensor) -> tuple[int, int, int]:
    """Return the strides of the first three dims in bytes."""
    size, (outer, head, token, _) = t.element_size(), t.stride()
    return outer * size, head * size, token * size


def stored_ids(form: RowFormat) -> tuple[int, int, int, int]:
    """Return `element`, `packed`, `block` and `factor_id` of `StoredRows`."""
    factor_id = 0
    if form.factor is not None:
        factor_id = 1 if form.factor is torch.float32 else 3 if form.divisor else 2
    element = _PLAIN[form.dtype] if form.element is None else _ELEMENTS[form.element.name]
    return element, int(form.group == (4, 3)), form.block, factor_id


def _stored(codes: Tensor, factors: Tensor | None, form: RowFormat) -> StoredRows:
    """Return the description of buffers."""
    factor_strides = (0, 0, 0) if factors is None else _byte_strides(factors)
    return StoredRows(
        codes.data_ptr(),
        None if factors is None else factors.data_ptr(),
        *(*_byte_strides(codes), *factor_strides),
        *stored_ids(form),
        form.size(codes.shape[3]),
    )


def _indices(t: Tensor | None) -> Tensor | None:
    """Return contiguous int64 indices."""
    return None if t is None else t.to(torch.int64).contiguous()


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


def _wide(value: Tensor | None, form: RowFormat) -> float:
    """Return the float32 factor of a whole cache."""
    return 1.0 if value is None else _float32(value.item() / form.divisor)


def attention_(out: Tensor, args: Any, sums: Tensor | None = None) -> bool:
    """Write the attention of a call.

    Args:
        out: (B, Hq, M, E), contiguous.
        args: the arguments of the op `attention`, whose shapes and dtypes are checked.
        sums: float32 (B, Hq, M, 2) for the op `attention_part`, whose `out` is float32; else None.

    Returns:
        False with nothing written if no kernel serves the call, or if lengths or pages are outside
        the cache, or heads are too large.
    """
    q, mask, sinks = args.q, args.mask, args.sinks
    tensors = (q, args.k, args.k_factors, args.v, args.v_factors, args.lengths, args.positions)
    if not _serves(*tensors, args.first, mask, sinks, args.block_table, args.k_global):
        return False
    k_form, v_form = row_format(args.k_format), row_format(args.v_format)
    handle = library() if _serves(args.v_global) else None
    if handle is None:
        return False
    batch, heads, queries, _ = q.shape
    q = q if q.stride(3) == 1 else q.contiguous()
    table, lengths = _indices(args.block_table), _indices(args.lengths)
    positions, first = _indices(args.positions), _indices(args.first)
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    mask_dtype = 0
    if mask is not None:
        mask_dtype = _DTYPES[mask.dtype]
        mask_strides = mask.expand(batch, heads, queries, -1).stride()
    sinks, sink_strides = _sinks(sinks, q)
    factor = _LOG2_E * args.scale
    factor = 2.0 * factor / args.soft_cap if args.soft_cap else factor
    page = 0 if table is None else args.k.shape[2]
    columns = 1 if table is None else table.shape[1]
    tokens = args.k.shape[2] * columns
    call = AttentionCall(
        *(q.data_ptr(), _DTYPES[q.dtype], *q.stride()[:3]),
        *(out.data_ptr(), _address(sums)),
        *(batch, args.k.shape[1], heads // args.k.shape[1], queries),
        _stored(args.k, args.k_factors, k_form),
        _stored(args.v, args.v_factors, v_form),
        *(_address(table), columns, page, args.k.shape[0], tokens),
        *(_address(lengths), _address(positions), _address(first), args.causal, args.window),
        *(_address(mask), mask_dtype, *mask_strides, 0 if mask is None else mask.shape[3]),
        *(_address(sinks), *sink_strides),
        *(torch.get_num_threads(), DOTS),
        _float32(factor * _wide(args.k_global, k_form)),
        _float32(args.soft_cap * _LOG2_E),
        _wide(args.v_global, v_form),
    )
    return bool(handle.qt_attention(ctypes.byref(call)) == 0)


def _sinks(sinks: Tensor | None, q: Tensor) -> tuple[Tensor | None, tuple[int, ...]]:
    """Return float32 sinks, and their strides in (B, Hq, M)."""
    if sinks is None:
        return None, (0, 0, 0)
    sinks = sinks.float()
    every = sinks[:, None] if sinks.ndim == 1 else sinks
    return sinks, every.expand(q.shape[:3]).stride()


def join_(out: Tensor, args: Any) -> bool:
    """Write the attention over two parts.

    Args:
        out: (B, Hq, M, E), contiguous.
        args: the arguments of the op `join_attention`, whose shapes and dtypes are checked.

    Returns:
        False with nothing written if no kernel serves the call.
    """
    batch, heads, queries, size = out.shape
    parts = (args.values, args.sums, args.more_values, args.more_sums)
    handle = library() if _serves(*parts, args.sinks) else None
    if handle is None:
        return False
    sinks, strides = _sinks(args.sinks, out)
    call = AttentionCall(
        out=out.data_ptr(),
        q_dtype=_DTYPES[out.dtype],
        batch=batch,
        heads=heads,
        groups=1,
        queries=queries,
        v=StoredRows(stored=size),
        sinks=_address(sinks),
        post=1.0,
    )
    call.sink_batch, call.sink_head, call.sink_query = strides
    parts = tuple(t.contiguous() for t in parts)
    addresses = [t.data_ptr() for t in parts]
    return bool(handle.qt_join(ctypes.byref(call), *addresses) == 0)


def cache_append_(
    rows: Sequence[tuple[Tensor, Tensor]], positions: Tensor, block_table: Tensor | None
) -> bool:
    """Write encoded rows of new tokens into the buffers of a cache.

    Args:
        rows: pairs of encoded rows (B * H * N, width or more), which are contiguous, and the buffer
            (B, H, capacity, width) or (pages, H, page, width) that takes them.
        positions: (B, N); negative for a token that is not written.
        block_table: (B, pages of a sequence), or None.

    Returns:
        False with nothing written if no kernel serves the call, or if positions or pages are
        outside the cache.
    """
    handle = library() if _serves(positions, block_table, *itertools.chain(*rows)) else None
    if handle is None:
        return False
    positions, table = positions.to(torch.int64).contiguous(), _indices(block_table)
    first = rows[0][1]
    columns = 1 if table is None else table.shape[1]
    described = []
    for source, target in rows:
        size = target.element_size()
        described.append(
            AppendedRows(
                *(source.data_ptr(), source.stride(0) * size, target.shape[3] * size),
                *(target.data_ptr(), *_byte_strides(target)),
            )
        )
    call = AppendCall(
        *(positions.data_ptr(), _address(table), columns, first.shape[2], first.shape[0]),
        *(first.shape[2] * columns, positions.shape[0], first.shape[1], positions.shape[1]),
        *(len(described), (AppendedRows * 4)(*described)),
    )
    return bool(handle.qt_cache_append(ctypes.byref(call)) == 0)
