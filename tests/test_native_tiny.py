"""Small tensors quantized and decoded in one native call, and calls of a user that leave the
dispatcher out.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from formats import BY_NAME, DTYPES, FormatCase, assert_same_bytes, formats, usages
from native_cases import (
    SHAPES,
    assert_same_buffers,
    assert_same_floats,
    by_reference,
    call_of,
    data,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import qtensor
from qtensor.kernels.cpu import native, tiny
from qtensor.library.codec import by_name
from qtensor.library.define import FILLS
from qtensor.library.direct import direct
from qtensor.library.quantize import QUANTIZE

NAMES = ("fp8", "mxfp8", "nvfp4")


def small(rows: int = 32, cols: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def quantized(
    codec: Any, x: Tensor, scale: Any = None, amax: Any = None, seed: Any = None
) -> list[Tensor] | None:
    """The second call of its kind: the first goes the long way."""
    tiny.quantized(codec, x, scale, amax, seed)
    return tiny.quantized(codec, x, scale, amax, seed)


def check(codec: Any, x: Tensor, call: dict[str, Any]) -> None:
    """Buffers and values of one native call beside the reference arithmetic."""
    want = by_reference(codec, x, **call)
    got = quantized(codec, x, **call)
    assert got is not None, f"not served: {codec.canonical}, {tuple(x.shape)}, {x.dtype}"
    assert_same_buffers(codec, got, want)
    buffers = want[: len(codec.slots)]
    values = codec.decode(by_name(codec, buffers), tuple(x.shape))
    for dtype in DTYPES:
        for _ in range(2):
            decoded = tiny.dequantized(codec, buffers, x.shape, dtype)
        assert decoded is not None
        assert decoded.is_contiguous()
        assert_same_floats(decoded, values.to(dtype), f"values, {dtype}")


@formats
@usages
def test_bytes_of_every_shape(case: FormatCase, rowwise: bool, columnwise: bool) -> None:
    codec = case.quantizer(rowwise=rowwise, columnwise=columnwise)
    for shape in SHAPES:
        for dtype in DTYPES:
            check(codec, data("wide", shape, dtype), call_of(case, {}))


@formats
def test_bytes_of_every_option(case: FormatCase) -> None:
    for options in case.each_option():
        codec = case.quantizer(columnwise=True, **options)
        check(codec, data("wide", (33, 72), torch.bfloat16), call_of(case, options))


def test_padding_is_zero() -> None:
    """The memory that a call takes is dirty."""
    codec = qtensor.quantizer("mxfp8", columnwise=True)
    for _ in range(20):
        dirty = [torch.full((128, 4), 0xA5, dtype=torch.uint8) for _ in range(8)]
        del dirty
        scales = quantized(codec, torch.ones(3, 40))[1]
        assert scales.shape == (128, 4)
        assert scales.view(torch.uint8)[3:].count_nonzero() == 0
        assert scales.view(torch.uint8)[:, 2:].count_nonzero() == 0


@pytest.mark.parametrize("name", NAMES)
def test_what_goes_the_long_way(name: str) -> None:
    codec = qtensor.quantizer(name)
    x = small()
    for other in (x.t(), x[:, ::2], x.double(), x.to_sparse(), x.to("meta"), torch.empty(0, 64)):
        assert quantized(codec, other) is None
    assert quantized(codec, x) is not None
    assert quantized(codec, x, torch.ones(1)) is None
    assert quantized(codec, x, None, [torch.ones(1)]) is None
    buffers = codec(x).buffers()
    for dtype in (torch.float32, torch.float64):
        tiny.dequantized(codec, buffers, (32, 64), dtype)
    assert tiny.dequantized(codec, buffers, (32, 64), torch.float64) is None
    assert tiny.dequantized(codec, buffers, (32, 64), torch.float32) is not None
    turned = [b.t().contiguous().t() if b.ndim == 2 else b for b in buffers]
    assert tiny.dequantized(codec, turned, (32, 64), torch.float32) is None
    assert tiny.dequantized(codec, [b.to("meta") for b in buffers], (32, 64), torch.float32) is None
    large = torch.zeros(native.ONE_THREAD // 64 + 1, 64)
    assert quantized(codec, large) is None


def test_delayed_scaling_needs_its_scale() -> None:
    codec, x = qtensor.quantizer("fp8_delayed"), small()
    for scale in (None, torch.ones(2), torch.ones(1, dtype=torch.float64)):
        assert quantized(codec, x, scale) is None


def test_a_kind_that_comes_once_is_not_prepared() -> None:
    codec, x = qtensor.quantizer("mxfp6"), small(29, 37)
    known = len(tiny._ENCODERS), len(tiny._DECODERS)
    codec(x).dequantize()
    assert (len(tiny._ENCODERS), len(tiny._DECODERS)) == known
    codec(x).dequantize()
    assert (len(tiny._ENCODERS), len(tiny._DECODERS)) == (known[0] + 1, known[1] + 1)


def test_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = qtensor.quantizer("mxfp4")
    x = small(31, 32)
    want = codec(x)
    assert quantized(codec, x) is not None
    monkeypatch.setattr(native, "library", lambda: "switched off")
    for known in ({}, tiny._ENCODERS):
        monkeypatch.setattr(tiny, "_ENCODERS", known)
        assert quantized(codec, x) is None
        got = codec(x)
        for a, b in zip(got.buffers(), want.buffers(), strict=True):
            assert_same_bytes(a, b)
        assert_same_bytes(got.dequantize(), want.dequantize())


def test_a_fill_that_was_replaced_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    fill = FILLS["quantize"]
    monkeypatch.setitem(FILLS, "quantize", lambda *args: (asked.append(1), fill(*args))[1])
    qtensor.quantize(small(), "mxfp8")
    assert asked == [1]


class Watch(TorchDispatchMode):
    """Names of the library's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "qtensor":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


