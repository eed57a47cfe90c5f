"""What kernels get for each format, orientation and option: a stand-in library computes the product
from it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formats import BY_NAME, rand
from standin import Standin, as_on_a_gpu, install, pretend

import qtensor
from qtensor.cutlass_gemm import tuning
from qtensor.kernels.products import choice
from qtensor.kernels.products.problem import Pair, Product
from qtensor.library.define import BODIES
from qtensor.storage.ops.products import operand_of
from tests.kernels.test_gemm import assert_product, values

pytestmark = pytest.mark.usefixtures("native_kernels", "libraries", "in_python")
HOPPER, BLACKWELL = (9, 0), (10, 0)
M, N, K = 48, 80, 160
E5M2 = {"dtype": "e5m2"}
ROWS, COLUMNS = {"axis": -1}, {"axis": 0}
SQUARE = {"block_scaling_dim": 2}
SWIZZLED = {"swizzled": True}

# name, capability, layout, options of a, options of b, dtype
CASES = [
    ("fp8", HOPPER, "TN", {}, {}, torch.bfloat16),
    ("fp8", HOPPER, "TN", {}, {}, torch.float16),
    ("fp8", HOPPER, "NN", E5M2, {}, torch.bfloat16),
    ("fp8", HOPPER, "NT", E5M2, {}, torch.float32),
    ("fp8", HOPPER, "NT", {}, E5M2, torch.float32),
    ("fp8", BLACKWELL, "TN", {}, {}, torch.bfloat16),
    ("fp8_rowwise", HOPPER, "TN", ROWS, ROWS, torch.bfloat16),
    ("fp8_rowwise", HOPPER, "NN", ROWS, COLUMNS, torch.bfloat16),
    ("fp8_rowwise", HOPPER, "NT", COLUMNS, COLUMNS, torch.float32),
    ("fp8_blockwise", HOPPER, "TN", {}, SQUARE, torch.bfloat16),
    ("fp8_blockwise", HOPPER, "NN", {}, SQUARE, torch.bfloat16),
    ("fp8_blockwise", HOPPER, "NT", {}, {}, torch.float32),
    ("fp8_blockwise", HOPPER, "TN", {"force_pow_2_scales": False}, SQUARE, torch.float32),
    ("fp8_blockwise", BLACKWELL, "TN", {}, SQUARE, torch.bfloat16),
    ("mxfp8", BLACKWELL, "TN", {}, {}, torch.bfloat16),
    ("mxfp8", BLACKWELL, "TN", SWIZZLED, SWIZZLED, torch.float32),
    ("mxfp8", BLACKWELL, "NN", SWIZZLED, {}, torch.bfloat16),
    ("mxfp8", BLACKWELL, "NN", E5M2, SWIZZLED, torch.bfloat16),
    ("mxfp8", BLACKWELL, "NT", {}, {}, torch.bfloat16),
    ("mxfp8", BLACKWELL, "NT", SWIZZLED, SWIZZLED, torch.float32),
    ("mxfp4", BLACKWELL, "TN", {}, SWIZZLED, torch.bfloat16),
    ("mxfp4", BLACKWELL, "NN", SWIZZLED, {}, torch.bfloat16),
    ("mxfp4", BLACKWELL, "NT", {}, {}, torch.bfloat16),
    ("nvfp4", BLACKWELL, "TN", {}, SWIZZLED, torch.bfloat16),
    ("nvfp4", BLACKWELL, "TN", {"row_scaled": True}, {}, torch.bfloat16),
    ("nvfp4", BLACKWELL, "TN", {"use_4over6": True}, {}, torch.float32),
    ("nvfp4", BLACKWELL, "NN", {}, {"with_2d_quantization": True}, torch.bfloat16),
    ("nvfp4", BLACKWELL, "NT", {}, {}, torch.float32),
]


def case_id(value: Any) -> str:
    if isinstance(value, dict):
        return "+".join(f"{k}={v}" for k, v in value.items()) or "plain"
    return str(value).removeprefix("torch.")


def quantize(name: str, shape: tuple[int, ...], columnwise: bool, seed: int, **options: Any) -> Any:
    usage = {"rowwise": not columnwise, "columnwise": columnwise}
    return BY_NAME[name].quantize(rand(*shape, seed=seed), **usage, **options)


def pair(name: str, layout: str, left: dict[str, Any], right: dict[str, Any]) -> tuple[Any, Any]:
    """Operands of a product M x N x K, ragged in M and K."""
    a = quantize(name, (K, M) if layout == "NT" else (M, K), layout == "NT", 0, **left)
    b = quantize(name, (N, K) if layout == "TN" else (K, N), layout != "TN", 1, **right)
    return a, b


def oriented(a: Any, b: Any, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = values(a), values(b)
    return (left.mT if layout == "NT" else left), (right.mT if layout == "TN" else right)


def install_all(arch: str, recipe: str) -> None:
    for spec in tuning.select(arch, recipe):
        install(spec)


def recipe_of(name: str) -> str:
    return "fp8" if name.startswith("fp8") and name != "fp8_blockwise" else name


@pytest.mark.parametrize(
    ("name", "capability", "layout", "left", "right", "dtype"), CASES, ids=case_id
)
def test_the_kernel_gets_what_the_tensors_hold(
    name: str,
    capability: tuple[int, int],
    layout: str,
    left: dict[str, Any],
    right: dict[str, Any],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, capability)
    install_all(f"sm_{capability[0] * 10}a", recipe_of(name))
    a, b = pair(name, layout, left, right)
    bias = rand(N, seed=2)
    got = qtensor.gemm(a, b, layout, bias, dtype, backend="cutlass")
    assert got.dtype == dtype
    assert_product(got, *oriented(a, b, layout), bias)


def test_rotated_operands_meet_rotated_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """wgrad of NVFP4: both sides are rotated along the contraction, and the rotations cancel."""
    pretend(monkeypatch, BLACKWELL)
    install_all("sm_100f", "nvfp4")
    a, b = pair("nvfp4", "NT", {"with_rht": True}, {"with_rht": True})
    got = qtensor.gemm(a, b, "NT", dtype=torch.float32, backend="cutlass")
    left, right = oriented(a, b, "NT")
    # The reference sees rounded values of both operands after they are rotated back; the sums run
    # over other addends.
    bound = 32 * K * 2.0**-24 * (left.norm(dim=1)[:, None] * right.norm(dim=0)[None])
    assert ((got.double() - left @ right).abs() <= bound).all()
    plain = quantize("nvfp4", (K, N), True, 1)
    with pytest.raises(
        qtensor.UnsupportedError, match=r"one operand alone is rotated \(with_rht\)"
    ):
        qtensor.gemm(a, plain, "NT", dtype=torch.float32, backend="cutlass")


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_leading_dims_are_rows(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    install_all("sm_90a", "fp8")
    a = quantize("fp8", (2, 3, 8, K), False, 0)
    b = quantize("fp8", (N, K) if layout == "TN" else (K, N), layout == "NN", 1)
    got = qtensor.gemm(a, b, layout, backend="cutlass", dtype=torch.float32)
    assert got.shape == (2, 3, 8, N)
    assert_product(got, *oriented(a, b, layout))


def test_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    install_all("sm_90a", "fp8")
    a, b = quantize("fp8", (3, M, K), False, 0), quantize("fp8", (3, N, K), False, 1)
    got = qtensor.gemm(a, b, "TN", backend="cutlass", dtype=torch.bfloat16)
    assert_product(got, values(a), values(b).mT)


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_fp8_takes_either_copy_of_the_codes(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per-tensor FP8 holds the same bytes in both directions; the other copy is transposed,
    exactly.
    """
    pretend(monkeypatch, HOPPER)
    install_all("sm_90a", "fp8")
    a = quantize("fp8", (K, M) if layout == "NT" else (M, K), layout != "NT", 0)
    b = quantize("fp8", (N, K) if layout == "TN" else (K, N), layout == "TN", 1)
    got = qtensor.gemm(a, b, layout, backend="cutlass", dtype=torch.float32)
    assert_product(got, *oriented(a, b, layout))


