"""Tensors of more than 2^31 elements: places that 32 bits do not hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from formats import FORMATS, FormatCase, assert_same_bytes, formats, rand
from native_cases import (
    assert_same_buffers,
    by_kernels,
    by_reference,
    call_of,
    check,
    decoded,
)
from torch import Tensor

import qtensor
from qtensor.build.compilers import _free_memory
from qtensor.core.quantizer_registry import alloc_slots
from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.structs import c_quantizer

MANY = 2**31
ROW = 256


def untouched(elements: int, dtype: torch.dtype) -> Tensor:
    """Memory that takes room only where it is written."""
    try:
        return torch.empty(elements, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(
            reason=f"this machine reserves no {elements * dtype.itemsize >> 30} GiB: {error}"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@formats
def test_rows_that_lie_far_apart(case: FormatCase, dtype: torch.dtype) -> None:
    """A view whose last rows begin behind element 2^31: the bytes of a copy that is dense."""
    stride = MANY // 32 + 5
    x = untouched(34 * stride, dtype).as_strided((34, 300), (stride, 1))
    assert 33 * stride > MANY
    dense = rand(34, 300, dtype=dtype)
    x.copy_(dense)
    for options in case.each_option():
        codec = case.quantizer(columnwise=True, **options)
        call = call_of(case, options)
        want = by_kernels(codec, dense, **call)
        assert_same_buffers(codec, by_kernels(codec, x, **call), want)
        assert_same_buffers(codec, want, by_reference(codec, dense, **call))


def tail_of(codec: Any, shape: tuple[int, int], rows: int, small: list[Tensor]) -> list[Tensor]:
    """Buffers of ``shape`` whose last ``rows`` rows are those of ``small``; the others are never
    touched.

    Rows, or tiles of 128 of them, come first in rowwise buffers, so that the last rows are the end
    of the memory.
    """
    buffers = alloc_slots(codec.slots, shape, torch.device("cpu"))
    for slot, buffer, part in zip(codec.slots, buffers, small, strict=True):
        # Padding to 128 rows is the same behind both: the rows before are a multiple of 128.
        added = buffer.numel() - part.numel()
        assert added % (shape[0] - rows) == 0, slot.name
        buffer.view(-1)[added:] = part.view(-1)
    return buffers


@pytest.mark.parametrize(
    "case", [c for c in FORMATS if c.name != "fp8_blockwise"], ids=lambda c: c.name
)
def test_the_last_rows_decode(case: FormatCase) -> None:
    """Of a tensor with more codes than 2^31, of which only the last rows are in memory."""
    rows, shape = 40, (MANY // ROW + 128 + 40, ROW)
    for options in ({}, {"swizzled": True}):
        if not options.keys() <= case.options.keys():
            continue
        codec = case.quantizer(**options)
        small = by_kernels(codec, rand(rows, ROW), **call_of(case, options))[: len(codec.slots)]
        untouched(shape[0] * ROW, torch.uint8)
        buffers = tail_of(codec, shape, rows, small)
        want = decoded(codec, small, (rows, ROW))
        for dtype in (torch.float32, torch.bfloat16):
            first = shape[0] - rows
            got = decoded(codec, buffers, shape, dtype=dtype, first=first, count=rows)
            assert_same_bytes(got, want.to(dtype))


def test_the_last_rows_decode_with_factors_by_columns() -> None:
    rows, shape = 40, (MANY // ROW + 128 + 40, ROW)
    codec = qtensor.quantizer("fp8_blockwise")
    small = by_kernels(codec, rand(rows, ROW))
    untouched(shape[0] * ROW, torch.uint8)
    data, factors = alloc_slots(codec.slots, shape, torch.device("cpu"))
    data[-rows:] = small[0]
    factors[:, shape[0] - rows : shape[0]] = small[1][:, :rows]
    got = decoded(codec, [data, factors], shape, first=shape[0] - rows, count=rows)
    assert_same_bytes(got, decoded(codec, small, (rows, ROW)))


WHOLE = {
    "fp8": {},
    "mxfp4": {"swizzled": True},
    "mxfp4 columnwise": {"rowwise": False, "columnwise": True},
    "nvfp4": {},
    "nvfp4 columnwise": {"rowwise": False, "columnwise": True},
}


_WIDE = pytest.mark.nightly(reason="nvfp4 writes 2^31 elements in the default tier")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("fp8", marks=_WIDE),
        pytest.param("mxfp4", marks=_WIDE),
        pytest.param("mxfp4 columnwise", marks=_WIDE),
        "nvfp4",
        pytest.param("nvfp4 columnwise", marks=_WIDE),
    ],
)
def test_a_whole_pass(name: str) -> None:
    """2^31 elements and more are written; the input is one row again and again, which is what each
    row has to give.
    """
    free = _free_memory()
    if free is None or free < 6 << 30:
        pytest.skip(reason="a whole pass takes 3 GiB")
    codec = qtensor.quantizer(name.split()[0], **WHOLE[name])
    rows, row = MANY // ROW + 160, rand(1, ROW, dtype=torch.bfloat16)
    buffers = alloc_slots(codec.slots, (rows, ROW), torch.device("cpu"))
    repeat(codec, row, rows, buffers)
    small = by_reference(codec, row.expand(160, ROW))
    for slot, buffer, part in zip(codec.slots, buffers, small, strict=True):
        assert all(same_everywhere(slot.name, codec, buffer, part)), slot.name


def same_everywhere(name: str, codec: Any, buffer: Tensor, part: Tensor) -> Iterator[bool]:
    """Whether every line, or tile of 128 lines, is what ``part`` begins with; padding lines
    aside.
    """
    if buffer.shape == part.shape:
        yield torch.equal(buffer, part)
    elif name.startswith("_columnwise") and c_quantizer(codec).transposed:
        blocks = (MANY // ROW + 160) // (2 if name.endswith("data") else 16)
        for line, first in zip(buffer[:ROW], part[:ROW, :1], strict=True):
            yield bool((line[:blocks] == first).all())
    else:
        tiled = codec.scale_layout != "plain" and name.endswith("scale_inv")
        lines_of = {"_rowwise_scale_inv": 128 if tiled else 1, "_columnwise_scale_inv": 32}
        tile = part.shape[1] * (128 if tiled else 1)
        count = (MANY // ROW + 160) // lines_of[name] if name in lines_of else buffer.shape[0]
        lines = buffer.view(-1)[: count * tile]
        for piece in lines.view(-1, tile).split(1 << 16):
            yield bool((piece == part.view(-1)[:tile]).all())


def repeat(codec: Any, row: Tensor, rows: int, buffers: list[Tensor]) -> None:
    """What ``native.quantize_`` does, of a row that stands for all: it would copy an input that
    overlaps.
    """
    site = native.buffer_layout(codec, torch.Size((rows, ROW)))
    library = native.library()
    assert site is not None
    assert isinstance(library, native.Library)
    pointers = native.addresses(site, buffers)
    assert pointers is not None
    call = (row.data_ptr(), 1, rows, ROW, 0, 1, *pointers, 0, 0, 0)
    assert library.handle.qt_quantize(native._QUANTIZE.pack(site.address, *call)) == 0


@pytest.mark.parametrize("name", ["fp8_rowwise", "mxfp8"])
@pytest.mark.parametrize("shape", [(1, 3_000_001), (3_000_001, 1)])
def test_the_largest_dims_of_a_small_tensor(name: str, shape: tuple[int, int]) -> None:
    """Shapes whose other dim is one: a line of 3 million, and as many lines."""
    check(qtensor.quantizer(name), torch.randn(shape))
