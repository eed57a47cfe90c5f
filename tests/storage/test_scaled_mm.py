"""``F.scaled_mm`` and ``F.scaled_grouped_mm`` of quantized tensors on a CPU: bytes and errors."""

from __future__ import annotations

from typing import Any

import pytest
import scaled_mm_oracle as oracle
import torch
from compile_helpers import Compiled
from formats import BY_NAME, rand
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

import qtensor
from qtensor.core.errors import QTensorError
from tests.kernels.test_gemm import assert_product

ANY, SQUARE = {"force_pow_2_scales": False}, {"force_pow_2_scales": False, "block_scaling_dim": 2}
RECIPES = [
    ("fp8", {}, {}),
    ("fp8", {"dtype": "e5m2"}, {}),
    ("fp8_delayed", {}, {}),
    ("fp8_rowwise", {}, {}),
    ("fp8_rowwise", {"dtype": "e5m2"}, {}),
    ("fp8_blockwise", ANY, ANY),
    ("fp8_blockwise", ANY, SQUARE),
    ("fp8_blockwise", SQUARE, ANY),
    ("mxfp8", {}, {}),
    ("mxfp8", {"swizzled": True}, {}),
    ("mxfp4", {}, {"swizzled": True}),
    ("nvfp4", {}, {}),
    ("nvfp4", {"swizzled": True}, {"with_2d_quantization": True}),
    ("nvfp4", {"with_global_scale_inv": True}, {"use_4over6": True}),
]
recipes = pytest.mark.parametrize(
    ("name", "left", "right"), RECIPES, ids=lambda case: case if isinstance(case, str) else None
)


def operands(
    name: str, left: dict[str, Any], right: dict[str, Any], sizes: tuple[int, int, int]
) -> tuple[Any, Any]:
    m, n, k = sizes
    a, b = rand(m, k).bfloat16(), rand(n, k, seed=1).bfloat16()
    return BY_NAME[name].quantize(a, **left), BY_NAME[name].quantize(b, **right)


def call(x: Any, w: Any, **options: Any) -> torch.Tensor:
    return F.scaled_mm(**x.scaled_mm_args("a"), **w.scaled_mm_args("b"), **options)


@recipes
@pytest.mark.parametrize("m", [3, 130], ids=["few-rows", "many-rows"])
def test_the_bytes_are_those_of_gemm(
    name: str, left: dict[str, Any], right: dict[str, Any], m: int
) -> None:
    x, w = operands(name, left, right, (m, 144, 320))
    bias = rand(144, seed=2).bfloat16()
    got = call(x, w, bias=bias)
    assert type(got) is torch.Tensor
    assert torch.equal(got, qtensor.gemm(x, w, "TN", bias, torch.bfloat16))
    exact = call(x, w, output_dtype=torch.float32)
    assert torch.equal(exact, qtensor.gemm(x, w, "TN", None, torch.float32))
    # What the arguments mean, by torch's documentation.
    a, b = x.scaled_mm_args(codes=True), w.scaled_mm_args("a", codes=True)
    assert_product(exact, oracle.decoded(*a.values()), oracle.decoded(*b.values()).mT)


@recipes
def test_torch_takes_the_arguments_on_a_gpu(
    name: str, left: dict[str, Any], right: dict[str, Any]
) -> None:
    x, w = operands(name, left, right, (128, 256, 384))
    a, b = x.scaled_mm_args("a", codes=True), w.scaled_mm_args("b", codes=True)
    assert not any(type(v) is not torch.Tensor for v in (a["mat_a"], b["mat_b"], *a["scale_a"]))
    if name == "mxfp4":
        # Tracing, torch 2.13 counts half of the factors of 4-bit codes.
        assert [s.numel() for s in (*a["scale_a"], *b["scale_b"])] == [128 * 12, 256 * 12]
    else:
        assert oracle.check_on_cuda(**a, **b).shape == (128, 256)


