"""Parts of tensors: writes never change values outside a part, wherever the part has been."""

import io

import pytest
import torch
from formats import BY_NAME, FORMATS, FormatCase, formats
from torch.nn import functional as F

import qtensor

SHARED = pytest.mark.parametrize("name", ["fp8", "fp8_delayed", "nvfp4"])
SQUARE = ["mxfp8", "mxfp6", "mxfp4", "nvfp4"]
backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


def whole(name: str, rows: int = 128) -> torch.Tensor:
    return BY_NAME[name].quantize(torch.randn(rows, 128))


@SHARED
def test_a_write_keeps_the_factor_that_the_whole_shares(name: str) -> None:
    """Values beyond the range of the shared factor saturate; nothing outside the part moves."""
    q = whole(name)
    before, largest = q.dequantize(), q.dequantize().abs().max()
    q[32:64].mul_(100)
    after = q.dequantize()
    assert torch.equal(after[:32], before[:32])
    assert torch.equal(after[64:], before[64:])
    assert not torch.equal(after[32:64], before[32:64])
    assert after[32:64].abs().max() <= 448 / 32 if name == "fp8_delayed" else largest * 1.07


@SHARED
def test_quantizing_a_part_again_gives_bytes_of_its_own(name: str) -> None:
    q = whole(name)
    before = q.dequantize()
    call = BY_NAME[name].call()
    q.quantizer.quantize(q[32:64], **call).mul_(100)
    assert torch.equal(q.dequantize(), before)


@SHARED
@backends
def test_the_note_crosses_compile_boundaries(name: str, backend: str) -> None:
    q = whole(name)
    before = q.dequantize()
    torch.compile(lambda p: p.mul_(100), fullgraph=True, backend=backend)(q[64:])
    assert torch.equal(q.dequantize()[:64], before[:64])
    part = torch.compile(lambda t: t[64:], fullgraph=True, backend=backend)(q)
    part.mul_(0)
    assert torch.equal(q.dequantize()[:64], before[:64])
    assert not q.dequantize()[64:].any()


@SHARED
def test_a_saved_part_is_on_its_own(name: str) -> None:
    q = whole(name)
    file = io.BytesIO()
    torch.save({"whole": q, "part": q[:32]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    before = loaded["whole"].dequantize()
    loaded["part"].mul_(100)
    assert torch.equal(loaded["whole"].dequantize(), before)


@pytest.mark.parametrize("name", SQUARE)
def test_rows_cut_across_square_blocks_derive_nothing_wrong(name: str) -> None:
    x = torch.randn(256, 256) * torch.logspace(-3, 3, 256)[:, None]
    q = qtensor.quantize(x, name, with_2d_quantization=True)
    pick = torch.tensor([0, 200, 3])
    cut = (q[3:77], q.index_select(0, pick), torch.cat([q[3:20], q[100:200]]), q.view(128, 512))
    for part in cut:
        assert not part.quantizer.with_2d_quantization
        with pytest.raises(qtensor.UnsupportedError, match="cannot be derived"):
            part.update_usage(columnwise=True)
    for part in (q[32:64], torch.cat(q.chunk(2))):
        assert part.quantizer == q.quantizer
        values = part.dequantize()
        part.update_usage(rowwise=False, columnwise=True)
        assert torch.equal(part.dequantize(), values)


@formats
def test_autograd_sees_a_requantized_weight(case: FormatCase) -> None:
    x = torch.randn(8, 128, requires_grad=True)
    q = case.quantize(torch.randn(32, 128))
    y = F.linear(x, q)
    q.quantize_(torch.zeros(32, 128))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


LAYOUTS = [
    ("TN", (5, 64, 96), (48, 96)),
    ("TN", (3, 64, 96), (3, 32, 96)),
    ("NN", (64, 96), (96, 48)),
    ("NN", (3, 64, 96), (3, 96, 32)),
    ("NT", (64, 96), (64, 48)),
]


@formats
@pytest.mark.parametrize(("layout", "left", "right"), LAYOUTS)
def test_gemm_has_gradients(case: FormatCase, layout: str, left: tuple, right: tuple) -> None:
    """Those of the matmul of the values, to the order of float32 sums of at most 320 products."""
    a = torch.randn(left, requires_grad=True)
    b = case.quantize(torch.randn(right), columnwise=True).requires_grad_()
    bias = torch.randn(1, requires_grad=True)
    y = qtensor.gemm(a, b, layout, bias=bias)
    grad = torch.randn_like(y)
    y.backward(grad)
    a64 = a.detach().double().requires_grad_()
    b64 = b.detach().dequantize().double().requires_grad_()
    product = {"TN": lambda: a64 @ b64.mT, "NN": lambda: a64 @ b64, "NT": lambda: a64.mT @ b64}[
        layout
    ]()
    product.backward(grad.double())
    for got, want, sizes in ((a.grad, a64.grad, b64), (b.grad, b64.grad, a64)):
        bound = 320 * torch.finfo(torch.float32).eps * sizes.abs().max() * grad.abs().max() * 32
        assert ((got - want).abs() <= bound).all()
    assert (
        abs(bias.grad.item() - grad.double().sum().item()) <= grad.numel() * 1e-6 * grad.abs().max()
    )


def test_devices_must_agree() -> None:
    """A tensor on another device would make the op run as its fake and return bytes that nobody
    wrote.
    """
    x = torch.randn(4, 32)
    with pytest.raises(qtensor.QTensorError, match="scale must be on the device"):
        qtensor.quantize(x, "fp8_delayed", scale=torch.ones(1, device="meta"))
    seed = torch.ones(1, dtype=torch.int64, device="meta")
    with pytest.raises(qtensor.QTensorError, match="seed must be on the device"):
        qtensor.quantize(x, "nvfp4", stochastic_rounding=True, generator=seed)
    q = qtensor.quantize(x, "fp8")
    with pytest.raises(qtensor.QTensorError, match="operands must be on one device"):
        qtensor.gemm(x, q, "TN", bias=torch.ones(4, device="meta"))


@pytest.mark.parametrize("case", FORMATS, ids=lambda c: c.name)
def test_defaults_of_the_caller_do_not_matter(case: FormatCase) -> None:
    """Tables made at the first call are float32 on the right device, whatever the default dtype or
    mode is then.
    """
    from qtensor.reference import constants, elements, hadamard  # noqa: PLC0415

    x, call = torch.randn(32, 64), case.call()
    want = case.quantizer(columnwise=True).quantize(x, **call)
    for cached in (
        constants.constant,
        elements.code_values,
        elements._values,
        elements._pairs,
        hadamard.matrix,
    ):
        cached.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            first = case.quantizer(columnwise=True).quantize(x, **call)
            first.dequantize()
    finally:
        torch.set_default_dtype(torch.float32)
    again = case.quantizer(columnwise=True).quantize(x, **call)
    for t in (first, again):
        assert all(torch.equal(a, b) for a, b in zip(t.buffers(), want.buffers(), strict=True))
        assert torch.equal(t.dequantize(), want.dequantize())
    (again.dequantize() * torch.ones((), requires_grad=True)).sum().backward()
