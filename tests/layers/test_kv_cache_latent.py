"""Latent attention: one head of keys, of which the values are the first elements."""

from __future__ import annotations

import copy

import pytest
import torch
from formats import assert_same_bytes, rand

import qtensor

LATENT, ROPE, HEADS, TOKENS = 128, 64, 4, 40
KINDS = {
    "static": {},
    "growing": {"grow": True, "capacity": 4},
    "pages": {"page_size": 16},
    "ring": {"window": 12, "page_size": 8},
    "residual": {"residual": 9},
}
FORMATS = ["mxfp8", "mxfp4", "nvfp4", "fp8_rowwise", "fp8", "bfloat16"]


def make(text="mxfp8", **options):
    options = {"capacity": 64, "latent": True, "v_head_size": LATENT, **options}
    return qtensor.KVCache(2, 1, LATENT + ROPE, k_format=text, **options)


def rows(heads=1, seed=0):
    return rand(2, heads, TOKENS, LATENT + ROPE, seed=seed).bfloat16()


@pytest.mark.parametrize("text", FORMATS)
def test_values_are_a_part_of_the_keys(text):
    q, k = rows(HEADS), rows(seed=1)
    cache = make(text)
    got = torch.cat(
        [cache.update(q[:, :, :30], k[:, :, :30], None)]
        + [cache.update(q[:, :, i : i + 1], k[:, :, i : i + 1], None) for i in range(30, TOKENS)],
        2,
    )
    keys = qtensor.dequantize(cache.keys)[:, :, :TOKENS]
    exact = qtensor.attention(q, keys, keys[..., :LATENT], causal=True)
    torch.testing.assert_close(got, exact, atol=0.02, rtol=0.02)
    assert cache.values.shape == (2, 1, 64, LATENT)
    assert_same_bytes(
        qtensor.dequantize(cache.values), qtensor.dequantize(cache.keys)[..., :LATENT].contiguous()
    )
    assert "v_codes" not in cache.state_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["mxfp8", "mxfp4"])
def test_the_bytes_of_values_stored_apart(text, kind):
    """Blocks do not know their neighbours: values on their own have the same codes."""
    q, k = rows(HEADS), rows(seed=1)
    cache, apart = (make(text, **KINDS[kind], latent=latent) for latent in (True, False))
    for start, end in ((0, 25), (25, 26), (26, 27), (27, 40)):
        part = slice(start, end)
        got = cache.update(q[:, :, part], k[:, :, part], None)
        want = apart.update(q[:, :, part], k[:, :, part], k[:, :, part, :LATENT])
        assert_same_bytes(got, want)
    other = copy.deepcopy(cache)
    other.select(torch.tensor([1, 0]))
    assert_same_bytes(other.attention(q[:, :, -1:].flip(0)), got[:, :, -1:].flip(0).contiguous())
    loaded = make(text, **KINDS[kind])
    loaded.load_state_dict(cache.state_dict())
    assert_same_bytes(loaded.attention(q[:, :, -1:]), got[:, :, -1:].contiguous())
    assert cache.nbytes < 0.7 * apart.nbytes


@pytest.mark.parametrize("text", ["fp8_rowwise", "nvfp4"])
def test_the_sizes_of_deepseek(text):
    """16 heads of queries for one of 512 + 64 elements; every size has a kernel."""
    q, k = (rand(1, heads, 40, 576, seed=heads).bfloat16() for heads in (16, 1))
    options = {"k_format": text, "k_global": 4.0 if text == "nvfp4" else None}
    cache = qtensor.KVCache(1, 1, 576, 64, v_head_size=512, latent=True, **options)
    got = cache.update(q, k, None)
    keys = qtensor.dequantize(cache.keys)[:, :, :40].float()
    exact = qtensor.attention(q.float(), keys, keys[..., :512], causal=True)
    assert got.shape == (1, 16, 40, 512)
    torch.testing.assert_close(got.float(), exact, atol=0.02, rtol=0.02)


def test_absorbed_projections_are_latent_attention():
    """The recipe of docs/attention.md: queries in the latent space, values projected last."""
    size, generator = 32, torch.Generator().manual_seed(0)
    w_k, w_v = (
        torch.randn(HEADS, size, LATENT, generator=generator, dtype=torch.float64) / 8
        for _ in range(2)
    )
    latent = rand(2, 1, TOKENS, LATENT).double()
    k_rope, q_rope = (
        rand(2, 1, TOKENS, ROPE, seed=1).double(),
        rand(2, HEADS, TOKENS, ROPE, seed=2).double(),
    )
    q_nope = rand(2, HEADS, TOKENS, size, seed=3).double()
    keys = torch.cat([latent @ w_k.mT, k_rope.expand(-1, HEADS, -1, -1)], -1)
    exact = torch.nn.functional.scaled_dot_product_attention(
        torch.cat([q_nope, q_rope], -1), keys, latent @ w_v.mT, is_causal=True, scale=0.1
    )
    cache = make("float32")
    q = torch.cat([q_nope @ w_k, q_rope], -1).float()
    got = cache.update(q, torch.cat([latent, k_rope], -1).float(), None, scale=0.1)
    torch.testing.assert_close(got.double() @ w_v.mT, exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"v_head_size": 100}, "values must be blocks of 32 of the 192 elements"),
        ({"v_head_size": 224}, "values must be blocks of 32"),
        ({"k_mean": "first"}, "a latent cache takes no v_format, v_global or k_mean; got k_mean"),
        ({"v_format": "mxfp4"}, "a latent cache takes no v_format"),
    ],
)
def test_errors_name_the_rule(options, rule):
    with pytest.raises(qtensor.QTensorError, match=rule):
        make(**options)


def test_values_for_a_latent_cache_are_refused():
    cache, k = make(), rows()
    with pytest.raises(qtensor.QTensorError, match="v must be None"):
        cache.append(k, k[..., :LATENT])
    assert not cache.lengths.any()


def test_the_repr_names_options():
    cache = make("mxfp8", residual=8)
    assert repr(cache).endswith(
        f"k=mxfp8 {LATENT + ROPE}, v=mxfp8 {LATENT}, residual=8, latent=True)"
    )