def test_torch_computes_what_it_knows_on_a_cpu() -> None:
    for name in ("fp8", "fp8_rowwise"):
        x, w = operands(name, {}, {}, (48, 32, 64))
        a, b = x.scaled_mm_args("a", codes=True), w.scaled_mm_args("b", codes=True)
        got = F.scaled_mm(**a, **b, output_dtype=torch.float32)
        left, right = (
            oracle.decoded(*a.values()),
            oracle.decoded(*w.scaled_mm_args("a", codes=True).values()),
        )
        assert_product(got, left, right.mT)
        # Plain tensors stay torch's.
        with pytest.raises(ValueError, match=r"Invalid scaling|[Ee]xpected"):
            F.scaled_mm(**a, **b | {"scale_recipe_b": [ScalingType.BlockWise1x128]})


def test_factors_without_tiles_and_repeated_ones() -> None:
    x, w = operands("mxfp8", {}, {}, (48, 32, 64))
    args = x.scaled_mm_args("a") | w.scaled_mm_args("b")
    plain = {"swizzle_a": [SwizzleType.NO_SWIZZLE], "swizzle_b": None}
    for side, t in (("a", x), ("b", w)):
        factors = t._rowwise_scale_inv[: t.shape[0], :2].clone()
        plain[f"scale_{side}"] = [factors.view(torch.float8_e8m0fnu)]
    assert torch.equal(F.scaled_mm(**args | plain), F.scaled_mm(**args))
    x, w = operands("fp8", {}, {}, (48, 32, 64))
    args = x.scaled_mm_args("a") | w.scaled_mm_args("b")
    rows = {"scale_a": args["scale_a"][0].repeat(48, 1), "scale_recipe_a": ScalingType.RowWise}
    rows |= {"scale_b": args["scale_b"][0].repeat(1, 32), "scale_recipe_b": ScalingType.RowWise}
    a, b = x.dequantize(torch.float32).double(), w.dequantize(torch.float32).double()
    assert_product(F.scaled_mm(**args | rows), a, b.mT)


def test_factors_of_blocks_alone() -> None:
    """The caller multiplies the result by the factors of the tensors."""
    x, w = operands("nvfp4", {}, {}, (48, 32, 64))
    args = x.scaled_mm_args("a") | w.scaled_mm_args("b")
    alone = {name: value[:1] for name, value in args.items() if not name.startswith("mat")}
    got = F.scaled_mm(**args | alone, output_dtype=torch.float32)
    kinds = [args["scale_recipe_a"][:1], args["swizzle_a"][:1]]
    left = oracle.decoded(x.scaled_mm_args(codes=True)["mat_a"], args["scale_a"][:1], *kinds)
    right = oracle.decoded(w.scaled_mm_args(codes=True)["mat_a"], args["scale_b"][:1], *kinds)
    assert_product(got, left, right.mT)


def test_factors_of_the_call_decode() -> None:
    x, w = operands("mxfp8", {}, {}, (48, 32, 64))
    a, b = x.scaled_mm_args("a"), w.scaled_mm_args("b")
    doubled = [(a["scale_a"][0].view(torch.uint8) + 1).view(torch.float8_e8m0fnu)]
    twice = F.scaled_mm(**a | {"scale_a": doubled}, **b)
    assert torch.equal(twice, 2 * F.scaled_mm(**a, **b))


def test_plain_codes_beside_a_quantized_tensor() -> None:
    for name in ("fp8", "mxfp8", "nvfp4"):
        x, w = operands(name, {}, {}, (48, 32, 64))
        want = call(x, w)
        for left, right in ((True, False), (False, True)):
            a = x.scaled_mm_args("a", codes=left)
            assert torch.equal(F.scaled_mm(**a, **w.scaled_mm_args("b", codes=right)), want)


