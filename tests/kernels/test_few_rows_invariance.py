"""Few rows: the same bytes for small weights, parts of weights, every path and every batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import few_rows_oracle as oracle
import pytest
import torch
import torch.nn.functional as F
from few_rows_cases import WEIGHTS, quantized, same_bits
from native_cases import threads
from torch import Tensor

import qtensor
from qtensor.kernels.cpu import native
from qtensor.kernels.products import choice, dot_products, reference, tiles
from qtensor.library import native_ops

weights = pytest.mark.parametrize(
    ("fmt", "options"), WEIGHTS, ids=[f"{f}-{'-'.join(map(str, o.values()))}" for f, o in WEIGHTS]
)
SHAPES = ((1, 1), (1, 16), (5, 48), (48, 33), (130, 256))
"""Shapes (N, K) of small weights."""


def by_no_other_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reference, tiles):
        monkeypatch.setattr(module, "matmul", lambda *_: pytest.fail("another backend"))
    monkeypatch.setattr(reference, "matmul_", lambda *_: pytest.fail("another backend"))
    monkeypatch.setattr(
        dot_products.DotProducts, "__call__", lambda *_: pytest.fail("dot products")
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@weights
def test_small_weights(fmt: str, options: dict[str, Any], shape: tuple[int, int]):
    """The order is that of large weights, in Python and in C++."""
    torch.manual_seed(0)
    w, bias = quantized(*shape, fmt, options), torch.randn(shape[0])
    x = torch.randn(64, shape[1]).bfloat16()
    want = oracle.product(x, w, bias)
    for rows, count in ((1, 1), (2, 3), (64, 4)):
        with threads(count):
            got = qtensor.gemm(x[:rows], w, "TN", bias, dtype=torch.float32)
            same_bits(got, want[:rows])
            same_bits(F.linear(x[:rows], w, bias), want[:rows].bfloat16())
    assert qtensor.explain(x, w).backend == "few_rows"


@weights
def test_every_number_of_rows(fmt: str, options: dict[str, Any]):
    """1 to 64 rows, 1 to 4 threads, each position: a row has the bytes that it has alone."""
    torch.manual_seed(1)
    w = quantized(40, 200, fmt, options)
    x = torch.randn(64, 200).bfloat16()
    whole = F.linear(x, w)
    same_bits(whole, oracle.product(x, w).bfloat16())
    for rows in range(1, 65):
        first = (64 - rows) // 3
        with threads(1 + rows % 4):
            same_bits(F.linear(x[first : first + rows], w), whole[first : first + rows])
    same_bits(F.linear(x.view(2, 4, 8, 200), w).view(64, 40), whole)


@weights
@pytest.mark.parametrize("k", [4096, 5472, 17000])
def test_few_rows_that_leave_the_first_cache_level(fmt: str, options: dict[str, Any], k: int):
    """The bytes are the same whether or not x fits the first cache level."""
    torch.manual_seed(9)
    w, x = quantized(11, k, fmt, options), torch.randn(6, k).bfloat16()
    want = oracle.product(x, w).bfloat16()
    for rows in range(1, 7):
        with threads(1 + rows % 2):
            same_bits(F.linear(x[:rows], w), want[:rows])


@weights
def test_parts_of_a_weight(fmt: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Slices of rows and of columns, whose buffers lack padding or are not contiguous."""
    torch.manual_seed(2)
    w, x = quantized(384, 512, fmt, options), torch.randn(3, 512).bfloat16()
    whole = F.linear(x, w)
    narrow = x[:, 256:]
    want = oracle.product(narrow, w[:, 256:].clone()).bfloat16()
    by_no_other_backend(monkeypatch)
    step = 128 if options.get("swizzled") or options.get("block_scaling_dim") == 2 else 1
    for first, end in ((0, 128), (128, 384), (37, 41), (256, 257), (383, 384)):
        if first % step == 0 and (end % step == 0 or end == 384):
            part = w[first:end]
            same_bits(F.linear(x, part), whole[:, first:end].contiguous())
            turned = qtensor.gemm(part, x, "TN", dtype=x.dtype)
            same_bits(turned.t().contiguous(), F.linear(x, part))
    same_bits(F.linear(narrow, w[:, 256:]), want)


