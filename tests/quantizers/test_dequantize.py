"""Decoding: codes written by hand, dtypes in and out, ranks, error bounds, both directions,
``out=``, gradients.
"""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
from adversarial import assert_same_values, mixed
from formats import (
    BY_NAME,
    DTYPES,
    FormatCase,
    assert_same_bytes,
    dtypes,
    formats,
    rand,
    usages,
)
from torch import Tensor

import qtensor
from qtensor.core.quantizer_registry import by_name

RANKS = [(), (40,), (3, 40), (2, 3, 40), (2, 1, 3, 40), (0, 40), (3, 0), (0,)]


def sqnr(x: Tensor, y: Tensor) -> float:
    noise = (x.double() - y.double()).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(x.double().square().sum().item() / noise)


def hand_made(fmt: str, shape: tuple[int, ...], **buffers: Tensor) -> qtensor.QuantizedTensor:
    """A tensor around buffers; those not given are zero."""
    quantizer = qtensor.quantizer(fmt)
    made = {name: buffer.zero_() for name, buffer in quantizer.alloc_tensors(shape).items()}
    for name, values in buffers.items():
        made[name].view(-1)[: values.numel()] = values.reshape(-1)
    return quantizer.assemble(list(made.values()), shape, torch.float32)


@pytest.mark.parametrize(("fmt", "one"), [("mxfp8", 0x38), ("mxfp6", 0x08), ("mxfp4", 0x22)])
def test_every_e8m0_code(fmt: str, one: int) -> None:
    """Blocks of ones under each of the 256 factors: 0 decodes to 2^-127 (not to zero), 255 to
    NaN.
    """
    q = hand_made(fmt, (256, 32))
    q._rowwise_data.fill_(one)
    q._rowwise_scale_inv[:256, 0] = torch.arange(256)
    got = q.dequantize()
    want = torch.exp2(torch.arange(256.0, dtype=torch.float64) - 127).float()
    assert got[0, 0].item() == 2.0**-127
    assert_same_bytes(got[:255], want[:255, None].expand(255, 32))
    assert got[255].isnan().all()
    assert not got[:255].isnan().any()


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_extreme_scales_meet_extreme_codes(element: str) -> None:
    """MXFP8 decodes in one float32 product: infinite beyond the range, subnormal below it, as the
    oracle says.
    """
    q = qtensor.quantize(torch.zeros(256, 256), "mxfp8", dtype=element)
    q._rowwise_data.copy_(torch.arange(256).expand(256, 256))
    q._rowwise_scale_inv.copy_(torch.arange(256)[:, None].expand(256, 8))
    buffers = {slot.name: getattr(q, slot.name).numpy() for slot in q.quantizer.slots}
    got = q.dequantize()
    assert_same_values(got, oracle.dequantize(buffers, "mxfp8", (256, 256), dtype=element))
    assert got.isinf().any()
    assert ((got != 0) & (got.abs() < torch.finfo(torch.float32).tiny)).any()


def test_every_nvfp4_scale_code() -> None:
    """fp4 * E4M3 * (A / 2688): all 256 factors, with A = 2688 so that the last factor is 1."""
    q = hand_made("nvfp4", (256, 16), _amax_rowwise=torch.tensor([2688.0]))
    q._rowwise_data.copy_(
        torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    )
    q._rowwise_scale_inv[:, 0] = torch.arange(256)
    scales = torch.from_numpy(oracle.ELEMENTS["e4m3"].values)
    values = torch.from_numpy(oracle.ELEMENTS["e2m1"].values)
    assert_same_values(q.dequantize(), (values * scales[:, None]).numpy())


def test_nvfp4_tensor_factor_is_amax_over_448_times_6() -> None:
    """Not its inverse, which other checkpoints store."""
    q = hand_made("nvfp4", (1, 16), _amax_rowwise=torch.tensor([1344.0]))
    q._rowwise_data.fill_(0x22)
    q._rowwise_scale_inv[0, 0] = 0x38
    assert (q.dequantize() == 0.5).all()


@formats
@dtypes
@pytest.mark.parametrize("out", [*DTYPES, torch.float64, None], ids=str)
def test_dtypes_in_and_out(case: FormatCase, dtype: torch.dtype, out: torch.dtype | None) -> None:
    """One rounding from float32 to the dtype asked for, the nominal one by default."""
    q = case.quantize(torch.randn(7, 70).to(dtype))
    got = q.dequantize(out)
    assert q.dtype == dtype
    assert type(got) is torch.Tensor
    assert_same_bytes(got, q.dequantize(torch.float32).to(out or dtype))


