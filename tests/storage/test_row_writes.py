"""Rows along a middle dim: slices, concatenation and writes give the bytes of quantizing at once.

Shapes are those of keys: (sequences, heads, tokens, head size).
"""

from __future__ import annotations

import copy

import pytest
import torch
from formats import assert_same_bytes, assert_same_tensor, rand, snapshot

import qtensor

SHAPE = (2, 3, 20, 64)
FORMATS = (
    "fp8",
    "fp8_rowwise",
    "mxfp8",
    "mxfp6",
    "mxfp6(packed=True)",
    "mxfp4",
    "nvfp4",
)
rows = pytest.mark.parametrize("text", FORMATS)


def quantized(x, text):
    return qtensor.api.parsed(text).quantize(x)


def with_maximum(x):
    """Return ``x`` with its largest value in token 0, so that the other rows do not decide it."""
    x[0, 0, 0, 0] = 8.0
    return x


def original():
    return with_maximum(rand(*SHAPE).clamp(-4, 4))


@rows
def test_slices_are_views(text):
    x = original()
    q, other = quantized(x, text), quantized(-x, text)
    want = q.dequantize()
    for cut in (
        (slice(None), slice(None), slice(3, 9)),
        (slice(None), slice(None), 4),
        (slice(None), slice(1, 3)),
        (slice(None), 2),
        (1, slice(None), slice(5, 20)),
        (slice(None), slice(0, 2), slice(5, 9)),
        (slice(1, 2), slice(1, 3), 7),
        (slice(None), 1, 7),
    ):
        part = q[cut]
        assert part.shape == want[cut].shape
        assert_same_bytes(part.dequantize(), want[cut])
        part.copy_(other[cut])
        want[cut] = other.dequantize()[cut]
        assert_same_bytes(q.dequantize(), want)


@rows
def test_a_slice_sees_later_writes_and_is_copied(text):
    q = quantized(original(), text)
    part, kept = q[:, :, 3:9], q[:, :, 3:9].clone()
    assert_same_tensor(copy.deepcopy(part).clone(), kept)
    q[:, :, 4:5] = torch.zeros(2, 3, 1, 64)
    assert not part.dequantize()[:, :, 1].any()
    assert kept.dequantize()[:, :, 1].any()


@rows
def test_other_views_of_a_slice_are_refused(text):
    """They would be copies, which do not follow later writes."""
    part = quantized(original(), text)[:, :, 3:9]
    if text == "fp8":
        assert part.mT.shape == (2, 3, 64, 6)
        return
    for view in (lambda t: t.mT, lambda t: t.view(6, 6, 64)):
        with pytest.raises(qtensor.UnsupportedError, match=r"sliced view.*Call \.clone\(\)"):
            view(part)
        assert view(part.clone()).shape == view(part.dequantize().contiguous()).shape


@rows
@pytest.mark.parametrize("dim", [1, 2])
def test_parts_are_joined(text, dim):
    q = quantized(original(), text)
    parts = q.split([1, SHAPE[dim] - 1], dim)
    assert_same_tensor(torch.cat([part.clone() for part in parts], dim), q)
    assert_same_tensor(torch.cat(parts, dim), q)


def test_parts_with_other_maxima_are_not_joined():
    one, other = (quantized(rand(*SHAPE) * factor, "nvfp4") for factor in (1, 2))
    with pytest.raises(qtensor.QTensorError, match="_amax_rowwise must be equal in all parts"):
        torch.cat([one, other], 2)


@rows
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_are_written(text, dim):
    x = original()
    index = torch.tensor([1, 0]) if dim == 0 else torch.tensor([2, 1])
    new = rand(*SHAPE[:dim], 2, *SHAPE[dim + 1 :]).clamp(-4, 4)
    if dim == 0:
        new[1] = x[0]  # the row of the maximum
    whole = x.index_copy(dim, index, new)
    want = quantized(whole, text)
    cut = (slice(None),) * dim + (index,)
    copied, assigned = quantized(x, text), quantized(x, text)
    assert copied.index_copy_(dim, index, new) is copied
    assigned[cut] = new
    for got in (copied, assigned):
        assert_same_tensor(got, want)


