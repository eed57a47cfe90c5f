"""``F.scaled_grouped_mm`` of quantized tensors on a CPU: each group has the bytes of ``gemm``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_helpers import Compiled
from formats import BY_NAME, rand
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

import qtensor
from qtensor.core.errors import QTensorError
from qtensor.library import scaled_grouped
from qtensor.library.define import FILLS

NAMES = ["fp8_rowwise", "mxfp8", "mxfp4", "nvfp4"]
names = pytest.mark.parametrize("name", NAMES)
WIDE = pytest.mark.nightly(reason="compiles for a second; one and two factors do")
GROUPS = [[0, 37, 200], [64, 64, 256], [256, 256, 256], [3, 131, 256]]
N, K = 48, 192
grouped = F.scaled_grouped_mm


def ends(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def quantize(name: str, *shape: int, seed: int = 0, **options: Any) -> Any:
    return BY_NAME[name].quantize(rand(*shape, seed=seed).bfloat16(), **options)


def pieces(t: Any, offs: list[int], dim: int) -> list[Any]:
    return [t.narrow(dim, a, b - a) for a, b in zip([0, *offs], offs, strict=False)]


def by_gemm(lefts: list[Any], rights: list[Any]) -> list[Tensor]:
    """The products of groups, each by gemm; of an empty contraction, zeros."""
    return [
        qtensor.gemm(a, b, "TN", dtype=torch.bfloat16)
        if a.shape[-1]
        else torch.zeros(a.shape[0], b.shape[0], dtype=torch.bfloat16)
        for a, b in zip(lefts, rights, strict=True)
    ]


@names
@pytest.mark.parametrize("offs", GROUPS, ids=str)
@pytest.mark.parametrize("swizzled", [False, True])
def test_groups_of_rows(name: str, offs: list[int], swizzled: bool) -> None:
    option = {"swizzled": True} if swizzled and name != "fp8_rowwise" else {}
    x, w = quantize(name, 256, K, **option), quantize(name, 3, N, K, seed=1, **option)
    a, b = x.scaled_grouped_mm_args("a", offs=ends(offs)), w.scaled_grouped_mm_args("b")
    got = grouped(**a, **b, offs=ends(offs))
    plain = quantize(name, 256, K), quantize(name, 3, N, K, seed=1)
    want = by_gemm(pieces(plain[0], offs, 0), list(plain[1]))
    behind = torch.zeros(256 - offs[-1], N, dtype=torch.bfloat16)
    assert torch.equal(got, torch.cat([*want, behind]))
    codes = x.scaled_grouped_mm_args("a", offs=ends(offs), codes=True)
    assert torch.equal(grouped(**codes, **b, offs=ends(offs)), got)


@names
@pytest.mark.parametrize("offs", [[64, 64, 256], [32, 160, 192]], ids=str)
def test_groups_along_the_contraction(name: str, offs: list[int]) -> None:
    a, b = quantize(name, 80, 256), quantize(name, N, 256, seed=1)
    options = {"offs": ends(offs), "along_k": True}
    left, right = a.scaled_grouped_mm_args("a", **options), b.scaled_grouped_mm_args("b", **options)
    got = grouped(**left, **right, offs=ends(offs))
    want = by_gemm(pieces(a, offs, 1), pieces(b, offs, 1))
    assert torch.equal(got, torch.stack(want))


def test_stacks() -> None:
    x, w = quantize("fp8_rowwise", 3, 40, K), quantize("fp8_rowwise", 3, N, K, seed=1)
    got = grouped(**x.scaled_grouped_mm_args("a"), **w.scaled_grouped_mm_args("b"))
    assert torch.equal(got, torch.stack(by_gemm(list(x), list(w))))
    offs = [16, 16, 30]
    rows = quantize("fp8_rowwise", N, K, seed=1)
    b = rows.scaled_grouped_mm_args("b", offs=ends(offs))
    got = grouped(**x.scaled_grouped_mm_args("a"), **b, offs=ends(offs))
    want = torch.cat(by_gemm(list(x), pieces(rows, offs, 0)), 1)
    assert torch.equal(got[:, :30], want)
    assert got.shape == (40, N)
    assert not got[:, 30:].any()


@pytest.mark.parametrize(
    "name", [n if n in ("mxfp8", "nvfp4") else pytest.param(n, marks=WIDE) for n in NAMES]
)
def test_compiled_and_fake(name: str) -> None:
    def multiply(x: Any, w: Any, offs: Tensor, args: dict[str, Any]) -> Tensor:
        return grouped(x, w.mT, **args, offs=offs) + 1

    w, compiled = quantize(name, 3, N, K, seed=1), Compiled(multiply, dynamic=True)
    for rows, offs in ((256, [0, 37, 200]), (96, [32, 64, 96])):
        x = quantize(name, rows, K)
        args = x.scaled_grouped_mm_args("a", offs=ends(offs)) | w.scaled_grouped_mm_args("b")
        del args["mat_a"], args["mat_b"]
        assert torch.equal(compiled(x, w, ends(offs), args), multiply(x, w, ends(offs), args))
    with FakeTensorMode():
        for device in ("cpu", "meta"):
            x = BY_NAME[name].quantize(torch.empty(96, K, device=device))
            w = BY_NAME[name].quantize(torch.empty(3, N, K, device=device))
            offs = torch.empty(3, dtype=torch.int32, device=device)
            a = x.scaled_grouped_mm_args("a", offs=offs)
            y = grouped(**a, **w.scaled_grouped_mm_args("b"), offs=offs)
            assert (y.shape, y.dtype, y.device.type) == ((96, N), torch.bfloat16, device)


@names
def test_a_gpu_gets_the_plain_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the op passes to torch's own function on a CUDA device."""
    op = "scaled_grouped_gemm"
    kept: list[Any] = []
    fill: Callable[..., None] = FILLS[op]
    monkeypatch.setitem(FILLS, op, lambda out, args: kept.append(args) or fill(out, args))
    given: dict[str, Any] = {}

    def stand_in(*args: Any, offs: Tensor, output_dtype: torch.dtype) -> str:
        given.update(enumerate(args))
        given.update(offs=offs, output_dtype=output_dtype)
        return "the result of torch"

    x, w, offs = quantize(name, 256, K), quantize(name, 3, N, K, seed=1), ends([0, 37, 256])
    a, b = (
        t.scaled_grouped_mm_args(side, offs=where, codes=True)
        for t, side, where in ((x, "a", offs), (w, "b", None))
    )
    grouped(**x.scaled_grouped_mm_args("a", offs=offs), **w.scaled_grouped_mm_args("b"), offs=offs)
    monkeypatch.setattr(F, "scaled_grouped_mm", stand_in)
    assert scaled_grouped._by_torch(kept[0]) == "the result of torch"
    # The order of torch's positional arguments.
    wanted = [a["mat_a"], b["mat_b"], a["scale_a"], a["scale_recipe_a"], b["scale_b"]]
    wanted += [b["scale_recipe_b"], a["swizzle_a"], b["swizzle_b"]]
    for i, value in enumerate(wanted):
        same(given[i], value)
    assert given["offs"] is offs
    assert given["output_dtype"] == torch.bfloat16


