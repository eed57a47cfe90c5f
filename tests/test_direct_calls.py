"""C++ answers calls from Python, and passes every other call to torch's dispatcher."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import qtensor
from qtensor.kernels.cpu.small_calls import answers, direct

OPS = torch.ops.qtensor


def direct_op(name: str, dispatched: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that `direct.install` would put in front of `dispatched`."""
    library = answers.library()
    if library is None or direct.maker() is None:
        pytest.skip(reason="no compiler, no headers of Python, or not Linux")
    function = direct.direct_op(library, getattr(OPS, name).default, name, dispatched)
    assert type(function).__name__ == "DirectOp"
    return function


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the call went to the dispatcher")


class Passed:
    """Notes the calls that reach the dispatcher."""

    def __init__(self, op: Callable[..., Any]) -> None:
        self.op, self.calls = op, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.op(*args, **kwargs)


def product(rows: int = 2, **x: Any) -> tuple[Tensor, list[Tensor], str, int, Tensor | None]:
    """Return arguments of `weight_gemm`, for which a program is known."""
    torch.manual_seed(0)
    weight = qtensor.quantize(torch.randn(64, 64), "mxfp8")
    buffers = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    args = (torch.randn(rows, 64, **x), buffers, "mxfp8", 64, torch.randn(64))
    with torch.no_grad():
        for _ in range(3):
            OPS.weight_gemm.default(*args)
    return args


def repeated(name: str) -> tuple[Any, ...]:
    """Return arguments of an op, for which a program is known."""
    torch.manual_seed(0)
    x = torch.randn(8, 64)
    codes = OPS.quantize.default(x, "mxfp8")[:2]
    args: dict[str, tuple[Any, ...]] = {
        "quantize": (x, "mxfp8"),
        "dequantize": (codes, "mxfp8", x.shape, torch.bfloat16),
        "gemm": ([x], "", [8, 64], codes, "mxfp8", (8, 64), "TN", torch.float32),
    }
    for _ in range(3):
        getattr(OPS, name).default(*args[name])
    return args[name]


@pytest.mark.parametrize("name", ["quantize", "dequantize", "gemm"])
def test_a_known_call_does_not_reach_the_dispatcher(name: str):
    args = repeated(name)
    with answers.left_to_python():
        expected = getattr(OPS, name).default(*args)
    found = direct_op(name, refuse)(*args)
    assert type(found) is type(expected)
    pairs = zip(found, expected, strict=True) if name == "quantize" else [(found, expected)]
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_names_and_defaults_of_arguments():
    x, buffers, text, n, bias = product()
    call = direct_op("weight_gemm", refuse)
    for _ in range(3):
        plain = OPS.weight_gemm.default(x, buffers, text, n, None)
    assert torch.equal(call(x, tuple(buffers), text, n), plain)
    assert torch.equal(call(x, buffers, n=n, quantizer=text, bias=None), plain)
    with_bias = OPS.weight_gemm.default(x, buffers, text, n, bias)
    assert torch.equal(call(x, buffers, text, bias=bias, n=n), with_bias)
    assert not torch.equal(plain, with_bias)


def test_compiled_code_takes_the_same_way(monkeypatch: pytest.MonkeyPatch):
    weight = qtensor.quantize(torch.randn(64, 64), "mxfp8")
    x = torch.randn(2, 64)
    compiled = torch.compile(lambda x: F.linear(x, weight), fullgraph=True)
    with torch.inference_mode():
        for _ in range(3):
            expected = compiled(x)
        monkeypatch.setattr(OPS.weight_gemm.default, "_op", direct_op("weight_gemm", refuse))
        assert torch.equal(compiled(x), expected)
        assert torch.equal(F.linear(x, weight), expected)


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


class Own(Tensor):
    pass


def _gradient(call: Callable[..., Any]) -> None:
    call(*product(requires_grad=True))


def _gradient_of_the_bias(call: Callable[..., Any]) -> None:
    x, buffers, text, n, _ = product()
    call(x, buffers, text, n, torch.ones(64, requires_grad=True))


def _torch_function_mode(call: Callable[..., Any]) -> None:
    args = product()
    with torch.device("cpu"):
        call(*args)


def _mode(call: Callable[..., Any]) -> None:
    args = product()
    with Nothing():
        call(*args)


def _profiler(call: Callable[..., Any]) -> None:
    args = product()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    # Without acc_events, torch 2.11 warns that it keeps the events of one cycle only.
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        call(*args)
    assert "qtensor::weight_gemm" in [event.name for event in profile.events()]


def _vmap(call: Callable[..., Any]) -> None:
    args = product()

    def inner(y: Tensor) -> Tensor:
        call(*args)
        return y

    torch.func.vmap(inner)(torch.ones(2))


def _trace(call: Callable[..., Any]) -> None:
    x, *rest = product()
    with warnings.catch_warnings():
        # torch 2.14 says that torch.jit.trace is deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        traced = torch.jit.trace(lambda x: call(x, *rest), x)
    assert "qtensor::weight_gemm" in str(traced.graph)


