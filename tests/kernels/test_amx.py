"""Products by the tiles of AMX: the order of the sums, and when they are chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import amx_oracle as oracle
import pytest
import torch
from few_rows_cases import quantized, same_bits
from few_rows_oracle import weight_parts
from native_cases import threads
from torch import Tensor

import qtensor
from qtensor.kernels.cpu import native
from qtensor.kernels.products import dot_products

pytestmark = pytest.mark.skipif(
    not dot_products.is_available(native.linear_, native.TILES), reason="the CPU has no AMX-BF16"
)

Options = dict[str, Any]
FORMATS: list[tuple[str, Options]] = [
    ("fp8", {}),
    ("fp8_rowwise", {"dtype": "e5m2"}),
    ("fp8_blockwise", {}),
    ("mxfp8", {}),
    ("mxfp6", {"packed": True}),
    ("mxfp4", {"swizzled": True}),
    ("nvfp4", {"row_scaled": True}),
]
SHAPES = ((1, 1, 1), (5, 33, 48), (70, 64, 100), (100, 30, 333), (40, 300, 1100), (140, 36, 2112))
"""(M, N, K) around tiles, groups and bands; in three, x has more rows than the weight, and the
memory of the last one holds tiles.
"""

formats = pytest.mark.parametrize(
    ("fmt", "options"), FORMATS, ids=["-".join((f, *map(str, o))) for f, o in FORMATS]
)


def by_name(x: Tensor, w: Any, bias: Tensor | None = None, layout: str = "TN") -> Tensor:
    return qtensor.gemm(x, w, layout, bias, torch.float32, backend="amx")


def expected(x: Tensor, w: Any, bias: Tensor | None) -> Tensor:
    codes, scales, factors, block, _ = weight_parts(w)
    one = torch.ones(1)
    values = torch.from_numpy(codes)
    if scales is not None:
        wide = torch.from_numpy(scales).repeat_interleave(block, 1)
        values = values * wide[:, : values.shape[1]]
    return oracle.product(x, values, one if factors is None else torch.from_numpy(factors), bias)


@formats
def test_the_order_of_the_sums(fmt: str, options: Options) -> None:
    """Any number of rows, one thread and several, each dtype of the result."""
    for turn, (m, n, k) in enumerate(SHAPES):
        torch.manual_seed(turn)
        w, x = quantized(n, k, fmt, options, 1.0), torch.randn(m, k).bfloat16()
        bias = torch.randn(n) if turn % 2 else None
        want = expected(x, w, bias)
        same_bits(by_name(x, w, bias), want)
        with threads(3):
            same_bits(by_name(x, w, bias), want)
        for dtype in (torch.bfloat16, torch.float16):
            same_bits(qtensor.gemm(x, w, "TN", bias, dtype, backend="amx"), want.to(dtype))


@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("fmt", ["fp8", "fp8_blockwise", "mxfp6", "nvfp4"])
def test_codes_that_lie_across_the_sums(fmt: str, usage: str) -> None:
    """Bands of many rows and of few. Factors of the whole weight are powers of two here."""
    side = {"rowwise": usage == "rowwise", "columnwise": usage == "columnwise"}
    for m, n, k in ((5, 33, 4200), (70, 540, 1100)):
        torch.manual_seed(m)
        dense, x = torch.randn(k, n), torch.randn(m, k).bfloat16()
        dense[0, 0] = {"fp8": 448 * 2.0**-6, "nvfp4": 6 * 448 * 2.0**-8}.get(fmt, 1.0)
        w = qtensor.quantize(dense, fmt, **side)
        values = w.dequantize(dtype=torch.float32).T.contiguous()
        want = oracle.sums(x.float().numpy(), values.numpy())
        same_bits(by_name(x, w, layout="NN"), torch.from_numpy(want))


@pytest.mark.parametrize("k", [96, 5000])
def test_a_row_does_not_depend_on_the_others(k: int) -> None:
    """Not on its place, nor on whether tiles of x stand on the left or on the right."""
    torch.manual_seed(0)
    w, x = quantized(100, k, "mxfp8", {}), torch.randn(300, k).bfloat16()
    whole = by_name(x, w)
    for first, end in ((0, 1), (3, 40), (32, 64), (17, 160), (299, 300)):
        same_bits(by_name(x[first:end], w), whole[first:end])
    same_bits(by_name(x.repeat(1, 2)[:, k:], w), whole)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x)
    same_bits(by_name(shifted, w), whole)


def test_values_that_are_not_finite() -> None:
    """They stay in their row and column."""
    x, w = torch.ones(40, 64).bfloat16(), qtensor.quantize(torch.ones(50, 64), "mxfp8")
    x[3, 5], x[20, 40] = torch.inf, torch.nan
    got = by_name(x, w)
    assert got[3].isposinf().all()
    assert got[20].isnan().all()
    rest = [i for i in range(40) if i not in (3, 20)]
    assert (got[rest] == 64).all()


CHOSEN = """
import torch
import qtensor
from qtensor.library import native_ops

