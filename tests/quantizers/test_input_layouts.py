"""Inputs that are not contiguous give the bytes of contiguous ones; gradients pass straight
through; inputs stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial import call_of, mixed
from formats import DTYPES, FormatCase, assert_same_bytes, assert_same_tensor, dtypes, formats
from torch import Tensor

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "permuted": lambda x: x.view(6, 11, 40).permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "strided_columns": lambda x: torch.stack((x, -x), -1)[..., 0],
    "strided_rows": lambda x: torch.stack((x, -x), 1)[:, 0],
    "padded_rows": lambda x: torch.cat((x, x), 1)[:, :40],
    "offset": lambda x: torch.cat((x.new_full((3,), 7.0), x.flatten()))[3:].view(x.shape),
    "expanded_rows": lambda x: x[:1].expand(66, 40),
    "expanded_columns": lambda x: x[:, :1].expand(66, 40),
    "expanded_scalar": lambda x: x[5, 5].expand(66, 40),
    "channels_last": lambda x: x.view(3, 11, 2, 40).contiguous(memory_format=torch.channels_last),
    "negative_bit": torch._neg_view,
}
"""Each gives the values of its argument (66, 40), or some of them, in memory of another order."""

OPTIONS: list[dict[str, Any]] = [
    {},
    {"with_2d_quantization": True},
    {"block_scaling_dim": 2},
    {"axis": 0},
    {"with_rht": True},
    {"row_scaled": True},
    {"use_4over6": True},
    {"stochastic_rounding": True},
    {"packed": True, "swizzled": True},
]


def options_of(case: FormatCase) -> list[dict[str, Any]]:
    return [o for o in OPTIONS if set(o) <= set(case.options)]


@formats
@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bytes_as_contiguous(case: FormatCase, dtype: torch.dtype, layout: str) -> None:
    x = LAYOUTS[layout](mixed((66, 40), dtype))
    assert x.is_contiguous() == (layout in ("offset", "negative_bit"))
    before, strides = x.clone(), x.stride()
    for options in options_of(case):
        quantizer = case.quantizer(columnwise=True, **options)
        call = call_of(case, options)
        assert_same_tensor(
            quantizer(x, **call), quantizer(x.clone(memory_format=torch.contiguous_format), **call)
        )
    assert x.stride() == strides
    assert_same_bytes(x, before, "the input")


@formats
def test_rows_of_an_expanded_tensor_do_not_alias(case: FormatCase) -> None:
    q = case.quantize(torch.randn(1, 32).expand(4, 32))
    values = q.dequantize()
    assert (values == values[:1]).all()
    assert all(0 not in buffer.stride() for buffer in q.buffers())


@formats
@dtypes
@pytest.mark.parametrize("shape", [(), (40,), (5, 40), (2, 3, 40), (0, 40)], ids=str)
def test_straight_through_gradient(
    case: FormatCase, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """The gradient that comes in is the one that goes out, bit for bit, in the input's dtype."""
    x = torch.randn(shape).to(dtype).requires_grad_()
    q = case.quantize(x)
    assert q.requires_grad
    grad = (torch.randn(shape) * 1e3).to(dtype)
    q.dequantize().backward(grad)
    assert_same_bytes(x.grad, grad)
    assert x.grad.dtype == dtype


@formats
def test_gradient_of_options(case: FormatCase) -> None:
    for options in case.each_option():
        x = torch.randn(33, 40, requires_grad=True)
        q = case.quantizer(columnwise=True, **options)(x, **call_of(case, options))
        grad = torch.randn(33, 40)
        q.dequantize().backward(grad)
        assert_same_bytes(x.grad, grad)


@formats
def test_gradient_through_a_view_of_the_input(case: FormatCase) -> None:
    base = torch.randn(40, 66, requires_grad=True)
    grad = torch.randn(66, 40)
    case.quantize(base.t()).dequantize().backward(grad)
    assert_same_bytes(base.grad, grad.t())


@formats
def test_gradient_accumulates_over_two_uses(case: FormatCase) -> None:
    x = torch.randn(4, 40, requires_grad=True)
    first, second = torch.randn(4, 40), torch.randn(4, 40)
    torch.autograd.backward(
        [case.quantize(x).dequantize(), case.quantize(x).dequantize()], [first, second]
    )
    assert_same_bytes(x.grad, first + second)


@formats
def test_no_graph_is_recorded_without_need(case: FormatCase) -> None:
    x = torch.randn(4, 40, requires_grad=True)
    with torch.no_grad():
        assert not case.quantize(x).requires_grad
    assert not case.quantize(x.detach()).requires_grad
    with torch.inference_mode():
        assert not case.quantize(x).requires_grad
    assert case.quantize(x).grad_fn is not None


@formats
@dtypes
def test_gradient_tracking_changes_no_byte(case: FormatCase, dtype: torch.dtype) -> None:
    x = mixed((66, 40), dtype)
    tracked = case.quantize(x.clone().requires_grad_(), columnwise=True)
    assert_same_tensor(tracked.detach(), case.quantize(x, columnwise=True))


@formats
def test_sixteen_bit_input_is_read_as_its_float32_values(case: FormatCase) -> None:
    """All arithmetic is float32: a bfloat16 tensor and its float32 copy give the same bytes.

    Where the input dtype has a say (the overflow of a blockwise factor, the rounding of the
    rotation), it has none here.
    """
    for dtype in DTYPES[1:]:
        x = torch.randn(66, 40).to(dtype)
        narrow, wide = case.quantize(x, columnwise=True), case.quantize(x.float(), columnwise=True)
        for a, b in zip(narrow.buffers(), wide.buffers(), strict=True):
            assert_same_bytes(a, b)
