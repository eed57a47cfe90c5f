"""Few rows times a quantized weight: the bytes of an order of sums that depends on nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import few_rows_oracle as oracle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compile_helpers import backends
from few_rows_cases import WEIGHTS, check_tails, quantized, same_bits
from native_cases import DOTS_HERE, ISAS, library_of, loaded, threads
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import Linear, Parameter, Sequential

import qtensor
from benchmarks import overhead
from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.native import MOST_ROWS
from qtensor.kernels.products import reference
from qtensor.storage.ops.grouped import group_sizes, grouped_product

weights = pytest.mark.parametrize(
    ("fmt", "options"), WEIGHTS, ids=[f"{f}-{'-'.join(map(str, o.values()))}" for f, o in WEIGHTS]
)
N, K = 67, 1031
"""Ragged for each block, set of rows and stage."""


@pytest.fixture(scope="session", params=[*ISAS, *DOTS_HERE])
def library(request: pytest.FixtureRequest) -> native.Library:
    """The kernels of one instruction set."""
    return library_of(request.param)


@pytest.fixture
def isa(library: native.Library) -> Iterator[None]:
    with loaded(library):
        yield


def rounded(total: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(total.isnan(), torch.nan, total).to(dtype)


def test_the_oracle_has_one_rounding():
    fmaf = ctypes.CDLL("libm.so.6").fmaf
    fmaf.argtypes, fmaf.restype = (ctypes.c_float,) * 3, ctypes.c_float
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(3000).astype(np.float32) for _ in range(3))
    c *= np.exp2(rng.integers(-60, 30, 3000)).astype(np.float32)
    a[:500] *= np.float32(2.0**-140)
    c[:500] *= np.float32(2.0**-130)
    # 2^-54 below the middle of two float32 numbers: float64 rounds to the middle.
    a[-1], b[-1], c[-1] = 1 + 2.0**-15, (1 - 2.0**-15) * 2.0**-24, 1 + 2.0**-23
    want = np.array([fmaf(*map(float, v)) for v in zip(a, b, c, strict=True)], np.float32)
    assert (oracle.fused(a, b, c).view(np.int32) == want.view(np.int32)).all()
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice.view(np.int32) != want.view(np.int32)).any(), "the cases do not tell them apart"


@weights
def test_bytes_of_every_format(isa: None, fmt: str, options: dict[str, Any]):
    torch.manual_seed(0)
    w, bias = quantized(N, K, fmt, options), torch.randn(N)
    wide = torch.randn(21, K + 9)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        x = wide.to(dtype)[:, 4 : K + 4]
        want = oracle.product(x, w, bias)
        for rows in (1, 2, 3, 4, 5, 7, 21):
            for count in (1, 2):
                with threads(count):
                    got = qtensor.gemm(x[:rows], w, "TN", bias, dtype=torch.float32)
                same_bits(got, want[:rows])
        for result in (torch.bfloat16, torch.float16):
            same_bits(qtensor.gemm(x, w, "TN", bias, dtype=result), rounded(want, result))
    why = qtensor.explain(x, w)
    assert why.backend == "few_rows", why


@pytest.mark.parametrize("fmt", ["fp8", "fp8_rowwise", "mxfp8"])
def test_four_rows_that_fill_the_first_cache_level(isa: None, fmt: str):
    """Four rows of fp8 weights share reads of x if x needs most of the first cache level."""
    torch.manual_seed(1)
    w, x = quantized(21, 4096, fmt, {}), torch.randn(4, 4096).bfloat16()
    want = oracle.product(x, w)
    for count in (1, 2):
        with threads(count):
            same_bits(qtensor.gemm(x, w, "TN", dtype=torch.float32), want)


@weights
def test_every_kind_of_tail(isa: None, fmt: str, options: dict[str, Any]):
    check_tails(fmt, options)


@weights
def test_a_row_does_not_depend_on_the_others(fmt: str, options: dict[str, Any]):
    """Rows of a batch of 64 beside each other number of rows, one to four threads, and slices."""
    torch.manual_seed(2)
    w = quantized(300, 1024, fmt, options)
    x = torch.randn(64, 1024).bfloat16()
    whole = F.linear(x, w)
    for rows in range(1, 65):
        first = (64 - rows) // 2
        with threads(1 + rows % 4):
            same_bits(F.linear(x[first : first + rows], w), whole[first : first + rows])
    assert qtensor.explain(x, w.t(), "NN").backend == "few_rows"
    same_bits(F.linear(x.view(4, 16, 1024)[1, 3], w), whole[19])
    same_bits(F.linear(x.float()[5:9], w).bfloat16(), whole[5:9])


@backends
@pytest.mark.parametrize("fmt", ["mxfp4", "fp8_rowwise"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_is_eager(fmt: str, backend: str):
    torch.manual_seed(3)
    w, bias = quantized(N, K, fmt, {}), torch.randn(N).bfloat16()
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(F.linear, fullgraph=True, backend=counter)
    for rows in (1, 2, 3, 5):
        x = torch.randn(rows, K).bfloat16()
        same_bits(step(x, w, bias), F.linear(x, w, bias))
    assert counter.frame_count <= 2  # one row is a graph of its own


@pytest.mark.nightly(reason="g++ compiles the graph for half a minute")
@pytest.mark.usefixtures("fresh_dynamo")
def test_calls_that_inductor_writes_in_cpp():
    """The option ``cpp_wrapper`` calls the op without Python."""
    torch.manual_seed(4)
    weights = [quantized(K, K, fmt, {}) for fmt in ("mxfp4", "fp8_rowwise", "nvfp4")]

    def step(x: Tensor) -> Tensor:
        for weight in weights:
            x = F.linear(x, weight)
        return x

    compiled = torch.compile(step, fullgraph=True, options={"cpp_wrapper": True})
    for rows in (1, 3):
        x = torch.randn(rows, K).bfloat16()
        for _ in range(2):
            same_bits(compiled(x), step(x))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_without_guards_of_modules():
    """Products still follow the weights, which are inputs of the graph."""
    torch.manual_seed(9)
    model = Sequential(*(Linear(K, K, bias=False, device="meta") for _ in range(2)))
    for layer, fmt in zip(model, ("mxfp4", "fp8"), strict=True):
        layer.weight = Parameter(quantized(K, K, fmt, {}), requires_grad=False)
    counter = CompileCounterWithBackend("aot_eager")
    options = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    compiled = torch.compile(model, fullgraph=True, backend=counter, options=options)
    x = torch.randn(1, K).bfloat16()
    before = model(x)
    same_bits(compiled(x), before)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(K, K))
    assert not torch.equal(model(x), before)
    same_bits(compiled(x), model(x))
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_models_measured_without_guards_of_modules_do_not_share_a_graph():
    """benchmarks.overhead compiles a quantized and a plain model of the same class."""
    torch.manual_seed(9)
    x, outputs = torch.randn(1, K).bfloat16(), []
    for fmt in ("mxfp4", None):
        model = Sequential(Linear(K, K, bias=False).bfloat16())
        if fmt:
            model[0].weight = Parameter(quantized(K, K, fmt, {}), requires_grad=False)
        options = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
        call = torch.compile(overhead._apart(model), backend="aot_eager", options=options)
        outputs.append((call(x), model(x)))
    for got, want in outputs:
        same_bits(got, want)


@weights
def test_the_weight_on_the_left(fmt: str, options: dict[str, Any]):
    """``w @ x.T`` and ``w @ vector`` have the sums of ``x @ w.T``."""
    torch.manual_seed(7)
    w, x = quantized(N, K, fmt, options), torch.randn(5, K).bfloat16()
    want = qtensor.gemm(x, w, "TN", dtype=torch.float32)
    same_bits(qtensor.gemm(w, x.t(), "NN", dtype=torch.float32).t().contiguous(), want)
    same_bits(qtensor.gemm(w, x, "TN", dtype=torch.float32).t().contiguous(), want)
    same_bits(qtensor.gemm(w, x[:1], "TN", dtype=torch.float32).t().contiguous(), want[:1])
    assert qtensor.explain(w, x.t(), "NN").backend == "few_rows"
    # Both dims of a square x fit the weight.
    w, x = quantized(N, 32, fmt, options), torch.randn(32, 32)
    want = qtensor.gemm(x, w, "TN", dtype=torch.float32)
    same_bits((w @ x.t()).t().contiguous(), want)
    same_bits(qtensor.gemm(w, x, "TN", dtype=torch.float32).t().contiguous(), want)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "mxfp8", "mxfp6", "fp8", "fp8_rowwise"])
def test_slices_of_rows_and_experts(fmt: str, monkeypatch: pytest.MonkeyPatch):
    """Rows of a weight, whose factors have no padding of their own, and matrices of a stack."""
    torch.manual_seed(8)
    w, x = quantized(400, 1024, fmt, {}), torch.randn(3, 1024).bfloat16()
    whole = F.linear(x, w)
    stack = qtensor.quantize(torch.randn(3, 300, 1024), fmt)
    want = [oracle.product(x, stack[i].clone()).bfloat16() for i in range(3)]
    monkeypatch.setattr(reference, "matmul", lambda *args: pytest.fail("not by few rows"))
    for first, end in ((0, 100), (37, 137), (300, 400), (128, 256)):
        same_bits(F.linear(x, w[first:end]), whole[:, first:end].contiguous())
    for i in range(3):
        same_bits(F.linear(x, stack[i]), want[i])
    sizes = group_sizes(torch.tensor([1, 1, 3]), 3, "test")
    got = grouped_product(x, stack, "TN", sizes)
    same_bits(got, torch.cat([want[0][:1], want[2][1:]]))


@weights
def test_both_operands_quantized(fmt: str, options: dict[str, Any]):
    """The factor of the rows of x follows the sum; its other factors are part of its values."""
    torch.manual_seed(9)
    w = quantized(N, K, fmt, options)
    for name in ("mxfp8", "fp8", "fp8_rowwise", "nvfp4", "mxfp4"):
        x = qtensor.quantize(torch.randn(4, K), name)
        own = {"fp8": "_scale_inv", "fp8_rowwise": "_scale_inv"}.get(name)
        factor = getattr(x, own) if own else None
        values = x.dequantize(torch.float32)
        if own:
            values = torch.from_numpy(
                oracle.narrow_values(x._data.view(torch.uint8).numpy(), "e4m3")
            )
        elif name == "nvfp4":
            factor = x._amax_rowwise / (6 * 448)
            parts = oracle.weight_parts(x)
            scales = np.repeat(parts[1], 16, 1)[:, :K]
            values = torch.from_numpy(parts[0] * scales)
        want = oracle.product(values, w, own=factor)
        # Codes of 4 and 6 bits on both sides are multiplied as integers unless asked.
        options_of_call = {"dtype": torch.float32, "backend": "few_rows"}
        same_bits(qtensor.gemm(x, w, "TN", **options_of_call), want)
        same_bits(qtensor.gemm(x[:1].clone(), w, "TN", **options_of_call), want[:1])


@pytest.mark.parametrize("tiny", [2.0**-97, 2.0**-126, 2.0**-133])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "fp8", "mxfp8", "mxfp6", "fp8_blockwise"])
def test_subnormal_numbers_count(isa: None, fmt: str, tiny: float):
    """In x, in products and in sums, which bfloat16 dot products would take for zero."""
    torch.manual_seed(4)
    w = quantized(N, K, fmt, {}, spread=0.5)
    for place in (0, 5, 2 * K + 7):
        x = torch.zeros(3, K)
        x.view(-1)[place] = tiny
        x[1] = torch.randn(K) * tiny
        x = x.bfloat16()
        same_bits(qtensor.gemm(x, w, "TN", dtype=torch.float32), oracle.product(x, w))
    flushed = qtensor.gemm(x.float() * 0, w, "TN", dtype=torch.float32)
    assert not torch.equal(qtensor.gemm(x, w, "TN", dtype=torch.float32), flushed) or tiny < 2**-130


SCALED_BYTES = [(f, o) for f, o in WEIGHTS if f in ("fp8_blockwise", "mxfp8", "mxfp6")]


@pytest.mark.parametrize(
    ("fmt", "options"),
    SCALED_BYTES,
    ids=[f"{f}-{'-'.join(map(str, o.values()))}" for f, o in SCALED_BYTES],
)
def test_factors_of_every_size(isa: None, fmt: str, options: dict[str, Any]):
    """Kernels may multiply powers of two into values; the bits stay those of factors of sums."""
    torch.manual_seed(10)
    w, x = quantized(9, 1152, fmt, options), torch.randn(MOST_ROWS // 2, 1152).bfloat16()
    scales = next(s for s in w.buffers() if s.dtype == torch.float32 or s is w._rowwise_scale_inv)
    narrow = scales.dtype != torch.float32
    for least in (0, 40, 126, 236, 249):
        exponents = torch.randint(least, least + 6, scales.shape)
        scales.copy_(exponents if narrow else torch.exp2(exponents - 127.0))
        for power in (-95, 0, 60, 105, 120):
            rows = x * 2.0**power
            want = rounded(oracle.product(rows, w), torch.float32)
            for count in (len(rows), 2):
                same_bits(qtensor.gemm(rows[:count], w, "TN", dtype=torch.float32), want[:count])


@weights
def test_non_finite_values(isa: None, fmt: str, options: dict[str, Any]):
    torch.manual_seed(5)
    w = quantized(N, K, fmt, options)
    x = torch.randn(6, K)
    x[0, 3], x[1, K - 1], x[2, 17], x[2, 900] = torch.inf, torch.nan, torch.inf, -torch.inf
    x[3] = 3e38
    for dtype in (torch.bfloat16, torch.float32):
        got = qtensor.gemm(x.to(dtype), w, "TN", dtype=torch.float32)
        same_bits(got, rounded(oracle.product(x.to(dtype), w), torch.float32))
        assert not got[4:].isnan().any()
    raw = next(
        b for b in w.buffers() if b.dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
    )
    raw.view(torch.uint8).random_(0, 64 if fmt == "mxfp6" else 256)
    raw.view(torch.uint8)[: N // 2] &= 0x3F  # rows of FP8 without NaN beside rows with NaN
    want = rounded(oracle.product(x, w), torch.float32)
    for first, count in ((0, 6), (4, 1), (4, 2), (0, 3), (0, 4)):
        got = qtensor.gemm(x[first : first + count], w, "TN", dtype=torch.float32)
        same_bits(got, want[first : first + count])


@weights
def test_factors_of_nan(isa: None, fmt: str, options: dict[str, Any]):
    torch.manual_seed(6)
    w, x = quantized(N, K, fmt, options), torch.randn(5, K)
    factors = w.buffers()[1].view(-1)
    narrow = factors.dtype != torch.float32
    codes = factors.view(torch.uint8) if narrow else factors
    for place in (0, len(codes) // 2):
        codes[place] = 255 if narrow else torch.nan  # 255 is NaN of E8M0 and of E4M3
    want = oracle.product(x, w)
    shared = fmt == "fp8" or options.get("block_scaling_dim") == 2  # by all rows of the weight
    assert want.isnan().all() if shared else want.isnan().any() and not want.isnan().all()
    for count in (1, 5):
        got = qtensor.gemm(x[:count], w, "TN", dtype=torch.float32)
        same_bits(got, rounded(want, torch.float32)[:count])


@pytest.mark.parametrize(
    ("shape", "layout", "options", "reason"),
    [
        ((65, 1024), "TN", {}, "it serves 1 to 64 rows; got 65"),
        ((0, 1024), "TN", {}, "it serves 1 to 64 rows; got 0"),
        ((2, 1024), "TN", {"with_rht": True, "rht_side": "rowwise"}, "must be rotated back"),
        ((2, 300), "NN", {"columnwise": True}, "do not run along the contraction"),
    ],
)
def test_explain_says_why_not(
    shape: tuple[int, int], layout: str, options: dict[str, Any], reason: str
):
    w = qtensor.quantize(torch.randn(300, 1024), "nvfp4", **options)
    why = qtensor.explain(torch.randn(shape).bfloat16(), w, layout)
    assert why.backend != "few_rows"
    assert reason in dict(why.reasons)["few_rows"]
