"""Every kind of cache appends, goes back, changes places, and is copied, stored and moved."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from formats import assert_same_bytes, rand

import qtensor
from qtensor.caches import global_value

B, H, D, TOKENS = 2, 2, 64, 260
SMALL = {"capacity": 3, "grow": True}
RING = {"window": 40, "page_size": 16}
KINDS: dict[str, dict[str, Any]] = {
    "static": {},
    "growing": SMALL,
    "pages": {"page_size": 16},
    "growing pages": {**SMALL, "page_size": 16},
    "ring": RING,
    "growing ring": {**SMALL, **RING},
    "residual": {"residual": 20},
    "growing residual": {**SMALL, "residual": 20},
    "ring residual": {**RING, "residual": 20},
    "residual of all": {"residual": 300},
    "mean and residual": {"k_mean": torch.linspace(-1, 1, H * D).view(H, D), "residual": 20},
}
kinds = pytest.mark.parametrize("kind", KINDS)
formats = pytest.mark.parametrize("text", ["mxfp4", "fp8_rowwise", "nvfp4", "mxfp6"])


def make(kind: str, text: str = "mxfp4") -> qtensor.KVCache:
    options = {"capacity": 270, **KINDS[kind], "k_format": text}
    if text == "nvfp4":
        options |= {"k_global": global_value(text, 6.0), "v_global": global_value(text, 6.0)}
    return qtensor.KVCache(B, H, D, **options)


def tokens(count: int = TOKENS, heads: int = H, seed: int = 0) -> torch.Tensor:
    return rand(B, heads, TOKENS, D, seed=seed)[:, :, :count].clamp(-5, 5).bfloat16()


def rule(kind: str, text: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The attention of all queries at once, over all tokens without a cache."""
    options, count = KINDS[kind], q.shape[2]
    window, residual = options.get("window", 0), options.get("residual", 0)
    keys = k.float() - options["k_mean"].unsqueeze(1) if "k_mean" in options else k
    plain = (keys.bfloat16(), v)
    if text == "nvfp4":
        marks = [torch.full_like(t[:, :, :1], 6.0) for t in (keys, v)]
        codes = [
            qtensor.quantize(torch.cat([t, mark], 2), text)[:, :, :-1]
            for t, mark in zip((keys, v), marks, strict=True)
        ]
    else:
        codes = [qtensor.quantize(t, text) for t in (keys, v)]
    if not residual:
        return qtensor.attention(q, *codes, causal=True, window=window)
    buffers = [qtensor.storage.ops.attention.stored("k", t) for t in (*codes, *plain)]
    lengths = torch.full((B,), count)
    parts: list[torch.Tensor] = []
    steps = torch.arange(count).expand(B, count)
    seen = ((steps - residual, window and window - residual), (steps, residual))
    for (at, width), (one, other) in zip(seen, (buffers[:2], buffers[2:]), strict=True):
        parts += torch.ops.qtensor.attention_part(
            *(q, one.codes, one.factors, other.codes, other.factors, one.format, other.format),
            *(lengths, D**-0.5, True, width, 0.0, at),
            **{"k_global": one.wide, "v_global": other.wide},
        )
    return torch.ops.qtensor.join_attention(*parts, q.dtype)


@kinds
@formats
def test_steps_are_the_rule_for_all_queries_at_once(kind, text):
    """Prompts of any length and single tokens have the bits of one call without a cache."""
    q, k, v = tokens(heads=2 * H), tokens(seed=1), tokens(seed=2)
    want = rule(kind, text, q, k, v)
    for bounds in ([0, TOKENS], [0, 70, 71, 72, 73, 190, *range(191, 211), TOKENS]):
        cache = make(kind, text)
        got = [
            cache.update(*(t[:, :, start:end] for t in (q, k, v)))
            for start, end in itertools.pairwise(bounds)
        ]
        assert_same_bytes(torch.cat(got, 2), want)


@kinds
def test_a_mask_in_place_of_causal_gives_the_same_bytes(kind):
    """As models of transformers pass it: the mask hides later tokens, and those before a window."""
    q, k, v = tokens(24, 2 * H), tokens(24, seed=1), tokens(24, seed=2)
    cache, other = make(kind), make(kind)
    steps = torch.arange(24)
    mask = steps[:, None] >= torch.arange(270)
    mask = mask & (steps[:, None] - torch.arange(270) < (cache.window or 270))
    for shown in (mask, torch.zeros(24, 270).masked_fill(~mask, -torch.inf)):
        cache.reset()
        got = [
            cache.update(
                *(t[:, :, i : i + 8] for t in (q, k, v)),
                mask=shown[None, None, i : i + 8],
                causal=False,
            )
            for i in range(0, 24, 8)
        ]
        other.reset()
        assert_same_bytes(torch.cat(got, 2), other.update(q, k, v))


