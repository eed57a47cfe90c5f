"""Who computes a product: the choice, the reasons, the warning, and that every backend computes the
same.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import scaled_mm_oracle as oracle
import torch
import torch_process
from formats import BY_NAME, FORMATS, rand
from standin import Standin, as_on_a_gpu, install, pretend
from torch.nn import functional as F

import qtensor
from qtensor.core.errors import QTensorError
from qtensor.cutlass_gemm import library, tuning
from qtensor.kernels.products import choice
from tests.kernels.test_gemm import assert_product, values
from tests.kernels.test_gemm_cutlass_operands import SQUARE, oriented, pair, quantize

pytestmark = pytest.mark.usefixtures("native_kernels", "libraries", "in_python")
HOPPER, BLACKWELL, ADA, AMPERE, VOLTA = (9, 0), (10, 0), (8, 9), (8, 0), (7, 0)
ULTRA, SPARK = (10, 3), (12, 1)


def install_some(arch: str, recipe: str) -> dict[str, Standin]:
    return {s.name: Standin(install(s)) for s in tuning.select(arch, recipe)}


# ------------------------------------------------------------------------------------ the choice


@pytest.mark.parametrize(
    ("capability", "name", "built", "chosen"),
    [
        (HOPPER, "fp8", True, "cutlass"),
        (HOPPER, "fp8", False, "scaled_mm"),
        (HOPPER, "fp8_rowwise", False, "scaled_mm"),
        (HOPPER, "fp8_blockwise", True, "cutlass"),
        (HOPPER, "fp8_blockwise", False, "scaled_mm"),
        (HOPPER, "mxfp8", False, "dequant"),
        (HOPPER, "mxfp6", False, "dequant"),
        (HOPPER, "mxfp4", False, "dequant"),
        (HOPPER, "nvfp4", False, "dequant"),
        (BLACKWELL, "mxfp8", True, "cutlass"),
        (ULTRA, "mxfp8", True, "cutlass"),
        (SPARK, "nvfp4", True, "cutlass"),
        (BLACKWELL, "mxfp4", False, "scaled_mm"),
        (BLACKWELL, "nvfp4", False, "scaled_mm"),
        (ADA, "fp8", False, "scaled_mm"),
        (AMPERE, "fp8", False, "dequant"),
        (VOLTA, "fp8", False, "reference"),
    ],
)
def test_the_choice(
    capability: tuple[int, int],
    name: str,
    built: bool,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(monkeypatch, capability)
    monkeypatch.setattr(F, "scaled_mm", oracle.scaled_mm)
    if built:
        install_some("sm_{}{}".format(*capability), "fp8" if name == "fp8_rowwise" else name)
    right = SQUARE if name == "fp8_blockwise" else {}
    a, b = quantize(name, (64, 256), False, 0), quantize(name, (128, 256), False, 1, **right)
    found = qtensor.explain(a, b, dtype=torch.bfloat16)
    assert found.backend == chosen
    assert (found.kernel is not None) == (chosen == "cutlass")
    assert dict(found.reasons)[chosen].startswith("chosen")
    assert [backend for backend, _ in found.reasons] == list(choice.BACKENDS)
    assert repr(found) == str(found)
    assert capsys.readouterr().out == ""
    got = qtensor.gemm(a, b, "TN", dtype=torch.bfloat16, backend=chosen)
    assert_product(got, values(a), values(b).mT)


REASONS = [
    # capability, (name, shape, options) of a and of b, layout, dtype, reason of cutlass
    (HOPPER, "fp8", (32, 72), {}, "fp8", (16, 72), {}, "TN", None,
     "K must be a multiple of 16 .* got K=72"),
    (HOPPER, "fp8", (32, 64), {}, "fp8", (12, 64), {}, "TN", torch.bfloat16,
     "N must be a multiple of 8 .* got N=12"),
    (HOPPER, "fp8", (32, 64), {}, "mxfp8", (16, 64), {}, "TN", None,
     "no kernel multiplies fp8 by mxfp8"),
    (HOPPER, "mxfp8", (32, 64), {}, "mxfp8", (16, 64), {}, "TN", None,
     "there is no kernel mxfp8 .* on sm_90a"),
    (HOPPER, "fp8", (32, 64), {"dtype": "e5m2"}, "fp8", (16, 64), {"dtype": "e5m2"}, "TN", None,
     "no kernel fp8 e5m2 x e5m2"),
    (HOPPER, "fp8", (0, 64), {}, "fp8", (16, 64), {}, "TN", None, "a product without elements"),
    (HOPPER, "fp8", (32, 64), {}, "fp8", (16, 64), {}, "TN", torch.float64,
     "no kernel writes torch.float64"),
    (HOPPER, "fp8_rowwise", (32, 64), {"axis": 0}, "fp8_rowwise", (16, 64), {}, "TN", None,
     "factors of a run along the contraction; quantize it with axis=-1"),
    (HOPPER, "fp8_blockwise", (128, 128), SQUARE, "fp8_blockwise", (128, 128), SQUARE, "TN", None,
     "1x128 blocks for a"),
    (BLACKWELL, "nvfp4", (32, 48), {}, "nvfp4", (16, 48), {}, "TN", None,
     "K must be a multiple of 32"),
    (BLACKWELL, "mxfp6", (32, 64), {}, "mxfp6", (16, 64), {}, "TN", None,
     "no kernel multiplies mxfp6"),
    (BLACKWELL, "mxfp8", (2, 32, 64), {}, "mxfp8", (2, 16, 64), {}, "TN", None,
     "batched kernels take fp8"),
    ((11, 0), "mxfp8", (32, 64), {}, "mxfp8", (16, 64), {}, "TN", None,
     "no kernels for compute capability 11.0"),
]  # fmt: skip


@pytest.mark.parametrize("case", REASONS, ids=lambda case: f"{case[1]}-{case[-1][:30]}")
def test_reasons(case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    capability, a_name, a_shape, left, b_name, b_shape, right, layout, dtype, reason = case
    pretend(monkeypatch, capability)
    a = BY_NAME[a_name].quantize(rand(*a_shape), **left)
    b = BY_NAME[b_name].quantize(rand(*b_shape, seed=1), **right)
    with pytest.raises(qtensor.UnsupportedError, match=f"backend cutlass must be able.*{reason}"):
        qtensor.gemm(a, b, layout, dtype=dtype, backend="cutlass")
    # The reference computes what a kernel refuses.
    got = qtensor.gemm(a, b, layout, dtype=dtype, backend="reference")
    assert got.shape == (*a_shape[:-1], b_shape[-2])


@pytest.mark.parametrize(
    ("bias", "reason"),
    [
        ((4, 16), "kernels add a bias of N values"),
        ((16,), None),
        ((1,), None),
        ((), None),
        ((1, 16), None),
    ],
)
def test_biases(bias: tuple[int, ...], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    install_some("sm_90a", "fp8")
    a, b = quantize("fp8", (4, 64), False, 0), quantize("fp8", (16, 64), False, 1)
    added = rand(*bias, seed=2)
    if reason is None:
        got = qtensor.gemm(a, b, "TN", added, torch.float32, backend="cutlass")
        assert_product(got, values(a), values(b).mT, added)
        return
    with pytest.raises(qtensor.UnsupportedError, match=reason):
        qtensor.gemm(a, b, "TN", added, backend="cutlass")


def test_slices_go_to_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of padded factors, and codes that are no whole rows, are not what kernels read."""
    pretend(monkeypatch, HOPPER)
    install_some("sm_90a", "fp8")
    a, b = quantize("fp8", (32, 128), False, 0), quantize("fp8", (16, 64), False, 1)
    part = a[:, 32:96]
    with pytest.raises(qtensor.UnsupportedError, match="a must be contiguous"):
        qtensor.gemm(part, b, "TN", backend="cutlass")
    as_on_a_gpu(monkeypatch)
    got = qtensor.gemm(part, b, "TN", dtype=torch.float32)
    assert_product(got, values(part), values(b).mT)


