"""``DotProductAttention`` in high precision, beside attention in float64 by its definition."""

from __future__ import annotations

import pytest
import torch
from attention_module_cases import (
    Mask,
    PlainCache,
    Sizes,
    attention64,
    first,
    gradients,
    last,
    module,
    sqnr,
    table,
)

import qtensor
from qtensor import recipes

MASKS = [
    Mask("no_mask"),
    Mask("no_mask", (5, 3)),
    Mask("no_mask", (-1, 2), False),
    Mask("causal"),
    Mask("causal", (7, 0)),
    Mask("causal_bottom_right"),
    Mask("causal_bottom_right", (7, 0)),
    Mask("padding"),
    Mask("padding", (4, 4)),
    Mask("padding_causal"),
    Mask("padding_causal_bottom_right", (6, 0)),
]
LENGTHS = [(29, 17), (40, 48)]
FLOAT32 = 110.0
"""Decibels: sums of float32 over less than 64 terms lose less than 4 of 24 bits."""


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: f"{m.kind}{m.window}")
@pytest.mark.parametrize("keys", [40, 48])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_masks(qkv_format, mask, keys, groups):
    sizes = Sizes(keys=keys, groups=groups, values=16 if groups == 2 else 24)
    layer = module(sizes, qkv_format, **mask.options())
    inputs = sizes.draw(qkv_format)
    lengths = [(sizes.queries, keys)] * sizes.batch
    options = {}
    if mask.kind.startswith("padding"):
        lengths = [(q, min(k, keys)) for q, k in LENGTHS]
        sums = [torch.tensor([0, *column]).cumsum(0) for column in zip(*lengths, strict=True)]
        options = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), sums, strict=True))
    seen = table(mask, (sizes.queries, keys), lengths)
    q, k, v = (first(t, qkv_format) for t in inputs)
    expected = gradients(last(attention64(q, k, v, seen), qkv_format), inputs)
    got = gradients(layer(*inputs, **options), inputs)
    for a, b in zip(got, expected, strict=True):
        assert sqnr(a, b) > FLOAT32
    other = qtensor.DotProductAttention(
        sizes.heads, (sizes.size, sizes.values), sizes.groups, qkv_format=qkv_format
    )
    again = other(*inputs, **options, **mask.options())
    assert torch.equal(again, got[0]), "options of the call"


def test_masks_of_padding_hide_what_lengths_hide():
    sizes = Sizes(keys=48)
    layer = module(sizes, "bshd", attn_mask_type="padding_causal_bottom_right")
    inputs = sizes.draw("bshd")
    queries, keys = zip(*LENGTHS, strict=True)
    sums = [torch.tensor([0, *n]).cumsum(0) for n in (queries, keys)]
    masks = tuple(
        torch.arange(size)[None, None, None] >= torch.tensor(n)[:, None, None, None]
        for size, n in ((40, queries), (48, keys))
    )
    expected = layer(*inputs, cu_seqlens_q=sums[0], cu_seqlens_kv=sums[1])
    assert torch.equal(layer(*inputs, attention_mask=masks), expected)
    assert not expected[0, queries[0] :].any()


def test_an_arbitrary_mask_a_bias_and_a_scale():
    sizes = Sizes(keys=48)
    inputs = sizes.draw("bshd")
    hidden = torch.rand(2, 1, 40, 48) < 0.5
    hidden[1, 0, 3] = True
    bias = torch.randn(1, 4, 40, 48)
    layer = module(sizes, "bshd", attn_mask_type="arbitrary", softmax_scale=0.1)
    got = gradients(
        layer(
            *inputs,
            hidden,
            core_attention_bias_type="post_scale_bias",
            core_attention_bias=bias,
        ),
        inputs,
    )
    q, k, v = (first(t, "bshd") for t in inputs)
    expected = gradients(last(attention64(q, k, v, ~hidden, 0.1, bias), "bshd"), inputs)
    for a, b in zip(got, expected, strict=True):
        assert sqnr(a, b) > FLOAT32
    assert not got[0][1, 3].any(), "a query that sees nothing"


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("mask", [Mask("padding_causal", (9, 0)), Mask("padding")], ids=str)
def test_packed_sequences_are_each_sequence_alone(gap, mask):
    lengths = [7, 0, 23, 12]
    sizes = Sizes(batch=1, queries=sum(lengths) + gap * len(lengths), keys=0)
    layer = module(sizes, "thd", **mask.options())
    made = Sizes(batch=1, queries=sizes.queries, keys=sizes.queries).draw("bshd")
    packed = [t[0].detach().requires_grad_() for t in made]
    sums = torch.tensor([0, *lengths]).cumsum(0)
    padded = torch.tensor([0, *[n + gap for n in lengths]]).cumsum(0)
    options = {"cu_seqlens_q_padded": padded} if gap else {}
    got = layer(*packed, cu_seqlens_q=sums, **options)
    alone = module(
        Sizes(), "bshd", **Mask(mask.kind.replace("padding_", ""), mask.window).options()
    )
    if mask.kind == "padding":
        alone = module(Sizes(), "bshd", attn_mask_type="no_mask")
    expected, outside = torch.zeros_like(got), torch.ones(sizes.queries, dtype=torch.bool)
    starts = padded if gap else sums
    for start, length in zip(starts.tolist(), lengths, strict=False):
        if length:
            rows = slice(start, start + length)
            outside[rows] = False
            expected[rows] = alone(*[t[None, rows] for t in packed])[0]
    for a, b in zip(gradients(got, packed), gradients(expected, packed), strict=True):
        assert sqnr(a, b) > FLOAT32
        assert not a[outside].any()