def steps_of(cache: qtensor.KVCache, count: int, seed: int) -> torch.Tensor:
    """Append tokens one by one, and return their results."""
    batch = cache.lengths.shape[0]
    q, k, v = (tokens(count, heads, seed + i) for i, heads in enumerate((2 * H, H, H)))
    parts = [(t[0:1].expand(batch, -1, -1, -1)) for t in (q, k, v)]
    return torch.cat([cache.update(*(t[:, :, i : i + 1] for t in parts)) for i in range(count)], 2)


def filled(kind: str, count: int = 240, text: str = "mxfp4") -> qtensor.KVCache:
    cache = make(kind, text)
    cache.update(tokens(count, 2 * H), tokens(count, seed=1), tokens(count, seed=2))
    return cache


@kinds
def test_cropped_tokens_are_written_again(kind):
    """The tokens behind the crop leave no trace; a ring goes back as far as it holds windows."""
    cache, want = filled(kind), filled(kind, 235)
    cache.crop(235)
    assert cache.lengths.tolist() == [235, 235]
    assert_same_bytes(steps_of(cache, 25, 7), steps_of(want, 25, 7))


@kinds
def test_sequences_change_places_and_number(kind):
    cache = filled(kind)
    want = steps_of(copy.deepcopy(cache), 5, 3)
    cache.select(torch.tensor([1, 0, 1]))
    assert cache.lengths.tolist() == [240] * 3
    assert_same_bytes(steps_of(cache, 5, 3), want[[1, 0, 1]])


@kinds
def test_copies_and_stored_states_continue_alike(kind):
    cache = filled(kind)
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    loaded = make(kind)
    loaded.load_state_dict(torch.load(file))
    copies = [copy.deepcopy(cache), copy.copy(cache).to("cpu"), pickle.loads(pickle.dumps(cache))]
    want = steps_of(copies.pop(0), 25, 5)
    for other in (loaded, copies[1]):
        assert_same_bytes(steps_of(other, 25, 5), want)
        assert other.nbytes > 0
    assert cache.lengths.tolist() == [240, 240]


@kinds
def test_all_buffers_move_and_count(kind):
    cache = filled(kind)
    buffers = cache.state_dict()
    memory = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in buffers.values()
    }
    assert cache.nbytes == sum(memory.values())
    assert cache.to("meta") is cache
    assert {t.device.type for t in cache.state_dict().values()} == {"meta"}
    assert cache.keys.device.type == cache.values.device.type == cache.lengths.device.type == "meta"
    assert cache.nbytes == sum(memory.values())


@kinds
def test_nan_behind_the_end_changes_nothing(kind):
    """A ring has no tokens behind the end, but old ones, which the other tests cover."""
    cache = filled(kind, 64, "fp8_rowwise")
    cache.crop(60)
    want = steps_of(copy.deepcopy(cache), 20, 5)
    state = cache.state_dict()
    for prefix in ("", "recent_"):
        table = state.get(f"{prefix}block_table")
        for codes in (state.get(f"{prefix}{name}_codes") for name in "kv"):
            if codes is None or (table is not None and table.unique().numel() < table.numel()):
                continue
            for position in range(60, cache.capacity):
                place, at = slice(None), position
                if table is not None:
                    place, at = table[:, position // codes.shape[2]], position % codes.shape[2]
                codes[place, :, at] = 0x7F if codes.dtype is torch.uint8 else torch.nan
    if "ring" not in kind:
        assert qtensor.dequantize(cache.keys).isnan().any()
    assert_same_bytes(steps_of(cache, 20, 5), want)


def test_bytes_of_the_last_tokens():
    """A ring of 64 tokens a page holds the last ones in bfloat16, whatever the capacity."""
    plain, recent = (
        qtensor.KVCache(1, 2, 64, 4096, k_format="mxfp4", residual=r) for r in (0, 100)
    )
    pages = -(-(100 + 62) // 64) + 1
    assert recent.nbytes - plain.nbytes == 2 * 2 * 64 * 2 * 64 * pages + 8 * 4096 // 64


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"residual": -1}, "residual must be an integer of at least 0"),
        ({"residual": 2.5}, "residual must be an integer of at least 0; got 2.5"),
        ({"residual": 8, "window": 8}, "less than a window; got 8, window=8"),
    ],
)
def test_errors_name_the_rule(options, rule):
    with pytest.raises(qtensor.QTensorError, match=rule):
        qtensor.KVCache(1, 1, 64, 16, **options)


def test_a_residual_goes_back_as_far_as_it_can():
    cache = filled("residual")
    with pytest.raises(qtensor.UnsupportedError, match="ring of pages can go back"):
        cache.crop(40)
    assert cache.lengths.tolist() == [240, 240]