torch.manual_seed(0)
w = qtensor.quantize(torch.randn(3, 128, 96), "nvfp4")
x = torch.randn(3, 40, 96).bfloat16()

def named(x, w, backend="amx"):
    return qtensor.gemm(x, w, "TN", backend=backend)

one = torch.nn.functional.linear(x[0], w[0])  # in C++
assert torch.equal(one, named(x[0], w[0].clone()))
with native_ops.left_to_python():
    assert torch.equal(torch.nn.functional.linear(x[0], w[0]), one)
compiled = torch.compile(torch.nn.functional.linear, backend="aot_eager")
assert torch.equal(compiled(x[0], w[0]), one)
stack = qtensor.gemm(x, w, "TN")
assert torch.equal(stack[0], one) and torch.equal(stack[2], named(x[2], w[2].clone()))
ends = torch.tensor([2, 2, 40], dtype=torch.int32)
groups = torch.nn.functional.grouped_mm(x[0], w.mT, offs=ends)
assert torch.equal(groups[2:], named(x[0, 2:], w[2].clone()))
assert torch.equal(groups[:2], named(x[0, :2], w[0].clone(), "few_rows"))
for rows, backend in ((4, "few_rows"), (5, "amx"), (40, "amx")):
    assert qtensor.explain(x[0, :rows], w[0].clone()).backend == backend
both = [qtensor.quantize(torch.randn(64, 96), "mxfp8") for _ in range(2)]
assert qtensor.explain(*both).backend == "amx"
assert torch.equal(qtensor.gemm(*both, "TN"), named(*both))
small = torch.full((70, 96), 2.0**100).bfloat16()
tiny = torch.zeros(128, 96)
tiny[5, 7] = 2.0**-128
assert torch.nn.functional.linear(small, qtensor.quantize(tiny, "mxfp8")).count_nonzero() == 70
"""


def run(*arguments: str) -> None:
    environment = os.environ | {"QTENSOR_AMX": "1"}
    done = subprocess.run(
        (sys.executable, *arguments), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_products_that_choose_it() -> None:
    """In C++, in Python and compiled: more than four rows of bfloat16."""
    run("-c", CHOSEN)


def test_qtensor_amx_0() -> None:
    """The products of this process have the bytes that they have without AMX."""
    x, w = torch.randn(20, 64).bfloat16(), qtensor.quantize(torch.randn(32, 64), "fp8")
    why = qtensor.explain(x, w)
    assert why.backend == "few_rows"
    assert dict(why.reasons)["amx"] == "possible in bfloat16: QTENSOR_AMX=0"
    same_bits(torch.nn.functional.linear(x, w), qtensor.gemm(x, w, "TN", backend="few_rows"))


@pytest.mark.nightly(reason="the tests of another file again, in a process of its own")
def test_all_that_dot_products_serve() -> None:
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_dot_products.py")
