"""Small calls behave like large calls for modes, the profiler, autograd, subclasses and errors."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from formats import BY_NAME, FormatCase, assert_same_bytes, formats
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import qtensor
from qtensor.kernels.cpu import native
from qtensor.library import native_ops
from qtensor.library.gemm import WEIGHT_GEMM
from qtensor.library.quantize import QUANTIZE

NAMES = ("fp8", "mxfp8", "nvfp4")


def small(rows: int = 32, cols: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def thrice(op: Any, *args: Any) -> Any:
    """Return the result of the third call: C++ answers it where it can."""
    for _ in range(2):
        op(*args)
    return op(*args)


def test_padding_is_zero() -> None:
    """The memory that a call takes is dirty."""
    for _ in range(20):
        dirty = [torch.full((128, 4), 0xA5, dtype=torch.uint8) for _ in range(8)]
        del dirty
        scales = thrice(QUANTIZE, torch.ones(3, 40), "mxfp8(columnwise=True)")[1]
        assert scales.shape == (128, 4)
        assert scales.view(torch.uint8)[3:].count_nonzero() == 0
        assert scales.view(torch.uint8)[:, 2:].count_nonzero() == 0


def test_a_kind_that_comes_once_is_not_planned() -> None:
    if native_ops.library() is None:
        pytest.skip(reason="no compiler, or a torch without its headers")
    x, known = small(29, 37), len(answers._OWNED)
    values = torch.ops.qtensor.dequantize
    buffers = QUANTIZE(x, "mxfp6")
    values(buffers, "mxfp6", x.shape, torch.float32)
    assert len(answers._OWNED) == known
    QUANTIZE(x, "mxfp6")
    values(buffers, "mxfp6", x.shape, torch.float32)
    assert len(answers._OWNED) == known + 2


def test_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = qtensor.quantizer("mxfp4")
    x = small(31, 32)
    want = codec(x)
    with native_ops.left_to_python():
        monkeypatch.setattr(native, "library", lambda: "switched off")
        got = codec(x)
        for a, b in zip(got.buffers(), want.buffers(), strict=True):
            assert_same_bytes(a, b)
        assert_same_bytes(got.dequantize(), want.dequantize())


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
        traced = torch.jit.trace(lambda x: QUANTIZE(x, "mxfp8")[0], small())
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


def product() -> tuple[Tensor, list[Tensor], str, int, Tensor]:
    """Return arguments of ``weight_gemm``, for which a program is known."""
    weight = qtensor.quantize(small(64, 64), "mxfp8")
    args = (small(2, 64, seed=1), weight.buffers(), "mxfp8", 64, small(1, 64, seed=2)[0])
    thrice(WEIGHT_GEMM, *args)
    return args


@pytest.mark.parametrize("name", ["quantize", "dequantize", "gemm"])
def test_results_have_the_type_and_the_strides_of_the_op(name: str) -> None:
    x = small(8, 64)
    buffers = QUANTIZE(x, "mxfp8")
    args: dict[str, tuple[Any, ...]] = {
        "quantize": (x, "mxfp8"),
        "dequantize": (buffers, "mxfp8", x.shape, torch.bfloat16),
        "gemm": ([x], "", [8, 64], buffers, "mxfp8", (8, 64), "TN", torch.float32),
    }
    op = getattr(torch.ops.qtensor, name).default
    found = thrice(op, *args[name])
    with native_ops.left_to_python():
        expected = op(*args[name])
    assert type(found) is type(expected)
    pairs = zip(found, expected, strict=True) if name == "quantize" else [(found, expected)]
    for a, b in pairs:
        assert a.stride() == b.stride()
        assert_same_bytes(a, b)


def test_names_and_defaults_of_arguments() -> None:
    x, buffers, text, n, bias = product()
    plain = thrice(WEIGHT_GEMM, x, buffers, text, n, None)
    assert_same_bytes(WEIGHT_GEMM(x, tuple(buffers), text, n), plain)
    assert_same_bytes(WEIGHT_GEMM(x, buffers, n=n, quantizer=text, bias=None), plain)
    with_bias = WEIGHT_GEMM(x, buffers, text, n, bias)
    assert_same_bytes(WEIGHT_GEMM(x, buffers, text, bias=bias, n=n), with_bias)
    assert not torch.equal(plain, with_bias)


def test_errors_are_those_of_the_op() -> None:
    x, *rest = product()
    with pytest.raises(qtensor.QTensorError, match="_rowwise_data"):
        WEIGHT_GEMM(x[:, :32].contiguous(), *rest)
    for wrong in ({"n": 64, "rows": 2}, {"x": x, "n": 64}, {}):
        with pytest.raises(RuntimeError, match="weight_gemm"):
            WEIGHT_GEMM(x, *rest[:2], **wrong)


def test_a_known_call_keeps_its_arguments_and_shares_no_results() -> None:
    args = product()
    before = [sys.getrefcount(held) for held in (*args, *args[1])]
    results = [WEIGHT_GEMM(*args) for _ in range(100)]
    assert [sys.getrefcount(held) for held in (*args, *args[1])] == before
    assert {sys.getrefcount(y) for y in results} == {sys.getrefcount(y) for y in [torch.ones(1)]}
    assert len({y.data_ptr() for y in results}) == 100


class Own(Tensor):
    """A subclass of the caller."""


def test_a_known_call_of_other_tensors() -> None:
    """The same sizes do not make fake tensors, subclasses and negated views a known call."""
    x, *rest = product()
    expected = WEIGHT_GEMM(x, *rest)
    assert type(WEIGHT_GEMM(x.as_subclass(Own), *rest)) is Own
    assert_same_bytes(WEIGHT_GEMM(torch._neg_view(-x), *rest), expected)
    with FakeTensorMode() as mode:
        buffers = [mode.from_tensor(b) for b in rest[0]]
        fake = WEIGHT_GEMM(mode.from_tensor(x), buffers, *rest[1:3], None)
    assert isinstance(fake, FakeTensor)
    assert fake.shape == expected.shape
