"""Products that a backend of a GPU cannot compute after all, and sizes that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from standin import as_on_a_gpu, pretend

import qtensor
from qtensor.kernels.products.cutlass import kernels
from qtensor.kernels.products.problem import Problem, facts_of, sides
from qtensor.kernels.products.scaled_mm import ScaledMM
from qtensor.storage.ops.products import operand_of
from tests.kernels.test_gemm import assert_product
from tests.kernels.test_gemm_backends import BLACKWELL, HOPPER, install_some
from tests.kernels.test_gemm_cutlass_operands import oriented, pair, quantize

pytestmark = pytest.mark.usefixtures("native_kernels", "libraries", "in_python")


@pytest.mark.filterwarnings("ignore:qtensor. no CUTLASS kernel")
def test_a_backend_that_fails_passes_the_product_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch decides at the call what its products take; its error is a reason from then on."""
    pretend(monkeypatch, HOPPER)
    as_on_a_gpu(monkeypatch)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("cuBLAS says no\nand more")

    monkeypatch.setattr(ScaledMM, "__call__", fail)
    a, b = pair("fp8", "TN", {}, {})
    with pytest.warns(RuntimeWarning, match="scaled_mm cannot compute .*it failed: cuBLAS says no"):
        got = qtensor.gemm(a, b, "TN")
    assert_product(got, *oriented(a, b, "TN"))
    assert_product(qtensor.gemm(a, b, "TN"), *oriented(a, b, "TN"))
    assert len(calls) == 1
    found = qtensor.explain(a, b)
    assert found.backend == "dequant"
    assert dict(found.reasons)["scaled_mm"] == "it failed: cuBLAS says no"
    with pytest.raises(qtensor.UnsupportedError, match="it failed: cuBLAS says no"):
        qtensor.gemm(a, b, "TN", backend="scaled_mm")
    other = quantize("fp8", (16, a.shape[1]), False, 3)
    with pytest.warns(RuntimeWarning, match="scaled_mm cannot compute"):
        qtensor.gemm(a, other, "TN")


@pytest.mark.filterwarnings("ignore:qtensor. no CUTLASS kernel")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_errors_of_the_device_are_raised(
    error: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, HOPPER)
    as_on_a_gpu(monkeypatch)

    def fail(*_: Any) -> None:
        raise error("too much")

    monkeypatch.setattr(ScaledMM, "__call__", fail)
    with pytest.raises(error, match="too much"):
        qtensor.gemm(*pair("fp8", "TN", {}, {}), "TN")
    assert qtensor.explain(*pair("fp8", "TN", {}, {})).backend == "scaled_mm"


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((1, 1 << 31, 16, 16), "kernels take sizes below 2^31; got 2147483648"),
        ((1, (1 << 31) - 1, 16, 16), None),
        ((2, 1 << 20, 16, 1 << 11), "batched kernels take matrices of less than 2^31 elements"),
        ((2, 16, 1 << 20, 1 << 11), "batched kernels take matrices of less than 2^31 elements"),
        ((2, 1 << 16, 1 << 15, 16), "batched kernels take matrices of less than 2^31 elements"),
        ((1, 1 << 20, 16, 1 << 11), None),
    ],
)
def test_sizes_that_do_not_fit_int32(
    sizes: tuple[int, int, int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, HOPPER)
    install_some("sm_90a", "fp8")
    batch, m, n, k = sizes
    lead = (batch,) if batch > 1 else ()
    text, _, dtype = facts_of(operand_of(quantize("fp8", (16, 16), False, 0)))
    a, b = sides((text, (*lead, m, k), dtype), (text, (*lead, n, k), dtype), "TN")
    problem = Problem(a, b, "TN", torch.bfloat16, None, "cuda:0", HOPPER, 132)
    assert problem.sizes == sizes
    said = kernels(problem)
    assert reason in said if reason else not isinstance(said, str)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_explain_names_factors_that_are_rearranged(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, BLACKWELL)
    install_some("sm_100f", name)
    plain, tiled = (pair(name, "TN", given, given) for given in ({}, {"swizzled": True}))
    said = "are put into tiles at every call: quantize with swizzled=True"
    for operands, names in (
        (plain, "factors of a and b "),
        ((plain[0], tiled[1]), "factors of a "),
        (tiled, None),
    ):
        found = dict(qtensor.explain(*operands, dtype=torch.bfloat16).reasons)["cutlass"]
        assert (f"{names}{said}" in found) if names else (said not in found)
