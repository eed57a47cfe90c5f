"""Products by dot products: formats, directions and sizes, the same bytes everywhere.

With QTENSOR_AMX=1, on a CPU that has AMX, these are the tests of the backend `amx` (test_amx.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

import few_rows_oracle
import numpy as np
import pytest
import torch
from few_rows_cases import same_bits
from native_cases import threads
from torch import Tensor

import qtensor
from qtensor.core.operand import plain_operand
from qtensor.kernels.cpu import native, sources
from qtensor.kernels.products import dot_products
from qtensor.library import native_ops
from qtensor.library.define import FILLS
from qtensor.library.grouped import GROUPED_GEMM
from qtensor.library.ragged import Groups
from qtensor.storage.ops.products import operand_of
from tests.kernels.test_gemm import assert_product, values

Options = dict[str, Any]

BACKEND, KERNEL = ("dot_products", native.DOTS)
if os.environ["QTENSOR_AMX"] != "0":
    BACKEND, KERNEL = ("amx", native.TILES)

FORMATS: list[tuple[str, Options]] = [
    ("fp8", {}),
    ("fp8", {"dtype": "e5m2"}),
    ("fp8_rowwise", {}),
    ("fp8_rowwise", {"axis": 0}),
    ("fp8_blockwise", {}),
    ("fp8_blockwise", {"block_scaling_dim": 2}),
    ("fp8_blockwise", {"force_pow_2_scales": False}),
    ("mxfp8", {}),
    ("mxfp8", {"swizzled": True}),
    ("mxfp6", {"packed": True}),
    ("mxfp6", {"dtype": "e3m2"}),
    ("mxfp4", {}),
    ("mxfp4", {"swizzled": True}),
    ("nvfp4", {}),
    ("nvfp4", {"row_scaled": True}),
    ("nvfp4", {"with_2d_quantization": True}),
    ("nvfp4", {"with_global_scale_inv": True}),
]
SHAPES = ((70, 33, 48), (3, 64, 100), (65, 130, 257), (130, 40, 384), (7, 1100, 300))
"""(M, N, K) around panels and blocks; one K is odd, and the last has several strips and bands."""
USAGES = {"rowwise": {}, "columnwise": {"rowwise": False, "columnwise": True}}

formats = pytest.mark.parametrize(
    ("fmt", "options"), FORMATS, ids=["-".join((f, *map(str, o))) for f, o in FORMATS]
)


only_dots = pytest.mark.skipif(
    KERNEL != native.DOTS, reason="tiles have an order of their own (test_amx.py)"
)


@pytest.fixture(autouse=True, scope="module")
def _served() -> None:
    if not dot_products.is_available(native.linear_, KERNEL):
        pytest.skip(reason=f"the CPU has no bfloat16 products by {BACKEND}")


def matrix(rows: int, cols: int, fmt: str, options: Options, **usage: bool) -> Any:
    """A matrix with blocks and rows of many sizes, and some zeros."""
    x = torch.randn(rows, cols) * torch.exp2(torch.randn(rows, 1) * 3)
    x[rows // 2] = 0.0
    return qtensor.quantize(x, fmt, **options, **usage)


def is_served(a: Any, b: Any, layout: str, **options: Any) -> bool:
    """Whether dot products are possible, which the first product behind others shows."""
    return "possible" in said(a, b, layout, **options) or "chosen" in said(a, b, layout, **options)


def said(a: Any, b: Any, layout: str, **options: Any) -> str:
    return dict(qtensor.explain(a, b, layout, **options).reasons)[BACKEND]


@pytest.mark.parametrize("direction", USAGES)
@pytest.mark.parametrize("layout", ["TN", "NN"])
@formats
def test_a_plain_operand(fmt: str, options: Options, layout: str, direction: str) -> None:
    """The value in float32 sums, within the bound of any order; the same bytes whoever calls."""
    for turn, (m, n, k) in enumerate(SHAPES):
        torch.manual_seed(turn)
        size = (n, k) if layout == "TN" else (k, n)
        # Small enough for float16 to hold the sums.
        x = torch.randn(m, k).bfloat16() / 64
        b = matrix(*size, fmt, options, **USAGES[direction])
        if not is_served(x, b, layout):
            reasons = ("along the contraction", "matrix", "not powers of two")  # the last of tiles
            assert any(reason in said(x, b, layout) for reason in reasons)
            continue
        bias = torch.randn(n) if turn % 2 else None
        right = values(b).T if layout == "TN" else values(b)
        named = by_name(x, b, layout)
        if named is not None:
            assert_product(named, values(x), right)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            # The order of other sums may depend on the number of threads.
            with threads(1 if named is None else 2):
                got = qtensor.gemm(x, b, layout, bias, dtype)
            assert_product(got, values(x), right, bias)
            with native_ops.left_to_python(), threads(1 if named is None else 3):
                same_bits(qtensor.gemm(x, b, layout, bias, dtype), got)


def by_name(a: Any, b: Any, layout: str) -> Tensor | None:
    """The product by dot products; None where no kernel reads codes that lie across a sum."""
    try:
        return qtensor.gemm(a, b, layout, dtype=torch.float32, backend=BACKEND)
    except qtensor.UnsupportedError as error:
        assert "no kernel reads these buffers" in str(error)  # noqa: PT017
        return None


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@formats
def test_both_quantized(fmt: str, options: Options, layout: str) -> None:
    for turn, (m, n, k) in enumerate(SHAPES):
        torch.manual_seed(turn)
        sizes = (k, m) if layout == "NT" else (m, k), (n, k) if layout == "TN" else (k, n)
        a, b = (matrix(*size, fmt, options, columnwise=True) for size in sizes)
        if not is_served(a, b, layout):
            assert "operand a: factors" in said(a, b, layout)
            continue
        left = values(a, columnwise=True).T if layout == "NT" else values(a)
        right = values(b).T if layout == "TN" else values(b, columnwise=True)
        with native_ops.left_to_python():
            got = by_name(a, b, layout)
            assert got is not None
            assert_product(got, left, right)
            with threads(3):
                same_bits(by_name(a, b, layout), got)
        if "chosen" in said(a, b, layout):
            same_bits(qtensor.gemm(a, b, layout, dtype=torch.float32), got)


def in_pairs(x: Tensor, w: Tensor) -> Tensor:
    """float32 x (M, K) @ w (N, K).T in the order of docs/numerics.md."""
    left, right = x.float().numpy(), w.numpy()
    sums = np.zeros((len(left), len(right)), np.float32)
    for first in range(0, left.shape[1], 2):
        for k in range(min(first + 1, left.shape[1] - 1), first - 1, -1):
            sums = few_rows_oracle.fused(left[:, k, None], right[None, :, k], sums)
    return torch.from_numpy(sums)


@only_dots
@formats
def test_the_order_of_the_sums(fmt: str, options: Options) -> None:
    """Of weights along the contraction and across it. Factors of tensors are powers of two here."""
    compared = 0
    for turn, (m, n, k) in enumerate(((3, 40, 37), (9, 70, 290), (70, 33, 48), (140, 20, 64))):
        torch.manual_seed(turn)
        x = torch.randn(m, k).bfloat16()
        for layout in ("TN", "NN"):
            dense = torch.randn((n, k) if layout == "TN" else (k, n))
            dense[0, 0] = {"fp8": 448 * 2.0**-6, "nvfp4": 6 * 448 * 2.0**-8}.get(fmt, 1.0)
            if options.get("dtype") == "e5m2":
                dense[0, 0] = 57344 * 2.0**-12
            b = qtensor.quantize(dense, fmt, **options)
            got = by_name(x, b, layout) if is_served(x, b, layout) else None
            if got is None:
                continue
            w, factors = b.dequantize(torch.float32), torch.ones(1)
            if "row_scaled" in options and layout == "TN":  # amaxes of rows follow the sums
                codes, scales, amaxes, block, _ = few_rows_oracle.weight_parts(b)
                wide = np.repeat(scales, block, 1)[:, :k]
                w, factors = torch.from_numpy(codes * wide), torch.from_numpy(amaxes)
            if fmt == "fp8_rowwise" and (layout == "TN") == (options == {}):  # they follow the sums
                factors = b._scale_inv.reshape(-1)
                codes = b._data.view(torch.uint8).numpy()
                w = torch.from_numpy(few_rows_oracle.narrow_values(codes, b.quantizer.element.name))
            w = w if layout == "TN" else w.T.contiguous()
            same_bits(got, in_pairs(x, w) * factors)
            compared += 1
    assert compared >= 4


@only_dots
@pytest.mark.skipif(
    not sources.capabilities().get("avx512_bf16"), reason="the CPU has no dot products of pairs"
)
@pytest.mark.parametrize("direction", USAGES)
@formats
def test_pairs_and_multiply_adds(
    fmt: str, options: Options, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the same bits, for few rows too, so that each CPU can use what is faster."""
    layouts = [("TN", BACKEND), ("NN", BACKEND), ("TN", "few_rows")]
    compared = 0
    for turn, (m, n, k) in enumerate(SHAPES):
        torch.manual_seed(turn)
        x = torch.randn(m, k).bfloat16()
        for layout, backend in layouts:
            b = matrix(*((n, k) if layout == "TN" else (k, n)), fmt, options, **USAGES[direction])
            left = x[:64] if backend == "few_rows" else x
            found = []
            for pairs in (0, 1):
                monkeypatch.setattr(native, "PAIRS", pairs)
                with native_ops.left_to_python(), contextlib.suppress(qtensor.UnsupportedError):
                    found.append(
                        qtensor.gemm(left, b, layout, None, torch.float32, backend=backend)
                    )
            if found:
                same_bits(*found)
                compared += 1
    assert compared >= len(SHAPES)