def test_unknown_backends_and_gradients() -> None:
    a, b = quantize("fp8", (32, 64), False, 0), quantize("fp8", (16, 64), False, 1)
    with pytest.raises(
        QTensorError,
        match="backend must be auto or one of cutlass, scaled_mm, dequant, integer, amx, "
        "few_rows, dot_products, tiles, reference; got 'cublas'",
    ):
        qtensor.gemm(a, b, "TN", backend="cublas")
    bias = torch.zeros(16, requires_grad=True)
    with pytest.raises(
        QTensorError, match="a product with backend or fast_accumulation has no gradient"
    ):
        qtensor.gemm(a, b, "TN", bias, backend="reference")
    with torch.no_grad():
        assert qtensor.gemm(a, b, "TN", bias, backend="reference").shape == (32, 16)


def test_the_reference_by_name_is_the_default_of_a_cpu() -> None:
    """For operands that no other backend of CPUs takes: factors of blocks in float32."""
    options = {"force_pow_2_scales": False}
    a, b = (qtensor.quantize(torch.randn(n, 64), "fp8_blockwise", **options) for n in (96, 16))
    assert torch.equal(qtensor.gemm(a, b, "TN", backend="reference"), qtensor.gemm(a, b, "TN"))
    explanation = qtensor.explain(a, b)
    assert explanation.backend == "reference"
    assert dict(explanation.reasons)["cutlass"] == "kernels run on CUDA devices"
    with pytest.raises(qtensor.UnsupportedError, match="kernels run on CUDA devices"):
        qtensor.gemm(a, b, "TN", backend="cutlass")


