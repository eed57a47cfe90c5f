"""A plain input times a quantized weight is one op with few arguments, served in C++."""

from __future__ import annotations

import itertools

import pytest
import torch
from compile_helpers import Compiled
from formats import DTYPES, FormatCase, formats
from native_cases import threads
from torch.nn import functional as F

import qtensor
from qtensor.core.operand import Operand, plain_operand
from qtensor.kernels.cpu import native
from qtensor.kernels.products.problem import Pair
from qtensor.library import native_ops
from qtensor.library.define import FILLS
from qtensor.library.gemm import GemmArgs
from qtensor.storage.ops.products import gemm_operands

N, K = 48, 64


@pytest.fixture
def seen(monkeypatch):
    """Names of the products that Python kernels compute."""
    names: list[str] = []
    gemm = FILLS["gemm"]

    def note(name, fill):
        def run(out, args):
            names.append(name)
            fill(out, args)

        return run

    def as_gemm(out, args):
        x, weight, quantizer, n, bias, layout = args
        shape = (n, *x.shape[-1:]) if layout == "TN" else (*x.shape[-1:], n)
        pair = Pair(plain_operand(x), Operand(weight, quantizer, shape))
        gemm(out, GemmArgs(pair, layout, x.dtype, bias))

    monkeypatch.setitem(FILLS, "gemm", note("gemm", gemm))
    monkeypatch.setitem(FILLS, "weight_gemm", note("weight_gemm", as_gemm))
    with native_ops.left_to_python():
        yield names


def weight_of(case: FormatCase, **usage: bool):
    generator = torch.Generator().manual_seed(3)
    return case.quantize(torch.randn(N, K, generator=generator).bfloat16(), **usage)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@formats
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("lead", [(1,), (2,), (1, 3)], ids=str)
def test_linear_has_the_bytes_of_gemm(case, bias, lead):
    q, x = weight_of(case), torch.randn(*lead, K).bfloat16()
    added = torch.randn(N).bfloat16() if bias else None
    wanted = gemm_operands(x, q, "TN", added)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            same(F.linear(x, q, added), wanted)


@formats
def test_which_op_serves(case, seen):
    """A quantized input needs the arguments of gemm."""
    q, x = weight_of(case), torch.randn(2, K).bfloat16()
    with torch.no_grad():
        F.linear(x, q)
        F.linear(x, q, torch.ones(N).bfloat16())
        x @ q.t()
        torch.randn(2, N).bfloat16() @ weight_of(case, columnwise=True)
        torch.randn(2, N).bfloat16() @ q
        assert seen == ["weight_gemm"] * 5
        seen.clear()
        F.linear(case.quantize(x), q)
        qtensor.gemm(x, q, "TN")
        assert seen == ["gemm"] * 2


def test_sizes_that_do_not_meet():
    q = qtensor.quantize(torch.randn(N, K), "mxfp8")
    with torch.inference_mode(), pytest.raises(qtensor.QTensorError, match="must be equal"):
        F.linear(torch.randn(2, K + 1), q)


@formats
def test_few_rows_of_a_large_weight(case, monkeypatch):
    """C++ serves weights for which the kernels use all threads."""
    if native_ops.library() is None:
        pytest.skip(reason="no compiler for the C++ kernels")
    n, k = native.ONE_THREAD // 256 + 16, 256
    calls = itertools.cycle(itertools.product(((1,), (3,), (2, 1)), (None, *DTYPES), DTYPES))
    for options, (lead, bias, dtype) in zip(case.each_option(), calls, strict=False):
        q, x = case.quantize(torch.randn(n, k), **options), torch.randn(*lead, k, dtype=dtype)
        added = None if bias is None else torch.randn(n, dtype=bias)
        with torch.inference_mode():
            with native_ops.left_to_python():
                wanted = F.linear(x, q, added)
            for count in (1, 3):
                with threads(count), monkeypatch.context() as patch:
                    if options.get("axis") != 0:  # of another backend
                        patch.setitem(FILLS, "weight_gemm", lambda *_: pytest.fail("Python"))
                    same(F.linear(x, q, added), wanted)


def test_compiled_code_calls_the_op(seen):
    layers = torch.nn.Sequential(*(torch.nn.Linear(K, K, dtype=torch.bfloat16) for _ in range(3)))
    for layer in layers:
        quantized = qtensor.quantize(layer.weight.detach(), "mxfp8")
        layer.requires_grad_(False).weight = torch.nn.Parameter(quantized, requires_grad=False)
    compiled = Compiled(layers)
    with torch.no_grad():
        for rows, graphs in ((2, 1), (7, 2), (9, 2), (1, 3)):
            x = torch.randn(rows, K).bfloat16()
            seen.clear()
            found = compiled(x)
            assert seen == ["weight_gemm"] * 3
            same(found, layers(x))
            compiled.check_graphs(graphs)