@rows
def test_bytes_of_the_same_format_are_moved(text):
    q = quantized(original(), text)
    turned = quantized(original(), text)
    turned.index_copy_(2, torch.arange(20).flip(0), q)
    assert_same_bytes(turned.dequantize(), q.dequantize().flip(2))
    turned[:, :, 2:5] = q[:, :, 6:9]
    assert_same_bytes(turned.dequantize()[:, :, 2:5], q.dequantize()[:, :, 6:9])
    turned[:, :, [3, -1]] = 0.0
    assert not turned.dequantize()[:, :, [3, 19]].any()


@rows
def test_appending_to_a_tensor_of_zeros(text):
    """Factors of zeros are those of the first rows, as for other writes to a part."""
    x = original()
    empty = quantized(torch.zeros(SHAPE), text)
    empty.index_copy_(2, torch.arange(20), x)
    error = (empty.dequantize() - x).abs().max()
    assert error < 1.0


def test_a_plain_tensor_takes_values():
    q = quantized(rand(8, 64), "mxfp8")
    plain = torch.zeros(8, 64)
    plain[torch.arange(8)] = q
    assert_same_bytes(plain, q.dequantize())


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda q: q.index_copy_(3, torch.tensor([0]), q[..., :1]), "any dim but the last"),
        (lambda q: q.index_copy_(2, torch.tensor([0]), torch.ones(2, 3, 2, 64)), "the shape"),
        (lambda q: q.index_copy_(2, torch.tensor([20]), torch.ones(2, 3, 1, 64)), "got 20"),
        (lambda q: q.index_copy_(2, torch.tensor([-1]), torch.ones(2, 3, 1, 64)), "got -1"),
        (
            lambda q: q.index_copy_(2, torch.tensor([0]), torch.ones(2, 3, 1, 64).double()),
            "float64",
        ),
        (lambda q: q.__setitem__([1, 0], torch.ones(3, 20, 64).bfloat16()), "got torch.bfloat16"),
        (lambda q: q[:, :, 2:].index_copy_(2, torch.tensor([0]), q[:, :, :1]), "whose view it is"),
        (lambda q: q.index_put_((torch.ones(2, 3, dtype=torch.bool),), torch.ones(64)), "integers"),
        (
            lambda q: q.index_put_((torch.tensor([0]),), torch.ones(3, 20, 64), accumulate=True),
            "without accumulation",
        ),
    ],
)
def test_other_writes_name_the_rule(call, rule):
    q = quantized(rand(*SHAPE), "mxfp8")
    before = snapshot(q)
    with pytest.raises(qtensor.QTensorError, match=rule):
        call(q)
    assert_same_tensor(q, before)


@pytest.mark.parametrize("text", ["fp8_blockwise", "mxfp8(columnwise=True)"])
def test_factors_of_several_rows_name_the_rule(text):
    q = quantized(rand(*SHAPE), text)
    with pytest.raises(qtensor.UnsupportedError, match=r"factors belong to one row.*dequantize"):
        q.index_copy_(2, torch.tensor([0]), torch.ones(2, 3, 1, 64))


@rows
def test_an_empty_write_does_nothing(text):
    q = quantized(torch.zeros(4, 64), text)
    before, none = snapshot(q), torch.tensor([], dtype=torch.long)
    q.index_copy_(0, none, torch.ones(0, 64))
    q[none] = torch.ones(0, 64)
    assert_same_tensor(q, before)


@pytest.mark.parametrize("source", ["values", "bytes"])
def test_an_index_outside_the_dim_is_named(source):
    q = quantized(rand(4, 64), "fp8_rowwise")
    row = q[:1].clone() if source == "bytes" else rand(1, 64)
    before = snapshot(q)
    for index in (4, -1):
        with pytest.raises(IndexError, match=rf"index_copy_: .* from 0 to 3, .* got {index}\."):
            q.index_copy_(0, torch.tensor([index]), row)
    with pytest.raises(qtensor.QTensorError, match=r"index_put_: .* from -4 to 3, .* got -5\."):
        q[torch.tensor([-5])] = row
    assert_same_tensor(q, before)


def test_graphs_with_symbolic_sizes_write_rows():
    def write(w, y, index):
        w[:, index] = y
        w[1:].index_copy_(1, index + 2, y[1:])

    w, y, index = quantized(rand(2, 6, 64), "fp8_rowwise"), rand(2, 2, 64), torch.tensor([1, 3])
    eager = w.clone()
    write(eager, y, index)
    torch.compile(write, fullgraph=True, dynamic=True, backend="aot_eager")(w, y, index)
    assert_same_tensor(w, eager)
