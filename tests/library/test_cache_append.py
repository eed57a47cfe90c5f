"""``cache_append_``: the bytes of quantizing the whole, in any order, contiguous and in pages."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DTYPES, FORMATS, Side, append, empty_side
from formats import assert_same_bytes, rand

import qtensor
from qtensor.core.row_format import row_format

B, H, S = 2, 3, 40
POSITIONS = torch.arange(S).expand(B, S)
formats = pytest.mark.parametrize("text", FORMATS)


def rows(size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = rand(B, H, S, size, seed=seed) * torch.exp2(torch.arange(S) % 9 - 4.0)[:, None]
    x[0, 0, 3] = 0
    return x.to(dtype)


def sides(text: str, lead: tuple[int, ...] = (B, H, 64)) -> tuple[Side, Side]:
    return empty_side(text, lead, 64), empty_side("bfloat16", lead, 32)


def whole(x: torch.Tensor, side: Side) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The codes and factors of quantizing all rows at once, by the op that quantizes."""
    form = row_format(side.text)
    if form.element is None:
        return x.to(form.dtype), None
    scale, amax = None, None
    if side.wide is not None:
        scale, amax = (None, [side.wide]) if form.factor is not None else (1 / side.wide, None)
    made = torch.ops.qtensor.quantize(x.reshape(-1, x.shape[-1]), side.text, scale, amax)
    codes = made[0].view(*x.shape[:3], -1)
    if form.factor is None:
        return codes, None
    return codes, made[1][: B * H * S, : form.factors(x.shape[-1])].reshape(B, H, S, -1)


def assert_holds(side: Side, x: torch.Tensor) -> None:
    codes, factors = whole(x, side)
    assert_same_bytes(side.codes[:, :, :S], codes)
    if factors is not None:
        assert_same_bytes(side.factors[:, :, :S], factors)
    assert not side.codes[:, :, S:].view(torch.uint8).any()


@formats
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_the_whole(text: str, dtype: torch.dtype) -> None:
    k, v = sides(text)
    keys, values = rows(64, 1, dtype), rows(32, 2, dtype)
    order = torch.randperm(S, generator=torch.Generator().manual_seed(0))
    for part in (order[:1], order[1:7], order[7:]):
        some = keys[:, :, part], values[:, :, part]
        append(k, v, *some, POSITIONS[:, part].contiguous())
    assert_holds(k, keys)
    assert_holds(v, values)


@formats
def test_pages_hold_the_same_rows(text: str) -> None:
    page, width = 16, 3
    table = torch.tensor([[5, 0, 3], [1, 4, 2]])
    k, v = sides(text)
    paged = sides(text, (6, H, page))
    keys, values = rows(64, 1), rows(32, 2)
    append(k, v, keys, values, POSITIONS)
    append(*paged, keys, values, POSITIONS.int(), block_table=table.int())
    for side, other in zip((k, v), paged, strict=True):
        for buffer, pages in ((side.codes, other.codes), (side.factors, other.factors)):
            if buffer is not None:
                joined = pages[table].transpose(1, 2).flatten(2, 3)
                assert_same_bytes(joined[:, :, : width * page][:, :, :S], buffer[:, :, :S])


def test_tokens_with_a_negative_position_are_not_written() -> None:
    k, v = sides("mxfp8")
    keys, values = rows(64, 1), rows(32, 2)
    positions = POSITIONS.clone()
    positions[1, ::2] = -1
    append(k, v, keys, values, positions)
    full, _ = whole(keys, k)
    assert_same_bytes(k.codes[0, :, :S], full[0])
    assert_same_bytes(k.codes[1, :, 1:S:2], full[1, :, 1::2])
    assert not k.codes[1, :, :S:2].any()


@pytest.mark.parametrize("shape", [(H, 64), (B, H, 64)])
def test_a_mean_is_subtracted_in_float32(shape: tuple[int, ...]) -> None:
    k, v = sides("fp8_rowwise")
    keys, mean = rows(64, 1, torch.bfloat16), rand(*shape, seed=4).bfloat16()
    append(k, v, keys, rows(32, 2), POSITIONS, k_mean=mean)
    wide = mean.float()
    assert_holds(k, keys.float() - (wide[:, None] if len(shape) == 2 else wide[:, :, None]))


