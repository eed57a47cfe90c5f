"""Products: the gemm op and every aten matmul against a float64 product of the decoded operands.

The bound is that of float32 accumulation: a sum of K products is off by at most gamma(K) * sum
|a||b| with gamma(n) = n * u / (1 - n * u), u = 2**-24. Four more roundings are added: one of each
decoded operand (the oracle sees the rounded value where the factor is applied at the end instead),
the product of the factors, the bias. The cast of the result adds its own half ulp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from formats import (
    BY_NAME,
    FORMATS,
    FormatCase,
    assert_same_bytes,
    assert_same_tensor,
    formats,
    layouts,
    rand,
    snapshot,
)

import qtensor
from qtensor.library.gemm import GEMM
from qtensor.storage.ops.products import operand_of

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
HALF_ULP = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float64: 0.0,
}
LAYOUTS = ("TN", "NN", "NT")
M, N, K = 24, 40, 96


def values(t: Any, *, columnwise: bool = False) -> torch.Tensor:
    """Decoded operand in float64; ``columnwise`` reads that direction where it is there."""
    if not isinstance(t, qtensor.QuantizedTensorStorage):
        return t.detach().double()
    if columnwise and t.get_usages()["columnwise"] and t.get_usages()["rowwise"]:
        t = t.detach()
        t.update_usage(rowwise=False)
    return t.dequantize(torch.float32).detach().double()


def assert_product(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: Any = None) -> None:
    """``got`` is ``a @ b + bias`` within the bound of the module's docstring; operands are
    float64.
    """
    want, size = a @ b, a.abs() @ b.abs()
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    steps = a.shape[-1] + 4
    gamma = steps * 2.0**-24 / (1 - steps * 2.0**-24)
    bound = gamma * size
    bound = (
        bound + HALF_ULP[got.dtype] * (want.abs() + bound) + torch.finfo(got.dtype).smallest_normal
    )
    assert got.shape == want.shape
    error = (got.double() - want).abs()
    assert (error <= bound).all(), f"off by {(error / bound).max().item():.3g} bounds"


def test_the_bound_notices_a_wrong_product() -> None:
    a, b = rand(M, K).double(), rand(K, N, seed=1).double()
    assert_product((a @ b).float(), a, b)
    with pytest.raises(AssertionError, match="bounds"):
        assert_product(((a @ b) * (1 + 2e-5)).float(), a, b)
    with pytest.raises(AssertionError, match="bounds"):
        assert_product((a @ b).float(), a, b, torch.ones(N) * 1e-3)


def operands(
    case: FormatCase, layout: str, other: FormatCase | None = None, **options: Any
) -> tuple[Any, Any]:
    """(a, b) with the usage that ``layout`` reads."""
    a_shape = (K, M) if layout == "NT" else (M, K)
    b_shape = (N, K) if layout == "TN" else (K, N)
    usage = [{"rowwise": not c, "columnwise": c} for c in (layout == "NT", layout != "TN")]
    a = case.quantize(rand(*a_shape), **usage[0], **options)
    b = (other or case).quantize(
        rand(*b_shape, seed=1), **usage[1], **(options if other is None else {})
    )
    return a, b


def oriented(a: Any, b: Any, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = values(a, columnwise=layout == "NT"), values(b, columnwise=layout != "TN")
    return (left.mT if layout == "NT" else left), (right.mT if layout == "TN" else right)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
@layouts
def test_gemm(case: FormatCase, options: dict, layout: str, dtype: torch.dtype) -> None:
    a, b = operands(case, layout, **options)
    before = snapshot(a), snapshot(b)
    bias = rand(N, seed=2, dtype=dtype)
    assert_product(qtensor.gemm(a, b, layout, dtype=dtype), *oriented(a, b, layout))
    assert_product(qtensor.gemm(a, b, layout, bias, dtype), *oriented(a, b, layout), bias)
    for t, old in zip((a, b), before, strict=True):
        assert_same_tensor(t, old)


@pytest.mark.parametrize("layout", LAYOUTS)
@formats
def test_gemm_forms_agree(case: FormatCase, layout: str) -> None:
    """Tensor or storage, one direction or both, function or op: the same bytes."""
    a, b = operands(case, layout)
    want = qtensor.gemm(a, b, layout)
    bare = [t.quantizer.assemble(t.buffers(), t.shape, t.dtype, bare=True) for t in (a, b)]
    assert_same_bytes(qtensor.gemm(*bare, layout), want)
    both = [case.quantize(x, columnwise=True) for x in (rand(*a.shape), rand(*b.shape, seed=1))]
    assert_same_bytes(qtensor.gemm(*both, layout), want)
    flat = [item for t in (a, b) for item in (t.buffers(), t.quantizer.canonical, t.shape)]
    assert_same_bytes(GEMM(*flat, layout, torch.float32), want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", FORMATS, ids=lambda c: f"with-{c.name}")
@formats
def test_gemm_of_two_formats(case: FormatCase, other: FormatCase, layout: str) -> None:
    a, b = operands(case, layout, other)
    assert_product(qtensor.gemm(a, b, layout), *oriented(a, b, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@formats
def test_gemm_with_one_plain_operand(case: FormatCase, layout: str) -> None:
    a, b = operands(case, layout)
    for left, right in ((a, values(b).float()), (values(a).bfloat16(), b)):
        got = qtensor.gemm(left, right, layout)
        assert got.dtype == left.dtype
        assert_product(got, *oriented(left, right, layout))


X_SHAPES = [(K,), (M, K), (2, 5, K), (2, 3, 4, K), (0, K), (1, K)]


@pytest.mark.parametrize("grad", ["no_grad", "grad", "inference"])
@pytest.mark.parametrize("shape", X_SHAPES, ids=str)
@formats
def test_linear(case: FormatCase, shape: tuple[int, ...], grad: str) -> None:
    """Weight-only and both quantized, with and without bias; the same bytes in every autograd
    mode.
    """
    mode = {"no_grad": torch.no_grad, "grad": torch.enable_grad, "inference": torch.inference_mode}[
        grad
    ]
    for columnwise in (False, True):
        weight = case.quantize(rand(N, K, seed=1), columnwise=columnwise)
        with mode():
            for x in (
                rand(*shape),
                rand(*shape, dtype=torch.bfloat16),
                case.quantize(rand(*shape)),
            ):
                for bias in (None, rand(N, seed=2)):
                    bias = bias if bias is None else bias.to(x.dtype)
                    got = F.linear(x, weight, bias)
                    assert type(got) is torch.Tensor
                    assert got.dtype == x.dtype
                    want = values(x).reshape(-1, K)
                    assert_product(got.reshape(-1, N), want, values(weight).mT, bias)
                    assert got.shape == (*shape[:-1], N)


@formats
def test_linear_takes_strided_inputs_and_quantized_bias(case: FormatCase) -> None:
    weight = case.quantize(rand(N, K, seed=1))
    for x in (
        rand(K, M).t(),
        rand(M, 2 * K)[:, ::2],
        rand(K).expand(M, K),
        rand(3, K, 5).transpose(1, 2),
    ):
        assert_product(F.linear(x, weight), values(x), values(weight).mT)
    bias = case.quantize(rand(N, seed=2))
    assert_product(
        F.linear(rand(M, K), weight, bias), rand(M, K).double(), values(weight).mT, values(bias)
    )


@formats
def test_a_quantized_input_is_used_as_it_is(case: FormatCase) -> None:
    """A49: not dequantized and quantized again."""
    x, weight = case.quantize(rand(M, K)), case.quantize(rand(N, K, seed=1))
    assert_same_bytes(F.linear(x, weight), qtensor.gemm(x, weight, "TN"))
    assert_product(F.linear(x, weight), values(x), values(weight).mT)


@formats
def test_matmuls_on_either_side(case: FormatCase) -> None:
    q, x = case.quantize(rand(M, K)), rand(K, N, seed=1)
    left, right = rand(7, M, seed=2), rand(3, 7, M, seed=3)
    bias = rand(N, seed=4)
    for got, a, b in (
        (torch.mm(q, x), q, x),
        (q @ x, q, x),
        (torch.matmul(q, x), q, x),
        (torch.mm(left, q), left, q),
        (left @ q, left, q),
        (right @ q, right, q),
        (torch.mm(rand(5, K), q.t()), rand(5, K), values(q).mT),
        (
            q @ case.quantize(x, columnwise=True),
            q,
            values(case.quantize(x, columnwise=True), columnwise=True),
        ),
    ):
        assert type(got) is torch.Tensor
        assert_product(got, values(a), values(b))
    assert_product((q @ x[:, 0])[:, None], values(q), values(x[:, :1]))
    assert_product((left[0] @ q)[None], values(left[:1]), values(q))
    assert_product(torch.addmm(bias, q, x), values(q), values(x), bias)
    assert_product(torch.addmm(bias, q, x, alpha=0.5, beta=2), values(q) * 0.5, values(x), bias * 2)
    assert_product(torch.addmm(bias, q, x, beta=0), values(q), values(x))
    nan = torch.full((N,), torch.nan)
    assert_product(torch.addmm(nan, q, x, beta=0), values(q), values(x))


@formats
def test_batched_matmuls(case: FormatCase) -> None:
    q, x = case.quantize(rand(3, M, K)), rand(3, K, N, seed=1)
    left, bias = rand(3, 7, M, seed=2), rand(3, M, N, seed=3)
    assert_product(torch.bmm(q, x), values(q), values(x))
    assert_product(torch.matmul(q, x), values(q), values(x))
    assert_product(q @ x[0], values(q), values(x[0]))
    assert_product(torch.bmm(left, q), values(left), values(q))
    assert_product(left @ q, values(left), values(q))
    assert_product(torch.baddbmm(bias, q, x), values(q), values(x), bias)
    assert_product(
        torch.baddbmm(bias, q, x, alpha=2, beta=0.5), values(q) * 2, values(x), bias * 0.5
    )
    loop = torch.stack([torch.mm(expert, one) for expert, one in zip(q.unbind(0), x, strict=True)])
    assert_product(loop, values(q), values(x))


@formats
def test_linear_backward(case: FormatCase) -> None:
    """Gradients of x, of a quantized weight and of the bias: plain, by the values that the forward
    used.
    """
    weight = torch.nn.Parameter(case.quantize(rand(N, K, seed=1), columnwise=False))
    bias, x = torch.nn.Parameter(rand(N, seed=2)), rand(2, 5, K).requires_grad_()
    grad = rand(2, 5, N, seed=3)
    before = snapshot(weight.detach())
    F.linear(x, weight, bias).backward(grad)
    flat = grad.reshape(-1, N).double()
    assert type(x.grad) is type(weight.grad) is torch.Tensor
    assert_product(x.grad.reshape(-1, K), flat, values(weight))
    assert_product(weight.grad, flat.t(), values(x).reshape(-1, K))
    assert_product(bias.grad[None], torch.ones(1, 10).double(), flat)
    assert_same_tensor(weight.detach(), before)
    frozen, again = weight.detach(), rand(2, 5, K).requires_grad_()
    F.linear(again, frozen).backward(grad)
    assert_same_bytes(again.grad, x.grad)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"]
)
@formats
def test_sqnr_of_a_linear(case: FormatCase, dtype: torch.dtype) -> None:
    """A5, with the floors of the format's row; beside the exact checks, not instead of them."""
    a, w = rand(32, 128, dtype=dtype), rand(4, 128, seed=1, dtype=dtype)
    want = F.linear(a.float(), w.float())
    got = F.linear(a, case.quantize(w)).float()
    sqnr = 20 * torch.log10(want.norm() / (want - got).norm()).item()
    floor = {"mxfp8": 18.0, "mxfp6": 13.0, "mxfp4": 13.0, "nvfp4": 8.0}.get(case.name, 25.0)
    assert sqnr > floor


