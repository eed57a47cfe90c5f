"""``attention`` against the oracle, to the bit, and against torch's formulation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import DTYPES, FORMATS, Problem, attend
from formats import assert_same_bytes
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import qtensor
from qtensor.kernels.table import FLOATS

formats = pytest.mark.parametrize("text", FORMATS)
FEW = ("bfloat16", "mxfp8", "nvfp4")
WIDE = pytest.mark.nightly(reason="the join does not see the format of a part")

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


@pytest.fixture(params=["native", "reference"])
def served(request, monkeypatch):
    """By which kernels the op is computed."""
    if request.param == "reference":
        for name in ("attention", "attention_part", "join_attention"):
            monkeypatch.delitem(FLOATS["cpu"], name)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("setting", SETTINGS)
@formats
def test_bytes_against_the_oracle(text, setting):
    index = FORMATS.index(text)
    problem = Problem(
        text, FORMATS[index * 5 % len(FORMATS)], DTYPES[index % 3], **SETTINGS[setting]
    )
    assert_same_bytes(problem.run(), problem.expected())


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_against_the_oracle(kind):
    mask = torch.randn(2, 1, 2, 300, generator=torch.Generator().manual_seed(5))
    mask = mask > 0 if kind == "bool" else mask.masked_fill(mask > 1, -torch.inf)
    mask[1, :, 1] = False if kind == "bool" else -torch.inf
    problem = Problem("mxfp8", lengths=(300, 280), queries=2, options={"mask": mask})
    got = problem.run()
    assert_same_bytes(got, problem.expected())
    assert (got[1, :, 1] == 0).all()


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("text", [pytest.param(t, marks=() if t in FEW else WIDE) for t in FORMATS])
def test_parts_over_different_tokens_against_the_oracle(text, sinks):
    """The last 40 tokens of each query lie in another cache; some queries have no others."""
    index, options = FORMATS.index(text), {} if sinks is None else {"sinks": sinks}
    common = {"lengths": (330, 45), "queries": 7, "dtype": DTYPES[index % 3]}
    positions = torch.arange(7) + torch.tensor([[323], [38]])
    early = Problem(text, **common, options={**options, "positions": positions - 40})
    late = Problem("bfloat16", **common, options={**options, "window": 40})
    parts = [problem.run(op="attention_part", sinks=None) for problem in (early, late)]
    assert parts[0][1][1, :, :2, 1].eq(0).all()
    got = torch.ops.qtensor.join_attention(*parts[0], *parts[1], common["dtype"], sinks)
    assert_same_bytes(got, early.expected(late))


def test_a_part_without_tokens_changes_no_bit():
    problem = Problem("mxfp8", lengths=(300,), queries=2, dtype=torch.float32)
    values, sums = problem.run(op="attention_part")
    none = problem.run(op="attention_part", mask=torch.zeros(1, 1, 1, 300, dtype=torch.bool))
    assert not none[0].any()
    for parts in ((values, sums, *none), (*none, values, sums)):
        joined = torch.ops.qtensor.join_attention(*parts, torch.float32)
        assert_same_bytes(joined, problem.run())


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


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "sinks"])
def test_a_lost_gradient_is_refused(name):
    operands = {each: torch.ones(1, 1, 2, 64) for each in "qkv"}
    operands |= {"mask": torch.zeros(1, 1, 2, 2), "sinks": torch.zeros(1)}
    operands["v"] = qtensor.quantize(operands["v"], "mxfp8")
    operands[name].requires_grad_()
    with pytest.raises(qtensor.UnsupportedError, match=rf"got {name} that .* DotProductAttention"):
        qtensor.attention(**operands)
    with torch.no_grad():
        assert not qtensor.attention(**operands).requires_grad


def refused(match, problem, **options):
    with pytest.raises(qtensor.QTensorError, match=match):
        problem.run(**options)


def test_errors_name_the_argument():
    problem = Problem("mxfp8", lengths=(40, 30), groups=2)
    refused(r"from 0 to the 47 tokens .* got \[48, 3\]", problem, lengths=torch.tensor([48, 3]))
    refused("from 0 to the 47 tokens", problem, lengths=torch.tensor([4, -1]))
    refused("lengths must be int64 or int32", problem, lengths=torch.ones(2))
    refused(r"lengths must have the shape \(2,\)", problem, lengths=torch.ones(1).long())
    refused(r"positions must have the shape \(2, 1\)", problem, positions=torch.ones(2).long())
    refused(r"first must have the shape \(2,\)", problem, first=torch.ones(2, 1).long())
    refused("a window needs causal=True", problem, window=3, causal=False)
    refused("window must be at least 0", problem, window=-1)
    refused("scale must be a finite number", problem, scale=float("nan"))
    refused("soft_cap must be a finite number of at least 0", problem, soft_cap=-1.0)
    for value in (1e300, 1e-300):
        refused("scale must be a finite number, .* float32", problem, scale=value)
        refused("soft_cap must be a finite number .* float32", problem, soft_cap=value)
    refused("scale / soft_cap must be a finite", problem, scale=1e30, soft_cap=1e-30)
    assert problem.run(scale=0.0, soft_cap=3.0).isfinite().all()
    refused("sinks must have the shape", problem, sinks=torch.ones(3))
    refused("the mask must cover the longest sequence, 40", problem, mask=torch.ones(1, 1, 1, 39))
    refused("mask must have the shape", problem, mask=torch.ones(1, 3, 1, 40))
    refused("the mask must be bool, float32", problem, mask=torch.ones(1, 1, 1, 40).long())
    refused("k has no global value", problem, k_global=torch.ones(1))
    refused("q must be a dense float32", dataclasses.replace(problem, dtype=torch.float64))
    refused("sinks join the attention", problem, op="attention_part", sinks=torch.ones(2))
    values, sums = problem.run(op="attention_part")
    join = torch.ops.qtensor.join_attention
    for match, arguments in {
        r"sums must have the shape \(2, 2, 1, 2\)": (values, sums[:1], values, sums, torch.float32),
        "more_values must be dense float32": (values, sums, values.half(), sums, torch.float32),
        "the dtype must be float32": (values, sums, values, sums, torch.int8),
        "sinks must have the shape": (values, sums, values, sums, torch.float32, torch.ones(3)),
    }.items():
        with pytest.raises(qtensor.QTensorError, match=match):
            join(*arguments)


def test_pages_outside_the_cache_are_refused():
    problem = Problem("fp8_rowwise", lengths=(40, 30), page=16)
    for table in ([[0, 1, 6], [2, 3, 0]], [[0, -1, 2], [2, 3, 0]]):
        refused("must name one of the 6 pages", problem, block_table=torch.tensor(table))
    # Pages behind the end of a sequence are not read.
    assert problem.run(block_table=torch.tensor([[0, 1, 2], [3, 4, 99]])).isfinite().all()
    refused("from 0 to the 32 tokens", problem, block_table=torch.tensor([[0, 1], [2, 3]]))
    wide = torch.tensor([[0], [1]]).expand(2, 2**61)
    refused("block_table must have at most 2147483647 columns", problem, block_table=wide)


def test_shapes_must_agree():
    problem = Problem("mxfp8", lengths=(40,), heads=2)
    k, v, _ = problem.cache()
    q, lengths = problem.q(), problem.lengths_tensor
    for match, call in {
        "heads of q must be a multiple": lambda: attend(q[:, :3], k, v, lengths),
        "one head size; got 32 and 64": lambda: attend(q[..., :32], k, v, lengths),
        "same sequences; got 2 and 1": lambda: attend(q.repeat(2, 1, 1, 1), k, v, lengths),
        "k and v must have the same sequences or pages": lambda: attend(
            q, k, v.map(lambda t: t[:, :, 1:]), lengths
        ),
        "the head size of k must be a positive multiple of 32": lambda: attend(
            q, k.map(lambda t: t[..., :40]), v, lengths
        ),
        "contiguous last dim": lambda: attend(q, k.map(lambda t: t.mT.contiguous().mT), v, lengths),
    }.items():
        with pytest.raises(qtensor.QTensorError, match=match):
            call()


def test_a_call_compiles_once_for_all_tokens():
    """Lengths and positions are tensors: a graph serves every step."""
    problem = Problem("fp8_rowwise", lengths=(40,))
    k, v, _ = problem.cache()
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def step(q, new, position):
        torch.ops.qtensor.cache_append_(*(
            new,
            new,
            position[None],
            k.codes,
            k.factors,
            v.codes,
            v.factors,
            k.text,
            v.text,
        ))
        return attend(q, k, v, position + 1)

    for position in (40, 41, 45):
        at, q = torch.tensor([position]), problem.q()
        got = step(q, q[:, :1], at)
        assert_same_bytes(got, attend(q, k, v, at + 1))
    assert counter.frame_count == 1
