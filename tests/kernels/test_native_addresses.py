"""C++ receives addresses only of tensors that have the sizes and dtypes that it reads.

Views at an offset give the bytes of their copies.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qtensor import MXFP8Quantizer
from qtensor.kernels.cpu import floats, native

ROWS, COLS = 8, 64


def at_an_offset(t: Tensor) -> Tensor:
    """Return a contiguous view of another storage, 64 bytes after its start."""
    first = 64 // t.itemsize
    storage = torch.full((t.numel() + 2 * first,), 3, dtype=t.dtype)
    view = storage[first : first + t.numel()].view(t.shape)
    assert view.storage_offset() == first
    return view.copy_(t)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def gradients() -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty(ROWS, COLS), torch.empty(COLS), torch.empty(COLS)


def norm_arguments() -> dict[str, Tensor]:
    x = random(ROWS, COLS)
    stats = {"mean": random(ROWS), "rstd": random(ROWS).abs()}
    return {"dy": random(ROWS, COLS) * x, "x": x, "weight": random(COLS), **stats}


def norm_backward(outputs: tuple[Tensor, Tensor, Tensor], values: dict[str, Tensor]) -> bool:
    stats = values["mean"], values["rstd"]
    return floats.norm_backward_(outputs, values["dy"], values["x"], values["weight"], stats, False)


def test_the_gradient_of_a_norm_reads_views_at_offsets() -> None:
    values = norm_arguments()
    expected, outputs = gradients(), gradients()
    assert norm_backward(expected, values)
    assert norm_backward(outputs, {name: at_an_offset(t) for name, t in values.items()})
    for output, other in zip(outputs, expected, strict=True):
        assert torch.equal(output, other)


@pytest.mark.parametrize("name", ["dy", "weight", "mean", "rstd"])
def test_a_norm_refuses_tensors_that_are_too_short(name: str) -> None:
    values = norm_arguments()
    values[name] = values[name][:1]
    assert not norm_backward(gradients(), values)


@pytest.mark.parametrize("name", ["mean", "rstd"])
def test_a_norm_refuses_statistics_of_another_dtype(name: str) -> None:
    values = norm_arguments()
    values[name] = values[name].half()
    assert not norm_backward(gradients(), values)


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_an_activation_refuses_a_short_gradient(kind: str) -> None:
    x, out = random(ROWS, COLS), torch.empty(ROWS, COLS)
    columns = COLS // 2 if kind == "swiglu" else COLS
    assert floats.activation_(out, x, kind, random(ROWS, columns))
    assert not floats.activation_(out, x, kind, random(ROWS - 1, columns))


def test_buffers_are_read_and_written_at_offsets() -> None:
    quantizer, x = MXFP8Quantizer(), random(32, COLS)
    expected = [buffer.clone() for buffer in quantizer(x).buffers()]
    buffers = [at_an_offset(torch.zeros_like(buffer)) for buffer in expected]
    assert native.quantize_(quantizer, buffers, at_an_offset(x), None, None, None)
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))
    out, view = torch.empty(32, COLS), at_an_offset(torch.empty(32, COLS))
    assert native.dequantize_(quantizer, expected, x.shape, out)
    assert native.dequantize_(quantizer, buffers, x.shape, view)
    assert torch.equal(view, out)


@pytest.mark.parametrize("change", ["short", "dtype", "strides", "missing"])
def test_buffers_of_other_sizes_are_refused(change: str) -> None:
    quantizer, x = MXFP8Quantizer(), random(32, COLS)
    buffers = [buffer.clone() for buffer in quantizer(x).buffers()]
    first = buffers[0]
    if change == "missing":
        buffers.pop()
    elif change == "short":
        buffers[0] = first[:1]
    elif change == "dtype":
        buffers[0] = first.view(torch.int8)
    else:
        buffers[0] = first.repeat_interleave(2, dim=1)[:, ::2]
    out = torch.empty(32, COLS)
    # A decode copies buffers that are strided; an encode would write into the copy.
    assert native.dequantize_(quantizer, buffers, x.shape, out) is (change == "strides")
    if change == "strides":
        assert torch.equal(out, quantizer(x).dequantize())
    assert not native.quantize_(quantizer, buffers, x, None, None, None)