@pytest.mark.parametrize("rows", [(50, 60, 40, 50), (5, 5, 5, 6, 5, 5, 5, 5, 5), (190, 3, 0, 4)])
@pytest.mark.parametrize("fmt", ["fp8", "fp8_blockwise", "mxfp4", "nvfp4"])
def test_matrices_that_share_the_threads(fmt: str, rows: tuple[int, ...]) -> None:
    """Each is computed whole by one thread, or, where one is most of the work, by all threads."""
    weights = qtensor.quantize(torch.randn(len(rows), 200, 260), fmt)
    x = torch.randn(sum(rows), 260).bfloat16()
    ends = torch.tensor(rows).cumsum(0).to(torch.int32)
    with threads(3):
        got = torch.nn.functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    for i, (part, one) in enumerate(zip(x.split(rows), got.split(rows), strict=True)):
        same_bits(torch.nn.functional.linear(part, weights[i]), one)


@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize(
    ("layout", "of_a", "of_b"),
    [
        ("TN", USAGES["columnwise"], {}),
        ("NN", USAGES["columnwise"], {"axis": 0}),
        ("NT", {"axis": 0}, {"axis": 0}),
    ],
    ids=["TN", "NN", "NT"],
)
def test_factors_of_lines_are_applied_to_sums(
    layout: str, of_a: Options, of_b: Options, count: int | None
) -> None:
    """bfloat16 would round values that hold them, also where the data lie across the sum."""
    m, n, k = SHAPES[0]
    sizes = (k, m) if layout == "NT" else (m, k), (n, k) if layout == "TN" else (k, n)
    lead = () if count is None else (count,)
    a, b = (
        qtensor.quantize(torch.randn(*lead, *size), "fp8_rowwise", **options)
        for size, options in zip(sizes, (of_a, of_b), strict=True)
    )
    assert "chosen" in said(a, b, layout)
    left, right = values(a), values(b)
    left, right = left.mT if layout == "NT" else left, right.mT if layout == "TN" else right
    got = qtensor.gemm(a, b, layout)
    assert_product(got, left, right)
    with native_ops.left_to_python():
        same_bits(qtensor.gemm(a, b, layout), got)


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_a_weight_that_is_a_view(name: str) -> None:
    """Rows, columns and the transpose of a weight; rows of x with a stride."""
    torch.manual_seed(5)
    w, x = matrix(96, 256, name, {}), torch.randn(80, 512)[:, :256].bfloat16()
    whole = qtensor.gemm(x, w, "TN")
    same_bits(x @ w.t(), whole)
    same_bits(torch.nn.functional.linear(x[:, None], w)[:, 0], whole)
    part = qtensor.gemm(x[:, 64:192], w[16:, 64:192], "TN", dtype=torch.float32)
    assert_product(part, values(x[:, 64:192]), values(w[16:, 64:192].clone()).T)


