"""``norm_quantize`` and ``activation_quantize``: the bytes of the two ops, whoever computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_helpers import Compiled, backends
from float_cases import hurting, strided, without_kernels
from formats import BY_NAME, DTYPES, USAGES, FormatCase, assert_same_bytes, formats, layouts
from native_cases import assert_same_floats, call_of, threads
from torch import Tensor

import qtensor
from qtensor.kernels import table
from qtensor.kernels.cpu import native

ops = torch.ops.qtensor
UNFUSED = {
    "fp8_rowwise": lambda q: q.axis == 0,
    "nvfp4": lambda q: q.row_scaled and q.columnwise,
}
"""Factors that span columns need all rows first: these are left to the two ops."""


def assert_all_same(got: list[Tensor], want: list[Tensor], name: str) -> None:
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        same = assert_same_floats if g.is_floating_point() else assert_same_bytes
        same(g, w, f"{name} output {i}")


def pair_of_norm(x: Tensor, weight: Tensor, settings: Any, q: str, call: Any, keep: bool) -> Any:
    y, mean, rstd = ops.norm(x, weight, None, *settings)
    return [*ops.quantize(y, q, **call), mean, rstd, *[y] * keep]


def pair_of_activation(x: Tensor, kind: str, q: str, call: Any, keep: bool) -> Any:
    y = ops.activation(x, kind)
    return [*ops.quantize(y, q, **call), *[y] * keep]


class Watched:
    """``table.floats_``, with a note of what fused kernels answered."""

    def __init__(self) -> None:
        self.real, self.answers = table.floats_, list[bool]()

    def __call__(self, name: str, *args: Any) -> bool:
        done = self.real(name, *args)
        if name.endswith("_quantize"):
            self.answers.append(done)
        return done


def check(x: Tensor, q: Any, call: Any, keep: bool, seed: int = 0) -> None:
    """Both fused ops on ``x`` against the pairs; a kernel serves them but for ``UNFUSED``."""
    weight = torch.randn(x.shape[-1])
    kind = ("rmsnorm", "layernorm")[seed % 2]
    settings = (kind, 1e-5, seed % 3 == 0, (x.dtype, torch.bfloat16)[seed % 2])
    act = ("swiglu", "gelu", "reglu", "silu", "qgeglu")[seed % 5]
    watched = Watched()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "floats_", watched)
        got = ops.norm_quantize(x, weight, None, *settings, q.canonical, keep=keep, **call)
        want = pair_of_norm(x, weight, settings, q.canonical, call, keep)
        assert_all_same(got, want, q.canonical)
        got = ops.activation_quantize(x, act, q.canonical, keep=keep, **call)
        assert_all_same(got, pair_of_activation(x, act, q.canonical, call, keep), q.canonical)
    fused = not UNFUSED.get(q.format, lambda _: False)(q)
    assert watched.answers == [fused, fused], f"{q.canonical}: who serves has changed"


@layouts
def test_every_layout(case: FormatCase, options: dict[str, Any]) -> None:
    """Each usage; bands that end inside a block, several of them; 1 and 2 threads; y kept or not."""
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
def test_without_native_kernels(case: FormatCase, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = hurting((66, 40), torch.bfloat16), torch.randn(40)
    q, call = case.quantizer(columnwise=True).canonical, call_of(case, {})
    args = (x, weight, weight, "layernorm", 1e-5, True, torch.bfloat16, q)
    want = ops.norm_quantize(*args, keep=True, **call)
    monkeypatch.setattr(native, "library", lambda: "switched off")
    with without_kernels():
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
