"""GEMM backends on a GPU: exact where sums are exact, and within the bound of the tensor cores'
sums elsewhere.

Two kinds of operands. *Integers*: codes are small integers and factors powers of two, so that every
partial sum fits the 14 bits to which Hopper's FP8 instructions keep their sums; the result is then
known to the last bit. *Random* data: an FP8 instruction adds 32 products to its accumulator and
drops what lies 2^-13 below the largest of the 33 addends, so it is off by less than 33 * 2^-13 *
the largest of them; what follows every 128 steps are float32 sums (gamma of their number), float32
factors and one rounding. Fast accumulation keeps one accumulator for all of K. Other architectures
round less.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch_process
from formats import BY_NAME
from gemm_integers import check_kernel

import qtensor
from qtensor.cutlass_gemm import library, tuning
from qtensor.cutlass_gemm.launch import Kernel
from qtensor.cutlass_gemm.spec import KernelSpec
from qtensor.kernels.products import choice
from qtensor.kernels.products.problem import Pair, Product
from qtensor.storage.ops.products import operand_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [
    (1, 128, 128), (1, 4096, 4096), (2, 136, 256), (7, 1024, 512), (16, 256, 2048), (17, 384, 128),
    (31, 128, 144), (33, 136, 272), (64, 64, 64), (64, 4096, 1024), (65, 520, 640),
    (100, 1000, 1008),
    (127, 128, 256), (128, 128, 128), (129, 257 * 8, 384), (200, 1024, 4096), (255, 512, 1536),
    (256, 8, 512), (1000, 2048, 1024), (2048, 1024, 2048),
]  # fmt: skip
FEW = [SHAPES[i] for i in (5, 7, 11, 14)]
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
STEP = 32  # products that one instruction adds
KEPT = 2.0**-13  # of the largest addend
E5M2, SQUARE = {"dtype": "e5m2"}, {"block_scaling_dim": 2}
# name, layout, options of a, options of b, dtype
KINDS = [
    ("fp8", "TN", {}, {}, torch.bfloat16),
    ("fp8", "TN", {}, {}, torch.float16),
    ("fp8", "NN", E5M2, {}, torch.bfloat16),
    ("fp8", "NT", E5M2, {}, torch.float32),
    ("fp8_rowwise", "TN", {}, {}, torch.bfloat16),
    ("fp8_rowwise", "NN", {}, {"axis": 0}, torch.bfloat16),
    ("fp8_blockwise", "TN", {}, SQUARE, torch.bfloat16),
    ("fp8_blockwise", "NN", {}, SQUARE, torch.bfloat16),
    ("fp8_blockwise", "NT", {}, {}, torch.float32),
    ("mxfp8", "TN", {}, {"swizzled": True}, torch.bfloat16),
    ("mxfp8", "NT", {}, {}, torch.float32),
    ("mxfp4", "TN", {}, {}, torch.bfloat16),
    ("nvfp4", "TN", {}, {"swizzled": True}, torch.bfloat16),
    ("nvfp4", "NT", {}, {}, torch.float32),
]
kinds = pytest.mark.parametrize(
    ("name", "layout", "left", "right", "dtype"),
    KINDS,
    ids=[f"{n}-{la}-{str(d).removeprefix('torch.')}" for n, la, _, _, d in KINDS],
)


def matrices(kind: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A (M, K) and B (N, K) on the GPU in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(m * 7 + n * 3 + k)
    if kind == "random":
        return tuple(  # type: ignore[return-value]
            torch.randn(rows, k, device="cuda", generator=generator).bfloat16() for rows in (m, n)
        )
    # At most 128 * 4 in an interval of 128 steps: 10 bits.
    return tuple(  # type: ignore[return-value]
        torch.randint(-2, 3, (rows, k), device="cuda", generator=generator).bfloat16()
        for rows in (m, n)
    )


def quantized(
    name: str, layout: str, options: tuple[dict[str, Any], dict[str, Any]], sources: Any
) -> tuple[Any, Any]:
    """Operands of ``A @ B.T`` in the orientation of a layout, with the usage that it reads."""
    a, b = sources
    turned = (layout == "NT", layout != "TN")
    operands = []
    for x, columnwise, chosen in zip((a, b), turned, options, strict=True):
        usage = {"rowwise": not columnwise, "columnwise": columnwise}
        source = x.t().contiguous() if columnwise else x
        operands.append(BY_NAME[name].quantize(source, **usage, **chosen))
    return operands[0], operands[1]


def product(a: Any, b: Any, layout: str, out: torch.Tensor, **options: Any) -> torch.Tensor:
    """The product by CUTLASS into a poisoned ``out``, or a skip with the reason why there is no
    kernel.

    With ``QTENSOR_GPU_CHECK=1`` (scripts/gpu_check.sh has built them all) a kernel that is not
    there is a failure.
    """
    pair = Pair(operand_of(a), operand_of(b))
    out.fill_(float("nan"))
    try:
        bias = options.pop("bias", None)
        choice.multiply_(out, Product(pair, layout, bias, "cutlass", **options))
    except qtensor.UnsupportedError as error:
        if os.environ.get("QTENSOR_GPU_CHECK") == "1" and "qtensor kernels build" in str(error):
            raise
        pytest.skip(reason=str(error))
    return out


def decoded(a: Any, b: Any, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in float64: (M, K) and (N, K)."""
    left, right = (x.dequantize(torch.float32).double() for x in (a, b))
    return (left.t() if layout == "NT" else left), (right if layout == "TN" else right.t())