def test_keys_alone() -> None:
    k, v = sides("mxfp4")
    keys = rows(64, 1)
    torch.ops.qtensor.cache_append_(*(
        keys,
        None,
        POSITIONS,
        k.codes,
        k.factors,
        None,
        None,
        k.text,
        "",
    ))
    assert_holds(k, keys)
    assert not v.codes.any()


def test_a_call_writes_only_its_rows() -> None:
    k, v = sides("nvfp4")
    append(k, v, rows(64, 1), rows(32, 2), POSITIONS)
    before = k.codes.clone()
    one = torch.tensor([[7], [9]])
    append(k, v, rows(64, 5)[:, :, :1], rows(32, 6)[:, :, :1], one)
    changed = (k.codes != before).any(-1).any(1)
    assert changed.nonzero().tolist() == [[0, 7], [1, 9]]


def refused(match: str, k: Side, v: Side, keys: torch.Tensor, **options: object) -> None:
    before = [t.clone() for side in (k, v) for t in (side.codes, side.factors) if t is not None]
    positions = options.pop("positions", POSITIONS)
    values = options.pop("values", rows(32, 2))
    with pytest.raises(qtensor.QTensorError, match=match):
        append(k, v, keys, values, positions, **options)
    after = [t for side in (k, v) for t in (side.codes, side.factors) if t is not None]
    assert all(map(torch.equal, before, after))


def test_errors_come_before_any_write() -> None:
    k, v = sides("mxfp8")
    keys = rows(64, 1)
    refused(
        "below the 64 tokens that the cache can hold; got 70", k, v, keys, positions=POSITIONS + 31
    )
    refused("positions must be int64 or int32", k, v, keys, positions=POSITIONS.float())
    refused(r"positions must have the shape \(2, 40\)", k, v, keys, positions=POSITIONS[0])
    refused("one head size; got 32 and 64", k, v, keys[..., :32])
    refused("same heads; got 1 and 3", k, v, keys[:, :1])
    refused("same sequences; got 1 and 2", k, v, keys[:1], positions=POSITIONS[:1])
    refused("k and v must have the same sequences, heads", k, v, keys, values=rows(32)[:, :, :9])
    refused("k must be a dense float32, bfloat16 or float16", k, v, keys.double())
    refused(r"k_mean must have the shape \(3, 64\)", k, v, keys, k_mean=torch.ones(64))
    refused("k has no global value", k, v, keys, k_global=torch.ones(1))
    nv, _ = sides("nvfp4")
    refused("k needs its global value", nv, v, keys, k_global=None)
    other = Side("mxfp8", k.codes, k.factors[..., :1], None)
    refused("the factors of k must have the shape", other, v, keys)
    refused("k needs its factors", Side("mxfp8", k.codes, None, None), v, keys)
    refused(
        "rows of a cache need a quantizer with swizzled=False",
        Side("mxfp8(swizzled=True)", k.codes, k.factors, None),
        v,
        keys,
    )
    refused(
        "the format of rows must be one of",
        Side("fp8_blockwise", k.codes, k.factors, None),
        v,
        keys,
    )
    paged = sides("mxfp8", (4, H, 16))
    table = torch.tensor([[0, 1, 2], [3, 4, 0]])
    refused("must name one of the 4 pages of the cache; got", *paged, keys, block_table=table)
    refused(r"block_table must have the shape \(2, pages", *paged, keys, block_table=table[:1])
    refused("below the 32 tokens", *paged, keys, block_table=table[:, :2])


def test_rows_that_share_memory_are_refused() -> None:
    k, v = sides("mxfp8")
    keys = rows(64, 1)
    shared = Side("mxfp8", k.codes[:1].expand(B, -1, -1, -1), k.factors, None)
    refused("codes of k must have memory of their own", shared, v, keys)
    shared = Side("mxfp8", k.codes, k.factors[:, :, :1].expand(-1, -1, 64, -1), None)
    refused("factors of k must have memory of their own", shared, v, keys)


def test_a_leaf_that_requires_grad_is_refused() -> None:
    k, v = sides("mxfp8")
    v.codes.requires_grad_()
    refused("must not require grad; got v_codes", k, v, rows(64, 1))
    with torch.no_grad():
        append(k, v, rows(64, 1), rows(32, 2), POSITIONS)
    assert v.codes.any()