@pytest.mark.parametrize("name", ["fp8", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"])
def test_a_weight_behind_t(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, BLACKWELL)
    install_all("sm_100f", recipe_of(name))
    a = quantize(name, (M, K), False, 0)
    w = quantize(name, (N, K), False, 1, **(SQUARE if name == "fp8_blockwise" else {}))
    got = qtensor.gemm(a, w.t(), "NN", backend="cutlass", dtype=torch.bfloat16)
    assert_product(got, values(a), values(w).mT)


def test_accumulation_adds_to_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """beta: the weight gradient is added to a float32 main_grad by the kernel itself."""
    pretend(monkeypatch, HOPPER)
    paths = {spec.name: install(spec) for spec in tuning.select("sm_90a", "fp8")}
    a, b = pair("fp8", "NT", E5M2, {})
    main_grad = rand(M, N, seed=5)
    before = main_grad.double()
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False), raising=False)
    assert choice.accumulate_(main_grad, Product(Pair(operand_of(a), operand_of(b)), "NT"))
    monkeypatch.undo()
    left, other = oriented(a, b, "NT")
    want = before + left @ other
    bound = 2 * (K + 8) * 2.0**-24 * (before.abs() + left.abs() @ other.abs())
    assert ((main_grad.double() - want).abs() <= bound).all()
    used = [name for name, path in paths.items() if Standin(path).calls]
    assert len(used) == 1
    assert "_f32_" in used[0]