@pytest.mark.parametrize("kind", [PlainCache, qtensor.KVCache])
@pytest.mark.parametrize("window", [(5, 0), None])
def test_a_cache_gets_new_tokens_and_answers_for_all(kind, window):
    sizes = Sizes(queries=24, keys=24)
    layer = module(sizes, "sbhd", window_size=window).eval()
    cache = PlainCache()
    if kind is qtensor.KVCache:
        cache = kind(sizes.batch, sizes.groups, sizes.size, sizes.keys, k_format="float32")
    with torch.no_grad():
        q, k, v = sizes.draw("sbhd")
        whole = layer(q, k, v)
        for start, stop in ((0, 16), (16, 17), (17, 24)):
            part = layer(q[start:stop], k[start:stop], v[start:stop], cache=cache)
            assert sqnr(part, whole[start:stop]) > FLOAT32
    with pytest.raises(qtensor.UnsupportedError, match="causal inference"):
        layer(q, k, v, cache=cache)


def test_dropout_is_for_training_and_keeps_the_mean():
    sizes = Sizes(queries=64, keys=64)
    layer = module(sizes, "bshd", attention_dropout=0.25, attn_mask_type="no_mask")
    q, k, _ = sizes.draw("bshd")
    ones = torch.ones(2, 64, 2, 16)
    y = layer(q, k, ones).detach()
    assert 0.02 < y.std() < 0.3
    assert abs(float(y.mean()) - 1) < 0.02
    assert torch.allclose(layer.eval()(q, k, ones), torch.ones(2, 64, 64))


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling(fp8_dpa=True)], ids=str)
def test_a_checkpoint_of_the_attention_changes_no_byte(recipe):
    sizes = Sizes()
    layer = module(sizes, "bshd", recipe=recipe, attention_dropout=0.1)
    inputs = sizes.draw("bshd")
    results = []
    for again in (False, True):
        torch.manual_seed(3)
        results.append(gradients(layer(*inputs, checkpoint_core_attention=again), inputs))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"attn_mask_type": "diagonal"}, {}, "attn_mask_type must be one of no_mask"),
        ({"window_size": (3,)}, {}, "window_size must be two integers"),
        ({"window_size": (3, 2)}, {}, "no keys after the query"),
        ({"attention_dropout": 1.0}, {}, "from 0 to below 1"),
        ({"softmax_scale": float("nan")}, {}, "softmax_scale must be a finite number"),
        ({"attn_mask_type": "padding"}, {}, "needs the lengths of the sequences"),
        ({"attn_mask_type": "arbitrary"}, {}, "needs a bool attention_mask"),
        ({}, {"attention_mask": torch.ones(1, 1, 40, 40) > 0}, "is for masks of padding"),
        ({}, {"core_attention_bias_type": "pre_scale_bias"}, "must be one of no_bias"),
        ({}, {"core_attention_bias": torch.ones(1)}, "goes with"),
        ({}, {"qkv_format": "bhsd"}, "qkv_format must be one of sbhd"),
        ({}, {"qkv_format": "thd"}, "thd: 3 dims"),
    ],
)
def test_mistakes(options, call, message):
    sizes = Sizes()
    with pytest.raises(qtensor.QTensorError, match=message):
        module(sizes, "bshd", **options)(*sizes.draw("bshd"), **call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k.double(), v), "key_layer must be float32"),
        (lambda q, k, v: (q, k[..., :8], v), "one head size"),
        (lambda q, k, v: (q, k[:, :3], v), "the same tokens and heads"),
        (lambda q, k, v: (q[:, :, :3], k, v), "multiple of those of the keys"),
        (lambda q, k, v: (q[:1], k, v), "the same batch"),
    ],
)
def test_shapes_that_do_not_fit(change, message):
    sizes = Sizes()
    with pytest.raises(qtensor.QTensorError, match=message):
        module(sizes, "bshd")(*change(*sizes.draw("bshd")))


def test_packed_sequences_need_their_lengths():
    layer, t = module(Sizes(), "thd"), torch.randn(12, 4, 16)
    with pytest.raises(qtensor.QTensorError, match="needs cu_seqlens_q"):
        layer(t, t, t)
    sums = torch.tensor([0, 5, 12])
    with pytest.raises(qtensor.QTensorError, match="at least the greatest length, 7"):
        layer(t, t, t, cu_seqlens_q=sums, max_seqlen_q=5)
    with pytest.raises(qtensor.QTensorError, match="as many keys as queries"):
        layer(t, t[:8], t[:8], cu_seqlens_q=sums)
    with pytest.raises(qtensor.UnsupportedError, match="causal masks, windows and padding"):
        layer(t, t, t, cu_seqlens_q=sums, attn_mask_type="arbitrary")
