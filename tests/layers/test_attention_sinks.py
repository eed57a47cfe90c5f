"""``softmax_type`` and ALiBi of the attention modules, beside their definitions in float64."""

from __future__ import annotations

import math

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
from qtensor.functional.attention.alibi import default_slopes

FLOAT32 = 110.0
"""Decibels: sums of float32 over less than 64 terms lose less than 4 of 24 bits."""
MASKS = [
    Mask("no_mask"),
    Mask("causal"),
    Mask("causal_bottom_right", (7, 0)),
    Mask("padding_causal"),
    Mask("no_mask", (5, 3), False),
]
LENGTHS = [(29, 17), (40, 48)]
masks = pytest.mark.parametrize("mask", MASKS, ids=lambda m: f"{m.kind}{m.window}")


def lengths_of(mask, sizes):
    """The lengths of the sequences, and the options of a call that has them."""
    if not mask.kind.startswith("padding"):
        return [(sizes.queries, sizes.keys)] * sizes.batch, {}
    sums = [torch.tensor([0, *column]).cumsum(0) for column in zip(*LENGTHS, strict=True)]
    return LENGTHS, dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), sums, strict=True))


def with_offset(layer):
    """Give a layer different sinks, none of them 0."""
    with torch.no_grad():
        layer.softmax_offset.copy_(torch.tensor([1.5, -0.5, 3.0, 0.25]))
    return layer


# ---- sinks


@masks
@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_sinks(kind, mask):
    sizes = Sizes(keys=48)
    layer = module(sizes, "bshd", softmax_type=kind, **mask.options())
    inputs, sinks = sizes.draw("bshd"), torch.zeros(4)
    if kind == "learnable":
        sinks = with_offset(layer).softmax_offset
        inputs.append(sinks)
    lengths, options = lengths_of(mask, sizes)
    seen = table(mask, (sizes.queries, sizes.keys), lengths)
    q, k, v = (first(t, "bshd") for t in inputs[:3])
    expected = gradients(last(attention64(q, k, v, seen, sinks=sinks), "bshd"), inputs)
    got = gradients(layer(*inputs[:3], **options), inputs)
    for a, b in zip(got, expected, strict=True):
        assert sqnr(a, b) > FLOAT32
    vanilla = module(sizes, "bshd", **mask.options())(*inputs[:3], **options)
    assert sqnr(vanilla, expected[0]) < 40


@pytest.mark.parametrize("name", ["Float8CurrentScaling", "MXFP8BlockScaling"])
def test_sinks_of_quantized_attention(name):
    """Output and gradients keep the error of the formats; those without sinks do not."""
    sizes, mask = Sizes(queries=64, keys=64), Mask("causal")
    recipe = getattr(recipes, name)(fp8_dpa=True)
    layer = module(sizes, "bshd", softmax_type="learnable", recipe=recipe)
    inputs = [*sizes.draw("bshd"), with_offset(layer).softmax_offset]
    seen = table(mask, (64, 64), [(64, 64)] * 2)
    q, k, v = (first(t, "bshd") for t in inputs[:3])
    expected = gradients(
        last(attention64(q, k, v, seen, sinks=layer.softmax_offset), "bshd"), inputs
    )
    got = gradients(layer(*inputs[:3]), inputs)
    for a, b in zip(got, expected, strict=True):
        assert 17 < sqnr(a, b) < 60
    plain = module(sizes, "bshd", recipe=recipe)(*inputs[:3])
    assert sqnr(plain, expected[0]) < 10


def test_packed_sequences_with_sinks():
    sizes = Sizes(batch=1, queries=24, keys=24)
    packed = [t[0].detach() for t in sizes.draw("bshd")]
    options = {"softmax_type": "off-by-one"}
    got = module(sizes, "thd", attn_mask_type="padding_causal", **options)(
        *packed, cu_seqlens_q=torch.tensor([0, 10, 24])
    )
    alone = module(sizes, "bshd", **options)
    for rows in (slice(10), slice(10, 24)):
        assert sqnr(got[rows], alone(*[t[None, rows] for t in packed])[0]) > FLOAT32


@pytest.mark.parametrize("kind", [PlainCache, qtensor.KVCache])
def test_a_cache_with_sinks(kind):
    sizes = Sizes(queries=24, keys=24)
    layer = with_offset(module(sizes, "sbhd", softmax_type="learnable")).eval()
    cache = PlainCache()
    if kind is qtensor.KVCache:
        cache = kind(sizes.batch, sizes.groups, sizes.size, sizes.keys, k_format="float32")
    q, k, v = (t.detach() for t in sizes.draw("sbhd"))
    with torch.no_grad():
        whole = layer(q, k, v)
        for start, stop in ((0, 16), (16, 17), (17, 24)):
            part = layer(q[start:stop], k[start:stop], v[start:stop], cache=cache)
            assert sqnr(part, whole[start:stop]) > FLOAT32
    with pytest.raises(qtensor.UnsupportedError, match="causal inference"):
        layer(q, k, v, cache=cache)