@formats
def test_modes_see_the_ops(case: FormatCase) -> None:
    with Watch() as watch:
        case.quantize(small()).dequantize()
    assert watch.seen == ["quantize", "dequantize_tensor"]


def test_the_profiler_sees_the_ops() -> None:
    with torch.profiler.profile() as profile:
        qtensor.quantize(small(), "mxfp8").dequantize()
    names = {event.key for event in profile.key_averages()}
    assert {"qtensor::quantize", "qtensor::dequantize_tensor"} <= names


def test_a_trace_holds_the_ops() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: direct(QUANTIZE, 0)(x, "mxfp8")[0], small())
    assert "qtensor::quantize" in str(traced.graph)


@pytest.mark.parametrize("name", NAMES)
def test_lazy_values_are_computed_first(name: str) -> None:
    """Views whose values the dispatcher computes: negated ones, and zeros without memory."""
    x = small()
    for lazy, plain in (
        (torch._neg_view(x), -x),
        (torch._efficientzerotensor((32, 64)), torch.zeros(32, 64)),
    ):
        got, want = qtensor.quantize(lazy, name), qtensor.quantize(plain, name)
        for a, b in zip(got.buffers(), want.buffers(), strict=True):
            assert_same_bytes(a, b)


@formats
def test_gradients_pass(case: FormatCase) -> None:
    x = small().requires_grad_()
    q = case.quantize(x)
    q.dequantize().sum().backward()
    assert torch.equal(x.grad, torch.ones(32, 64))
    assert q.requires_grad
    assert q.dequantize().requires_grad
    with torch.no_grad():
        assert not q.dequantize().requires_grad
        assert_same_bytes(q.dequantize(), q.detach().dequantize())


@formats
def test_inference_mode(case: FormatCase) -> None:
    want = case.quantize(small())
    with torch.inference_mode():
        q = case.quantize(small())
        values, of_normal = q.dequantize(), want.dequantize()
    assert values.is_inference()
    assert of_normal.is_inference()
    assert all(b.is_inference() for b in q.buffers())
    assert_same_bytes(values, want.dequantize())
    assert not want.dequantize().is_inference()


def test_a_subclass_with_a_dispatch_of_its_own_is_asked() -> None:
    asked = []
    parent = type(qtensor.quantize(small(), "mxfp8"))

    class Mine(parent):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked.append(func._opname)
            return super().__torch_dispatch__(func, types, args, kwargs)

    q = BY_NAME["mxfp8"].quantize(small())
    data_, scale = q.buffers()
    mine = Mine(q.shape, q.dtype, q.quantizer, rowwise_data=data_, rowwise_scale_inv=scale)
    assert_same_bytes(mine.dequantize(), q.dequantize())
    assert asked == ["dequantize_tensor"]