@weights
def test_shards_of_tensor_parallelism(fmt: str, options: dict[str, Any]):
    """Ranks that share the rows of a weight compute the columns of the whole result."""
    torch.manual_seed(3)
    w, x = quantized(768, 256, fmt, options), torch.randn(5, 256)
    whole = F.linear(x, w)
    for ranks in (2, 3, 6):
        shards = w.chunk(ranks)
        same_bits(torch.cat([F.linear(x, shard) for shard in shards], 1), whole)
        same_bits(torch.cat([F.linear(x, shard.clone()) for shard in shards], 1), whole)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "fp8", "fp8_blockwise"])
def test_matrices_of_a_stack(fmt: str, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(4)
    stack = qtensor.quantize(torch.randn(3, 128, 256), fmt)
    x = torch.randn(4, 256).bfloat16()
    want = [oracle.product(x, stack[i].clone()).bfloat16() for i in range(3)]
    by_no_other_backend(monkeypatch)
    for i in range(3):
        same_bits(F.linear(x, stack[i]), want[i])


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4", "fp8_rowwise"])
def test_other_dtypes_and_biases(fmt: str):
    """float64 in and out, and a bias for each element, follow the same sums."""
    torch.manual_seed(5)
    w, x = quantized(40, 96, fmt, {}), torch.randn(6, 96)
    want = oracle.product(x, w)
    same_bits(qtensor.gemm(x.double(), w, "TN", dtype=torch.float32), want)
    assert torch.equal(qtensor.gemm(x, w, "TN", dtype=torch.float64), want.double())
    bias = torch.randn(6, 40)
    same_bits(torch.addmm(bias, x, w.t()), want + bias)
    same_bits(qtensor.gemm(x, w, "TN", bias[:, :1]), want + bias[:, :1])
    same_bits(qtensor.gemm(x, w, "TN", bias[0, :1]), want + bias[0, :1])
    got = torch.addmm(bias.bfloat16(), x.bfloat16(), w.t())
    same_bits(got, (oracle.product(x.bfloat16(), w) + bias.bfloat16().float()).bfloat16())


@pytest.mark.parametrize("name", ["mxfp8", "fp8", "fp8_rowwise", "nvfp4", "mxfp4", "fp8_blockwise"])
def test_both_quantized_in_python_and_in_cpp(name: str):
    """C++ decodes x without the factors of its rows, as Python does."""
    torch.manual_seed(6)
    for options in ({}, {"row_scaled": True}) if name == "nvfp4" else ({},):
        for rows, (n, k) in itertools.product((1, 3, 64), ((40, 96), (272, 256))):
            w = qtensor.quantize(torch.randn(n, k), "mxfp4")
            x = qtensor.quantize(torch.randn(rows, k), name, **options)
            with native_ops.left_to_python():
                want = qtensor.gemm(x, w, "TN", torch.ones(n), dtype=torch.bfloat16)
            got = qtensor.gemm(x, w, "TN", torch.ones(n), dtype=torch.bfloat16)
            same_bits(got, want)
            chosen = "integer" if name == "mxfp4" else "few_rows"
            assert qtensor.explain(x, w).backend == chosen


@pytest.mark.parametrize("recipe", ["MXFP8BlockScaling", "NVFP4BlockScaling"])
def test_rows_of_a_layer(recipe: str):
    """A layer's output of a row does not depend on the number of rows."""
    torch.manual_seed(7)
    options = {"disable_rht": True} if recipe.startswith("NV") else {}
    made: Callable[..., Any] = getattr(qtensor.recipes, recipe)
    try:
        chosen = made(**options)
    except TypeError:
        chosen = made()
    layer = qtensor.Linear(96, 64, recipe=chosen)
    x = torch.randn(64, 96)
    if recipe.startswith("NV"):
        # One factor for the tensor: every batch needs the same maximum.
        x[:, 0] = 8.0
    outputs: dict[int, Tensor] = {}
    for rows in (64, 32, 2, 1):
        part = x[:rows].clone().requires_grad_()
        y = layer(part)
        same_bits(y.detach(), outputs.setdefault(rows, y.detach()))
        same_bits(y.detach(), outputs[64][:rows])


REASONS: dict[str, tuple[Callable[[], tuple[Any, Any, str]], str]] = {
    "65 rows": (lambda: (torch.randn(65, 64), weight(), "TN"), "1 to 64 rows; got 65"),
    "no rows": (lambda: (torch.randn(0, 64), weight(), "TN"), "1 to 64 rows; got 0"),
    "no columns": (lambda: (torch.randn(2, 0), weight(0), "TN"), "no elements"),
    "rotated": (
        lambda: (torch.randn(2, 64), weight(with_rht=True, rht_side="rowwise"), "TN"),
        "must be rotated back",
    ),
    "factors of columns": (
        lambda: (torch.randn(2, 64), weight(fmt="fp8_rowwise", axis=0), "TN"),
        "run along the contraction",
    ),
    "blocks across": (
        lambda: (torch.randn(2, 32), weight(fmt="mxfp8"), "NN"),
        "do not run along the contraction",
    ),
    "codes across": (
        lambda: (
            torch.randn(2, 32),
            weight(fmt="mxfp8", rowwise=False, columnwise=True),
            "NN",
        ),
        "are not adjacent in memory",
    ),
    "x by columns": (
        lambda: (weight(fmt="fp8", rowwise=False, columnwise=True), weight(fmt="fp8"), "TN"),
        "no rowwise data",
    ),
    "gradient of a weight": (
        lambda: (torch.randn(32, 8), weight(), "NT"),
        "layout NT has no weight",
    ),
    "plain": (lambda: (torch.randn(2, 64), torch.randn(32, 64), "TN"), "is not quantized"),
    "no kernels": (lambda: (torch.randn(2, 64), weight(), "TN"), "switched off for this test"),
}


def weight(columns: int = 64, fmt: str = "nvfp4", **options: Any) -> Any:
    return qtensor.quantize(torch.randn(32, columns), fmt, **options)


@pytest.mark.parametrize("case", REASONS)
def test_what_has_other_sums(case: str, monkeypatch: pytest.MonkeyPatch):
    """The conditions that docs/numerics.md lists, each with the reason that `explain` gives."""
    make, reason = REASONS[case]
    a, b, layout = make()
    if case == "no kernels":
        monkeypatch.setattr(native, "library", lambda: "switched off for this test")
        monkeypatch.setattr(choice, "choose", choice.choose.__wrapped__)
    why = qtensor.explain(a, b, layout)
    assert why.backend != "few_rows"
    assert reason in dict(why.reasons)["few_rows"], why


def test_codes_across_the_contraction():
    """Columnwise MX codes lie like rowwise ones: a product that contracts rows reads columns."""
    torch.manual_seed(8)
    w = qtensor.quantize(torch.randn(64, 96), "mxfp8", rowwise=False, columnwise=True)
    x = torch.randn(3, 64)
    assert "are not adjacent in memory" in dict(qtensor.explain(x, w, "NN").reasons)["few_rows"]
    with pytest.raises(qtensor.UnsupportedError, match="are not adjacent in memory"):
        qtensor.gemm(x, w, "NN", backend="few_rows")
    torch.testing.assert_close(x @ w, x @ w.dequantize())


@pytest.mark.parametrize("rows", [1, 64])
def test_the_stored_transpose_is_read(rows: int):
    """FP8 data of both usages hold the same codes, so `x @ w` reads the columnwise ones."""
    torch.manual_seed(9)
    w = qtensor.quantize(torch.randn(64, 96), "fp8", columnwise=True)
    x = torch.randn(rows, 64)
    same_bits(x @ w, oracle.product(x, w.t().contiguous()))
    assert qtensor.explain(x, w, "NN").backend == "few_rows"
    torch.testing.assert_close(x @ w, x @ w.dequantize())
