"""``scaled_dot_product_attention`` and ``varlen_attention`` of quantized tensors read the codes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from formats import assert_same_bytes, rand
from torch._dynamo.testing import CompileCounterWithBackend

import qtensor

FORMATS = ("fp8", "fp8_rowwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
formats = pytest.mark.parametrize("text", FORMATS)
B, HQ, H, M, S, D = 2, 4, 2, 5, 18, 64


def operands(text, dtype=torch.bfloat16):
    q = rand(B, HQ, M, D, dtype=dtype)
    return q, *(qtensor.quantize(rand(B, H, S, D, dtype=dtype), text) for _ in range(2))


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


MASK = (torch.arange(M)[:, None] * 7 + torch.arange(S) * 5) % 3 > 0
CALLS = {
    "plain": ({}, {}),
    "scale": ({"scale": 0.3}, {"scale": 0.3}),
    # torch counts positions from the first token: query i sees tokens 0 to i.
    "causal": (
        {"is_causal": True},
        {"causal": True, "positions": torch.arange(M).expand(B, M)},
    ),
    "boolean": ({"attn_mask": MASK}, {"mask": MASK[None, None]}),
    "added": (
        {"attn_mask": -MASK.bfloat16().expand(B, 1, M, S)},
        {"mask": -MASK.bfloat16().expand(B, 1, M, S)},
    ),
    "a row without tokens": (
        {"attn_mask": MASK & (torch.arange(M) != 2)[:, None]},
        {"mask": (MASK & (torch.arange(M) != 2)[:, None])[None, None]},
    ),
    "a row": (
        {"attn_mask": MASK[1:2]},
        {"mask": MASK[1:2].expand(1, 1, 1, S)},
    ),
}


@formats
@pytest.mark.parametrize("call", CALLS)
def test_codes_are_read(text, call):
    q, k, v = operands(text)
    options, own = CALLS[call]
    got = sdpa(q, k, v, **options)
    assert_same_bytes(got, qtensor.attention(q, k, v, **own))
    values = [t.float() for t in (q, k.dequantize(), v.dequantize())]
    if call == "added":
        options = {"attn_mask": options["attn_mask"].float()}
    torch.testing.assert_close(got.float(), sdpa(*values, **options), atol=0.02, rtol=0.02)
    assert got[:, :, 2].any() == (call != "a row without tokens")


@formats
def test_a_quantized_query_is_decoded(text):
    q, k, v = operands(text)
    coded = qtensor.quantize(q, text)
    want = qtensor.attention(coded.dequantize(), k, v)
    assert_same_bytes(sdpa(coded, k, v), want)
    with torch.inference_mode():
        assert_same_bytes(sdpa(coded, k, v), want)
    assert_same_bytes(sdpa(q, k, v.dequantize()), qtensor.attention(q, k, v.dequantize()))


FALLS_BACK = {
    "three dims": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0, 0], v[0, 0]),
    "broadcast": lambda q, k, v: sdpa(q, k[:1].clone(), v[:1].clone()),
    "gradient": lambda q, k, v: sdpa(q.clone().requires_grad_(), k, v),
    "mask and causal": lambda q, k, v: sdpa(q, k, v, attn_mask=MASK, is_causal=True),
    "double": lambda q, k, v: sdpa(q.double(), k.double(), v.double()),
}


@pytest.mark.parametrize("call", FALLS_BACK)
def test_the_rest_is_torch_on_values(call):
    q, k, v = operands("mxfp8", torch.float32)
    got = FALLS_BACK[call](q, k, v)
    want = FALLS_BACK[call](q, k.dequantize(), v.dequantize())
    torch.testing.assert_close(got, want)
    assert got.requires_grad == want.requires_grad


def test_columns_of_blocks_are_decoded():
    q, k, v = (rand(B, H, 32, D) for _ in range(3))
    k, v = (qtensor.quantize(t, "fp8_blockwise") for t in (k, v))
    want = F.scaled_dot_product_attention(q, k.dequantize(), v.dequantize())
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), want)


def test_the_gradient_is_not_lost():
    q, k, v = operands("mxfp8", torch.float32)
    q.requires_grad_()
    k = k.detach().requires_grad_()
    sdpa(q, k, v).square().sum().backward()
    values = [t.detach().dequantize() if t is not q else q.detach() for t in (q, k, v)]
    plain = [t.clone().requires_grad_() for t in values]
    sdpa(*plain).square().sum().backward()
    torch.testing.assert_close(q.grad, plain[0].grad)
    torch.testing.assert_close(k.grad, plain[1].grad)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: sdpa(q[:, :3], k, v),
        lambda q, k, v: sdpa(q.float(), k, v),
        lambda q, k, v: sdpa(q, k, v, attn_mask=MASK[:, :3]),
    ],
)
def test_wrong_calls_raise_what_torch_raises(call):
    q, k, v = operands("mxfp8")
    with pytest.raises(RuntimeError) as wanted:
        call(q, k.dequantize(), v.dequantize())
    with pytest.raises(RuntimeError) as caught:
        call(q, k, v)
    assert str(caught.value) == str(wanted.value)


# ---- sequences of different lengths

QUERIES, KEYS = (3, 1, 0, 4), (9, 7, 3, 4)
WINDOWS = [(-1, -1), (-1, 0), (4, 0), (0, 0), (2, 3), (-1, 2), (3, -1)]


def cumulative(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def expected(q, k, v, window):
    """Attention of one sequence in torch: (M, Hq, D), (S, H, D)."""
    q, k, v = (t.transpose(0, 1)[None].float() for t in (q, k, v))
    own = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    distance = torch.arange(k.shape[2]) - own
    before, after = (n if n >= 0 else 99 for n in window)
    seen = (distance >= -before) & (distance <= after)
    return sdpa(q, k, v, attn_mask=seen)[0].transpose(0, 1)


@pytest.mark.parametrize("text", [*FORMATS, None])
@pytest.mark.parametrize("window", WINDOWS)
def test_packed_sequences(text, window):
    q = rand(sum(QUERIES), HQ, D, dtype=torch.float32)
    k, v = (rand(sum(KEYS), H, D, dtype=torch.float32) for _ in range(2))
    if text is not None:
        k, v = (qtensor.quantize(t, text) for t in (k, v))
    got = qtensor.varlen_attention(
        *(q, k, v, cumulative(QUERIES), cumulative(KEYS), max(QUERIES), max(KEYS)),
        window_size=window,
        enable_gqa=True,
    )
    values = [qtensor.dequantize(t).split(KEYS) for t in (k, v)]
    parts = zip(q.split(QUERIES), *values, strict=True)
    want = torch.cat([expected(*part, window) for part in parts])
    torch.testing.assert_close(got, want)


@formats
def test_pages(text):
    q = rand(sum(QUERIES), HQ, D, dtype=torch.float32)
    k, v = (qtensor.quantize(rand(9, 4, H, D, dtype=torch.float32), text) for _ in range(2))
    table = torch.tensor([[8, 0, 3], [2, 1, 0], [5, 7, 7], [6, 4, 4]], dtype=torch.int32)
    used = torch.tensor(KEYS, dtype=torch.int32)
    got = qtensor.varlen_attention(
        *(q, k, v, cumulative(QUERIES), None, max(QUERIES), max(KEYS)),
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=used,
        block_table=table,
    )
    rows = [t.dequantize()[table.long()].flatten(1, 2) for t in (k, v)]
    parts = zip(q.split(QUERIES), *rows, KEYS, strict=True)
    want = [expected(a, b[:n], c[:n], (-1, 0)) for a, b, c, n in parts]
    torch.testing.assert_close(got, torch.cat(want))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"enable_gqa": False}, "heads differ only with enable_gqa=True"),
        ({"cu_seq_q": torch.tensor([0, 5, 3])}, "never falls"),
        ({"cu_seq_k": None}, "keys need cu_seq_k"),
        ({"query": rand(8, HQ, D).requires_grad_()}, "there is no gradient"),
        ({"value": rand(sum(KEYS), H, D).requires_grad_()}, "got value that requires grad"),
        ({"cu_seq_q": torch.tensor([0, 3, 4, 4, 9])}, "cu_seq_q must .* ends with the 8 rows"),
        ({"cu_seq_q": torch.tensor([0, 3, 4, 4, 7])}, "cu_seq_q must .* ends with the 8 rows"),
        ({"cu_seq_q": torch.tensor([1, 3, 4, 4, 8])}, "cu_seq_q must .* begins with 0"),
        ({"cu_seq_q": torch.ones(5)}, "cu_seq_q must be int64 or int32"),
        ({"cu_seq_k": torch.tensor([0, 9, 16, 19, 22])}, "cu_seq_k must .* with the 23 rows"),
        ({"cu_seq_k": torch.tensor([0, 23])}, "same number of sequences; got 4 and 1"),
        ({"cu_seq_k": None}, "keys need cu_seq_k; got no block table and no lengths"),
        ({"max_q": 3}, "max_q must be at least the 4 queries"),
        ({"max_k": 8}, "max_k must be at least the 9 keys"),
        ({"seqused_k": torch.tensor([9, 7, 4, 4])}, "at most the keys of the sequence"),
        ({"seqused_k": torch.tensor([9, 7, -1, 4])}, "seqused_k must be at least 0"),
        ({"seqused_k": torch.tensor([9, 7, 3])}, r"seqused_k must have the shape \(4,\)"),
    ],
)
def test_wrong_sequences_name_the_rule(change, rule):
    k = rand(sum(KEYS), H, D)
    arguments = {
        "query": rand(sum(QUERIES), HQ, D),
        "key": k,
        "value": k,
        "cu_seq_q": cumulative(QUERIES),
        "cu_seq_k": cumulative(KEYS),
        "max_q": 4,
        "max_k": 9,
        "enable_gqa": True,
        **change,
    }
    with pytest.raises(qtensor.QTensorError, match=rule):
        qtensor.varlen_attention(**arguments)


def test_compiled_code_packs_other_lengths_in_one_graph():
    """Lengths are read when the graph runs; shapes and the largest lengths may differ."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def call(q, k, v, starts, ends, max_q, max_k):
        return qtensor.varlen_attention(q, k, v, starts, ends, max_q, max_k, enable_gqa=True)

    for queries, keys in ((QUERIES, KEYS), ((2, 5, 1, 3), (8, 9, 2, 4)), ((4, 4), (11, 12))):
        q = rand(sum(queries), HQ, D)
        k, v = (qtensor.quantize(rand(sum(keys), H, D), "mxfp8") for _ in range(2))
        arguments = (q, k, v, cumulative(queries), cumulative(keys), max(queries), max(keys))
        assert_same_bytes(call(*arguments), qtensor.varlen_attention(*arguments, enable_gqa=True))
    with pytest.raises(qtensor.QTensorError, match="max_k must be at least the 12 keys"):
        call(*arguments[:-1], 10)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        (torch.zeros(3, 3, dtype=torch.long), r"block_table must have the shape \(4, pages"),
        (torch.zeros(4, 2, dtype=torch.long), "at most the 8 keys that a row of block_table"),
    ],
)
def test_wrong_pages_name_the_rule(table, rule):
    q, k = rand(sum(QUERIES), H, D), rand(9, 4, H, D)
    options = {"seqused_k": torch.tensor(KEYS), "block_table": table}
    with pytest.raises(qtensor.QTensorError, match=rule):
        qtensor.varlen_attention(q, k, k, cumulative(QUERIES), None, 4, 9, **options)


def test_a_broadcast_table_is_read_as_far_as_it_is_used():
    q, k = rand(2, H, D), rand(1, 4, H, D)
    one = torch.zeros(1, 1, dtype=torch.long)
    first, second = (
        qtensor.varlen_attention(
            *(q, k, k, cumulative([2]), None, 2, 8),
            seqused_k=torch.tensor([8]),
            block_table=table,
        )
        for table in (one.expand(1, 2**61), one.expand(1, 2).clone())
    )
    assert_same_bytes(first, second)
