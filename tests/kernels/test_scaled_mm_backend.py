"""The backend ``scaled_mm``: what torch's function gets, on which GPUs, and what it returns.

A stand-in takes the place of torch's function. It lets torch check each call for a CUDA device, and
multiplies by torch's documentation.
"""

from __future__ import annotations

from typing import Any

import pytest
import scaled_mm_oracle as oracle
import torch
from formats import BY_NAME, rand
from standin import pretend
from torch import Tensor
from torch.nn import functional as F

import qtensor
from tests.kernels.test_gemm import assert_product

pytestmark = pytest.mark.usefixtures("native_kernels", "libraries", "in_python")
HOPPER, BLACKWELL, ADA, CONSUMER = (9, 0), (10, 0), (8, 9), (12, 0)
ANY, SQUARE = {"force_pow_2_scales": False}, {"block_scaling_dim": 2}
M, N, K = 256, 128, 384

CASES = [
    # capability, format, options of a and of b, results
    (ADA, "fp8", {}, {}, "bf16 fp16 fp32"),
    (HOPPER, "fp8", {"dtype": "e5m2"}, {}, "bf16 fp32"),
    (HOPPER, "fp8", {}, {"dtype": "e5m2"}, "bf16"),
    (HOPPER, "fp8_delayed", {}, {}, "bf16"),
    (HOPPER, "fp8_rowwise", {}, {}, "bf16"),
    (HOPPER, "fp8_blockwise", {}, SQUARE, "bf16 fp32"),
    (HOPPER, "fp8_blockwise", ANY, SQUARE | ANY, "bf16"),
    (HOPPER, "fp8_blockwise", {}, {}, "bf16"),
    (HOPPER, "fp8_blockwise", SQUARE, {}, "bf16"),
    (BLACKWELL, "mxfp8", {}, {}, "bf16 fp32"),
    (CONSUMER, "mxfp8", {"swizzled": True}, {"swizzled": True}, "bf16"),
    (BLACKWELL, "mxfp4", {}, {}, "bf16"),
    (BLACKWELL, "nvfp4", {}, {}, "bf16 fp32"),
    (CONSUMER, "nvfp4", {"with_global_scale_inv": True}, {"swizzled": True}, "bf16"),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that lets CPU tensors count as those of a GPU."""
    monkeypatch.setattr(F, "scaled_mm", oracle.scaled_mm)
    return lambda capability: pretend(monkeypatch, capability)


def operands(name: str, layout: str, left: dict[str, Any], right: dict[str, Any]) -> Any:
    case, axes = BY_NAME[name], name == "fp8_rowwise"
    pair = []
    for seed, options, transposed, rows in (
        (0, left, layout == "NT", M),
        (1, right, layout != "TN", N),
    ):
        x = rand(*((K, rows) if transposed else (rows, K)), seed=seed).bfloat16()
        usage = (
            {"axis": 0 if transposed else -1}
            if axes
            else {"rowwise": not transposed, "columnwise": transposed}
        )
        pair.append(case.quantize(x, **options, **usage))
    return pair


def values(t: Any, transposed: bool) -> Tensor:
    decoded = t.dequantize(torch.float32).double()
    return decoded.mT if transposed else decoded


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:4])))
def test_the_product(case: tuple[Any, ...], layout: str, on: Any) -> None:
    capability, name, left, right, results = case
    on(capability)
    a, b = operands(name, layout, left, right)
    for result in results.split():
        dtype = DTYPES[result]
        got = qtensor.gemm(a, b, layout, dtype=dtype, backend="scaled_mm")
        assert_product(got, values(a, layout == "NT"), values(b, layout == "TN"))
        found = qtensor.explain(a, b, layout, dtype=dtype)
        assert found.backend == "scaled_mm"
        assert dict(found.reasons)["scaled_mm"].startswith("chosen: ")
    if name != "mxfp4":
        bias = rand(N, seed=2).bfloat16()
        got = qtensor.gemm(a, b, layout, bias, torch.bfloat16, backend="scaled_mm")
        assert_product(got, values(a, layout == "NT"), values(b, layout == "TN"), bias)


def test_explain_names_the_recipes(on: Any) -> None:
    on(HOPPER)
    found = qtensor.explain(*operands("fp8_blockwise", "TN", {}, SQUARE), dtype=torch.bfloat16)
    assert "chosen: BlockWise1x128 x BlockWise128x128" in found
    on(BLACKWELL)
    found = qtensor.explain(*operands("nvfp4", "TN", {}, {}), dtype=torch.bfloat16)
    assert "BlockWise1x16 + TensorWise x BlockWise1x16 + TensorWise" in found


def test_rotated_operands_cancel(on: Any) -> None:
    on(BLACKWELL)
    options = {"with_rht": True}
    a, b = operands("nvfp4", "NT", options, options)
    got = qtensor.gemm(a, b, "NT", dtype=torch.float32, backend="scaled_mm")
    want = values(a, True) @ values(b, False)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
    _, plain = operands("nvfp4", "NT", {}, {})
    with pytest.raises(qtensor.UnsupportedError, match="must both be rotated, with equal signs"):
        qtensor.gemm(a, plain, "NT", backend="scaled_mm")


def test_fast_accumulation_is_for_fp8(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on(BLACKWELL)
    asked = []
    monkeypatch.setattr(
        F,
        "scaled_mm",
        lambda *a, **k: asked.append(k["use_fast_accum"]) or oracle.scaled_mm(*a, **k),
    )
    for name in ("fp8", "nvfp4"):
        a, b = operands(name, "TN", {}, {})
        qtensor.gemm(a, b, "TN", backend="scaled_mm", fast_accumulation=True, dtype=torch.bfloat16)
    assert asked == [True, False]


def test_a_batch_of_rows_and_slices(on: Any) -> None:
    on(BLACKWELL)
    a = BY_NAME["mxfp8"].quantize(rand(2, 32, 64))
    b = BY_NAME["mxfp8"].quantize(rand(16, 64, seed=1))
    got = qtensor.gemm(a, b, "TN", dtype=torch.float32, backend="scaled_mm")
    assert_product(got, values(a, False), values(b, True))
    with pytest.raises(qtensor.UnsupportedError, match="these are of slices"):
        qtensor.gemm(a[:1], b, "TN", backend="scaled_mm")


REFUSED = [
    (HOPPER, "fp8", {}, {}, {"n": 24}, "N and K at multiples of 16; got N=24, K=384"),
    (HOPPER, "fp8", {}, {}, {"dtype": torch.float64}, "scaled_mm does not write torch.float64"),
    (HOPPER, "fp8", {}, {}, {"bias": torch.float32}, "bias of N values in the result's 16-bit"),
    (HOPPER, "fp8", {"dtype": "e5m2"}, {"dtype": "e5m2"}, {}, "got e5m2 x e5m2"),
    (HOPPER, "fp8_rowwise", {}, {}, {"dtype": torch.float32}, "of fp8_rowwise writes bfloat16"),
    (HOPPER, "fp8_rowwise", {}, {"dtype": "e5m2"}, {}, "takes codes e4m3 x e4m3, e5m2 x e4m3"),
    (HOPPER, "fp8_rowwise", {"axis": 0}, {}, {}, "operand a: factors run along the contraction"),
    (HOPPER, "fp8_blockwise", SQUARE, SQUARE, {}, "BlockWise128x128 x BlockWise128x128"),
    (BLACKWELL, "fp8_blockwise", {}, {}, {}, "on compute capability 9.0 to below 10.0"),
    (HOPPER, "mxfp8", {}, {}, {}, "takes BlockWise1x32 on compute capability 10.0 or later"),
    (BLACKWELL, "mxfp8", {"dtype": "e5m2"}, {}, {}, "takes codes e4m3 x e4m3, e2m1 x e2m1"),
    (CONSUMER, "mxfp4", {}, {}, {}, "on compute capability 10.0 to below 11.0"),
    (BLACKWELL, "mxfp4", {}, {}, {"bias": torch.bfloat16}, "scaled_mm of mxfp4 adds no bias"),
    (BLACKWELL, "mxfp4", {}, {}, {"dtype": torch.float32}, "scaled_mm of mxfp4 writes bfloat16"),
    (BLACKWELL, "mxfp6", {}, {}, {}, "operand a: scaled_mm has no recipe for mxfp6"),
    (BLACKWELL, "nvfp4", {"row_scaled": True}, {}, {}, "factors of rows (row_scaled)"),
    (BLACKWELL, "nvfp4", {}, {}, {"k": 48}, "N at multiples of 16 and K of 32; got N=128, K=48"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[1]}-{case[-1][:30]}")
def test_refusals(case: tuple[Any, ...], on: Any) -> None:
    capability, name, left, right, call, reason = case
    on(capability)
    k, n = call.get("k", K), call.get("n", N)
    a = BY_NAME[name].quantize(rand(M, k), **left)
    b = BY_NAME[name].quantize(rand(n, k, seed=1), **right)
    bias = rand(n).to(call["bias"]) if "bias" in call else None
    dtype = call.get("dtype", torch.bfloat16)
    assert reason in dict(qtensor.explain(a, b, "TN", bias, dtype).reasons)["scaled_mm"]


def test_formats_that_differ(on: Any) -> None:
    on(BLACKWELL)
    a, b = BY_NAME["fp8"].quantize(rand(M, K)), BY_NAME["mxfp8"].quantize(rand(N, K))
    why = dict(qtensor.explain(a, b).reasons)["scaled_mm"]
    assert "got TensorWise x BlockWise1x32" in why
    plain = dict(qtensor.explain(rand(M, K), b).reasons)["scaled_mm"]
    assert plain == "operand a: scaled_mm has no recipe for float32"


def test_the_oracle_notices_a_wrong_factor() -> None:
    x = BY_NAME["mxfp8"].quantize(rand(48, 64))
    args = [*x.scaled_mm_args(codes=True).values()]
    right = oracle.decoded(*args)
    assert torch.equal(right, x.dequantize(torch.float32).double())
    args[1] = [args[1][0].view(torch.uint8).flip(0).view(torch.float8_e8m0fnu)]
    assert not torch.equal(oracle.decoded(*args), right)