def same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        kind = {4: torch.int32, 1: torch.uint8}[wanted.element_size()]
        assert torch.equal(got.view(kind), wanted.view(kind))
    elif isinstance(wanted, list):
        assert len(got) == len(wanted)
        for pair in zip(got, wanted, strict=True):
            same(*pair)
    else:
        assert got == wanted


# ---- errors


@functools.cache
def arguments(name: str) -> dict[str, Any]:
    x, w, offs = quantize(name, 256, K), quantize(name, 3, N, K, seed=1), ends([0, 37, 256])
    a = x.scaled_grouped_mm_args("a", offs=offs)
    return a | w.scaled_grouped_mm_args("b") | {"offs": offs}


WRONG = [
    ("mxfp8", {"offs": None}, r"offs must be int32 \(3,\); got None"),
    ("mxfp8", {"offs": torch.tensor([1, 2, 3])}, "offs must be int32"),
    ("mxfp8", {"offs": ends([1, 2])}, r"offs must be int32 \(3,\); got torch.int32 \(2,\)"),
    ("mxfp8", {"offs": ends([5, 3, 256])}, "offs must ascend from 0 to at most 256"),
    ("mxfp8", {"offs": ends([5, 30, 257])}, "offs must ascend from 0 to at most 256"),
    ("mxfp8", {"output_dtype": torch.float32}, "output_dtype must be torch.bfloat16"),
    ("mxfp8", {"bias": torch.ones(N).bfloat16()}, "there is no bias"),
    ("mxfp8", {"swizzle_a": SwizzleType.NO_SWIZZLE}, "scale_a must be in SWIZZLE_32_4_4"),
    ("mxfp8", {"scale_recipe_a": ScalingType.RowWise, "scale_recipe_b": ScalingType.RowWise},
     "whose recipe is BlockWise1x32; got RowWise"),
    ("fp8_rowwise", {"scale_a": torch.ones(256, 1)}, r"scale_a must be .* of shape \(256,\)"),
    ("fp8_rowwise", {"scale_b": torch.ones(N)}, r"scale_b must be .* of shape \(3, 48\)"),
    ("nvfp4", {"use_fast_accum": True}, "use_fast_accum is for FP8 codes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=lambda case: str(case)[:24])
def test_wrong_arguments(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(QTensorError, match=message):
        grouped(**arguments(name) | change)


def test_factors_that_end_too_early() -> None:
    args = arguments("mxfp8")
    short = args["scale_a"][0][:256].contiguous()
    with pytest.raises(QTensorError, match="the factors must hold those of every group"):
        grouped(**args | {"scale_a": short})
    args = arguments("nvfp4")
    factors = [args["scale_a"][0], torch.ones(2)]
    with pytest.raises(QTensorError, match=r"scale_a\[1\] must be .* with one entry a group"):
        grouped(**args | {"scale_a": factors})


def test_what_torch_does_not_multiply_by_groups() -> None:
    x, w = quantize("fp8", 3, 40, K), quantize("fp8", 3, N, K)
    with pytest.raises(QTensorError, match="groups have the recipes RowWise, BlockWise1x32"):
        x.scaled_grouped_mm_args("a")
    with pytest.raises(QTensorError, match="groups have the recipes RowWise"):
        grouped(
            x, w.mT, torch.ones(1), ScalingType.TensorWise, torch.ones(1), ScalingType.TensorWise
        )
    x, w = quantize("mxfp8", 3, 40, K), quantize("mxfp8", 3, N, K)
    with pytest.raises(QTensorError, match="a stack as mat_a takes RowWise"):
        grouped(**x.scaled_grouped_mm_args("a"), **w.scaled_grouped_mm_args("b"))
    with pytest.raises(QTensorError, match="a matrix with offs, or a stack without"):
        x.scaled_grouped_mm_args("a", offs=ends([1, 2, 3]))
    rows = quantize("mxfp8", 80, 256)
    for offs in ([40, 80], torch.tensor([40, 80])):
        with pytest.raises(QTensorError, match=r"offs must be an int32 tensor; got (list|torch)"):
            rows.scaled_grouped_mm_args("a", offs=offs)
    for wrong in ([40, 81], [50, 40], [-1, 80]):
        with pytest.raises(QTensorError, match="offs must ascend from 0 to at most 80; got"):
            rows.scaled_grouped_mm_args("a", offs=ends(wrong))
    with pytest.raises(QTensorError, match=r"must have multiples of 32 values; got .*48"):
        rows.scaled_grouped_mm_args("a", offs=ends([48, 256]), along_k=True)