def test_fast_accumulation_is_a_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    standins = install_some("sm_90a", "fp8")
    a, b = quantize("fp8", (32, 64), False, 0), quantize("fp8", (16, 64), False, 1)
    for dtype, fast in ((torch.bfloat16, True), (torch.float32, False)):
        before = {name: standin.calls for name, standin in standins.items()}
        qtensor.gemm(a, b, "TN", dtype=dtype, backend="cutlass", fast_accumulation=True)
        (used,) = [name for name, standin in standins.items() if standin.calls > before[name]]
        assert used.endswith("_fast") == fast


def test_mixed_devices() -> None:
    a, b = quantize("fp8", (32, 64), False, 0), quantize("fp8", (16, 64), False, 1)
    with pytest.raises(QTensorError, match="operands must be on one device"):
        qtensor.gemm(a, b.to("meta"), "TN", backend="cutlass")


# ------------------------------------------------------------------------------------ equal results


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.name)
def test_dequant_computes_the_product(
    case: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values in 16 bits are exact: the product is that of the decoded operands up to the order of
    the sums.
    """
    pretend(monkeypatch, HOPPER)
    axes = ({"axis": 0 if layout == "NT" else -1}, {"axis": -1 if layout == "TN" else 0})
    left, right = axes if case.name == "fp8_rowwise" else ({}, {})
    a, b = pair(case.name, layout, left, right)
    bias = rand(80, seed=3)
    got = qtensor.gemm(a, b, layout, bias, torch.float32, backend="dequant")
    assert_product(got, *oriented(a, b, layout), bias)


WEIGHT_ONLY = [("fp8", {}), ("fp8_rowwise", {}), ("fp8_blockwise", SQUARE), ("mxfp8", {}),
               ("mxfp6", {}), ("mxfp4", {}), ("nvfp4", {}),
               ("nvfp4", {"row_scaled": True})]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "options"), WEIGHT_ONLY, ids=str)
def test_weight_only(
    name: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 activations take weights whose values are exact in float16; the range of others needs
    bfloat16.
    """
    pretend(monkeypatch, HOPPER)
    x, w = rand(48, 160, seed=0).to(dtype), quantize(name, (80, 160), False, 1, **options)
    if dtype == torch.float16 and name not in ("fp8", "fp8_rowwise", "nvfp4"):
        with pytest.raises(qtensor.UnsupportedError, match="no 16-bit dtype holds both operands"):
            qtensor.gemm(x, w, "TN", backend="dequant")
        return
    got = qtensor.gemm(x, w, "TN", dtype=torch.float32, backend="dequant")
    assert_product(got, x.double(), values(w).mT)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("fp8_blockwise", {"force_pow_2_scales": False}, "not powers of two do not fit 16 bits"),
        ("fp8_rowwise", {"axis": 0}, "factors run along the contraction"),
    ],
)
def test_what_dequant_would_round(
    name: str, options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, HOPPER)
    a, b = (quantize(name, (rows, 128), False, rows, **options) for rows in (32, 16))
    with pytest.raises(qtensor.UnsupportedError, match=reason):
        qtensor.gemm(a, b, "TN", backend="dequant")
    x = rand(32, 128)
    with pytest.raises(qtensor.UnsupportedError, match=r"torch\.float32 would be rounded"):
        qtensor.gemm(x, quantize("fp8", (16, 128), False, 1), "TN", backend="dequant")


