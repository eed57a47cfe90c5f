"""Ops on a CPU in C++: the bytes of the Python kernels from the first call on, and their errors."""

from __future__ import annotations

import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from compile_helpers import Compiled
from formats import DTYPES, FORMATS, FormatCase, assert_same_bytes, formats, usages
from linear_cases import backward_arguments, forward_arguments
from native_cases import (
    SHAPES,
    assert_same_buffers,
    assert_same_floats,
    by_reference,
    call_of,
    data,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import qtensor
from qtensor.core.quantizer_registry import by_name, parse
from qtensor.kernels.cpu import native
from qtensor.kernels.products import choice
from qtensor.library import native_ops
from qtensor.library.define import BODIES, FILLS, SCHEMAS
from tests.library.test_linear_ops import same

OPS = torch.ops.qtensor


@pytest.fixture(autouse=True, scope="module")
def _served() -> None:
    """Skip where there are no kernels."""
    if isinstance(native.library(), str) or native_ops.library() is None:
        pytest.skip(reason="no compiler for the C++ kernels")


@pytest.fixture
def in_cpp(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls a function that must reach no Python kernel, whether it calls an op first or again."""

    def refuse(*args: Any) -> None:
        raise AssertionError("the Python kernel")

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            for name in cpp_ops():
                patch.setitem(FILLS, name, refuse)
            return function(*args, **kwargs)

    return call


def cpp_ops() -> list[str]:
    return [name for name in BODIES if native_ops.library().qtensor_ops_kinds(name.encode())]


def in_python(op: Any, *args: Any, **kwargs: Any) -> Any:
    with native_ops.left_to_python():
        return op(*args, **kwargs)


def facts(result: Any) -> list[Any]:
    results = [result] if isinstance(result, Tensor) else result
    return [(t.shape, t.stride(), t.dtype) for t in results]


# ---- bytes


def check(in_cpp: Any, codec: Any, x: Tensor, call: dict[str, Any]) -> None:
    """Quantize and decode beside the reference arithmetic: bytes, sizes, strides, dtypes."""
    want = by_reference(codec, x, **call)
    got = in_cpp(OPS.quantize, x, codec.canonical, **call)
    assert_same_buffers(codec, got, want)
    assert facts(got) == facts(want)
    buffers = want[: len(codec.slots)]
    values = codec.decode(by_name(codec, buffers), tuple(x.shape))
    for dtype in DTYPES:
        found = in_cpp(OPS.dequantize, buffers, codec.canonical, x.shape, dtype)
        assert found.is_contiguous()
        assert_same_floats(found, values.to(dtype), f"values, {dtype}")
        out = torch.full_like(found, -7.0)
        in_cpp(OPS.dequantize_, buffers, codec.canonical, x.shape, out)
        assert_same_floats(out, found, f"values in place, {dtype}")


@formats
@usages
def test_quantize_and_decode_every_shape(case: FormatCase, rowwise, columnwise, in_cpp) -> None:
    codec = case.quantizer(rowwise=rowwise, columnwise=columnwise)
    for i, shape in enumerate(shape for shape in SHAPES if shape):
        check(in_cpp, codec, data("wide", shape, DTYPES[i % 3]), call_of(case, {}))


@formats
def test_quantize_and_decode_every_option(case: FormatCase, in_cpp) -> None:
    for options in case.each_option():
        codec = case.quantizer(columnwise=True, **options)
        check(in_cpp, codec, data("nan", (33, 72), torch.bfloat16), call_of(case, options))


@formats
def test_into_existing_buffers(case: FormatCase, in_cpp) -> None:
    """`quantize_` writes the bytes of `quantize`, and leaves padding alone as the kernels do."""
    codec = case.quantizer(columnwise=True)
    call, x = call_of(case, {}), data("wide", (96, 33), torch.bfloat16).t()
    made = OPS.quantize(x, codec.canonical, **call)
    # Room for the amax of delayed scaling is optional.
    for count in {len(made), len(codec.slots)}:
        results = []
        for run in (in_cpp, in_python):
            out = [torch.empty_like(t) for t in made[:count]]
            for t in out:
                t.view(-1).view(torch.uint8).fill_(1)
            assert run(OPS.quantize_, x, codec.canonical, out, **call) is None
            results.append(out)
        for a, b in zip(*results, strict=True):
            assert_same_bytes(a, b)


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_a_weight(case: FormatCase, dtype: torch.dtype, in_cpp) -> None:
    """Few rows and many, both layouts of a weight; the buffers of `weight.t()` are views."""
    weight = case.quantizer()(torch.randn(64, 96).to(dtype), **call_of(case, {}))
    columnwise = case.quantizer(rowwise=False, columnwise=True)
    other = columnwise(torch.randn(64, 96).to(dtype), **call_of(case, {}))
    bias = torch.randn(64).to(dtype)
    for rows in (8, 80):
        x, y = torch.randn(rows, 96).to(dtype), torch.randn(rows, 64).to(dtype)
        quantized = case.quantizer()(x, **call_of(case, {}))
        gradient = case.quantizer()(y, **call_of(case, {}))
        for product in (
            lambda x=x: torch.nn.functional.linear(x, weight),
            lambda x=x: torch.nn.functional.linear(x[None], weight, bias),
            lambda q=quantized: torch.nn.functional.linear(q, weight, bias),
            lambda g=gradient: qtensor.gemm(g, other, "NN"),
            lambda y=y: qtensor.gemm(y, other, "NN"),
        ):
            assert_same_bytes(in_cpp(product), in_python(product))
    x, y = torch.randn(8, 96).to(dtype), torch.randn(8, 64).to(dtype)
    for product in (
        lambda: qtensor.gemm(x, weight.t(), "NN"),
        lambda: qtensor.gemm(y, weight.t(), "TN"),
    ):
        assert_same_bytes(product(), in_python(product))


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.name)
def test_layers_of_every_option(case: FormatCase, in_cpp) -> None:
    kept = itertools.cycle(itertools.product(("", "rowwise", "columnwise", "both"), repeat=2))
    dtypes = itertools.cycle(itertools.product(DTYPES, repeat=3))
    wanted = [w for w in itertools.product((True, False), repeat=3) if any(w[:2])]
    sizes = ((32, 32, 32), (2, 32, 64), (33, 96, 160), (1, 1, 32), (80, 64, 96))
    for (some, size), options in itertools.product(
        zip(itertools.cycle(wanted), sizes, strict=False), ({}, *case.each_option())
    ):
        q = case.quantizer(columnwise=True, **options)
        bias = torch.randn(size[1]) if some[2] else None
        forward = forward_arguments(q, size, next(kept), next(dtypes), bias)
        backward = backward_arguments(q, size, some, next(dtypes))
        for op, args in ((OPS.linear_forward, forward), (OPS.linear_backward, backward)):
            found, expected = in_cpp(op, *args), in_python(op, *args)
            same(found, expected)
            assert facts(found) == facts(expected)


def strided(t: Tensor) -> Iterator[Tensor]:
    """Tensors with the values of a matrix, and with other strides."""
    yield t.t().contiguous().t()
    yield t.repeat(1, 2)[:, : t.shape[1]]
    yield t.repeat_interleave(2, 1)[:, ::2]
    yield t.repeat_interleave(2, 0)[::2]


@formats
def test_operands_of_other_strides(case: FormatCase, in_cpp) -> None:
    q = case.quantizer(columnwise=True)
    x, weight, *rest = forward_arguments(q)
    dy, *saved = backward_arguments(q)
    expected, gradients = OPS.linear_forward(x, weight, *rest), OPS.linear_backward(dy, *saved)
    for turned, turned_weight, gradient in zip(*map(strided, (x, weight, dy)), strict=True):
        same(in_cpp(OPS.linear_forward, turned, turned_weight, *rest), expected)
        same(in_cpp(OPS.linear_backward, gradient, *saved), gradients)
    alike = torch.ones(()).expand_as(dy)
    same(
        in_cpp(OPS.linear_backward, alike, *saved), OPS.linear_backward(alike.contiguous(), *saved)
    )


def test_the_hundredth_call_and_other_values(in_cpp) -> None:
    """Nothing but descriptions is remembered: new values, scales and seeds count."""
    for name, options in (("fp8_delayed", {}), ("nvfp4", {"stochastic_rounding": True})):
        args = list(forward_arguments(qtensor.quantizer(name, columnwise=True, **options)))
        for turn in range(100):
            args[0] = args[0] * (1.5 if turn % 2 else 0.7)
            args[4] = None if args[4] is None else args[4] * (2 if turn % 2 else 0.5)
            args[5] = None if args[5] is None else args[5] + turn
            same(in_cpp(OPS.linear_forward, *args), in_python(OPS.linear_forward, *args))


def test_padding_is_zero_in_dirty_memory() -> None:
    for _ in range(20):
        dirty = [torch.full((128, 4), 0xA5, dtype=torch.uint8) for _ in range(8)]
        del dirty
        scales = OPS.quantize(torch.ones(3, 40), "mxfp8(columnwise=True)")[1].view(torch.uint8)
        assert scales.shape == (128, 4)
        assert scales[3:].count_nonzero() == scales[:, 2:].count_nonzero() == 0


# ---- what Python serves


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ops whose Python kernels ran."""
    names: list[str] = []
    for name in cpp_ops():
        fill = FILLS[name]

        def noted(*args: Any, name: str = name, fill: Any = fill) -> Any:
            names.append(name)
            return fill(*args)

        monkeypatch.setitem(FILLS, name, noted)
    return names


def test_what_is_left_to_python(asked: list[str]) -> None:
    """Dtypes, sizes, maxima, buffers and backends that C++ does not take."""
    x, text = data("wide", (32, 64), torch.float32), "mxfp8"
    buffers = OPS.quantize(x, text)
    turned = [b.t().contiguous().t() for b in buffers]
    large = data("wide", (native.ONE_THREAD // 64 + 1, 64), torch.bfloat16)
    weight = qtensor.quantize(torch.randn(16, 64), text)
    calls: list[Callable[[], Any]] = [
        lambda: OPS.quantize(large, text),
        lambda: OPS.quantize(x[:0], text),
        lambda: OPS.quantize(x[0, 0], text),
        lambda: OPS.quantize(x, "fp8", None, [torch.ones(1)]),
        lambda: [OPS.dequantize(buffers, text, (32, 64), torch.float64)],
        lambda: [OPS.dequantize(turned, text, (32, 64), torch.float32)],
        lambda: [qtensor.gemm(x, weight, "TN", backend="reference")],
        lambda: [qtensor.gemm(x, weight, "TN", fast_accumulation=True)],
        lambda: [qtensor.gemm(weight, x, "TN")],
    ]
    for call in calls:
        asked.clear()
        found = call()
        assert len(asked) == 1 or asked[-1] == "gemm"
        same(found, in_python(call))
    assert all(t.is_meta for t in OPS.quantize(x.to("meta"), text))


def test_the_table_of_products_decides(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ asks it once for each product, in each thread."""
    x, weight = torch.randn(8, 64), qtensor.quantize(torch.randn(16, 64), "mxfp8")
    product = qtensor.gemm(x, weight, "TN")
    monkeypatch.setitem(choice.TABLE, "few_rows", lambda problem: "not in this test")
    choice.reset()
    with ThreadPoolExecutor(1) as thread:
        decoded = thread.submit(qtensor.gemm, x, weight, "TN").result()
    assert qtensor.explain(x, weight).backend == "reference"
    monkeypatch.undo()
    choice.reset()
    assert asked == []
    assert torch.equal(decoded, torch.mm(x, weight.dequantize().t()))
    assert torch.equal(qtensor.gemm(x, weight, "TN"), product)


def wrong_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    x, buffers = torch.randn(32, 64), OPS.quantize(torch.randn(32, 64), "mxfp8")
    forward = list(forward_arguments(qtensor.quantizer("fp8", columnwise=True)))
    backward = list(backward_arguments(qtensor.quantizer("fp8_delayed", columnwise=True)))
    yield "quantize", (x.double(), "mxfp8")
    yield "quantize", (x, "mxfp9")
    yield "quantize", (x, "mxfp8\0")
    yield "quantize", (x, "mxfp8(columnwise=Maybe)")
    yield "quantize", (x, "fp8_delayed")
    yield "quantize", (x, "nvfp4(stochastic_rounding=True)")
    yield "quantize", (x, "mxfp8", None, None, torch.ones(2))
    yield "quantize_", (x, "mxfp8", [b[:1] for b in buffers])
    yield "dequantize", (buffers[:1], "mxfp8", (32, 64), torch.float32)
    yield "dequantize", (buffers * 2, "mxfp8", (32, 64), torch.float32)
    yield "dequantize", (buffers, "mxfp8", (32, 64), torch.uint8)
    yield "dequantize_", (buffers, "mxfp8", (32, 64), torch.ones(64, 32))
    yield "gemm", ([x], "", [32, 64], buffers, "mxfp8", [32, 64], "TT", torch.float32)
    yield "gemm", ([x], "", [32, 64], buffers * 2, "mxfp8", [32, 64], "TN", torch.float32)
    yield "weight_gemm", (x, buffers, "mxfp8", 31)
    yield "weight_gemm", (x[:, :32].contiguous(), buffers, "mxfp8", 32)
    yield "weight_gemm", (x, buffers, "mxfp8", 32, torch.ones(5))
    yield "linear_forward", (forward[0], torch.randn(64, 32), *forward[2:])
    yield "linear_forward", (*forward[:3], "no plan", *forward[4:])
    yield "linear_backward", (*backward[:4], torch.ones(2), None)
    yield "linear_backward", (backward[0], backward[1][:1], *backward[2:])
    yield "record_amax_", (torch.ones(4, 3), [torch.ones(2)], 2)
    yield "advance_step_", (torch.zeros(2, dtype=torch.int64),)


def test_errors_are_those_of_the_python_kernels(capfd: pytest.CaptureFixture[str]) -> None:
    for name, args in wrong_calls():
        with pytest.raises(qtensor.QTensorError) as expected:
            BODIES[name](*args)
        packet = getattr(OPS, name)
        for op in (packet, packet.default):
            with pytest.raises(type(expected.value)) as found:
                op(*args)
            assert type(found.value) is type(expected.value)
            assert str(found.value) == str(expected.value)
            assert found.value.__context__ is expected.value.__context__ is None
    assert capfd.readouterr() == ("", "")


def test_errors_of_torch_and_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 32)
    with pytest.raises(qtensor.QTensorError):
        OPS.quantize(x, "mxfp9")
    for wrong in (("mxfp8",), (x,), (x, 3), (x, "mxfp8", "no tensor")):
        with pytest.raises(RuntimeError, match="quantize"):
            OPS.quantize(*wrong)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(FILLS, "quantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        OPS.quantize(torch.randn(0, 32), "mxfp8")


def test_a_description_that_fails_leaves_the_call_to_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any error: C++ would take what it leaves behind for an address. Nobody has asked for this
    text yet.
    """

    def broken(quantizer: Any) -> None:
        raise KeyError(quantizer.canonical)

    monkeypatch.setattr(native_ops, "describe", broken)
    x, codec = torch.randn(4, 32), parse("fp8(amax_epsilon=0.21875)")
    assert_same_buffers(codec, OPS.quantize(x, codec.canonical), by_reference(codec, x))


def test_an_interrupt_of_a_description_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(quantizer: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(native_ops, "describe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        OPS.quantize(torch.randn(4, 32), "fp8(amax_epsilon=0.28125)")


def test_the_letters_of_the_arguments_fit_the_schemas() -> None:
    letters = {"Tensor": "t", "Tensor[]": "l", "Tensor?": "o", "Tensor[]?": "p", "str": "s"}
    letters |= {"SymInt[]": "n", "float[]": "n"}
    for name in cpp_ops():
        text = re.sub(r"\(\w!\)", "", SCHEMAS[name]).partition("(")[2].rpartition(") -> ")[0]
        types = [argument.split()[0] for argument in text.split(", ")]
        expected = "".join(letters.get(kind, "w") for kind in types)
        assert native_ops.library().qtensor_ops_kinds(name.encode()).decode() == expected


# ---- what watches ops


class Watch(TorchDispatchMode):
    """Names of the library's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.startswith("qtensor"):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_what_watches_sees_the_ops() -> None:
    x = torch.randn(32, 64)
    for source in (x, x[:0]):  # served in C++, and by Python
        with Watch() as watch:
            qtensor.quantize(source, "mxfp8").dequantize()
        assert watch.seen == ["qtensor::quantize", "qtensor::dequantize_tensor"]
    with torch.profiler.profile() as profile:
        qtensor.quantize(x, "mxfp8").dequantize()
    names = {event.key for event in profile.key_averages()}
    assert {"qtensor::quantize", "qtensor::dequantize_tensor"} <= names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: OPS.quantize(x, "mxfp8")[0], x)
    assert "qtensor::quantize" in str(traced.graph)
    with FakeTensorMode() as mode:
        fakes = OPS.quantize(mode.from_tensor(x), "mxfp8")
    assert all(isinstance(fake, FakeTensor) for fake in fakes)
    assert facts(fakes) == facts(OPS.quantize(x, "mxfp8"))


def test_transforms_and_the_compiler() -> None:
    x = torch.randn(3, 4, 64)
    weight = qtensor.quantize(torch.randn(32, 64), "mxfp8")
    buffers = weight.buffers()

    def call(x: Tensor) -> Tensor:
        return OPS.weight_gemm(x, buffers, "mxfp8", 32)

    same([torch.func.functionalize(call)(x)], [call(x)])
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(call)(x)
    for _ in range(2):
        compiled = Compiled(call)
        same([compiled(x)], [call(x)])
        compiled.check_graphs(1)


@formats
def test_gradients_and_inference_mode(case: FormatCase) -> None:
    x = torch.randn(32, 64).requires_grad_()
    q = case.quantize(x)
    q.dequantize().sum().backward()
    assert torch.equal(x.grad, torch.ones(32, 64))
    with torch.inference_mode():
        made = case.quantize(x.detach())
        assert made.dequantize().is_inference()
        assert all(b.is_inference() for b in made.buffers())
    assert not q.detach().dequantize().is_inference()


def test_an_op_without_gradients_is_warned_about_once() -> None:
    weight = qtensor.quantize(torch.randn(32, 64), "mxfp8").buffers()
    for rows in (8, 9000):  # served in C++, and by Python
        x = torch.randn(rows, 64, requires_grad=True)
        with pytest.warns(UserWarning, match="qtensor::weight_gemm: an autograd kernel") as told:
            OPS.weight_gemm(x, weight, "mxfp8", 32).sum().backward()
        assert len(told) == 1
        assert x.grad is None


def test_values_that_the_dispatcher_computes() -> None:
    x = torch.randn(32, 64)
    for lazy, plain in (
        (torch._neg_view(x), -x),
        (torch._efficientzerotensor((32, 64)), torch.zeros(32, 64)),
    ):
        same(OPS.quantize(lazy, "nvfp4"), OPS.quantize(plain, "nvfp4"))


class Own(Tensor):
    """A subclass of the caller."""


def test_arguments_and_results() -> None:
    weight = qtensor.quantize(torch.randn(64, 64), "mxfp8")
    x, buffers, bias = torch.randn(2, 64), weight.buffers(), torch.randn(64)
    args, op = (x, buffers, "mxfp8", 64, bias), OPS.weight_gemm.default
    plain, with_bias = op(*args[:4]), op(*args)
    assert_same_bytes(op(x, tuple(buffers), n=64, quantizer="mxfp8", bias=None), plain)
    assert_same_bytes(op(x, buffers, "mxfp8", bias=bias, n=64), with_bias)
    assert type(op(x.as_subclass(Own), *args[1:])) is Own
    before = [sys.getrefcount(held) for held in (*args, *buffers)]
    results = [op(*args) for _ in range(100)]
    assert [sys.getrefcount(held) for held in (*args, *buffers)] == before
    assert len({y.data_ptr() for y in results}) == 100
    assert len({y._use_count() for y in results} | {torch.ones(1)._use_count()}) == 1


@pytest.mark.parametrize("cols", [64, 1 << 13])  # served in C++, and by Python
def test_a_product_of_a_subclass_of_the_caller(cols: int) -> None:
    x, weight = torch.randn(65, cols), qtensor.quantize(torch.randn(64, cols), "mxfp8").t()
    own = qtensor.quantize(x.as_subclass(Own), "mxfp8") @ weight
    assert_same_bytes(own.as_subclass(Tensor), qtensor.quantize(x, "mxfp8") @ weight)


# ---- threads


def test_threads_ask_at_the_same_time() -> None:
    """Texts and sizes that nobody has asked for yet."""
    x = torch.randn(24, 64)
    texts = [f"fp8(amax_epsilon={i}.0,columnwise=True)" for i in range(40)]
    cases = [(x[: 2 + i % 20], text) for i, text in enumerate(texts)]
    with ThreadPoolExecutor(4) as pool:
        rounds = [list(pool.map(lambda case: OPS.quantize(*case), cases)) for _ in range(3)]
    for found in rounds:
        for got, (source, text) in zip(found, cases, strict=True):
            assert_same_buffers(parse(text), got, by_reference(parse(text), source))
