"""Products with a weight that is decoded by tiles: the same bound as small ones, whoever
multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from formats import FormatCase, formats
from native_cases import threads

import qtensor
from benchmarks.memory import RESET, peak_mib
from qtensor.kernels.cpu import native
from qtensor.kernels.products import dot_products, integer, tiles
from qtensor.library import native_ops
from tests.kernels.test_gemm import assert_product, values

N, K = 515, 1030
"""More than ``tiles.SMALL`` elements, ragged for every block; K is even, as dot products of pairs
need.
"""


def refuse_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer, "integer_products_", lambda *_: False)


def refuse_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave products to the backends behind `integer` and `few_rows`."""
    refuse_integers(monkeypatch)
    linear_ = native.linear_

    def many_rows(*args: Any, few: bool = False, **options: Any) -> bool:
        return not few and linear_(*args, **options)

    monkeypatch.setattr(native, "linear_", many_rows)
    dot_products.is_available(native.linear_)


@pytest.fixture(params=["few rows", "dot products", "float32 tiles"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "dot products":
        refuse_few_rows(monkeypatch)
    if request.param == "float32 tiles":
        refuse_integers(monkeypatch)
        monkeypatch.setattr(native, "linear_", lambda *_, **__: False)
        monkeypatch.setattr(tiles, "TILE_BYTES", 100 * K * 4)
    with native_ops.left_to_python():
        yield request.param


def operands(case: FormatCase, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    x = torch.randn(13, K).to(dtype)
    return x, case.quantize(torch.randn(N, K).to(dtype), **options)


def test_the_weight_is_large():
    assert tiles.is_large((N, K))


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weight_only(case: FormatCase, dtype: torch.dtype, path: str):
    x, w = operands(case, dtype)
    bias = torch.randn(N).to(dtype)
    want = values(x), values(w).T
    assert_product(F.linear(x, w), *want)
    assert_product(F.linear(x, w, bias), *want, bias)
    assert_product(qtensor.gemm(x, w, "TN", dtype=torch.float32), *want)
    assert_product(F.linear(x.view(13, 1, K), w).flatten(0, 1), *want)


@formats
def test_both_quantized(case: FormatCase, path: str):
    x, w = operands(case, torch.bfloat16)
    q = case.quantize(x)
    bias = torch.randn(N)
    want = values(q), values(w).T
    assert_product(qtensor.gemm(q, w, "TN", bias), *want, bias)
    assert_product(qtensor.gemm(q, w, "TN", dtype=torch.float32), *want)


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("fp8", {"dtype": "e5m2"}),
        ("fp8_rowwise", {"axis": 0}),
        ("fp8_blockwise", {"block_scaling_dim": 2}),
        ("fp8_blockwise", {"force_pow_2_scales": False}),
        ("mxfp8", {"swizzled": True}),
        ("mxfp6", {"packed": True}),
        ("nvfp4", {"row_scaled": True}),
        ("nvfp4", {"with_2d_quantization": True}),
        ("nvfp4", {"with_rht": True, "rht_side": "rowwise"}),
        ("mxfp8", {"columnwise": True}),
        ("nvfp4", {"columnwise": True}),
    ],
)
def test_options(fmt: str, options: dict[str, Any], path: str):
    torch.manual_seed(1)
    x, w = torch.randn(6, K).bfloat16(), qtensor.quantize(torch.randn(N, K), fmt, **options)
    assert_product(F.linear(x, w), values(x), values(w).T)


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The operands that the dot products of the CPU took."""
    refuse_few_rows(monkeypatch)
    taken, linear_ = [], native.linear_
    monkeypatch.setattr(
        native,
        "linear_",
        lambda weight, *rest, kernel=native.DOTS, **options: (
            kernel == native.DOTS
            and (taken.append(weight) or linear_(weight, *rest, kernel=kernel, **options))
        ),
    )
    dot_products.is_available(native.linear_)
    taken.clear()
    with native_ops.left_to_python():
        yield taken


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("mxfp8", {}),
        ("mxfp8", {"swizzled": True}),
        ("mxfp6", {"packed": True}),
        ("mxfp4", {}),
        ("fp8_blockwise", {"block_scaling_dim": 1}),
        ("fp8_blockwise", {"block_scaling_dim": 2}),
    ],
)
def test_padding_and_blocks_of_zeros_do_not_matter(
    fmt: str, options: dict[str, Any], multiplied: list[Any]
):
    """13 rows of an activation: the factors of 115 more are zero. A block of zeros has factor 0."""
    torch.manual_seed(2)
    x, w = torch.randn(13, K), torch.randn(N, K)
    w[5:9, 128:256] = 0.0
    w[500] = 0.0
    x[3] = 0.0
    q, weight = (qtensor.quantize(t, fmt, **options) for t in (x, w))
    del multiplied[:]
    assert_product(qtensor.gemm(q, weight, "TN", dtype=torch.float32), values(q), values(weight).T)
    a = qtensor.explain(q, weight, dtype=torch.float32)
    said = dict(a.reasons)["dot_products"]
    assert bool(multiplied) == (said == "possible of values that bfloat16 holds")


@pytest.mark.parametrize("place", [(0, 0), (N - 1, K - 1), (N - 1, 0)])
def test_one_tiny_value_is_found(place: tuple[int, int], multiplied: list[Any]):
    """In the first block, in the ragged last one, and beside zeros."""
    x, w = torch.full((4, K), 2.0**100), torch.zeros(N, K)
    w[place] = 2.0**-128
    q, weight = qtensor.quantize(x, "mxfp8"), qtensor.quantize(w, "mxfp8")
    del multiplied[:]
    got = qtensor.gemm(q, weight, "TN", dtype=torch.float32)
    assert not multiplied
    assert got.count_nonzero() == 4


def test_tiny_factors_are_kept():
    """Values below the smallest normal bfloat16 number, which its dot products take for zero."""
    x = torch.full((4, K), 2.0**100).bfloat16()
    w = qtensor.quantize(torch.full((N, K), 2.0**-128), "mxfp8")
    got = qtensor.gemm(x, w, "TN", dtype=torch.float32)
    assert got.count_nonzero() == got.numel()
    assert_product(got, values(x), values(w).T)


def test_non_finite_values_reach_their_row_alone():
    x = torch.randn(3, K).bfloat16()
    w = torch.randn(N, K)
    w[7, 3] = float("nan")
    product = F.linear(x, qtensor.quantize(w, "mxfp8"))
    assert product[:, 7].isnan().all()
    assert product.isnan().sum() == 3


@pytest.mark.skipif(not RESET.exists(), reason="this system does not reset the peak of a process")
@formats
def test_no_full_size_copy_of_the_weight(case: FormatCase):
    """A bfloat16 copy would be 128 MiB, a float32 one 256."""
    x = torch.ones(8, 8192, dtype=torch.bfloat16)
    small, weight = (
        case.quantizer().make_empty((n, 8192), dtype=torch.bfloat16) for n in (64, 8192)
    )
    for buffer in (*small.buffers(), *weight.buffers()):
        buffer.zero_()
    with threads(1):
        F.linear(x, small)
        assert peak_mib(lambda: F.linear(x, weight)) < 64
        assert peak_mib(weight.dequantize) > 64, "the measurement does not see a copy"