@pytest.mark.parametrize("x_options", [{}, {"row_scaled": True}], ids=["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_sqnr_of_nvfp4_both_sides(dtype: torch.dtype, x_options: dict) -> None:
    """A48: 16 dB with bias, whichever amax the activation has."""
    case = BY_NAME["nvfp4"]
    x, w, bias = (
        rand(64, 256, dtype=dtype),
        rand(64, 256, seed=1, dtype=dtype),
        rand(64, seed=2, dtype=dtype) * 50,
    )
    got = F.linear(case.quantize(x, **x_options), case.quantize(w), bias).float()
    want = F.linear(x.float(), w.float(), bias.float())
    assert 20 * torch.log10(want.norm() / (want - got).norm()) > 16


def golden(name: str, key: str) -> torch.Tensor:
    with np.load(GOLDEN / f"{name}.npz") as archive:
        array = archive[key]
    tensor = torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


@pytest.mark.parametrize(
    ("key", "fmt", "options"),
    [
        ("fp8cs_y_f32", "fp8", {}),
        ("fp8cs_y_f32_exact_dequant_matmul", "fp8", {}),
        ("fp8cs_y_bf16", "fp8", {}),
        ("nvfp4_y_f32", "nvfp4", {"with_2d_quantization": True}),
    ],
)
def test_golden_products(key: str, fmt: str, options: dict) -> None:
    """x in 1x16 blocks, w in 16x16 (NVFP4); both results are within the bound of the exact
    product.
    """
    want = golden("gemm_ref", key)
    x = qtensor.quantize(golden("inputs", "randn_bf16_64x128"), fmt)
    w = qtensor.quantize(golden("gemm_ref", "w"), fmt, **options)
    got = qtensor.gemm(x, w, "TN", dtype=want.dtype)
    for y in (got, want, F.linear(x, w)):
        assert_product(y, values(x), values(w).mT)


@formats
def test_embedding(case: FormatCase) -> None:
    index = torch.tensor([[4, 0, 32], [4, 1, 31]])
    for columnwise in (False, True):
        table = case.quantize(rand(33, 130), columnwise=columnwise)
        before = snapshot(table)
        got = F.embedding(index, table)
        assert type(got) is torch.Tensor
        assert_same_bytes(got, F.embedding(index, table.dequantize()))
        module = torch.nn.Embedding(33, 130, padding_idx=1)
        module.weight = torch.nn.Parameter(table)
        assert_same_bytes(module(index).detach(), got)
        assert F.embedding(index[:0], table).shape == (0, 3, 130)
        assert_same_tensor(table, before)
        for wrong in (torch.tensor([33]), torch.tensor([-1])):
            with pytest.raises((IndexError, RuntimeError), match="range"):
                F.embedding(wrong, table)


@formats
def test_mismatched_operands(case: FormatCase) -> None:
    """A57 and the rules of the GEMM, by message; the operands stay as they are."""
    w, x = case.quantize(rand(N, K)), rand(M, K)
    before = snapshot(w)
    sizes = r"gemm\[.*\]: the last dim.* must be equal \(\w\w\); got a .*, b .*\. Transpose"
    for call in (
        lambda: F.linear(rand(M, K + 1), w),
        lambda: F.linear(case.quantize(rand(M, K + 32)), w),
        lambda: torch.mm(rand(M, K), w),
        lambda: qtensor.gemm(x, w, "NN"),
    ):
        with pytest.raises(qtensor.QTensorError, match=sizes):
            call()
    for dtype in (torch.int64, torch.complex64, torch.bool):
        with pytest.raises(
            qtensor.QTensorError, match=r"gemm: operands must be quantized or floating; got torch\."
        ):
            qtensor.gemm(torch.ones(M, K, dtype=dtype), w, "TN")
    with pytest.raises(
        qtensor.QTensorError, match=r"gemm: operands must be on one device; got (cpu|meta)"
    ):
        qtensor.gemm(x, w.to("meta"), "TN")
    with pytest.raises(qtensor.QTensorError, match="layout"):
        qtensor.gemm(x, w, "TT")
    with pytest.raises(qtensor.QTensorError, match="operands must be matrices"):
        qtensor.gemm(w, torch.ones(K), "TN")
    with pytest.raises(qtensor.QTensorError, match=r"bias must broadcast.*\(7,\) for"):
        qtensor.gemm(x, w, "TN", bias=torch.ones(7))
    with pytest.raises(
        qtensor.QTensorError, match=r"result's dtype must be floating; got torch.int32"
    ):
        qtensor.gemm(x, w, "TN", dtype=torch.int32)
    with pytest.raises(
        qtensor.ArgumentTypeError,
        match=r"result's dtype must be a torch.dtype; got 'float32'. Pass",
    ):
        qtensor.gemm(x, w, "TN", dtype="float32")
    assert_same_tensor(w, before)


@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
def test_a_missing_usage_is_named(name: str) -> None:
    """Blocks must run along the contraction on both sides when both are quantized."""
    case = BY_NAME[name]
    row, column = ({"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True})
    for layout, a_usage, b_usage, operand, needed in (
        ("TN", column, row, "a", "rowwise"),
        ("TN", row, column, "b", "rowwise"),
        ("NN", row, row, "b", "columnwise"),
        ("NT", row, column, "a", "columnwise"),
        ("NT", column, row, "b", "columnwise"),
    ):
        a = case.quantize(rand(64, 64), **a_usage)
        b = case.quantize(rand(64, 64, seed=1), **b_usage)
        message = (
            rf"gemm\[{name}\]: operand {operand} needs {needed} data.*Quantize it with "
            rf"{needed}=True"
        )
        with pytest.raises(qtensor.QTensorError, match=message):
            qtensor.gemm(a, b, layout)


def test_what_does_not_fit_is_refused_before_a_kernel_runs() -> None:
    """A traced product has its shape alone; `F.linear` leaves all checks to the op."""
    a, b = (
        operand_of(qtensor.quantize(torch.randn(shape), "mxfp8").to("meta"))
        for shape in ((4, 64), (32, 96))
    )
    with pytest.raises(qtensor.QTensorError, match="last dims of a and b must be equal"):
        GEMM(*a, *b, "TN", torch.float32, None)
    with pytest.raises(qtensor.QTensorError, match=r"bias must broadcast.*\(3,\) for \(4, 4\)"):
        GEMM(*a, *a, "TN", torch.float32, torch.ones(3, device="meta"))
    with pytest.raises(qtensor.QTensorError, match="on one device; got cpu and meta"):
        GEMM(*a, *a, "TN", torch.float32, torch.ones(4))
