"""Bytes do not depend on torch.set_flush_denormal, in native kernels and in the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from formats import FormatCase, assert_same_bytes, dtypes, formats, rand

import qtensor.kernels.table


@contextmanager
def flushed() -> Iterator[None]:
    """Denormals count as zero in the block."""
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def test_the_mode_is_on_and_stays_on() -> None:
    tiny = torch.full((4,), 1e-39)
    with flushed():
        assert not (tiny * 0.5).any()
        qtensor.quantize(rand(4, 64) * 1e-39, "mxfp8").dequantize()
        assert not (tiny * 0.5).any()
    assert (tiny * 0.5).any()


@pytest.mark.parametrize("native", [True, False], ids=["native", "reference"])
@pytest.mark.parametrize("scale", [1e-39, 1e-37, 1.0], ids=str)
@dtypes
@formats
def test_bytes_and_values(
    case: FormatCase,
    dtype: torch.dtype,
    scale: float,
    native: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not native:
        monkeypatch.setattr(qtensor.kernels.table, "quantize_", lambda *_: False)
        monkeypatch.setattr(qtensor.kernels.table, "dequantize_", lambda *_: False)
    # Larger than small programs serve, then small.
    for shape in ((1030, 256), (4, 64)):
        x = (rand(*shape) * scale).to(dtype)
        want = case.quantize(x, columnwise=True)
        values = want.dequantize(torch.float32)
        with flushed():
            got = case.quantize(x, columnwise=True)
            got_values = want.dequantize(torch.float32)
        for name, _ in got._FLATTEN_TENSOR_BUFFERS:
            if getattr(got, name) is not None:
                assert_same_bytes(getattr(got, name), getattr(want, name), name)
        assert_same_bytes(got_values, values)


@pytest.mark.parametrize("rows", [2, 64], ids=str)
@pytest.mark.parametrize("scale", [1e-37, 1e-36, 1e-34], ids=str)
@formats
def test_products(case: FormatCase, scale: float, rows: int) -> None:
    # The factor of an NVFP4 tensor is its amax divided by 2688, which may be denormal.
    x = case.quantize(rand(rows, 64) * scale)
    w = case.quantize(rand(48, 64) * 1e3)
    want = torch.nn.functional.linear(x, w)
    with flushed():
        got = torch.nn.functional.linear(x, w)
    assert_same_bytes(got, want)
