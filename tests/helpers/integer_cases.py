"""Operands of integer products, and products of the kernels themselves beside the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import integer_oracle as oracle
import torch
from few_rows_cases import same_bits
from torch import Tensor

import qtensor

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
FORMAT_IDS = ["-".join((f, *map(str, o))) for f, o in FORMATS]
LAYOUTS = ("TN", "NN", "NT")
SHAPES = ((1, 1, 1), (7, 33, 48), (65, 40, 200), (12, 130, 97), (600, 17, 64))
"""(M, N, K) around blocks, panels and heights of tiles, and more rows than are decoded at once."""


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


def check_layouts(a_format: tuple[str, Options], b_format: tuple[str, Options]) -> None:
    """Compare products of ragged sizes in each layout and dtype with the oracle, half of them with
    a bias."""
    for turn, (sizes, layout) in enumerate(itertools.product(SHAPES[1:4], LAYOUTS)):
        a, b = operands(sizes, layout, a_format, b_format)
        bias = torch.randn(sizes[1]) if turn % 2 else None
        want = oracle.product(a, b, layout, bias)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            got = qtensor.gemm(a, b, layout, bias, dtype, backend="integer")
            same_bits(got, want.to(dtype))


def _with_factors(codes: Tensor, rows: int) -> Any:
    """An MXFP4 matrix (rows, 32 * blocks) whose blocks have these E8M0 codes."""
    q = qtensor.quantize(torch.randn(rows, 32 * len(codes)), "mxfp4")
    q._rowwise_scale_inv[:rows, : len(codes)] = codes.to(torch.uint8)
    return q


def check_ends_of_factors() -> None:
    """Try the smallest and largest factors, NaN, and sums that are subnormal or overflow."""
    ends = [[0, 1, 2], [0, 254, 3], [254, 254, 0], [127, 255, 127], [230, 20, 227], [60, 66, 64]]
    for left, right in itertools.product(ends, repeat=2):
        a, b = (_with_factors(torch.tensor(codes), 5) for codes in (left, right))
        got = qtensor.gemm(a, b, "TN", dtype=torch.float32, backend="integer")
        want = oracle.product(a, b, "TN")
        same_bits(got, torch.where(want.isnan(), torch.nan, want))


def check_largest_sums() -> None:
    """Try codes of the largest value, of either sign: no sum of a block may leave its 16 or 32
    bits."""
    largest = {"mxfp4": 6.0, "mxfp6": 7.5, "nvfp4": 6.0}
    for (left, x), (right, w) in itertools.product(largest.items(), repeat=2):
        if (left == "nvfp4") != (right == "nvfp4"):
            continue
        for sign in (1, -1):
            a = qtensor.quantize(torch.full((7, 64), x), left)
            b = qtensor.quantize(torch.full((40, 64), sign * w), right)
            got = qtensor.gemm(a, b, "TN", dtype=torch.float32, backend="integer")
            same_bits(got, oracle.product(a, b, "TN"))
            assert a.element_values().eq(x).all()