def alone(stack: Any, i: int) -> Any:
    """Matrix number i of a stack as a tensor of its own."""
    return stack[i].clone()


STACKS = [f for f in FORMATS if f[1] not in ({"axis": 0}, {"block_scaling_dim": 2})]
"""Formats of which a matrix of a stack has factors of its own."""
stacks = pytest.mark.parametrize(
    ("fmt", "options"), STACKS, ids=["-".join((f, *map(str, o))) for f, o in STACKS]
)


def in_cpp(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    if native_ops.library() is not None:
        monkeypatch.setitem(FILLS, op, lambda *_: pytest.fail("the Python kernel"))


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("fmt", ["fp8", "fp8_blockwise", "mxfp8"])
def test_a_large_left_operand(fmt: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ decodes it, and turns it, by several threads: the bytes of Python by one."""
    m, n, k = 1100, 48, 520
    sizes = (k, m) if layout == "NT" else (m, k), (n, k) if layout == "TN" else (k, n)
    a, b = (qtensor.quantize(torch.randn(size), fmt, columnwise=True) for size in sizes)
    with native_ops.left_to_python():
        want = by_name(a, b, layout)
    assert want is not None
    in_cpp(monkeypatch, "gemm")
    with threads(3):
        same_bits(qtensor.gemm(a, b, layout, dtype=torch.float32), want)


@pytest.mark.parametrize("rows", [5, 70])
@stacks
def test_batches(fmt: str, options: Options, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix has the bytes that it has alone, in C++ and in Python; x may have any strides."""
    torch.manual_seed(6)
    w = qtensor.quantize(torch.randn(3, 128, 96), fmt, **options)
    x = torch.randn(rows, 3, 96).bfloat16().transpose(0, 1)
    xq = qtensor.quantize(torch.randn(3, 128, 96).bfloat16(), fmt, **options)
    # bfloat16 must hold a left operand.
    lefts = (x,) if "force_pow_2_scales" in options else (x, xq)
    for left in lefts:
        with native_ops.left_to_python():
            want = qtensor.gemm(left, w, "TN", dtype=torch.float32)
            singles = [
                qtensor.gemm(m, alone(w, i), "TN", dtype=torch.float32)
                for i, m in enumerate(x if left is x else [alone(xq, i) for i in range(3)])
            ]
        same_bits(want, torch.stack(singles))
        with monkeypatch.context() as patch:
            in_cpp(patch, "gemm")
            same_bits(qtensor.gemm(left, w, "TN", dtype=torch.float32), want)
        added = qtensor.gemm(left, w, "TN", torch.ones(128), torch.float32)
        same_bits(added, want + 1)


@stacks
def test_groups(fmt: str, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, none and many; each group has the bytes that it has alone."""
    torch.manual_seed(7)
    w = qtensor.quantize(torch.randn(4, 128, 96), fmt, **options)
    x, ends = torch.randn(90, 96).bfloat16(), torch.tensor([5, 5, 80, 90], dtype=torch.int32)
    with native_ops.left_to_python():
        want = torch.nn.functional.grouped_mm(x, w.mT, offs=ends)
        part = qtensor.gemm(x[5:80], alone(w, 2), "TN")
    same_bits(want[5:80], part)
    in_cpp(monkeypatch, "grouped_gemm")
    same_bits(torch.nn.functional.grouped_mm(x, w.mT, offs=ends), want)
    matrices = [operand_of(alone(w, i)) for i in range(4)]
    listed = matrices[0]._replace(buffers=[t for m in matrices for t in m.buffers])
    groups = Groups([5, 0, 75, 10], None, 4)
    same_bits(GROUPED_GEMM(*plain_operand(x), *listed, *groups, "TN", x.dtype, None), want)


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp6", "mxfp4"])
def test_blocks_of_zeros(
    fmt: str, swizzled: bool, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their factors are the smallest that there are; C++ multiplies these operands too."""
    options = {"swizzled": swizzled, "columnwise": True}
    if fmt == "mxfp6":
        options |= {"packed": True, "dtype": "e3m2"}
    values = torch.randn(2, 160, 160)
    values[:, 32:64], values[:, :, 96:130] = 0.0, 0.0
    x = values[0].bfloat16()
    a, b = (qtensor.quantize(v, fmt, **options) for v in values)
    small = b.detach().clone()
    for data in (small._rowwise_data, small._columnwise_data):
        data.view(torch.uint8).fill_(1)
    for left in (x, a) if fmt != "mxfp4" else (x,):
        if layout == "NT" and left is x:
            continue
        assert "chosen" in said(left, b, layout)
        with native_ops.left_to_python():
            want = qtensor.gemm(left, b, layout, dtype=torch.float32)
        assert torch.isfinite(want).all()
        with monkeypatch.context() as patch:
            in_cpp(patch, "gemm")
            same_bits(qtensor.gemm(left, b, layout, dtype=torch.float32), want)
            with pytest.raises(pytest.fail.Exception, match="the Python kernel"):
                qtensor.gemm(left, small, layout, dtype=torch.float32)


@pytest.mark.parametrize("direction", USAGES)
@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("fmt", ["fp8_blockwise", "mxfp8", "mxfp4"])
def test_factors_that_are_too_small(fmt: str, layout: str, direction: str) -> None:
    """A value below the smallest normal bfloat16 number counts, in C++ and in Python."""
    for place in itertools.product((0, -1), repeat=2):
        w = torch.zeros(160, 160)
        w[place] = 2.0**-128
        b = qtensor.quantize(w, fmt, **USAGES[direction])
        x = torch.full((70, 160), 2.0**100).bfloat16()
        for call in (native_ops.left_to_python(), threads(2)):
            with call:
                got = qtensor.gemm(x, b, layout, dtype=torch.float32)
            assert got.count_nonzero() == 70
