"""Products of codes of 4 and 6 bits have the bytes of the oracle, whoever computes them."""

from __future__ import annotations

import itertools
from typing import Any

import integer_oracle as oracle
import pytest
import torch
import torch.nn.functional as F
from few_rows_cases import same_bits
from native_cases import ISAS, library_of, loaded, threads
from torch import Tensor

import qtensor
from qtensor.library.native_ops import left_to_python

Options = dict[str, Any]

FORMATS: list[tuple[str, Options]] = [
    ("mxfp4", {}),
    ("mxfp4", {"swizzled": True}),
    ("mxfp6", {}),
    ("mxfp6", {"packed": True}),
    ("mxfp6", {"packed": True, "swizzled": True}),
    ("nvfp4", {}),
    ("nvfp4", {"swizzled": True}),
    ("nvfp4", {"row_scaled": True}),
    ("nvfp4", {"with_2d_quantization": True}),
    ("nvfp4", {"use_4over6": True}),
    ("nvfp4", {"with_global_scale_inv": True}),
]
PAIRS = [(f, f) for f in FORMATS] + [(FORMATS[0], FORMATS[2]), (FORMATS[3], FORMATS[0])]
LAYOUTS = ("TN", "NN", "NT")
SHAPES = ((1, 1, 1), (7, 33, 48), (65, 40, 200), (12, 130, 97), (600, 17, 64))
"""(M, N, K) around blocks, panels and heights of tiles, and more rows than are decoded at once."""

formats = pytest.mark.parametrize(
    ("fmt", "options"), FORMATS, ids=["-".join((f, *map(str, o))) for f, o in FORMATS]
)


def quantized(rows: int, cols: int, fmt: str, options: Options) -> Any:
    """A matrix in both directions, whose blocks have factors of many sizes."""
    spread = torch.exp2(torch.randn(rows, cols // 16 + 1) * 3).repeat_interleave(16, 1)[:, :cols]
    return qtensor.quantize(torch.randn(rows, cols) * spread, fmt, columnwise=True, **options)


def operands(
    sizes: tuple[int, int, int], layout: str, a: tuple[str, Options], b: tuple[str, Options]
) -> tuple[Any, Any]:
    m, n, k = sizes
    left = quantized(*((k, m) if layout == "NT" else (m, k)), *a)
    return left, quantized(*((n, k) if layout == "TN" else (k, n)), *b)


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
        for sizes in SHAPES[1:4]:
            for layout in LAYOUTS:
                a, b = operands(sizes, layout, (fmt, options), (fmt, options))
                got = qtensor.gemm(a, b, layout, dtype=torch.float32, backend="integer")
                same_bits(got, oracle.product(a, b, layout))


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


def with_factors(codes: Tensor, rows: int) -> Any:
    """An MXFP4 matrix (rows, 32 * blocks) whose blocks have these E8M0 codes."""
    q = qtensor.quantize(torch.randn(rows, 32 * len(codes)), "mxfp4")
    q._rowwise_scale_inv[:rows, : len(codes)] = codes.to(torch.uint8)
    return q


@pytest.mark.parametrize("isa", ISAS)
def test_factors_at_the_ends_of_their_range(isa: str) -> None:
    """The smallest and largest factors, NaN, sums that are subnormal, and sums that overflow."""
    torch.manual_seed(7)
    ends = [[0, 1, 2], [0, 254, 3], [254, 254, 0], [127, 255, 127], [230, 20, 227], [60, 66, 64]]
    with loaded(library_of(isa)), left_to_python():
        for left in ends:
            for right in ends:
                a, b = (with_factors(torch.tensor(codes), 5) for codes in (left, right))
                got = qtensor.gemm(a, b, "TN", dtype=torch.float32, backend="integer")
                same_bits(got, one_nan(oracle.product(a, b, "TN")))


def one_nan(t: Tensor) -> Tensor:
    return torch.where(t.isnan(), torch.nan, t)


@pytest.mark.parametrize("isa", ISAS)
def test_largest_sums(isa: str) -> None:
    """Codes of the largest value, of either sign: no sum of a block may leave its 16 or 32 bits."""
    largest = {"mxfp4": 6.0, "mxfp6": 7.5, "nvfp4": 6.0}
    with loaded(library_of(isa)), left_to_python():
        for (left, x), (right, w) in itertools.product(largest.items(), repeat=2):
            if (left == "nvfp4") != (right == "nvfp4"):
                continue
            for sign in (1, -1):
                a = qtensor.quantize(torch.full((7, 64), x), left)
                b = qtensor.quantize(torch.full((40, 64), sign * w), right)
                got = qtensor.gemm(a, b, "TN", dtype=torch.float32, backend="integer")
                same_bits(got, oracle.product(a, b, "TN"))
                assert a.element_values().eq(x).all()


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