def test_columnwise_data_through_a_transpose() -> None:
    """The gradient of a weight: ``dy.T @ x``."""
    for name in ("fp8", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"):
        dy, x = (
            BY_NAME[name].quantize(rand(96, n, seed=n).bfloat16(), columnwise=True)
            for n in (48, 64)
        )
        got = call(dy.t(), x.t(), output_dtype=torch.float32)
        a, b = (oracle.decoded(*t.t().scaled_mm_args(codes=True).values()) for t in (dy, x))
        assert_product(got, a, b.mT)
        close = qtensor.gemm(dy, x, "NT", dtype=torch.float32, backend="reference")
        assert (got - close).abs().max() <= 1e-4 * close.abs().max()


def test_rotated_operands() -> None:
    options = {"with_rht": True, "columnwise": True}
    dy, x = (BY_NAME["nvfp4"].quantize(rand(96, n, seed=n), **options) for n in (48, 64))
    got = call(dy.t(), x.t(), output_dtype=torch.float32)
    want = qtensor.gemm(dy, x, "NT", dtype=torch.float32)
    # Rotations cancel in exact arithmetic: what is left is the rounding of turning back.
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
    plain = BY_NAME["nvfp4"].quantize(rand(64, 96))
    with pytest.raises(QTensorError, match="both operands must be rotated alike"):
        call(dy.t(), plain)


LIKE_OTHERS = pytest.mark.nightly(reason="the graphs of three formats are in the default tier")


INDUCTOR = pytest.mark.nightly(reason="inductor calls the same ops as aot_eager")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
@pytest.mark.parametrize(
    "name",
    [
        *("fp8", "fp8_blockwise", "nvfp4"),
        *(pytest.param(name, marks=LIKE_OTHERS) for name in ("fp8_rowwise", "mxfp8", "mxfp4")),
    ],
)
def test_compiled(name: str, backend: str) -> None:
    def multiply(x: Any, w: Any, a: dict[str, Any], b: dict[str, Any]) -> torch.Tensor:
        return F.scaled_mm(x, w.t(), **a, **b) * 2

    compiled = Compiled(multiply, backend, dynamic=True)
    for m in (4, 48, 130):
        x, w = operands(name, {}, {}, (m, 64, 256))
        a, b = x.scaled_mm_args("a"), w.scaled_mm_args("b")
        del a["mat_a"], b["mat_b"]
        assert torch.equal(compiled(x, w, a, b), multiply(x, w, a, b))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        for device in ("cpu", "cuda", "meta"):
            x = qtensor.quantize(torch.empty(48, 64, device=device), "mxfp8")
            w = qtensor.quantize(torch.empty(32, 64, device=device), "mxfp8")
            y = call(x, w)
            assert (y.shape, y.dtype, y.device.type) == ((48, 32), torch.bfloat16, device)


def test_a_result_in_place() -> None:
    x, w = operands("mxfp8", {}, {}, (48, 32, 64))
    out = torch.zeros(48, 32, dtype=torch.bfloat16)
    a, b = x.scaled_mm_args("a"), w.scaled_mm_args("b")
    kinds = [[each.value for each in a[name]] for name in ("scale_recipe_a", "swizzle_a")]
    torch.ops.aten._scaled_mm_v2.out(
        *(x, w.t(), a["scale_a"], *kinds, b["scale_b"], *kinds, None, torch.bfloat16), out=out
    )
    assert torch.equal(out, call(x, w))


# ---- errors

WRONG = [
    ("fp8", {"scale_recipe_a": ScalingType.RowWise}, "scaled_mm multiplies TensorWise x Tensor"),
    ("mxfp8", {"scale_recipe_a": ScalingType.BlockWise1x16,
               "scale_recipe_b": ScalingType.BlockWise1x16},
     "mat_a is mxfp8, whose recipe is BlockWise1x32; got BlockWise1x16"),
    ("mxfp8", {"output_dtype": None}, "output_dtype must be torch.bfloat16"),
    ("mxfp8", {"output_dtype": torch.float8_e4m3fn}, "quantize the result if it must be FP8"),
    ("mxfp8", {"swizzle_a": SwizzleType.NO_SWIZZLE}, r"scale_a must be .*float8_e8m0fnu with"),
    ("fp8", {"swizzle_a": SwizzleType.SWIZZLE_32_4_4}, "swizzle_a must hold NO_SWIZZLE for Tensor"),
    ("nvfp4", {"swizzle_b": SwizzleType.SWIZZLE_32_4_4},
     "swizzle_b must hold .* and NO_SWIZZLE for BlockWise1x16 [+] TensorWise"),
    ("mxfp8", {"scale_a": torch.ones(48, 2)}, r"got torch.float32 \(48, 2\)"),
    ("fp8_rowwise", {"scale_b": torch.ones(32, 1)}, r"scale_b must be .* \(1, 32\) entries"),
    ("nvfp4", {"scale_a": torch.ones(1)}, "scale_a must hold 2 plain tensors"),
    ("fp8", {"bias": torch.ones(32)}, "the bias must have N values in the 16-bit dtype"),
    ("fp8", {"bias": torch.ones(31).bfloat16()}, "the bias must have N values"),
    ("nvfp4", {"use_fast_accum": True}, "use_fast_accum is for FP8 codes"),
    ("fp8", {"contraction_dim": (0, 1)}, r"contraction_dim must be empty or \(-1, -2\)"),
    ("fp8", {"mat_a": torch.ones(48, 64)}, "mat_a must be quantized, or hold codes in"),
    ("fp8", {"mat_b": torch.ones(64, 32).to(torch.float8_e4m3fn)}, "mat_b must be column-major"),
    ("fp8_blockwise", {"scale_a": torch.ones(48, 1)}, None),
    ("fp8_blockwise", {"scale_a": torch.ones(47, 1)}, r"scale_a must be .* \(48, 1\) entries"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=lambda case: str(case)[:24])
def test_wrong_arguments(name: str, change: dict[str, Any], message: str | None) -> None:
    x, w = operands(name, {}, {}, (48, 32, 64))
    args = x.scaled_mm_args("a") | w.scaled_mm_args("b")
    if message is None:
        assert F.scaled_mm(**args | change).shape == (48, 32)
        return
    with pytest.raises(QTensorError, match=message):
        F.scaled_mm(**args | change)


def test_what_no_gpu_multiplies_is_refused_on_a_cpu() -> None:
    for sizes, message in (
        ((48, 24, 64), "N and K at multiples of 16; got N=24, K=64"),
        ((48, 32, 72), "N and K at multiples of 16; got N=32, K=72"),
    ):
        with pytest.raises(QTensorError, match=message):
            call(*operands("fp8", {}, {}, sizes))
    with pytest.raises(QTensorError, match="K of 32; got N=32, K=48"):
        call(*operands("nvfp4", {}, {}, (48, 32, 48)))
    both = {"dtype": "e5m2"}
    with pytest.raises(QTensorError, match=r"takes codes e4m3 x e4m3.*got e5m2 x e5m2"):
        call(*operands("fp8", both, both, (48, 32, 64)))
    x, w = operands("fp8", {}, {}, (48, 32, 64))
    with pytest.raises(QTensorError, match="K must be equal in mat_a and mat_b; got 64 and 32"):
        call(x, w.t().contiguous())
    with pytest.raises(QTensorError, match="mat_a must be a matrix"):
        F.scaled_mm(x[None], **w.scaled_mm_args("b"), scale_a=[], scale_recipe_a=[])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mxfp6", {}, r"scaled_mm_args\[mxfp6\]: scaled_mm has no recipe for mxfp6"),
        ("nvfp4", {"row_scaled": True}, "no recipe for blocks of 16 with factors of rows"),
        ("mxfp8", {"rowwise": False, "columnwise": True}, "blocks must run along the contraction"),
        ("fp8_rowwise", {"axis": 0}, "factors run along the contraction"),
    ],
)
def test_formats_without_a_recipe(name: str, options: dict[str, Any], message: str) -> None:
    q = BY_NAME[name].quantize(rand(48, 64), **options)
    with pytest.raises(qtensor.UnsupportedError, match=message):
        q.scaled_mm_args()


def test_arguments_of_other_tensors() -> None:
    q = BY_NAME["mxfp8"].quantize(rand(256, 64))
    with pytest.raises(QTensorError, match='side must be "a" or "b"; got \'left\''):
        q.scaled_mm_args("left")
    with pytest.raises(QTensorError, match="the tensor must be a matrix"):
        q.view(2, 128, 64).scaled_mm_args()
    part = q[32:64]
    with pytest.raises(QTensorError, match="the buffers must be those of a whole tensor"):
        part.scaled_mm_args()
    assert part.clone().scaled_mm_args()["scale_a"][0].numel() == 128 * 4