def _fake(call: Callable[..., Any]) -> None:
    x, buffers, text, n, _ = product()
    with FakeTensorMode() as mode:
        call(mode.from_tensor(x), [mode.from_tensor(b) for b in buffers], text, n, None)


def _subclass(call: Callable[..., Any]) -> None:
    x, *rest = product()
    assert type(call(x.as_subclass(Own), *rest)) is Own


def _negative(call: Callable[..., Any]) -> None:
    _, *rest = product()
    x = torch.randn(2, 64, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    call(x, *rest)


def _integer_of_numpy(call: Callable[..., Any]) -> None:
    x, buffers, text, _, bias = product()
    call(x, buffers, text, np.int64(64), bias)


def _another_kind(call: Callable[..., Any]) -> None:
    x, *rest = product()
    call(x[:1].repeat(7, 1), *rest)


def _left_to_python(call: Callable[..., Any]) -> None:
    args = product()
    with answers.left_to_python():
        call(*args)


REASONS = (
    _gradient,
    _gradient_of_the_bias,
    _torch_function_mode,
    _mode,
    _profiler,
    _vmap,
    _trace,
    _fake,
    _subclass,
    _negative,
    _integer_of_numpy,
    _another_kind,
    _left_to_python,
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.trace
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.__name__[1:])
def test_what_the_dispatcher_has_to_see(reason: Callable[[Callable[..., Any]], None]):
    passed = Passed(OPS.weight_gemm.default)
    reason(direct_op("weight_gemm", passed))
    assert passed.calls


def test_a_gradient_that_nobody_records_changes_nothing():
    args = product(requires_grad=True)
    with torch.no_grad():
        y = direct_op("weight_gemm", refuse)(*args)
    assert not y.requires_grad


def test_errors_are_those_of_the_op():
    x, *rest = product()
    with pytest.raises(qtensor.QTensorError, match="_rowwise_data"):
        OPS.weight_gemm.default(x[:, :32].contiguous(), *rest)
    for wrong in ({"n": 64, "rows": 2}, {"x": x, "n": 64}, {}):
        with pytest.raises(RuntimeError, match="weight_gemm"):
            OPS.weight_gemm.default(x, *rest[:2], **wrong)


def test_nothing_is_kept():
    args = product()
    call = direct_op("weight_gemm", refuse)
    before = [sys.getrefcount(held) for held in (*args, *args[1])]
    results = [call(*args) for _ in range(100)]
    assert [sys.getrefcount(held) for held in (*args, *args[1])] == before
    assert {sys.getrefcount(y) for y in results} == {sys.getrefcount(y) for y in [torch.ones(1)]}
    assert len({y.data_ptr() for y in results}) == 100


def test_an_op_keeps_its_hash():
    # torch finds ops in dicts: rules of DTensor, decompositions.
    assert hash(direct_op("weight_gemm", refuse)) == hash(refuse)
    assert direct_op("weight_gemm", refuse).__name__ == "refuse"


def test_only_ops_that_write_nothing_are_answered_directly():
    direct_op("weight_gemm", refuse)  # skips where there are no direct calls
    names = {name for name in answers.PLANNERS if type(_function(name)).__name__ == "DirectOp"}
    assert names == set(answers.PLANNERS) - {"quantize_"}


def _function(name: str) -> Any:
    return getattr(OPS, name).default._op


def test_a_second_installation_changes_nothing():
    call = direct_op("weight_gemm", refuse)
    op = OPS.weight_gemm.default
    assert direct.direct_op(answers.library(), op, "weight_gemm", call) is call


class OfAnotherTorch:
    """An op without `_op`."""

    class _schema:
        is_mutable = False


def test_a_torch_without_this_function(monkeypatch: pytest.MonkeyPatch):
    packet = type("Packet", (), {"default": OfAnotherTorch()})
    monkeypatch.setattr(torch.ops.qtensor, "weight_gemm", packet)
    direct.install(answers.library(), ["weight_gemm"])
    assert not hasattr(packet.default, "_op")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(direct, "maker", lambda: None)
    op = OPS.weight_gemm.default
    assert direct.direct_op(answers.library(), op, "weight_gemm", refuse) is refuse


def test_a_list_may_change_while_a_program_runs():
    """Another thread replaces the tensors that the kernel reads, and writes to freed memory."""
    weight = qtensor.quantize(torch.randn(1024, 1024), "mxfp8")
    buffers = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    x, call = torch.randn(1, 1024), direct_op("weight_gemm", OPS.weight_gemm.default)
    expected = [OPS.weight_gemm.default(x, buffers, "mxfp8", 1024) for _ in range(3)][-1]
    shared, stop = [*buffers], threading.Event()

    def replace() -> None:
        while not stop.is_set():
            shared[:] = [buffer.clone() for buffer in buffers]
            for _ in range(4):
                [torch.full_like(buffer, 99) for buffer in buffers]

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        assert all(torch.equal(call(x, shared, "mxfp8", 1024), expected) for _ in range(1000))
    finally:
        stop.set()
        thread.join()
