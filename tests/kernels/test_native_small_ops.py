"""Small calls of the ops ``quantize`` and ``dequantize`` that C++ answers without Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import DTYPES, FormatCase, assert_same_bytes, formats, usages
from native_cases import (
    SHAPES,
    assert_same_buffers,
    assert_same_floats,
    by_reference,
    call_of,
    data,
)
from torch import Tensor

import qtensor
from qtensor.core.quantizer_registry import by_name
from qtensor.kernels.cpu import native
from qtensor.library import native_ops as cpp
from qtensor.library.define import FILLS
from tests.library.test_linear_ops import serves_here

OPS = ("quantize", "quantize_", "dequantize", "gemm", "weight_gemm")
QUANTIZE_IN_PLACE = torch.ops.qtensor.quantize_
QUANTIZE, DEQUANTIZE = torch.ops.qtensor.quantize, torch.ops.qtensor.dequantize


@pytest.fixture(autouse=True)
def answers() -> None:
    """Skip where there are no kernels, or no C++ that calls them."""
    if cpp.library() is None:
        pytest.skip(reason="no compiler, or a torch without its headers")


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls an op whose Python kernel fails."""

    def refuse(*args: Any) -> None:
        raise AssertionError("the Python kernel")

    def call(op: Any, *args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            for name in OPS:
                patch.setitem(FILLS, name, refuse)
            return op(*args, **kwargs)

    return call


def twice(op: Any, *args: Any, **kwargs: Any) -> None:
    """The first call of a kind is forgotten, the second is remembered."""
    for _ in range(2):
        op(*args, **kwargs)


def check(refusing: Any, codec: Any, x: Tensor, call: dict[str, Any]) -> None:
    """What C++ answers beside the reference arithmetic: bytes, sizes, strides, dtypes."""
    want = by_reference(codec, x, **call)
    twice(QUANTIZE, x, codec.canonical, **call)
    got = refusing(QUANTIZE, x, codec.canonical, **call)
    assert_same_buffers(codec, got, want)
    assert [t.stride() for t in got] == [t.stride() for t in want]
    buffers = want[: len(codec.slots)]
    values = codec.decode(by_name(codec, buffers), tuple(x.shape))
    for dtype in DTYPES:
        twice(DEQUANTIZE, buffers, codec.canonical, x.shape, dtype)
        decoded = refusing(DEQUANTIZE, buffers, codec.canonical, x.shape, dtype)
        assert decoded.is_contiguous()
        assert_same_floats(decoded, values.to(dtype), f"values, {dtype}")


@formats
@usages
def test_bytes_of_every_shape(case: FormatCase, rowwise: bool, columnwise: bool, refusing) -> None:
    if not serves_here(case):
        pytest.skip(reason="no kernel has the format")
    codec = case.quantizer(rowwise=rowwise, columnwise=columnwise)
    for i, shape in enumerate(SHAPES):
        check(refusing, codec, data("wide", shape, DTYPES[i % 3]), call_of(case, {}))


@formats
def test_bytes_of_every_option(case: FormatCase, refusing) -> None:
    if not serves_here(case):
        pytest.skip(reason="no kernel has the format")
    for options in case.each_option():
        if options.get("with_global_scale_inv"):
            continue  # programs do not write stored factors; test_global_scale.py has the bytes
        codec = case.quantizer(columnwise=True, **options)
        check(refusing, codec, data("wide", (33, 72), torch.bfloat16), call_of(case, options))


def ones(t: Tensor) -> Tensor:
    """A tensor like `t` in which every byte is 1."""
    out = torch.empty_like(t)
    out.view(-1).view(torch.uint8).fill_(1)
    return out


@formats
def test_into_existing_buffers(case: FormatCase, refusing) -> None:
    """`quantize_` writes the bytes of `quantize`, and leaves padding alone as the kernels do."""
    if not serves_here(case):
        pytest.skip(reason="no kernel has the format")
    codec = case.quantizer(columnwise=True)
    call, x = call_of(case, {}), data("wide", (33, 96), torch.bfloat16)
    out = [ones(t) for t in QUANTIZE(x, codec.canonical, **call)]
    twice(QUANTIZE_IN_PLACE, x, codec.canonical, out, **call)
    other = data("wide", (96, 33), torch.bfloat16).t()
    results = []
    for run in (refusing, lambda op, *args, **kwargs: op(*args, **kwargs)):
        target = [ones(t) for t in out]
        with cpp.left_to_python() if run is not refusing else contextlib.nullcontext():
            assert run(QUANTIZE_IN_PLACE, other, codec.canonical, target, **call) is None
        results.append(target)
    for a, b in zip(*results, strict=True):
        assert_same_bytes(a, b)
    # Room for the amax of delayed scaling is optional.
    without_amax = [ones(t) for t in out[: len(codec.slots)]]
    twice(QUANTIZE_IN_PLACE, other, codec.canonical, without_amax, **call)
    refusing(QUANTIZE_IN_PLACE, other, codec.canonical, without_amax, **call)
    for a, b in zip(without_amax, results[0], strict=False):
        assert_same_bytes(a, b)
    with pytest.raises(qtensor.QTensorError):
        QUANTIZE_IN_PLACE(x, codec.canonical, [t[:1] for t in out], **call)


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_that_linear_transposes(case: FormatCase, dtype: torch.dtype, refusing) -> None:
    """The buffers of `weight.t()` are transposed views: the product has the bits of Python's."""
    if not serves_here(case):
        pytest.skip(reason="no kernel has the format")
    weight = case.quantizer()(torch.randn(64, 96).to(dtype), **call_of(case, {}))
    x, y, bias = (torch.randn(*size).to(dtype) for size in ((8, 96), (8, 64), (64,)))
    quantized = case.quantizer()(x, **call_of(case, {}))
    products = (
        lambda: torch.nn.functional.linear(quantized, weight),
        lambda: torch.nn.functional.linear(quantized, weight, bias),
        lambda: torch.nn.functional.linear(x, weight),
        lambda: torch.nn.functional.linear(x, weight, bias),
        lambda: qtensor.gemm(x, weight.t(), "NN"),
        lambda: qtensor.gemm(y, weight.t(), "TN"),
    )
    for product in products:
        with cpp.left_to_python():
            want = product()
        twice(product)
        assert_same_bytes(refusing(product), want)


def test_values_are_read_at_every_call(refusing) -> None:
    """A program is remembered, not its tensors: new values, scales and seeds count."""
    for name, options in (("fp8_delayed", {}), ("nvfp4", {"stochastic_rounding": True})):
        codec = qtensor.quantizer(name, **options)
        x, call = data("wide", (16, 32), torch.float32), call_of(name, options)
        twice(QUANTIZE, x, codec.canonical, **call)
        found = []
        for factor in range(1, 4):
            now = {key: value * factor for key, value in call.items()}
            found.append(refusing(QUANTIZE, x + factor, codec.canonical, **now))
            assert_same_buffers(codec, found[-1], by_reference(codec, x + factor, **now))
        assert not all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_input_of_any_strides(dtype: torch.dtype, refusing) -> None:
    x = data("wide", (40, 96), dtype)
    twice(QUANTIZE, x, "mxfp8")
    for other in (x.t().contiguous().t(), x.repeat(1, 2)[:, ::2], x[:1].expand(40, 96)):
        want = QUANTIZE(other.contiguous(), "mxfp8")
        for a, b in zip(refusing(QUANTIZE, other, "mxfp8"), want, strict=True):
            assert_same_bytes(a, b)


def test_what_is_left_to_python() -> None:
    """Dtypes, sizes, given maxima and turned buffers that no program takes, now and after many
    calls.
    """
    x = data("wide", (32, 64), torch.float32)
    codec = qtensor.quantizer("fp8")
    text, buffers = codec.canonical, codec(x).buffers()
    blocks = qtensor.quantizer("mxfp8")(x).buffers()
    turned = [b.t().contiguous().t() for b in blocks]
    large = data("wide", (native.ONE_THREAD // 64 + 1, 64), torch.bfloat16)
    for op, args in (
        (QUANTIZE, (large, text)),
        (QUANTIZE, (x[:0], text)),
        (QUANTIZE, (x, text, None, [torch.ones(1)])),
        (DEQUANTIZE, (buffers, text, (32, 64), torch.float64)),
        (DEQUANTIZE, (turned, "mxfp8", (32, 64), torch.float32)),
    ):
        with cpp.left_to_python():
            want = op(*args)
        for _ in range(4):
            found = op(*args)
            for a, b in zip(*((t if op is QUANTIZE else [t]) for t in (found, want)), strict=True):
                assert_same_bytes(a, b)


def test_errors_keep_their_types() -> None:
    x = data("wide", (32, 64), torch.float32)
    for _ in range(4):
        QUANTIZE(x, "fp8_delayed", torch.ones(1))
        with pytest.raises(qtensor.QTensorError):
            QUANTIZE(x, "fp8_delayed")
        with pytest.raises(qtensor.QTensorError, match="float32, bfloat16 or float16"):
            QUANTIZE(x.double(), "mxfp8")


def test_a_fill_that_is_replaced_first_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ remembers no call that a backend of somebody else's has answered."""
    x, asked = data("wide", (5, 288), torch.float32), []
    for name in OPS:
        fill = FILLS[name]
        monkeypatch.setitem(
            FILLS, name, lambda *args, name=name, fill=fill: (asked.append(name), fill(*args))[1]
        )
    for _ in range(4):
        DEQUANTIZE(QUANTIZE(x, "mxfp8"), "mxfp8", x.shape, torch.float32)
    assert asked == ["quantize", "dequantize"] * 4


def test_autograd_and_inference_mode() -> None:
    x = data("wide", (32, 64), torch.float32)
    twice(QUANTIZE, x, "mxfp8")
    with torch.inference_mode():
        assert all(t.is_inference() for t in QUANTIZE(x, "mxfp8"))
    assert not any(t.is_inference() for t in QUANTIZE(x, "mxfp8"))
    meta = QUANTIZE(x.to("meta"), "mxfp8")
    assert [(t.shape, t.dtype, t.is_meta) for t in meta] == [
        (t.shape, t.dtype, True) for t in QUANTIZE(x, "mxfp8")
    ]