def bound(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """How far a result may be from ``a @ b.T``: see the module's docstring."""
    k = a.shape[1]
    error = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    total = torch.zeros_like(error)
    for start in range(0, k, STEP):
        if start % 128 == 0 and not fast:
            total.zero_()
        x, y = a[:, start : start + STEP], b[:, start : start + STEP]
        largest = torch.maximum(total.abs(), x.abs().amax(1)[:, None] * y.abs().amax(1)[None])
        total += x @ y.t()
        # The accumulator that is an addend has errors of its own, which 2 covers: they are far
        # below its value.
        error += 2 * (STEP + 1) * KEPT * largest
    steps = k / 128 + 4
    error += steps * 2.0**-24 * (a.abs() @ b.abs().t())
    want = (a @ b.t()).abs()
    return error + HALF_ULP[dtype] * (want + error) + torch.finfo(dtype).smallest_normal


def assert_within(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, fast: bool = False) -> None:
    error = (got.double() - a @ b.t()).abs()
    limit = bound(a, b, got.dtype, fast)
    assert torch.isfinite(got).all()
    assert (error <= limit).all(), f"off by {(error / limit).max().item():.3g} bounds"


def test_the_bound_notices_a_swapped_row() -> None:
    a, b = (x.double() for x in matrices("random", 64, 64, 512))
    good = (a @ b.t()).float()
    assert_within(good, a, b)
    with pytest.raises(AssertionError, match="bounds"):
        assert_within(good.roll(1, 0), a, b)


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_random_data(
    shape: tuple[int, int, int],
    name: str,
    layout: str,
    left: dict[str, Any],
    right: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    m, n, k = shape
    a, b = quantized(name, layout, (left, right), matrices("random", m, n, k))
    out = torch.empty(m, n, dtype=dtype, device="cuda")
    got = product(a, b, layout, out)
    assert_within(got, *decoded(a, b, layout))
    again = product(a, b, layout, torch.empty_like(out))
    assert torch.equal(got, again), "two runs differ"


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_integers_are_exact(
    shape: tuple[int, int, int],
    name: str,
    layout: str,
    left: dict[str, Any],
    right: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """Every sum is exact, so the result is the rounded product of the decoded operands, bit for
    bit.
    """
    if name == "nvfp4":
        reason = "the factor of NVFP4 is no power of two; test_random_data holds its bound"
        pytest.skip(reason=reason)
    m, n, k = shape
    pow2 = {"force_pow_2_scales": True} if name.startswith("fp8") else {}
    options = tuple({**chosen, **pow2} for chosen in (left, right))
    a, b = quantized(name, layout, options, matrices("integers", m, n, k))
    x, y = decoded(a, b, layout)
    got = product(a, b, layout, torch.empty(m, n, dtype=dtype, device="cuda"))
    assert torch.equal(got, (x @ y.t()).to(dtype))


def built(spec: KernelSpec) -> Kernel:
    if torch.cuda.get_device_capability() not in spec.capabilities:
        pytest.skip(reason=f"needs a compute capability of {spec.capabilities}")
    kernel = library.load(spec)
    if not isinstance(kernel, Kernel):
        if os.environ.get("QTENSOR_GPU_CHECK") == "1":
            pytest.fail(f"{spec.name}: {kernel}")
        pytest.skip(reason=f"{spec.name}: {kernel}")
    return kernel


@pytest.mark.parametrize(
    "size", [(1, 128, 128), (33, 136, 256), (160, 272, 672), (520, 784, 1152)], ids=str
)
@pytest.mark.parametrize("spec", tuning.specs(), ids=lambda spec: spec.name)
def test_every_kernel_is_exact_on_integers(spec: KernelSpec, size: tuple[int, int, int]) -> None:
    """Whichever tile a product would take: codes, factors of blocks, rows and columns, bias,
    accumulation.
    """
    kernel = built(spec)
    if (why := spec.refusal(*size)) is not None:
        pytest.skip(reason=why)
    check_kernel(kernel, spec, size, torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_fast_accumulation(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = quantized("fp8", "TN", ({}, {}), matrices("random", m, n, k))
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    assert_within(product(a, b, "TN", out, fast=True), *decoded(a, b, "TN"), fast=True)


@pytest.mark.parametrize("shape", FEW, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bias(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    a, b = quantized("fp8", "TN", ({}, {}), matrices("integers", m, n, k))
    x, y = decoded(a, b, "TN")
    bias = torch.arange(n, device="cuda", dtype=torch.float32) - n // 2
    got = product(a, b, "TN", torch.empty(m, n, dtype=dtype, device="cuda"), bias=bias)
    want = x @ y.t() + bias.double()
    # One float32 rounding of the factor and one of the sum, then that of the dtype.
    limit = 4 * 2.0**-24 * (x.abs() @ y.abs().t() + bias.abs()) + HALF_ULP[dtype] * want.abs()
    assert ((got.double() - want).abs() <= limit + limit * HALF_ULP[dtype]).all()


def test_a_batch() -> None:
    x, y = (torch.randn(3, rows, 256, device="cuda").bfloat16() for rows in (40, 72))
    a, b = (BY_NAME["fp8"].quantize(t, rowwise=True, columnwise=False) for t in (x, y))
    got = product(a, b, "TN", torch.empty(3, 40, 72, dtype=torch.bfloat16, device="cuda"))
    left, right = a.dequantize(torch.float32).double(), b.dequantize(torch.float32).double()
    for i in range(3):
        assert_within(got[i], left[i], right[i])


def test_accumulation_into_main_grad() -> None:
    a, b = quantized("fp8", "NT", ({}, {}), matrices("integers", 128, 256, 512))
    pair = Pair(operand_of(a), operand_of(b))
    main_grad = torch.arange(128 * 256, device="cuda", dtype=torch.float32).view(128, 256) / 64
    before = main_grad.double()
    if not choice.accumulate_(main_grad, Product(pair, "NT")):
        pytest.skip(reason="no float32 kernel is built for this device")
    x, y = decoded(a, b, "NT")
    want = before + x @ y.t()
    assert (
        (main_grad.double() - want).abs() <= 4 * 2.0**-24 * (before + x.abs() @ y.abs().t())
    ).all()


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradient_of_a_layer_into_main_grad(dtype: torch.dtype, overwrite: bool) -> None:
    """By a kernel that adds, or a product and a sum: integers, whose sums are exact either way."""
    layer = qtensor.Linear(256, 128, bias=False, device="cuda", fuse_wgrad_accumulation=True)
    start = torch.arange(128 * 256, device="cuda").view(128, 256) % 32
    layer.weight.main_grad = start.to(dtype)
    layer.weight.overwrite_main_grad = overwrite
    x = matrices("integers", 64, 8, 256)[0]
    dy = matrices("integers", 64, 8, 128)[0]
    with qtensor.autocast(recipe=qtensor.recipes.Float8CurrentScaling(use_power_2_scales=True)):
        y = layer(x)
    y.backward(dy)
    want = dy.double().t() @ x.double() + start.double() * (not overwrite)
    assert layer.weight.grad is None
    assert layer.weight.grad_added_to_main_grad
    assert torch.equal(layer.weight.main_grad, want.to(dtype))


def test_cuda_graphs() -> None:
    """Captured once, replayed on new codes."""
    a, b = quantized("fp8", "TN", ({}, {}), matrices("integers", 256, 512, 1024))
    out = torch.empty(256, 512, dtype=torch.bfloat16, device="cuda")
    product(a, b, "TN", out)
    first = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pair = Pair(operand_of(a), operand_of(b))
        choice.multiply_(out, Product(pair, "TN", None, "cutlass"))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, first)
    a.buffers()[0].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert not out.any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_leaves_no_context_on_the_first() -> None:
    """A product on cuda:1, in a process that does not use cuda:0."""
    code = (
        "import torch, qtensor; x = torch.ones(64, 64, device='cuda:1').bfloat16(); "
        "a = qtensor.quantize(x, 'fp8'); y = qtensor.gemm(a, a, 'TN', backend='cutlass'); "
        "assert bool((y == 64).all()); torch.cuda.synchronize(1); "
        "print(torch._C._cuda_hasPrimaryContext(0))"
    )
    assert torch_process.run(code, environment=dict(os.environ)).stdout.strip() == "False"


def test_streams() -> None:
    """The launch is on torch's current stream: it waits for what was put there before it."""
    a, b = quantized("fp8", "TN", ({}, {}), matrices("integers", 512, 512, 2048))
    want = product(a, b, "TN", torch.empty(512, 512, dtype=torch.bfloat16, device="cuda")).clone()
    codes = a.buffers()[0].clone()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        a.buffers()[0].zero_()
        torch.cuda._sleep(20_000_000)
        a.buffers()[0].copy_(codes)
        got = qtensor.gemm(a, b, "TN", dtype=torch.bfloat16, backend="cutlass")
    stream.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["fp8", "fp8_blockwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("shape", FEW, ids=lambda s: "x".join(map(str, s)))
def test_dequant(name: str, shape: tuple[int, int, int]) -> None:
    """bfloat16 products are exact and summed in float32 (gamma of K additions, in any order)."""
    m, n, k = shape
    a, b = quantized(name, "TN", ({}, {}), matrices("random", m, n, k))
    got = qtensor.gemm(a, b, "TN", dtype=torch.float32, backend="dequant")
    x, y = decoded(a, b, "TN")
    limit = (k + 8) * 2.0**-24 * (x.abs() @ y.abs().t()) * 1.01
    assert ((got.double() - x @ y.t()).abs() <= limit).all()


@pytest.mark.parametrize("shape", FEW, ids=lambda s: "x".join(map(str, s)))
def test_scaled_mm(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = quantized("fp8", "TN", ({}, {}), matrices("random", m, n, k))
    try:
        got = qtensor.gemm(a, b, "TN", dtype=torch.bfloat16, backend="scaled_mm")
    except qtensor.UnsupportedError as error:
        pytest.skip(reason=str(error))
    assert_within(got, *decoded(a, b, "TN"))


def test_linear_uses_the_fast_backend() -> None:
    """F.linear on quantized operands takes what ``explain`` names, and agrees with it."""
    a, b = quantized("fp8", "TN", ({}, {}), matrices("random", 64, 256, 512))
    found = qtensor.explain(a, b)
    assert found.backend in ("cutlass", "scaled_mm", "dequant")
    got = torch.nn.functional.linear(a, b)
    assert torch.equal(got, qtensor.gemm(a, b, "TN", backend=found.backend))
