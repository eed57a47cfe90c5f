"""Slices, views, transposes, chunks: equal to the same op on ``dequantize()``, sharing memory, or a
named error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import (
    BY_NAME,
    FormatCase,
    assert_same_bytes,
    assert_same_tensor,
    formats,
    layouts,
    rand,
    refusal,
    shares_memory,
    snapshot,
    usages,
)

import qtensor
from qtensor.storage.ops.lazy_view import layout_of

Op = Callable[[Any], Any]
ROWS, COLS = 256, 512


def make(
    case: FormatCase, shape: tuple[int, ...] = (ROWS, COLS), seed: int = 0, **options: Any
) -> Any:
    return case.quantize(rand(*shape, seed=seed), **options)


def assert_view(q: Any, op: Op, *, same_quantizer: bool = True) -> Any:
    """``op`` on ``q`` keeps class, dtype and absent buffers, equals ``op`` on the values, and
    leaves ``q`` alone.
    """
    before = snapshot(q)
    result = op(q)
    want = op(q.dequantize())
    assert type(result) is type(q)
    assert result.dtype == q.dtype
    if same_quantizer:
        # Cut across square blocks, the rest are 1-D ones (test_parts.py says where).
        assert result.quantizer in (q.quantizer, q.quantizer.without_square_blocks())
        assert all(
            getattr(result, a) is None
            for a, _ in q._FLATTEN_TENSOR_BUFFERS
            if getattr(q, a) is None
        )
    assert result.shape == want.shape
    assert_same_bytes(result.dequantize(), want)
    assert_same_tensor(q, before)
    return result


def assert_shares(result: Any, q: Any) -> None:
    """Every buffer of ``result`` lies in one of ``q``."""
    for buffer in result.buffers():
        assert any(shares_memory(buffer, other) for other in q.buffers())


@layouts
@usages
def test_slice_at_multiples(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    kwargs = {"rowwise": rowwise, "columnwise": columnwise, **options}
    q = make(case, **kwargs)
    rows, cols = case.slice_multiples(**kwargs)
    for start, end in (
        (0, rows),
        (rows, min(3 * rows, ROWS)),
        (ROWS - rows, ROWS),
        (0, 0),
        (ROWS, ROWS),
    ):
        assert_view(q, lambda t, s=start, e=end: t[s:e])
        assert_view(q, lambda t, s=start, e=end: t.narrow(0, s, e - s))
    for start, end in ((0, cols), (cols, min(3 * cols, COLS)), (COLS - cols, COLS), (0, 0)):
        assert_view(q, lambda t, s=start, e=end: t[:, s:e])
        assert_view(q, lambda t, s=start, e=end: t.narrow(-1, s, e - s))
    assert_view(q, lambda t: t[-rows:, -cols:])
    if not options.get("swizzled"):
        assert_shares(q[rows:], q)
        assert_shares(q[:, cols:], q)


@formats
@usages
def test_slice_of_a_ragged_tensor_up_to_its_end(
    case: FormatCase, rowwise: bool, columnwise: bool
) -> None:
    kwargs = {"rowwise": rowwise, "columnwise": columnwise}
    q = make(case, (150, 330), **kwargs)
    rows, cols = case.slice_multiples(**kwargs)
    assert_view(q, lambda t: t[rows:])
    assert_view(q, lambda t: t[:, cols:])
    assert_view(q, lambda t: t[rows:, cols:])


@layouts
@usages
def test_misaligned_bounds_name_the_multiple(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    kwargs = {"rowwise": rowwise, "columnwise": columnwise, **options}
    q = make(case, **kwargs)
    before = snapshot(q)
    for dim, kind, multiple in zip(
        (0, 1), ("Row", "Column"), case.slice_multiples(**kwargs), strict=True
    ):
        if multiple == 1:
            assert_view(q, lambda t, d=dim: t.narrow(d, 3, 5))
            continue
        for start, length in ((0, multiple // 2), (multiple // 2, multiple), (1, multiple)):
            with pytest.raises(
                RuntimeError, match=rf"{kind} slicing of \w+ requires bounds at a multiple of \d+"
            ) as e:
                q.narrow(dim, start, length)
            named = int(str(e.value).split("multiple of ")[1].split(";")[0])
            assert multiple % named == 0
            assert named > 1
        with pytest.raises(RuntimeError, match=f"multiple of {multiple};"):
            q.narrow(dim, 0, multiple + multiple // 2)
    assert_same_tensor(q, before)


@formats
def test_slice_with_a_step(case: FormatCase) -> None:
    q = make(case)
    with pytest.raises(
        qtensor.UnsupportedError, match=r"slice\[.*step must be 1; got 2\. Dequantize"
    ):
        q[::2]


@layouts
@usages
def test_write_through_a_narrow_as_vllm_does(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    """Shards of one checkpoint tensor are copied into a parameter, shard by shard; data and factors
    arrive.
    """
    kwargs = {"rowwise": rowwise, "columnwise": columnwise, **options}
    loaded = make(case, seed=1, **kwargs)
    for dim, size in ((0, 128), (1, 256)):
        parameter = torch.nn.Parameter(make(case, **kwargs))
        inner = parameter.buffers()
        for mine, other, part in zip(
            inner, loaded.buffers(), loaded.narrow(dim, 0, size).buffers(), strict=True
        ):
            if part.shape == other.shape:
                mine.copy_(other)  # a factor that all shards share is loaded beside them
        before = snapshot(parameter.detach())
        for start in range(0, (ROWS, COLS)[dim], size):
            to, source = (t.narrow(dim, start, size) for t in (parameter.data, loaded))
            refused = refusal(lambda to=to, source=source: to.copy_(source))
            if refused:
                assert options.get("swizzled"), refused
                assert_same_tensor(parameter.detach(), before)
                break
        else:
            assert_same_tensor(parameter.detach(), loaded)
            assert all(a is b for a, b in zip(parameter.buffers(), inner, strict=True))


@formats
@usages
def test_swapping_two_halves_in_place(case: FormatCase, rowwise: bool, columnwise: bool) -> None:
    q = make(case, rowwise=rowwise, columnwise=columnwise)
    want = torch.cat([q.dequantize()[128:], q.dequantize()[:128]])
    target = q.clone()
    target.narrow(0, 0, 128).copy_(q.narrow(0, 128, 128))
    target.narrow(0, 128, 128).copy_(q.narrow(0, 0, 128))
    assert_same_bytes(target.dequantize(), want)


CHUNKERS: dict[str, Callable[[Any, int], Any]] = {
    "Tensor.chunk": lambda q, dim: q.chunk(2, dim),
    "torch.chunk": lambda q, dim: torch.chunk(q, 2, dim=dim),
    "split": lambda q, dim: q.split(q.shape[dim] // 2, dim),
    "split_with_sizes": lambda q, dim: q.split(
        [q.shape[dim] // 4 * 2, q.shape[dim] - q.shape[dim] // 4 * 2], dim
    ),
    "aten.split": lambda q, dim: torch.ops.aten.split(q, q.shape[dim] // 2, dim),
    "tensor_split": lambda q, dim: torch.tensor_split(q, 2, dim),
}


@pytest.mark.parametrize("name", CHUNKERS)
@layouts
@usages
def test_chunk_then_cat_is_the_identity(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool, name: str
) -> None:
    q = make(case, rowwise=rowwise, columnwise=columnwise, **options)
    before = snapshot(q)
    for dim in (0, 1, -2, -1):
        parts = CHUNKERS[name](q, dim)
        for part, want in zip(parts, CHUNKERS[name](q.dequantize(), dim), strict=True):
            assert_same_bytes(part.dequantize(), want)
        assert_same_tensor(torch.cat(list(parts), dim), q)
    assert_same_tensor(q, before)


@layouts
@usages
def test_transpose(case: FormatCase, options: dict, rowwise: bool, columnwise: bool) -> None:
    """A4: the directions change places, the values are those of t(), no byte moves, t().t() is the
    original.
    """
    q = make(case, rowwise=rowwise, columnwise=columnwise, **options)
    before = snapshot(q)
    spellings: list[Op] = [
        lambda t: t.t(),
        lambda t: t.T,
        lambda t: t.mT,
        lambda t: t.transpose(0, 1),
        lambda t: t.transpose(-1, -2),
        lambda t: t.permute(1, 0),
        lambda t: t.swapaxes(0, 1),
        lambda t: t.movedim(0, 1),
    ]
    for op in spellings:
        flipped = op(q)
        assert flipped.shape == (COLS, ROWS)
        assert flipped.get_usages() == {"rowwise": columnwise, "columnwise": rowwise}
        assert_shares(flipped, q)
        assert_same_bytes(flipped.dequantize(), q.dequantize().t())
        for usage in ("rowwise", "columnwise"):
            if not getattr(q.quantizer, usage):
                continue
            other = "columnwise" if usage == "rowwise" else "rowwise"
            alone, flipped_alone = q.detach(), flipped.detach()
            alone.update_usage(**{usage: True, other: False})
            flipped_alone.update_usage(**{other: True, usage: False})
            assert_same_bytes(flipped_alone.dequantize(), alone.dequantize().t())
        assert_same_tensor(op(flipped), q)
        assert_shares(op(flipped), q)
    assert_same_tensor(q.transpose(0, 0), q)
    assert_same_tensor(q.permute(0, 1), q)
    assert_same_tensor(q, before)


@formats
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
def test_slice_of_a_transpose(case: FormatCase, usage: str) -> None:
    q = make(case, rowwise=usage == "rowwise", columnwise=usage == "columnwise")
    for op in (
        lambda t: t.t()[:256],
        lambda t: t.t()[:, :128],
        lambda t: t.t()[128:256].t(),
        lambda t: t[:128].t(),
    ):
        assert_view(q, op, same_quantizer=False)


@layouts
@usages
def test_views_of_leading_dims(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    q = make(case, rowwise=rowwise, columnwise=columnwise, **options)
    for op in (
        lambda t: t.view(2, 128, COLS),
        lambda t: t.view(-1, 64, COLS),
        lambda t: t.reshape(4, 2, 32, COLS),
        lambda t: t.unflatten(0, (2, -1)),
        lambda t: t.view(2, 128, COLS).flatten(0, 1),
        lambda t: t.view(4, 64, COLS).reshape(-1, COLS),
        lambda t: t.view_as(torch.empty(2, 128, COLS)),
        lambda t: t.unsqueeze(0),
        lambda t: t.unsqueeze(1),
        lambda t: t.unsqueeze(-2),
        lambda t: t[None],
        lambda t: t.unsqueeze(0).squeeze(0),
        lambda t: t.unsqueeze(1).squeeze(),
        lambda t: t.unsqueeze(0).unsqueeze(0).squeeze((0, 1)),
        lambda t: t.squeeze(0),
    ):
        result = assert_view(q, op)
        assert_shares(result, q)
        assert_same_tensor(result.reshape(q.shape), q)


@layouts
@usages
def test_regrouping_the_last_dim_is_exact_or_named(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    q = make(case, (128, 256), rowwise=rowwise, columnwise=columnwise, **options)
    before = snapshot(q)
    exact = 0
    for shape in (
        (-1,),
        (64, 512),
        (256, 128),
        (512, 64),
        (1024, 32),
        (2048, 16),
        (128, 256, 1),
        (3, 5),
        (128, 255),
    ):
        try:
            want = q.dequantize().view(shape)
        except RuntimeError:
            with pytest.raises(
                qtensor.QTensorError, match=r"view\[.*number of elements must not change"
            ):
                q.view(shape)
            continue
        refused = refusal(lambda s=shape: q.view(s))
        if not refused and layout_of(q.view(shape)) is not None:
            # It holds the tensor: values, and the way back.
            flat = q.view(shape)
            assert shape == (-1,)
            assert flat.detach().shape == (128 * 256,)
            assert_same_tensor(flat.view(128, 256), q)
            assert_same_bytes(flat.dequantize(), want)
            assert_same_tensor(flat.clone().view(128, 256), q)
            assert "View it back" in refusal(lambda f=flat: torch.cat([f, f]))
            continue
        if refused:
            assert shape != (-1,)  # fully_shard calls view(-1) for every parameter
            assert refused.startswith(f"view[{case.name}]: ")
            assert "got (128, 256) to" in refused or "stored in" in refused
            continue
        exact += 1
        result = q.view(shape)
        assert type(result) is type(q)
        assert_same_bytes(result.dequantize(), want)
    if case.name in ("fp8", "fp8_delayed") and not columnwise:
        assert exact == 7
    assert_same_tensor(q, before)


def test_view_as_another_dtype_is_refused() -> None:
    q = make(BY_NAME["mxfp8"])
    with pytest.raises(qtensor.UnsupportedError, match=r"view.dtype: .*inner buffers"):
        q.view(torch.uint8)


@formats
def test_dims_out_of_range(case: FormatCase) -> None:
    q = make(case, (8, 64))
    for op in (
        lambda: q.narrow(2, 0, 1),
        lambda: q.select(-3, 0),
        lambda: q.unsqueeze(4),
        lambda: q.transpose(0, 2),
    ):
        with pytest.raises(IndexError, match="out of range"):
            op()


ORDERS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda t: t,
    "t": lambda t: t.t(),
    "t t": lambda t: t.t().t(),
    "rows": lambda t: t[:128],
    "columns": lambda t: t[:, :128],
    "columns of a row": lambda t: t[:128].view(1, 128, 256)[..., :128],
    "t rows": lambda t: t.t()[:128],
    "t view": lambda t: t.t().view(2, 128, 256),
    "detached t": lambda t: t.t().detach(),
    "unsqueezed": lambda t: t.t().unsqueeze(0),
    "stack": lambda t: t.view(2, 128, 256).mT,
    "matrix": lambda t: t.view(2, 128, 256).mT[1],
    "matrix of a stack": lambda t: t.view(2, 128, 256)[1],
}


@formats
@usages
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("order", ORDERS)
def test_contiguous_copies_where_torch_does(
    case: FormatCase, rowwise: bool, columnwise: bool, order: str, inference: bool
) -> None:
    """A write to the copy changes nothing else; a write to what is no copy reaches the tensor."""
    with torch.inference_mode(inference):
        q = case.quantize(rand(256, 256), rowwise=rowwise, columnwise=columnwise)
        before, plain = q.dequantize(), torch.zeros(256, 256)
        got = ORDERS[order](q).contiguous()
        want = ORDERS[order](plain)
        shape = got.shape
        assert_same_bytes(got.dequantize(), ORDERS[order](before).contiguous())
        assert before.count_nonzero() > before.numel() // 2
        got.zero_()  # zeros are exact, also where a part keeps the factor of its whole
        want.contiguous().fill_(1)
        assert_same_bytes(q.dequantize(), before.masked_fill(plain != 0, 0))
        assert got.shape == shape


@pytest.mark.usefixtures("fresh_dynamo")
def test_contiguous_in_compiled_code() -> None:
    q = qtensor.quantize(rand(64, 64), "mxfp8")
    before = q.dequantize()
    turned = torch.compile(lambda t: t.t().contiguous(), fullgraph=True, backend="aot_eager")(q)
    turned.zero_()
    assert_same_bytes(q.dequantize(), before)


@formats
def test_reshape_copies_where_torch_does(case: FormatCase) -> None:
    for view in (lambda t: t.t(), lambda t: t[:, :128], lambda t: t.view(2, 128, 256).mT):
        q = case.quantize(rand(256, 256))
        before, turned = q.dequantize(), view(q)
        try:
            shaped = turned.reshape(2, -1, turned.shape[-1])
        except qtensor.UnsupportedError:
            continue
        plain = before.clone()
        like = view(plain).reshape(shaped.shape)
        assert_same_bytes(shaped.dequantize(), like.contiguous())
        like.zero_()
        shaped.zero_()
        assert torch.equal(q.dequantize(), plain)
    q = case.quantize(rand(256, 256))
    q.reshape(2, 128, 256).zero_()
    assert not q.dequantize().any()
