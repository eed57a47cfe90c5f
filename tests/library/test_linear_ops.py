"""The ops of a linear layer as a whole: the bytes of the single ops, in C++ and in Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from formats import FORMATS, FormatCase
from linear_cases import backward_arguments, forward_arguments, kept_text

import qtensor
from qtensor.core.linear_plans import backward_plan
from qtensor.core.quantizer_registry import by_name, parse, slots_within
from qtensor.kernels.cpu import native
from qtensor.library import native_ops
from qtensor.library.linear import LinearBackwardArgs, forward_of_quantized

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((32, 32, 32), (2, 32, 64), (33, 96, 160), (128, 64, 256))
every_format = pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.name)


def same(found: Any, expected: Any) -> None:
    """Bytes, but for what a NaN holds."""
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        if got.dtype.is_floating_point:
            assert torch.equal(got.isnan(), want.isnan())
            got, want = got.nan_to_num(nan=1.0), want.nan_to_num(nan=1.0)
        assert torch.equal(got, want)


def quantizers(case: FormatCase) -> Any:
    """Both directions, with each option on its own."""
    yield case.quantizer(columnwise=True)
    for options in case.each_option():
        yield case.quantizer(columnwise=True, **options)


@every_format
def test_forward_is_quantize_and_gemm(case):
    kept = itertools.cycle(itertools.product(("", "rowwise", "columnwise", "both"), repeat=2))
    dtypes = itertools.cycle(itertools.product(FLOATS, repeat=3))
    count = 0
    for q in quantizers(case):
        for sizes in SIZES:
            for bias in (None, torch.randn(sizes[1]), torch.randn(sizes[1]).bfloat16()):
                args = forward_arguments(q, sizes, next(kept), next(dtypes), bias)
                found = torch.ops.qtensor.linear_forward(*args)
                with native_ops.left_to_python():
                    same(found, forward_of_quantized(*args))
                    same(found, torch.ops.qtensor.linear_forward(*args))
                count += 1
    assert count


@every_format
def test_backward_is_quantize_gemm_and_bias_grad(case):
    wanted = itertools.cycle(w for w in itertools.product((True, False), repeat=3) if any(w[:2]))
    dtypes = itertools.cycle(itertools.product(FLOATS, repeat=3))
    for q in quantizers(case):
        for sizes in (*SIZES, *SIZES):  # each with two of the six choices, which take turns
            args = backward_arguments(q, sizes, next(wanted), next(dtypes))
            found = torch.ops.qtensor.linear_backward(*args)
            with native_ops.left_to_python():
                same(found, torch.ops.qtensor.linear_backward(*args))
                same(found, backward_by_ops(*args))


def backward_by_ops(*args: Any) -> list[torch.Tensor]:
    call = LinearBackwardArgs(*args)
    dy, scales, seed = call.dy, call.scales, call.seed
    text, x_text, w_text, dtype, w_dtype, bias = backward_plan(call.plan)
    x_shape, w_shape = (dy.shape[0], call.columns), (dy.shape[1], call.columns)
    count = len(parse(x_text).slots) if x_text else 0
    x, weight = call.saved[:count], call.saved[count:]
    q = parse(text)
    ops = torch.ops.qtensor
    buffers = ops.quantize(dy, text, None if scales is None else scales[2:3], None, seed)
    row, column = (kept_text(q, usage) for usage in ("rowwise", "columnwise"))
    left, left_t = ([buffers[i] for i in slots_within(text, part)] for part in (row, column))
    found = []
    if weight:
        found.append(ops.gemm(left, row, dy.shape, weight, w_text, w_shape, "NN", dtype))
    if x:
        found.append(ops.gemm(left_t, column, dy.shape, x, x_text, x_shape, "NT", w_dtype))
    if bias:
        found.append(ops.bias_grad(dy))
    return [*found, *buffers[len(q.slots) :]]


@every_format
def test_what_is_not_finite(case):
    q = case.quantizer(columnwise=True)
    args = list(forward_arguments(q))
    args[0][3, 5], args[1][7, 9] = float("inf"), float("nan")
    found = torch.ops.qtensor.linear_forward(*args)
    with native_ops.left_to_python():
        same(found, torch.ops.qtensor.linear_forward(*args))
    args = list(backward_arguments(q))
    args[0][3, 5], args[0][7, 9] = float("-inf"), float("nan")
    found = torch.ops.qtensor.linear_backward(*args)
    with native_ops.left_to_python():
        same(found, torch.ops.qtensor.linear_backward(*args))


def test_other_sizes_and_layouts():
    """Large matrices, rows of one element, other layouts."""
    q = qtensor.quantizer("mxfp8", columnwise=True)
    for sizes in ((65, 1, 32), (32, 512, 160), (65, 32, 1)):
        args = forward_arguments(q, sizes)
        outputs = torch.ops.qtensor.linear_forward(*args)
        same(outputs, forward_of_quantized(*args))
    args = list(forward_arguments(q))
    args[0] = args[0].t().contiguous().t()
    same(torch.ops.qtensor.linear_forward(*args), forward_of_quantized(*args))


def test_sizes_that_do_not_meet_reach_no_kernel():
    """Operands that do not fit are refused before anything is read."""
    q = qtensor.quantizer("fp8", columnwise=True)
    args = list(forward_arguments(q))
    args[1] = torch.randn(64, 32)
    with pytest.raises(qtensor.QTensorError, match="must be equal"):
        torch.ops.qtensor.linear_forward(*args)
    args = list(backward_arguments(q))
    args[0] = torch.randn(48, 64)
    with pytest.raises(qtensor.QTensorError, match="must have shape"):
        torch.ops.qtensor.linear_backward(*args)
    delayed = qtensor.quantizer("fp8_delayed", columnwise=True)
    args = list(backward_arguments(delayed))
    args[-2] = torch.ones(2)
    with pytest.raises(qtensor.QTensorError):
        torch.ops.qtensor.linear_backward(*args)
    x, w = (q.quantize(torch.randn(32, k)) for k in (64, 32))
    sides = (x.buffers(), q.canonical, [32, 64], w.buffers(), q.canonical, [32, 32])
    with pytest.raises(qtensor.QTensorError, match="must be equal"):
        torch.ops.qtensor.gemm(*sides, "TN", torch.float32)


def test_a_product_is_that_of_torch():
    """C++ multiplies with the bits of ``torch.mm``, whatever the sizes.

    Products of fewer rows have sums of their own.
    """
    generator = torch.Generator().manual_seed(5)
    plain = qtensor.quantizer("fp8", columnwise=True)
    for _ in range(60):
        m, n, k = torch.randint(2, 200, (3,), generator=generator).tolist()
        m += native.MOST_ROWS
        a, b = (torch.randn(s, k, generator=generator) for s in (m, n))
        buffers = plain.quantize(b).buffers()
        operands = ([a], "", [m, k], buffers, plain.canonical, [n, k])
        product = torch.ops.qtensor.gemm(*operands, "TN", torch.float32)
        values, factor = plain.decode_codes(by_name(plain, buffers), (n, k))
        assert torch.equal(product, torch.mm(a, values.t()) * factor)


def _while_set(change: Callable[[Any], Any], value: Any, usual: Any) -> AbstractContextManager[Any]:
    """Call ``change(value)``, and ``change(usual)`` at the end of the block."""
    stack = ExitStack()
    stack.callback(change, usual)
    change(value)
    return stack


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "medium precision": lambda: _while_set(
        torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision()
    ),
    "high precision": lambda: _while_set(
        torch.set_float32_matmul_precision, "high", torch.get_float32_matmul_precision()
    ),
    "two threads": lambda: _while_set(torch.set_num_threads, 2, torch.get_num_threads()),
    "float64 by default": lambda: _while_set(
        torch.set_default_dtype, torch.float64, torch.get_default_dtype()
    ),
    "denormals are zero": lambda: _while_set(torch.set_flush_denormal, True, False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
"""What programs set for torch's own products."""


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_equal_calls_have_the_same_bytes_under_any_setting(name, setting):
    """Whether C++ or Python computes them, seen before or after the change."""
    scale = 1e-20 if setting == "denormals are zero" else 1.0
    weight = qtensor.quantize(scale * torch.randn(128, 240), name)
    x = scale * torch.randn(128, 240)
    args = (x, weight.buffers(), weight.quantizer.canonical, 128)
    torch.ops.qtensor.weight_gemm(*args)
    fresh = (x[:100].contiguous(), *args[1:])
    found = []
    with SETTINGS[setting]():
        for call in (args, fresh):
            with native_ops.left_to_python():
                first = torch.ops.qtensor.weight_gemm(*call)
            found.append((first, [torch.ops.qtensor.weight_gemm(*call) for _ in range(2)]))
    for first, later in found:
        assert first.any()
        for product in later:
            assert torch.equal(product, first)