@formats
@usages
@pytest.mark.parametrize("shape", RANKS, ids=str)
def test_ranks(case: FormatCase, shape: tuple[int, ...], rowwise: bool, columnwise: bool) -> None:
    x = torch.randn(shape)
    q = case.quantize(x, rowwise=rowwise, columnwise=columnwise)
    assert (q.shape, q.ndim, q.numel()) == (x.shape, x.ndim, x.numel())
    assert q.dequantize().shape == x.shape
    assert q.dequantize().is_contiguous()


@formats
@usages
@dtypes
def test_error_bound(case: FormatCase, dtype: torch.dtype, rowwise: bool, columnwise: bool) -> None:
    """Half an ulp: of the value where its code is normal, of the smallest normal code below.

    The smallest normal code stands for the largest value of the block (16) over the element's
    largest, times the code; twice that where the factor is rounded up to a power of two. What the
    OCP floor mode saturates stays inside: 16 becomes 15 in E2M3 and 12 in E2M1. So does the
    rounding of NVFP4's factor, up to 2^-4, for the codes are fitted to it.
    """
    x = ((torch.rand(64, 96) * 15 + 1) * torch.randn(64, 96).sign()).to(dtype)
    quantizer = case.quantizer(rowwise=rowwise, columnwise=columnwise)
    q = quantizer(x, **({"scale": torch.tensor([28.0])} if case.call() else {}))
    got, exact = q.dequantize(torch.float64), x.double()
    smallest = 16 / quantizer.element.max * 2 * 2.0**quantizer.element.min_exponent
    # The float32 factor and product round on their own.
    bound = exact.abs().clamp(min=smallest) * case.rel_step * (1 + 2**-20)
    assert ((got - exact).abs() <= bound).all()


@formats
@dtypes
def test_sqnr_of_randn(case: FormatCase, dtype: torch.dtype) -> None:
    """The floors of signal to noise; the exact checks are elsewhere."""
    x = torch.randn(256, 256).to(dtype)
    for rowwise, columnwise in ((True, False), (False, True)):
        q = case.quantize(x, rowwise=rowwise, columnwise=columnwise)
        assert sqnr(x, q.dequantize(torch.float32)) >= case.min_sqnr


def test_sqnr_notices_a_wrong_scale() -> None:
    q = qtensor.quantize(torch.randn(64, 64), "mxfp8")
    values = q.dequantize()
    q._rowwise_scale_inv[:8] += 1
    assert sqnr(values, q.dequantize()) < 13


@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize(
    ("fmt", "element", "floor"),
    [
        ("mxfp8", "e4m3", 18),
        ("mxfp8", "e5m2", 13),
        ("mxfp6", "e2m3", 13),
        ("mxfp6", "e3m2", 13),
        ("mxfp4", "e2m1", 13),
    ],
)
def test_mx_sqnr_in_every_scale_mode(fmt: str, element: str, floor: float, mode: str) -> None:
    x = torch.randn(256, 256)
    assert sqnr(x, qtensor.quantize(x, fmt, dtype=element, scale_mode=mode).dequantize()) >= floor


@pytest.mark.parametrize("shape", [(64, 96), (2, 48, 64)], ids=str)
@pytest.mark.parametrize("row_scaled", [False, True])
def test_nvfp4_scales_recover_the_amax(shape: tuple[int, ...], row_scaled: bool) -> None:
    """Six times a block's factor is its largest magnitude, to 30 dB; the values come back to 8
    dB.
    """
    x = torch.randn(shape)
    rows, blocks = math.prod(shape[:-1]), shape[-1] // 16
    q = qtensor.quantize(x, "nvfp4", row_scaled=row_scaled)
    amax = x.view(rows, blocks, 16).abs().amax(-1)
    scales = q._rowwise_scale_inv[:rows, :blocks].contiguous().view(torch.float8_e4m3fn).float()
    assert sqnr(amax, scales * 6 * q._amax_rowwise[:, None] / 2688) >= 30
    assert sqnr(x, q.dequantize()) >= 8


@pytest.mark.parametrize("name", ["fp8", "fp8_delayed", "fp8_rowwise"])
def test_shared_bytes_decode_the_same_in_both_directions(name: str) -> None:
    x = mixed((66, 40), torch.float32, finite=False)
    row, column = (BY_NAME[name].quantize(x, rowwise=r, columnwise=not r) for r in (True, False))
    assert_same_bytes(row.dequantize(), column.dequantize())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fp8_blockwise", {"block_scaling_dim": 2}),
        ("mxfp8", {"with_2d_quantization": True}),
        ("mxfp6", {"with_2d_quantization": True, "packed": True}),
        ("mxfp4", {"with_2d_quantization": True}),
        ("nvfp4", {"with_2d_quantization": True}),
    ],
)
def test_two_dimensional_blocks_decode_the_same_in_both_directions(
    name: str, options: dict[str, object]
) -> None:
    x = torch.randn(70, 45)
    row, column = (
        BY_NAME[name].quantize(x, rowwise=r, columnwise=not r, **options) for r in (True, False)
    )
    assert_same_bytes(row.dequantize(), column.dequantize())


