"""One graph serves every token of a cache that does not grow; its bytes are those of eager code."""

from __future__ import annotations

import pytest
import torch
from formats import assert_same_bytes, rand
from torch._dynamo.utils import counters

import qtensor

CASES = {
    "static": {},
    "pages": {"k_format": "mxfp4", "page_size": 8},
    "mean": {"k_mean": "first", "v_format": "bfloat16"},
    "ring": {"k_format": "nvfp4", "window": 9, "page_size": 8},
    "residual": {"k_format": "mxfp4", "capacity": 256, "residual": 9},
    "ring and residual": {"k_format": "mxfp8", "capacity": 256, "window": 30, "residual": 9},
}


_COMBINED = ("mean", "ring and residual")
_WIDE = pytest.mark.nightly(reason="a second a cell; two have most of the options")


@pytest.mark.parametrize(
    "case", [c if c in ("pages", *_COMBINED) else pytest.param(c, marks=_WIDE) for c in CASES]
)
def test_one_graph_for_all_tokens(case):
    caches = [qtensor.KVCache(2, 2, 32, **{"capacity": 40, **CASES[case]}) for _ in range(2)]
    prompt = [rand(2, heads, 12, 32) for heads in (4, 2, 2)]
    for cache in caches:
        cache.update(*prompt)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(lambda q, k, v: caches[0].update(q, k, v), fullgraph=True)
    for _ in range(5):
        token = [rand(2, heads, 1, 32) for heads in (4, 2, 2)]
        assert_same_bytes(compiled(*token), caches[1].update(*token))
    assert counters["stats"]["unique_graphs"] == 1
    for name, t in caches[0].state_dict().items():
        assert_same_bytes(t, caches[1].state_dict()[name], name)


def test_a_cache_position_as_a_tensor():
    """Positions come from the caller, as a tensor that changes from token to token."""
    one, other = qtensor.KVCache(1, 2, 32, 40), qtensor.KVCache(1, 2, 32, 40)

    def step(q, k, v, position):
        one.append(k, v, position)
        return one.attention(q, positions=position)

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(step, fullgraph=True)
    for i in range(4):
        q, k, v = (rand(1, heads, 1, 32) for heads in (4, 2, 2))
        assert_same_bytes(compiled(q, k, v, torch.tensor([[i]])), other.update(q, k, v))
    assert counters["stats"]["unique_graphs"] == 1


def test_attention_of_quantized_tensors():
    """``scaled_dot_product_attention`` and ``attention`` reach the op in compiled code too."""
    q = rand(1, 4, 3, 32)
    k, v = (qtensor.quantize(rand(1, 2, 9, 32), "mxfp8") for _ in range(2))

    def call(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    compiled = torch.compile(call, fullgraph=True)
    assert_same_bytes(compiled(q, k, v), qtensor.attention(q, k, v))
    own = torch.compile(qtensor.attention, fullgraph=True)
    assert_same_bytes(own(q, k, v, causal=True), qtensor.attention(q, k, v, causal=True))