def test_the_offset_is_a_parameter_of_the_outer_modules():
    layer = qtensor.TransformerLayer(64, 64, 4, softmax_type="learnable")
    name = "self_attention.core_attention.softmax_offset"
    assert layer.state_dict()[name].tolist() == [0.0] * 4
    assert "softmax_type='learnable'" in repr(layer)
    attention = qtensor.MultiheadAttention(64, 4, softmax_type="learnable", device="meta")
    assert attention.core_attention.softmax_offset.is_meta
    core = attention.to_empty(device="cpu").core_attention
    core.reset_parameters()
    assert not core.softmax_offset.any()
    x = torch.randn(8, 2, 64)
    layer(x).sum().backward()
    assert layer.self_attention.core_attention.softmax_offset.grad.abs().min() > 0
    assert not [*qtensor.DotProductAttention(4, 16, softmax_type="off-by-one").parameters()]


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_code_has_sinks_and_slopes(backend):
    sizes = Sizes()
    layer = with_offset(module(sizes, "bshd", softmax_type="learnable"))
    inputs = [*sizes.draw("bshd"), layer.softmax_offset]
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for options in ({}, {"core_attention_bias_type": "alibi"}):
        want = gradients(layer(*inputs[:3], **options), inputs)
        got = gradients(compiled(*inputs[:3], **options), inputs)
        assert all(sqnr(a, b) > FLOAT32 for a, b in zip(got, want, strict=True))


# ---- ALiBi


def test_default_slopes():
    """Those of the paper; numbers of heads between two powers take more from the larger one."""
    assert default_slopes(8, torch.device("cpu")).tolist() == [2.0**-i for i in range(1, 9)]
    between = default_slopes(6, torch.device("cpu")).tolist()
    assert between == [0.25, 2.0**-4, 2.0**-6, 2.0**-8, 0.5, 0.125]
    assert default_slopes(1, torch.device("cpu")).tolist() == [2.0**-8]


@masks
@pytest.mark.parametrize("slopes", [None, (4,), (2, 4)], ids=str)
def test_alibi(mask, slopes):
    sizes = Sizes(keys=48)
    layer = module(sizes, "bshd", **mask.options())
    inputs = sizes.draw("bshd")
    lengths, options = lengths_of(mask, sizes)
    given = None if slopes is None else torch.rand(slopes, generator=torch.Generator()) + 0.1
    per_head = default_slopes(4, torch.device("cpu")) if given is None else given
    bias = torch.zeros(2, 4, sizes.queries, sizes.keys)
    for b, (queries, keys) in enumerate(lengths):
        bottom_right = "bottom_right" in mask.kind or (
            mask.bottom_right is None and "causal" not in mask.kind
        )
        for i in range(sizes.queries):
            at = i + (keys - queries if bottom_right else 0)
            away = torch.tensor([-math.fabs(at - j) for j in range(sizes.keys)])
            bias[b, :, i] = per_head.expand(2, 4)[b, :, None] * away
    seen = table(mask, (sizes.queries, sizes.keys), lengths)
    q, k, v = (first(t, "bshd") for t in inputs)
    expected = gradients(last(attention64(q, k, v, seen, bias=bias), "bshd"), inputs)
    options |= {"core_attention_bias_type": "alibi", "alibi_slopes": given}
    for a, b in zip(gradients(layer(*inputs, **options), inputs), expected, strict=True):
        assert sqnr(a, b) > FLOAT32


# ---- errors

ALIBI = {"core_attention_bias_type": "alibi"}


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"softmax_type": "zero"}, {}, "softmax_type must be one of 'vanilla', 'off-by-one'"),
        ({}, {"alibi_slopes": torch.ones(4)}, "alibi_slopes goes with"),
        ({}, ALIBI | {"core_attention_bias": torch.ones(1)}, "goes with"),
        ({}, ALIBI | {"alibi_slopes": torch.ones(3)}, r"must be \(4,\) or \(2, 4\), floating"),
        ({}, ALIBI | {"alibi_slopes": torch.ones(4).int()}, "floating"),
        ({}, ALIBI | {"cache": PlainCache()}, "no padding, mask, bias"),
    ],
)
def test_mistakes(options, call, message):
    sizes = Sizes()
    with pytest.raises(qtensor.QTensorError, match=message):
        module(sizes, "bshd", **options)(*sizes.draw("bshd"), **call)
