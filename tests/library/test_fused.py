"""``norm_quantize`` and ``activation_quantize``: the bytes of the two ops, whoever computes
them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_helpers import Compiled, backends
from float_cases import hurting, strided, without_kernels
from formats import BY_NAME, DTYPES, USAGES, FormatCase, formats, layouts
from fused_cases import assert_all_same, check, pair_of_activation, pair_of_norm
from native_cases import call_of, switched_off, threads
from torch import Tensor

import qtensor

ops = torch.ops.qtensor


@layouts
def test_every_layout(case: FormatCase, options: dict[str, Any]) -> None:
    """Each usage; bands that end inside a block, several of them; 1 and 2 threads; y kept or
    not.
    """
    for turn, (rowwise, columnwise) in enumerate(USAGES):
        q = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
        for i, shape in enumerate([(37, 84), (300, 70), (133, 1030)]):
            seed = turn + i
            dtype = DTYPES[seed % 3]
            x = hurting(shape, dtype, seed) if i < 2 else torch.randn(shape).to(dtype)
            with threads(1 + seed % 2):
                check(x, q, call_of(case, options), seed % 2 == 0, seed)


@formats
def test_every_option(case: FormatCase) -> None:
    for turn, options in enumerate(case.each_option()):
        q = case.quantizer(columnwise=True, **options)
        check(hurting((70, 130), DTYPES[turn % 3], turn), q, call_of(case, options), False, turn)


@formats
def test_shapes_and_strides(case: FormatCase) -> None:
    q = case.quantizer(columnwise=True)
    for turn, shape in enumerate([(2,), (1, 34), (2, 3, 40), (2, 1, 3, 66)]):
        check(torch.randn(shape), q, call_of(case, {}), turn % 2 == 0, turn)
    for view in strided(torch.randn(40, 70).half()):
        check(view, q, call_of(case, {}), True)
    x, call = torch.empty(0, 8), call_of(case, {})
    got = ops.norm_quantize(
        x, None, None, "rmsnorm", 1e-5, False, x.dtype, q.canonical, keep=True, **call
    )
    settings = ("rmsnorm", 1e-5, False, x.dtype)
    assert_all_same(got, pair_of_norm(x, None, settings, q.canonical, call, True), q.canonical)
    got = ops.activation_quantize(x, "glu", q.canonical, **call)
    assert_all_same(got, pair_of_activation(x, "glu", q.canonical, call, False), q.canonical)


@pytest.mark.parametrize("name", ["fp8", "fp8_rowwise", "nvfp4"])
def test_given_maxima(name: str) -> None:
    q = BY_NAME[name].quantizer(columnwise=True)
    x = torch.randn(140, 96)
    y = ops.activation(x, "silu")
    maxima = [a * 1.5 for a in q.amax(y)]
    got = ops.activation_quantize(x, "silu", q.canonical, amax=maxima)
    assert_all_same(got, ops.quantize(y, q.canonical, amax=maxima), name)


def test_the_norm_is_rounded_to_its_dtype_first() -> None:
    x, q = torch.randn(64, 256), qtensor.quantizer("mxfp4").canonical
    args = (x, None, None, "rmsnorm", 1e-5, False)
    narrow, wide = (ops.norm_quantize(*args, d, q)[0] for d in (torch.bfloat16, torch.float32))
    assert not torch.equal(narrow, wide)


@formats
def test_without_native_kernels(case: FormatCase) -> None:
    x, weight = hurting((66, 40), torch.bfloat16), torch.randn(40)
    q, call = case.quantizer(columnwise=True).canonical, call_of(case, {})
    args = (x, weight, weight, "layernorm", 1e-5, True, torch.bfloat16, q)
    want = ops.norm_quantize(*args, keep=True, **call)
    with switched_off(), without_kernels():
        assert_all_same(ops.norm_quantize(*args, keep=True, **call), want, q)


def test_large_tensors() -> None:
    """Outputs that go around the cache, in several bands a thread."""
    x = torch.randn((8 << 20) // 2048 + 7, 4096).bfloat16()
    for name in ("mxfp8", "nvfp4", "fp8"):
        q = qtensor.quantizer(name, columnwise=True).canonical
        got = ops.activation_quantize(x, "swiglu", q)
        assert_all_same(got, pair_of_activation(x, "swiglu", q, {}, False), q)


@backends
@pytest.mark.parametrize("name", ["mxfp8", "fp8_delayed"])
def test_compiled_bytes(name: str, backend: str, fresh_dynamo: None) -> None:
    q, call = BY_NAME[name].quantizer(columnwise=True).canonical, call_of(name, {})

    def step(x: Tensor, weight: Tensor) -> Any:
        dtype = torch.bfloat16
        norm = ops.norm_quantize(x * 2, weight, None, "rmsnorm", 1e-5, False, dtype, q, **call)
        return norm, ops.activation_quantize(x * 2, "geglu", q, keep=True, **call)

    compiled = Compiled(step, backend, dynamic=True)
    for rows in (40, 7, 130):
        x, weight = torch.randn(rows, 136), torch.randn(136)
        for got, want in zip(compiled(x, weight), step(x, weight), strict=True):
            assert_all_same(got, want, name)
    compiled.check_graphs(1)


def test_refusals() -> None:
    x = torch.zeros(4, 9)
    with pytest.raises(qtensor.QTensorError, match="activation_quantize: the last dim of glu"):
        ops.activation_quantize(x, "glu", "mxfp8")
    with pytest.raises(qtensor.QTensorError, match="norm_quantize: kind must be layernorm"):
        ops.norm_quantize(x, None, None, "norm", 1e-5, False, x.dtype, "mxfp8")
    with pytest.raises(qtensor.QTensorError, match="the format must be a registered one"):
        ops.activation_quantize(x, "gelu", "int3")
    with pytest.raises(qtensor.QTensorError, match=r"fp8_delayed.*scale"):
        ops.activation_quantize(x, "gelu", "fp8_delayed")
