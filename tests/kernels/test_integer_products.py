"""Products of codes of 4 and 6 bits have the bytes of the oracle, whoever computes them."""

from __future__ import annotations

from typing import Any

import integer_oracle as oracle
import pytest
import torch
import torch.nn.functional as F
from few_rows_cases import same_bits
from integer_cases import (
    FORMAT_IDS,
    FORMATS,
    LAYOUTS,
    PAIRS,
    SHAPES,
    Options,
    check_ends_of_factors,
    check_largest_sums,
    check_layouts,
    operands,
    quantized,
)
from native_cases import ISAS, library_of, loaded, threads

import qtensor
from qtensor.library.native_ops import left_to_python

formats = pytest.mark.parametrize(("fmt", "options"), FORMATS, ids=FORMAT_IDS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_oracle(pair: Any, layout: str) -> None:
    """Every format and direction, in Python and in C++, with a bias, in each dtype."""
    for turn, sizes in enumerate(SHAPES):
        torch.manual_seed(turn)
        a, b = operands(sizes, layout, *pair)
        bias = torch.randn(sizes[1]) if turn % 2 else None
        want = oracle.product(a, b, layout, bias)
        assert qtensor.explain(a, b, layout).backend == "integer"
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            same_bits(qtensor.gemm(a, b, layout, bias, dtype), want.to(dtype))
        with left_to_python(), threads(2):
            same_bits(qtensor.gemm(a, b, layout, bias, torch.float32), want)


@pytest.mark.parametrize("isa", ISAS)
@formats
def test_instruction_sets(fmt: str, options: Options, isa: str) -> None:
    torch.manual_seed(3)
    with loaded(library_of(isa)), left_to_python():
        check_layouts((fmt, options), (fmt, options))


@formats
def test_a_row_does_not_depend_on_the_others(fmt: str, options: Options) -> None:
    torch.manual_seed(4)
    a, b = operands((150, 70, 160), "TN", (fmt, options), (fmt, options))
    a.update_usage(columnwise=False)
    whole = qtensor.gemm(a, b, "TN", dtype=torch.float32)
    step = 128 if options.get("swizzled") else 16 if options.get("with_2d_quantization") else 1
    for rows in (slice(0, step), slice(128, 150), slice(0, 128)):
        same_bits(qtensor.gemm(a[rows], b, "TN", dtype=torch.float32), whole[rows])
    for count in (1, 2, 3):
        with threads(count):
            large = [quantized(n, 512, fmt, options) for n in (260, 300)]
            got = qtensor.gemm(*large, "TN", dtype=torch.float32)
        same_bits(got, oracle.product(*large, "TN"))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6", "nvfp4"])
def test_views(name: str) -> None:
    """Transposes, slices of rows and columns, and shapes with leading dims."""
    torch.manual_seed(5)
    rows, weight = operands((48, 96, 256), "TN", (name, {}), (name, {}))
    want = oracle.product(rows, weight, "TN")
    rows.update_usage(columnwise=False)
    weight.update_usage(columnwise=False)
    same_bits(rows @ weight.t(), want)
    same_bits(F.linear(rows.view(2, 24, 256), weight).view(48, 96), want)
    left, right = rows[8:40, 64:192], weight[16:, 64:192]
    part = qtensor.gemm(left, right, "TN", dtype=torch.float32, backend="integer")
    same_bits(part, oracle.product(left.clone(), right.clone(), "TN"))


def test_batches() -> None:
    torch.manual_seed(6)
    a, b = (qtensor.quantize(torch.randn(3, n, 64), "mxfp4") for n in (20, 24))
    got = qtensor.gemm(a, b, "TN", dtype=torch.float32)
    assert qtensor.explain(a, b).backend == "integer"
    for i in range(3):
        matrices = [qtensor.quantize(t[i].dequantize(), "mxfp4") for t in (a, b)]
        same_bits(got[i], oracle.product(*matrices, "TN"))
    added = qtensor.gemm(a, b, "TN", bias=torch.ones(3, 20, 24), dtype=torch.float32)
    same_bits(added, got + 1)


@pytest.mark.parametrize("isa", ISAS)
def test_factors_at_the_ends_of_their_range(isa: str) -> None:
    torch.manual_seed(7)
    with loaded(library_of(isa)), left_to_python():
        check_ends_of_factors()


@pytest.mark.parametrize("isa", ISAS)
def test_largest_sums(isa: str) -> None:
    with loaded(library_of(isa)), left_to_python():
        check_largest_sums()


def test_rotated_operands() -> None:
    """Data that are rotated alike are multiplied as they are; other pairs go to other backends."""
    torch.manual_seed(8)
    a, b = (
        qtensor.quantize(torch.randn(64, n), "nvfp4", columnwise=True, with_rht=True)
        for n in (32, 48)
    )
    same_bits(qtensor.gemm(a, b, "NT", dtype=torch.float32), oracle.product(a, b, "NT"))
    signs = qtensor.quantize(
        torch.randn(64, 48), "nvfp4", columnwise=True, with_rht=True, with_random_sign_mask=False
    )
    reasons = dict(qtensor.explain(a, signs, "NT").reasons)
    assert "rotated alike" in reasons["integer"]


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (("mxfp6", {"dtype": "e3m2"}), ("mxfp4", {}), "e3m2 codes are not small integers"),
        (("nvfp4", {}), ("mxfp4", {}), "differ in size"),
        (("mxfp8", {}), ("mxfp8", {}), "e4m3 codes are not small integers"),
    ],
    ids=["e3m2", "blocks", "mxfp8"],
)
def test_other_operands(a: Any, b: Any, reason: str) -> None:
    left, right = operands((32, 32, 32), "TN", a, b)
    assert reason in dict(qtensor.explain(left, right).reasons)["integer"]
    plain = dict(qtensor.explain(torch.randn(32, 32), right).reasons)["integer"]
    assert "not quantized" in plain
