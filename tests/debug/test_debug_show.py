"""``qtensor.debug.show``: codes, factors, values, borders and bits; HTML of views and tensors."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest
import torch
from formats import USAGES, FormatCase, formats

import qtensor
from qtensor.reference.elements import code_values


@formats
@pytest.mark.parametrize("shape", [(), (33,), (130, 72), (2, 3, 40)], ids=str)
def test_codes_times_factors_are_the_values(case: FormatCase, shape: tuple[int, ...]) -> None:
    """For every option and usage; rotated data have no factor of an element."""
    x = torch.randn(shape)
    for options in case.each_option():
        for rowwise, columnwise in USAGES:
            q = case.quantize(x, rowwise=rowwise, columnwise=columnwise, **options)
            view = qtensor.debug.show(q, slice(None), slice(None))
            flat = q.dequantize(torch.float32).reshape(len(view.rows), len(view.cols))
            assert view.values == flat.tolist()
            table = torch.tensor(code_values(q.quantizer.element))
            codes = q.codes().reshape(len(view.rows), len(view.cols)).long()
            decoded = table[codes]
            assert torch.equal(torch.tensor(view.codes), codes)
            if q.quantizer.factors_are_local:
                product = decoded.double() * torch.tensor(view.factors, dtype=torch.float64)
                torch.testing.assert_close(product.float(), flat, rtol=2**-22, atol=0)
            else:
                assert math.isnan(view.factors[0][0])


def test_text():
    """Two blocks of MXFP8 in two rows, as they are printed."""
    x = torch.ones(2, 64)
    x[:, 32:] = 3.5
    x[1] *= -4
    text = str(qtensor.debug.show(qtensor.quantize(x, "mxfp8"), cols=slice(31, 34)))
    assert text.splitlines() == [
        "mxfp8 2x64 float32, blocks of 1x32",
        "      column        31|      32       33",
        "----------------------------------------",
        "      factor  0.003906|0.007812",
        "     0 codes        78|      7e       7e",
        "      values         1|     3.5      3.5",
        "----------------------------------------",
        "      factor   0.01562| 0.03125",
        "     1 codes        f8|      fe       fe",
        "      values        -4|     -14      -14",
    ]


def test_bits_of_an_element():
    q = qtensor.quantize(torch.full((1, 32), -1.5), "mxfp4")
    view = qtensor.debug.show(q, bits=(0, 2))
    # -1.5 is -6 times the factor 0.25 of the block.
    assert view.bits_text() == (
        "[0, 2] e2m1 code 0xf: sign 1, exponent 11, mantissa 1 -> -6; factor 0.25, value -1.5"
    )
    assert str(view).splitlines()[-1] == view.bits_text()
    assert qtensor.debug.show(q, bits=True).bits == (0, 0)


def test_rows_far_from_the_first():
    x = torch.randn(1000, 48)
    q = qtensor.quantize(x, "nvfp4")
    view = qtensor.debug.show(q, rows=(700, 703), cols=-1)
    assert view.rows == range(700, 703)
    assert view.cols == range(47, 48)
    assert view.values == q.dequantize()[700:703, 47:].tolist()
    assert view.codes == q.codes()[700:703, 47:].tolist()


class _Tags(HTMLParser):
    """Checks that the tags of a text are balanced, and counts them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_of_a_view():
    q = qtensor.quantize(torch.randn(8, 64), "nvfp4")
    text = qtensor.debug.show(q, bits=True)._repr_html_()
    assert _Tags(text).count["td"] == 64
    assert "-&gt;" in text


@formats
def test_html_of_a_tensor(case: FormatCase) -> None:
    """The same text for a tensor without data, but for the first values, and it is small."""
    q = case.quantize(torch.randn(64, 64), columnwise=True)
    text = q._repr_html_()
    assert _Tags(text).count["tr"] == len(q.buffers()) + 1
    assert len(text) < 3000
    bare = q.quantizer.assemble(q.buffers(), q.shape, q.dtype, bare=True)
    assert bare._repr_html_() == text.replace(type(q).__name__, type(bare).__name__)
    text, count = re.subn(r", values=\[[^]]*\]", "", text)
    assert count == 1
    empty = q.quantizer.make_empty((64, 64), device="meta")
    assert empty._repr_html_() == text.replace("cpu", "meta")
    assert q.quantizer.canonical.replace("<", "&lt;") in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 64}, "rows must be from 0 to 63; got 64"),
        ({"cols": (0, 100)}, r"cols must lie in 0 to 64; got \(0, 100\)"),
        ({"rows": slice(0, 8, 2)}, "rows must have the step 1; got 2"),
        ({"rows": slice(5, 5)}, "from 1 to 16384 elements; got 0"),
        ({"cols": "0:4"}, r"must be an index, a slice or a pair \(start, end\); got '0:4'"),
        ({"bits": (9, 9)}, "bits must name an element of the region"),
    ],
)
def test_wrong_regions(options, message):
    q = qtensor.quantize(torch.randn(64, 64), "mxfp8")
    with pytest.raises(qtensor.QTensorError, match=message):
        qtensor.debug.show(q, **options)


def test_what_cannot_be_shown():
    with pytest.raises(qtensor.ArgumentTypeError, match="must be quantized; got Tensor"):
        qtensor.debug.show(torch.ones(2))
    empty = qtensor.quantizer("mxfp8").make_empty((32, 32), device="meta")
    with pytest.raises(qtensor.QTensorError, match="must have data"):
        qtensor.debug.show(empty)
    wide = qtensor.quantize(torch.randn(256, 128), "fp8")
    with pytest.raises(qtensor.QTensorError, match="got 32768"):
        qtensor.debug.show(wide, slice(None), slice(None))