def accumulate(target: torch.Tensor, a: Any, b: Any, overwrite: bool) -> None:
    """The op, on tensors that count as those of a GPU."""
    sides = [(t.buffers(), t._quantizer.canonical, list(t.shape)) for t in (a, b)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", property(lambda self: False), raising=False)
        torch.ops.qtensor.gemm_accumulate_(target, *sides[0], *sides[1], "NT", overwrite)


def wanted_gradient(before: torch.Tensor, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, bound of its error): float32 sums of K products, in any order, and what was there."""
    left, other = oriented(a, b, "NT")
    bound = 2 * (K + 8) * 2.0**-24 * (before.abs() + left.abs() @ other.abs())
    return before + left @ other, bound


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
@pytest.mark.parametrize(
    ("name", "capability"), [("fp8", HOPPER), ("fp8_blockwise", HOPPER), ("mxfp8", BLACKWELL)]
)
def test_weight_gradients_go_straight_into_main_grad(
    name: str, capability: tuple[int, int], overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one launch with a float32 result: no product is made beside it."""
    pretend(monkeypatch, capability)
    specs = tuning.select(f"sm_{capability[0] * 10}a", name)
    paths = {spec.name: install(spec) for spec in specs}
    monkeypatch.setitem(BODIES, "gemm", None)
    a, b = pair(name, "NT", {}, {})
    main_grad = rand(M, N, seed=5)
    before = main_grad.double() * (not overwrite)
    accumulate(main_grad, a, b, overwrite)
    want, bound = wanted_gradient(before, a, b)
    assert ((main_grad.double() - want).abs() <= bound).all()
    used = {
        name: Standin(path).last().arguments for name, path in paths.items() if Standin(path).calls
    }
    assert len(used) == 1
    ((kernel, arguments),) = used.items()
    assert "_f32_" in kernel
    assert arguments.beta == (0.0 if overwrite else 1.0)
    assert arguments.d == main_grad.data_ptr()


REFUSED = {
    "bfloat16": lambda: rand(M, N, seed=5).bfloat16(),
    "strided": lambda: rand(M, 2 * N, seed=5)[:, :N],
    "unaligned": lambda: rand(M * N + 1, seed=5)[1:].view(M, N),
}


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
@pytest.mark.parametrize("what", REFUSED)
def test_a_main_grad_that_no_kernel_takes(
    what: str, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multiplied, then added: right all the same."""
    pretend(monkeypatch, HOPPER)
    install_all("sm_90a", "fp8")
    as_on_a_gpu(monkeypatch)
    a, b = pair("fp8", "NT", E5M2, {})
    main_grad = REFUSED[what]()
    before = main_grad.double() * (not overwrite)
    accumulate(main_grad, a, b, overwrite)
    want, bound = wanted_gradient(before, a, b)
    if what == "bfloat16":
        bound = bound + 2.0**-8 * (want.abs() + bound)
    assert ((main_grad.double() - want).abs() <= bound).all()


def test_no_rows_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty group of a grouped linear layer."""
    pretend(monkeypatch, HOPPER)
    install_all("sm_90a", "fp8")
    as_on_a_gpu(monkeypatch)
    a = quantize("fp8", (0, M), True, 0)
    b = quantize("fp8", (0, N), True, 1)
    main_grad = rand(M, N, seed=5)
    before = main_grad.clone()
    accumulate(main_grad, a, b, False)
    assert torch.equal(main_grad, before)
    accumulate(main_grad, a, b, True)
    assert not main_grad.any()
