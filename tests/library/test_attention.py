"""``attention`` against the oracle, to the bit, and against torch's formulation."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DTYPES, FORMATS, Problem
from formats import assert_same_bytes
from torch.nn import functional as F

import qtensor

formats = pytest.mark.parametrize("text", FORMATS)

SETTINGS = {
    "one token": {"lengths": (1,), "groups": 1},
    "two segments": {"lengths": (1100,), "groups": 1},
    "two sequences": {"lengths": (300, 40), "queries": 3},
    "not causal": {"lengths": (270,), "queries": 2, "options": {"causal": False}},
    "window": {"lengths": (560, 20), "options": {"window": 250}},
    "soft cap": {"lengths": (70,), "options": {"soft_cap": 3.0}},
    "sinks": {"lengths": (70, 3), "options": {"sinks": torch.tensor([0.5, -1.0])}},
    "padding": {"lengths": (70, 70), "options": {"first": torch.tensor([0, 30])}},
    "positions": {
        "lengths": (70,),
        "queries": 3,
        "options": {"positions": torch.tensor([[69, 3, -1]])},
    },
    "heads": {"lengths": (33,), "heads": 2, "groups": 3, "size": 96, "v_size": 128},
    "pages": {"lengths": (70, 40), "page": 16},
    "scale": {"lengths": (20,), "options": {"scale": 0.3}},
}


@pytest.mark.parametrize("setting", SETTINGS)
@formats
def test_bytes_against_the_oracle(text, setting):
    index = FORMATS.index(text)
    problem = Problem(
        text, FORMATS[index * 5 % len(FORMATS)], DTYPES[index % 3], **SETTINGS[setting]
    )
    assert_same_bytes(problem.run(), problem.expected())


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_against_the_oracle(kind):
    mask = torch.randn(2, 1, 2, 300, generator=torch.Generator().manual_seed(5))
    mask = mask > 0 if kind == "bool" else mask.masked_fill(mask > 1, -torch.inf)
    mask[1, :, 1] = False if kind == "bool" else -torch.inf
    problem = Problem("mxfp8", lengths=(300, 280), queries=2, options={"mask": mask})
    got = problem.run()
    assert_same_bytes(got, problem.expected())
    assert (got[1, :, 1] == 0).all()


@formats
def test_results_are_near_those_of_torch(text):
    problem = Problem(text, dtype=torch.float32, lengths=(500,), heads=2, queries=4, size=128)
    k, v = problem.rows()
    rows = torch.arange(4)[:, None] + 496
    mask = torch.arange(500) <= rows
    want = F.scaled_dot_product_attention(problem.q(), k, v, mask, enable_gqa=True)
    error = (problem.run() - want).norm() / want.norm()
    loose = {"mxfp4": 0.3, "nvfp4": 0.25, "float32": 1e-6, "bfloat16": 1e-6, "float16": 1e-3}
    assert error < loose.get(text, 0.15)


@pytest.mark.parametrize("text", ["fp8", "fp8_rowwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
def test_the_public_function_reads_quantized_tensors(text):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 40, 64, generator=generator).unbind()
    stored = [qtensor.quantize(t, text, columnwise=text != "fp8_rowwise") for t in (k, v)]
    got = qtensor.attention(q, *stored, causal=True)
    want = F.scaled_dot_product_attention(q, *[t.dequantize() for t in stored], is_causal=True)
    assert (got - want).abs().max() < 1e-5
    plain = qtensor.attention(q, stored[0], v.mT.contiguous().mT)
    assert plain.shape == q.shape
