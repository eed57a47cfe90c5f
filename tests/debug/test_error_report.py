"""The error report: exact counts, ratios, factors, worst blocks, and what it refuses."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from formats import USAGES, FormatCase, assert_same_bytes, formats

import qtensor
from qtensor.storage.numbers import factors_of_elements

SHAPES = [(), (1,), (33,), (3, 7), (2, 3, 40), (130, 7), (0, 5), (5, 0)]


@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_format_option_usage_and_shape(case: FormatCase, shape: tuple[int, ...]) -> None:
    """The numbers against a plain reading of their definitions."""
    x = torch.randn(shape)
    for options in case.each_option():
        for rowwise, columnwise in USAGES:
            q = case.quantize(x, rowwise=rowwise, columnwise=columnwise, **options)
            report = qtensor.error_report(x, q)
            source, decoded = x.double(), q.dequantize(torch.float64)
            error = (source - decoded).abs()
            assert report.quantizer == q.quantizer.canonical
            assert report.shape == shape
            assert report.not_finite == 0
            assert report.bits_per_value == 8 * sum(b.nbytes for b in q.buffers()) / max(
                x.numel(), 1
            )
            assert report.max_abs_error == (error.max().item() if x.numel() else 0.0)
            assert report.flushed_to_zero == ((x != 0) & (decoded == 0)).sum().item() / max(
                x.numel(), 1
            )
            if x.numel() and error.any():
                want = 10 * math.log10(source.square().sum().item() / error.square().sum().item())
                assert report.sqnr_db == pytest.approx(want, rel=1e-12)
            assert report.quantizer in str(report)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_statistics_are_exact(element: str) -> None:
    """Saturated and zero counts for the factors 1e9, 1e-9 and 1, and a mixed tensor."""
    largest = {"e4m3": 448.0, "e5m2": 57344.0}[element]
    x = torch.randn(64, 64)
    x[x == 0] = 1.0
    mixed = torch.tensor([
        0.0,
        -0.0,
        largest,
        -largest,
        largest * 1.0001,
        -1e9,
        1e-30,
        -1e-30,
        1.0,
        math.inf,
    ])
    cases = [(x, 1e9, 4096, 0), (x, 1e-9, 0, 4096), (x, 1.0, 0, None), (mixed, 1.0, 3, 2)]
    for values, scale, saturated, flushed in cases:
        q = qtensor.quantize(values, "fp8_delayed", dtype=element, scale=torch.tensor([scale]))
        report = qtensor.error_report(values, q)
        assert report.saturated * values.numel() == saturated
        if flushed is not None:
            assert report.flushed_to_zero * values.numel() == flushed
        # One over the scale, rounded to float32.
        assert report.scale_min == report.scale_max == torch.tensor(scale).reciprocal().item()


def test_lossless_is_infinite() -> None:
    x = torch.tensor([[1.0, 2.0, -448.0, 0.0]])
    report = qtensor.error_report(x, qtensor.quantize(x, "mxfp8"))
    assert report.sqnr_db == math.inf
    assert (report.max_abs_error, report.max_rel_error, report.saturated) == (0.0, 0.0, 0.0)
    assert report.worst_blocks == ()


def test_nothing_kept_is_zero_decibels() -> None:
    x = torch.full((2, 16), 1e-9)
    report = qtensor.error_report(x, qtensor.quantize(x, "fp8_delayed", scale=torch.ones(1)))
    assert report.sqnr_db == 0.0
    assert report.flushed_to_zero == 1.0
    assert report.max_rel_error == 1.0


def test_worst_blocks_are_the_worst() -> None:
    """In order, with the place of the block; lossless blocks are not listed."""
    x = torch.ones(8, 128)
    x[3, 32:64] = torch.linspace(1, 2, 32)
    x[6, 96] = 1e4
    x[6, 97:] = 0.3
    report = qtensor.error_report(x, qtensor.quantize(x, "mxfp4"))
    assert [(b.row, b.col) for b in report.worst_blocks] == [(3, 32), (6, 96)] or [
        (b.row, b.col) for b in report.worst_blocks
    ] == [(6, 96), (3, 32)]
    ratios = [b.sqnr_db for b in report.worst_blocks]
    assert ratios == sorted(ratios)
    assert max(b.max_abs_error for b in report.worst_blocks) == report.max_abs_error
    assert f"[{report.worst_blocks[0].row}, {report.worst_blocks[0].col}]" in str(report)


def test_worst_blocks_are_at_most_five() -> None:
    x = torch.randn(64, 128)
    report = qtensor.error_report(x, qtensor.quantize(x, "nvfp4"))
    assert len(report.worst_blocks) == 5
    errors = (
        (x.double() - qtensor.quantize(x, "nvfp4").dequantize(torch.float64))
        .square()
        .view(64, 8, 16)
        .sum(-1)
    )
    ratio = x.double().square().view(64, 8, 16).sum(-1) / errors
    want = [(i // 8, i % 8 * 16) for i in ratio.flatten().argsort()[:5].tolist()]
    assert [(b.row, b.col) for b in report.worst_blocks] == want


def test_not_finite_values_are_counted_apart() -> None:
    x = torch.ones(4, 32)
    x[0, 0], x[1, 1] = math.nan, math.inf
    report = qtensor.error_report(x, qtensor.quantize(x, "mxfp8"))
    assert report.not_finite == 64
    assert report.sqnr_db == math.inf
    assert qtensor.error_report(x, qtensor.quantize(x, "nvfp4")).not_finite == 2


@formats
def test_nothing_to_compare_is_no_success(case: FormatCase) -> None:
    """Where every value is NaN or inf there is no ratio: NaN, not the inf of a quantization that
    loses nothing.
    """
    for x in (torch.full((4, 32), math.nan), torch.tensor(math.nan)):
        report = qtensor.error_report(x, case.quantize(x))
        assert report.not_finite == x.numel()
        assert all(
            math.isnan(n) for n in (report.sqnr_db, report.max_abs_error, report.max_rel_error)
        )
        assert "SQNR             nan dB" in str(report)
        assert report.worst_blocks == ()
    for x in (torch.zeros(2, 3), torch.zeros(0, 3)):
        assert qtensor.error_report(x, case.quantize(x)).sqnr_db == math.inf


@formats
def test_factors_times_codes_are_the_values(case: FormatCase) -> None:
    """A factor is what a code of 1.0 decodes to: every value over it is a value of the element."""
    element = case.quantizer().element
    x = torch.randn(33, 40)
    for rowwise, columnwise in USAGES:
        q = case.quantize(x, rowwise=rowwise, columnwise=columnwise)
        units = (q.dequantize(torch.float64) / factors_of_elements(q).double()).abs()
        significand, _ = torch.frexp(units)
        steps = significand * 2.0 ** (element.mantissa_bits + 1)
        # A float32 product of code and factor is off by 2^-24 at most.
        assert ((steps - steps.round()).abs() <= 2.0 ** (element.mantissa_bits - 21)).all()
        assert units.max() <= element.max * (1 + 2**-20)


def test_report_leaves_everything_alone() -> None:
    x = torch.randn(33, 40, requires_grad=True)
    q = qtensor.quantize(x, "nvfp4", columnwise=True)
    before, buffers = x.detach().clone(), [b.clone() for b in q.buffers()]
    report = qtensor.error_report(x, q)
    assert_same_bytes(x.detach(), before)
    for a, b in zip(q.buffers(), buffers, strict=True):
        assert_same_bytes(a, b)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.sqnr_db = 0.0


def test_bare_storage_and_quantized_source() -> None:
    x = torch.randn(33, 40)
    q = qtensor.quantize(x, "mxfp8")
    bare = q.quantizer.assemble(q.buffers(), q.shape, q.dtype, bare=True)
    assert qtensor.error_report(x, bare) == qtensor.error_report(x, q)
    assert qtensor.error_report(q, q).sqnr_db == math.inf


def test_refuses_what_it_cannot_compare() -> None:
    x = torch.randn(3, 40)
    with pytest.raises(
        qtensor.QTensorError,
        match=r"error_report: the second argument must be quantized; got Tensor",
    ):
        qtensor.error_report(x, x)
    with pytest.raises(
        qtensor.QTensorError,
        match=r"error_report: shapes must be equal; got \(40, 3\) and \(3, 40\)",
    ):
        qtensor.error_report(x.t(), qtensor.quantize(x, "fp8"))


def test_html_has_the_rows_of_the_table() -> None:
    """For notebooks."""
    x = torch.randn(32, 64)
    report = qtensor.error_report(x, qtensor.quantize(x, "nvfp4"))
    page = report._repr_html_()
    assert page.count("<tr>") == 1 + len(str(report).splitlines())
    assert "<td>SQNR</td><td>" in page