def test_rotated_operands_cancel_in_dequant(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    a, b = pair("nvfp4", "NT", {"with_rht": True}, {"with_rht": True})
    got = qtensor.gemm(a, b, "NT", dtype=torch.float32, backend="dequant")
    left, right = oriented(a, b, "NT")
    bound = 32 * 160 * 2.0**-24 * (left.norm(dim=1)[:, None] * right.norm(dim=0)[None])
    assert ((got.double() - left @ right).abs() <= bound).all()


def test_dequant_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    a, b = quantize("mxfp8", (2, 3, 32, 64), False, 0), quantize("mxfp8", (16, 64), False, 1)
    got = qtensor.gemm(a, b, "TN", dtype=torch.float32, backend="dequant")
    assert_product(got, values(a), values(b).mT)
    batch = quantize("mxfp8", (3, 16, 64), False, 1)
    a = quantize("mxfp8", (3, 32, 64), False, 0)
    got = qtensor.gemm(a, batch, "TN", dtype=torch.float32, backend="dequant")
    assert_product(got, values(a), values(batch).mT)


# ---------------------------------------------------------------------------------- missing kernels


def test_one_warning_tells_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    as_on_a_gpu(monkeypatch)
    a, b = quantize("fp8", (32, 64), False, 0), quantize("fp8", (16, 64), False, 1)
    command = "qtensor kernels build --arch sm_90a --recipe fp8"
    with pytest.warns(RuntimeWarning, match=f"scaled_mm multiplies. Run: {command}") as told:
        qtensor.gemm(a, b, "TN")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qtensor.gemm(a, b, "TN")
        qtensor.gemm(quantize("fp8", (48, 64), False, 0), b, "TN")


def test_formats_without_kernels_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    as_on_a_gpu(monkeypatch)
    a, b = quantize("mxfp8", (32, 64), False, 0), quantize("mxfp8", (16, 64), False, 1)
    got = qtensor.gemm(a, b, "TN", dtype=torch.float32)
    assert_product(got, values(a), values(b).mT)


def test_nothing_is_compiled_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    built = []
    monkeypatch.setattr(library, "build", lambda spec: built.append(spec) or install(spec))
    a, b = quantize("fp8", (32, 64), False, 0), quantize("fp8", (16, 64), False, 1)
    with pytest.raises(
        qtensor.UnsupportedError, match="none of its kernels is built; run: qtensor kernels build"
    ):
        qtensor.gemm(a, b, "TN", backend="cutlass")
    assert built == []
    monkeypatch.setenv("QTENSOR_JIT", "1")
    library.refresh()
    got = qtensor.gemm(a, b, "TN", dtype=torch.bfloat16, backend="cutlass")
    assert_product(got, values(a), values(b).mT)
    (want,) = {tuning.want_of(spec) for spec in built}
    assert (want.recipe, want.d, len(built)) == ("fp8", "bf16", 1)


def test_kernels_that_are_built_later_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    a, b = quantize("fp8", (32, 64), False, 0), quantize("fp8", (16, 64), False, 1)
    assert qtensor.explain(a, b, dtype=torch.bfloat16).backend == "scaled_mm"
    install_some("sm_90a", "fp8")
    assert qtensor.explain(a, b, dtype=torch.bfloat16).backend == "cutlass"


def test_the_choice_takes_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is not the best for the sizes is better than none."""
    pretend(monkeypatch, HOPPER)
    specs = [s for s in tuning.select("sm_90a", "fp8") if s.d == "bf16" and s.a == s.b == "e4m3"]
    largest = next(s for s in specs if s.tile == (256, 128, 128) and not s.fast)
    install(largest)
    a, b = quantize("fp8", (16, 64), False, 0), quantize("fp8", (16, 64), False, 1)
    assert qtensor.explain(a, b, dtype=torch.bfloat16).kernel == largest.name


# ------------------------------------------------------------------------------------ explain


def test_explain_for_another_device() -> None:
    a, b = quantize("mxfp8", (32, 64), False, 0), quantize("mxfp8", (16, 64), False, 1)
    found = qtensor.explain(a, b, arch="sm_90a")
    assert found.backend == "dequant"
    out = str(found)
    assert out.splitlines()[0].endswith("TN, M=32 N=16 K=64, sm_90a: dequant")
    assert "there is no kernel mxfp8 e4m3 x e4m3 -> " in out
    with pytest.raises(
        QTensorError, match=r"arch must be one of sm_90a, sm_100f, sm_120f, or name.*got 'sm_70'"
    ):
        qtensor.explain(a, b, arch="sm_70")


def test_explain_plain_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    x = rand(32, 64)
    assert qtensor.explain(x.bfloat16(), x.bfloat16()).backend == "dequant"
    found = qtensor.explain(x, x)
    assert found.backend == "reference"
    assert dict(found.reasons)["dequant"] == "operand a: torch.float32 would be rounded"


def test_operands_that_do_not_fit() -> None:
    a, b = quantize("fp8", (32, 64), False, 0), quantize("fp8", (16, 96), False, 1)
    with pytest.raises(QTensorError, match="the last dims of a and b must be equal"):
        qtensor.explain(a, b)


def test_a_dequant_that_rounds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of these tests sees values that were rounded to bfloat16 with their factors."""
    pretend(monkeypatch, HOPPER)
    a, b = pair("fp8", "TN", {}, {})
    rounded = (
        a.dequantize(torch.bfloat16).float() @ b.dequantize(torch.bfloat16).float().t()
    ).float()
    with pytest.raises(AssertionError, match="bounds"):
        assert_product(rounded, *oriented(a, b, "TN"))


def test_choosing_costs_a_cpu_nothing() -> None:
    """Neither the cache of libraries nor CUTLASS is imported by a product on a CPU."""
    code = (
        "import sys, torch, qtensor; q = qtensor.quantize(torch.ones(16, 32), 'fp8'); "
        "qtensor.gemm(q, q, 'TN');"
        "print([m for m in ('cutlass_library', 'qtensor.cutlass_gemm.library') if m in "
        "sys.modules])"
    )
    # Without kernels, so as not to compile them into this test's cache.
    done = torch_process.run(code, environment=os.environ | {"QTENSOR_NATIVE": "0"})
    assert done.stdout.strip() == "[]"
