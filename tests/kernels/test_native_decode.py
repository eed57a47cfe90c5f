"""The native CPU kernels decode as the reference does: any byte, any rows, without the factor, and
inside products.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formats import (
    DTYPES,
    FORMATS,
    FormatCase,
    assert_same_bytes,
    formats,
    layouts,
    rand,
    usages,
)
from native_cases import (
    assert_same_floats,
    assert_same_values,
    by_reference,
    call_of,
    data,
    decoded,
    dirty,
    switched_off,
)

import qtensor
from qtensor.core.quantizer_registry import by_name
from qtensor.kernels import table
from qtensor.kernels.cpu.structs import c_quantizer


@formats
@usages
def test_any_byte_decodes_alike(case: FormatCase, rowwise: bool, columnwise: bool) -> None:
    """Codes and factors that no quantization makes, NaN and inf among them."""
    for options in case.each_option():
        codec = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
        for shape in ((33, 50), (130, 257), (7,), ()):
            buffers = dirty(codec, shape)[: len(codec.slots)]
            for slot, buffer in zip(codec.slots, buffers, strict=True):
                # A code of six bits that has a byte of its own leaves two of them zero.
                narrow = case.name == "mxfp6" and not codec.packed and slot.name.endswith("data")
                buffer.view(torch.uint8).random_(0, 64 if narrow else 256)
            assert_same_values(codec, buffers, shape)


def assert_rows(codec: Any, options: dict[str, Any], shape: tuple[int, int]) -> None:
    call = call_of(codec.format, options)
    buffers = by_reference(codec, rand(*shape), **call)[: len(codec.slots)]
    want = codec.decode(by_name(codec, buffers), shape)
    for dtype in DTYPES:
        for first, count in ((0, 1), (0, shape[0]), (128, 128), (256, 264), (384, 1), (512, 8)):
            got = decoded(codec, buffers, shape, dtype=dtype, first=first, count=count)
            rows = want[first : first + count].to(dtype)
            assert_same_floats(got, rows, f"{count} rows from {first}")


def reads_a_transpose(codec: Any) -> bool:
    """Whether blocks along columns are decoded from data that lie transposed."""
    return codec.side() == "_columnwise" and bool(c_quantizer(codec).transposed)


@layouts
@usages
def test_rows_of_a_tensor(
    case: FormatCase, options: dict[str, Any], rowwise: bool, columnwise: bool
) -> None:
    codec = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
    if not (codec.spec.block and reads_a_transpose(codec)):
        assert_rows(codec, options, (520, 70))


@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4"])
def test_rows_of_transposed_blocks(name: str) -> None:
    codec = qtensor.quantizer(name, rowwise=False, columnwise=True)
    assert reads_a_transpose(codec)
    assert_rows(codec, {}, (520, 70))


@formats
def test_an_output_of_another_size_is_left_to_the_reference(case: FormatCase) -> None:
    q, out = case.quantize(rand(4, 64)), torch.zeros(8, 64)
    assert not table.dequantize_(q.quantizer, q.buffers(), (4, 64), out)


@formats
def test_buffers_of_another_dtype_are_left_to_the_reference(case: FormatCase) -> None:
    codec, x = case.quantizer(), rand(4, 64)
    buffers = [b.double() for b in dirty(codec, x.shape)]
    call = {"scale": None, "amax": None, "seed": None} | call_of(case, {})
    assert not table.quantize_(codec, buffers, x, **call)


@pytest.mark.parametrize(
    "case", [c for c in FORMATS if c.quantizer().per_tensor], ids=lambda c: c.name
)
@usages
def test_codes_without_their_factor(case: FormatCase, rowwise: bool, columnwise: bool) -> None:
    codec, x = case.quantizer(rowwise=rowwise, columnwise=columnwise), rand(33, 50)
    buffers = by_reference(codec, x, **call_of(case, {}))[: len(codec.slots)]
    want, _ = codec.decode_codes(by_name(codec, buffers), (33, 50))
    assert_same_bytes(decoded(codec, buffers, (33, 50), codes_only=True), want)


@formats
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_products(case: FormatCase, layout: str) -> None:
    """The same operands, decoded by kernels and by reference: the same product, bit for bit.

    Few rows and products of integers have sums of their own.
    """
    a_shape, b_shape = {
        "TN": ((80, 96), (72, 96)),
        "NN": ((80, 96), (96, 72)),
        "NT": ((96, 80), (96, 72)),
    }[layout]
    for turn, options in enumerate(case.each_option()):
        a, b = (
            case.quantizer(columnwise=True, **options)(
                data("randn", s, DTYPES[turn % 3]), **case.call()
            )
            for s in (a_shape, b_shape)
        )
        got = qtensor.gemm(a, b, layout, backend="reference")
        with switched_off():
            want = qtensor.gemm(a, b, layout, backend="reference")
        assert_same_bytes(got, want)
