"""Experts (E, N, K) and other 3-D tensors: select, chunk, transpose, MoE surgery; exact or a named
error.
"""

from __future__ import annotations

import pytest
import torch
from formats import (
    FormatCase,
    assert_same_bytes,
    assert_same_tensor,
    formats,
    layouts,
    rand,
    snapshot,
    usages,
)

import qtensor
from qtensor.storage.row_buffers import has_row_factors
from tests.storage.test_views import assert_shares, assert_view, make


@layouts
@usages
def test_select_and_unbind_of_experts(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    """Experts (E, N, K): one expert is a view; its bytes alone decode to its values."""
    q = make(case, (4, 128, 256), rowwise=rowwise, columnwise=columnwise, **options)
    for op in (
        lambda t: t[2],
        lambda t: t[-1],
        lambda t: t.select(0, 1),
        lambda t: t[1:3],
        lambda t: t[1:3][0],
    ):
        result = assert_view(q, op)
        if not options.get("swizzled"):
            assert_shares(result, q)
    for part, want in zip(q.unbind(0), q.dequantize().unbind(0), strict=True):
        assert_same_bytes(part.dequantize(), want)
    for part, want in zip(q, q.dequantize(), strict=True):
        assert_same_bytes(part.dequantize(), want)
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        q[4]
    if q.quantizer.per_tensor:
        assert_same_bytes(q[..., 3].dequantize(), q.dequantize()[..., 3])
    else:
        with pytest.raises(qtensor.UnsupportedError, match=r"select\[.*last dim"):
            q[..., 0]


@layouts
@usages
def test_experts_by_index(case: FormatCase, options: dict, rowwise: bool, columnwise: bool) -> None:
    """Experts of whole blocks are gathered as they are stored; only tiles of factors are not."""
    q = make(case, (4, 128, 256), rowwise=rowwise, columnwise=columnwise, **options)
    index = torch.tensor([2, 0, 2])
    if options.get("swizzled"):
        with pytest.raises(qtensor.UnsupportedError, match="rows can be selected along dim 0"):
            q[index]
        return
    picked = q[index]
    assert_same_bytes(picked.dequantize(), q.dequantize()[index])
    for part, number in zip(picked, (2, 0, 2), strict=True):
        assert_same_bytes(part.dequantize(), q[number].dequantize())
    if q.quantizer.two_dimensional:
        assert picked.quantizer == q.quantizer


@layouts
@usages
def test_chunk_of_experts(case: FormatCase, options: dict, rowwise: bool, columnwise: bool) -> None:
    q = make(case, (4, 128, 256), rowwise=rowwise, columnwise=columnwise, **options)
    assert_same_tensor(torch.cat(q.chunk(2)), q)
    assert_same_tensor(torch.cat(q.split([1, 3])), q)
    multiple = case.slice_multiples(rowwise=rowwise, columnwise=columnwise, **options)[1]
    if q.quantizer.two_dimensional:
        multiple = max(multiple, q.spec.block[1])
    sizes = [multiple, 256 - multiple]
    parts = q.split(sizes, -1)
    assert_same_tensor(torch.cat(parts, -1), q)
    for part, want in zip(parts, q.dequantize().split(sizes, -1), strict=True):
        assert_same_bytes(part.dequantize(), want)


@layouts
@usages
def test_middle_dim_of_experts_is_exact_or_named(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    """Leading dims are flattened in the factors. Factors of single rows are found again; others
    cannot be sliced along a middle dim.
    """
    q = make(case, (4, 128, 256), rowwise=rowwise, columnwise=columnwise, **options)
    before = snapshot(q)
    per_tensor = case.name in ("fp8", "fp8_delayed") or (
        case.name == "fp8_rowwise" and options.get("axis") == 0
    )
    by_rows = has_row_factors(q.quantizer)
    for op in (lambda t: t[:, 64:], lambda t: t[:, 5], lambda t: t.narrow(-2, 0, 32)):
        if per_tensor:
            assert_view(q, op)
        elif by_rows:
            assert_same_bytes(op(q).dequantize(), op(q.dequantize()))
        else:
            with pytest.raises(
                RuntimeError,
                match=r"slicing a middle dim needs factors .* dim 1 of \(4, 128, 256\)",
            ):
                op(q)
    if per_tensor or by_rows:
        assert_same_tensor(torch.cat(q.chunk(2, 1), 1), q)
    assert_same_tensor(q, before)


@pytest.mark.parametrize("dims", [(1, 2), (2, 1), (-1, -2), (-2, -1)], ids=str)
@formats
@usages
def test_transpose_of_experts(
    case: FormatCase, rowwise: bool, columnwise: bool, dims: tuple[int, int]
) -> None:
    """A34: 3-D weights change their last two dims; each direction on its own, byte for byte."""
    q = make(case, (4, 128, 256), rowwise=rowwise, columnwise=columnwise)
    before = snapshot(q)
    flipped = q.transpose(*dims)
    assert type(flipped) is type(q)
    assert flipped.shape == (4, 256, 128)
    assert_same_bytes(flipped.dequantize(), q.dequantize().transpose(*dims))
    assert_same_bytes(flipped.transpose(*dims).dequantize(), q.dequantize())
    if case.name == "fp8_rowwise":
        with pytest.raises(
            qtensor.UnsupportedError, match=r"transpose\[fp8_rowwise\]: .*more than two dims"
        ):
            flipped.buffers()
    else:
        copied = flipped.clone()
        assert_same_bytes(copied.dequantize(), q.dequantize().transpose(*dims))
        assert_same_bytes(copied.transpose(*dims).dequantize(), q.dequantize())
    assert_same_tensor(q, before)


@formats
def test_moe_surgery(case: FormatCase) -> None:
    """A62: transpose, merge, split, transpose gives the same product; experts join along the last
    two dims.
    """
    q = make(case, (4, 128, 256))
    other = case.quantize(rand(4, 128, 256))
    x = rand(4, 3, 256, seed=2)
    if case.name != "fp8_rowwise":
        want = torch.bmm(x, q.transpose(1, 2).clone())
        moved = q.transpose(1, 2).reshape(-1, 128).unflatten(0, (4, 256)).transpose(1, 2)
        again = moved.transpose(1, 2)
        assert torch.equal(again.dequantize(), q.transpose(1, 2).dequantize())
        if not q._quantizer.per_tensor:  # whose codes lie in another order, as do the sums
            assert_same_bytes(torch.bmm(x, again), want)
    assert torch.equal(
        torch.cat([q, other], -1).dequantize(), torch.cat([q.dequantize(), other.dequantize()], -1)
    )
    if case.name in ("fp8", "fp8_delayed"):
        assert torch.equal(
            torch.cat([q, other], -2).dequantize(),
            torch.cat([q.dequantize(), other.dequantize()], -2),
        )