@formats
def test_bare_storage_decodes_like_the_tensor(case: FormatCase) -> None:
    q = case.quantize(torch.randn(5, 40, dtype=torch.bfloat16), columnwise=True)
    bare = q.quantizer.assemble(q.buffers(), q.shape, q.dtype, bare=True)
    assert not isinstance(bare, torch.Tensor)
    for got in (bare.dequantize(), qtensor.dequantize(bare), qtensor.dequantize(q)):
        assert_same_bytes(got, q.dequantize())
    assert_same_bytes(qtensor.dequantize(bare, torch.float32), q.dequantize(torch.float32))


@formats
def test_out(case: FormatCase) -> None:
    q = case.quantize(torch.randn(5, 40))
    for dtype in DTYPES:
        out = torch.full((40, 5), 7.0, dtype=dtype).t()
        assert qtensor.dequantize(q, out=out) is out
        assert_same_bytes(out, q.dequantize(dtype))


def test_out_of_another_shape() -> None:
    q = qtensor.quantize(torch.randn(5, 40), "mxfp8")
    out = torch.zeros(40, 5)
    with pytest.raises(
        qtensor.QTensorError, match=r"dequantize: out must have the tensor's shape; got \(40, 5\)"
    ):
        qtensor.dequantize(q, out=out)
    assert not out.any()


def test_out_and_dtype_are_not_exchanged() -> None:
    q = qtensor.quantize(torch.randn(4, 64), "mxfp8")
    with pytest.raises(qtensor.QTensorError, match=r"got out=torch.float32\. Pass one"):
        qtensor.dequantize(q, out=torch.float32)  # type: ignore[arg-type]
    with pytest.raises(qtensor.QTensorError, match="got dtype=a tensor"):
        qtensor.dequantize(q, torch.zeros(4, 64))  # type: ignore[arg-type]


def test_out_would_lose_a_gradient() -> None:
    q, out = qtensor.quantize(torch.randn(4, 64), "mxfp8"), torch.full((4, 64), 7.0)
    leaf = q.detach().requires_grad_()
    with pytest.raises(qtensor.QTensorError, match="out= does not support automatic diff"):
        qtensor.dequantize(leaf, out=out)
    assert (out == 7).all()
    with torch.no_grad():
        assert_same_bytes(qtensor.dequantize(leaf, out=out), q.dequantize())


def test_plain_tensors_are_copied() -> None:
    x = torch.randn(3, 4)
    got = qtensor.dequantize(x, torch.bfloat16)
    assert_same_bytes(got, x.bfloat16())
    assert qtensor.dequantize(x).data_ptr() != x.data_ptr()


@formats
@dtypes
def test_gradient_passes_through_dequantize(case: FormatCase, dtype: torch.dtype) -> None:
    q = case.quantize(torch.randn(3, 40).to(dtype)).detach().requires_grad_()
    grad = torch.randn(3, 40).to(dtype)
    q.dequantize().backward(grad)
    assert_same_bytes(q.grad, grad)
    q.grad = None
    wide = torch.randn(3, 40)
    q.dequantize(torch.float32).backward(wide)
    assert_same_bytes(q.grad, wide.to(dtype))


@formats
def test_dequantize_changes_no_buffer(case: FormatCase) -> None:
    q = case.quantize(torch.randn(33, 40), columnwise=True)
    before = [buffer.clone() for buffer in q.buffers()]
    values = q.dequantize()
    values.zero_()
    for buffer, was in zip(q.buffers(), before, strict=True):
        assert_same_bytes(buffer, was)
    assert np.any(q.dequantize().numpy())


@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "col"])
@pytest.mark.parametrize("dtype", ["e2m3", "e3m2"])
def test_bits_above_a_six_bit_code_are_ignored(dtype: str, columnwise: bool) -> None:
    """By kernels, by the reference and in products; a file may hold any byte."""
    options = {"dtype": dtype, "rowwise": not columnwise, "columnwise": columnwise}
    q = qtensor.quantize(rand(64, 96), "mxfp6", **options)
    want = q.dequantize()
    q.buffers()[0].bitwise_or_(0xC0)
    assert_same_bytes(q.dequantize(), want)
    reference = q.quantizer.decode(by_name(q.quantizer, q.buffers()), q.shape)
    assert_same_bytes(reference, want)
    if not columnwise:
        x = rand(3, 96, seed=1)
        bound = 96 * torch.finfo(torch.float32).eps * (x.abs() @ want.abs().t())
        product = torch.nn.functional.linear(x, q)
        assert ((product - x @ want.t()).abs() <= bound).all()
