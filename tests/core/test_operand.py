"""An operand knows its quantizer, its transpose, and the rows of a weight behind ``t()``."""

from __future__ import annotations

import pytest
import torch
from formats import FormatCase, formats

from qtensor.core.operand import Operand, plain_operand
from qtensor.storage.ops.products import operand_of


def weight_of(case: FormatCase, **usage: bool):
    return case.quantize(torch.randn(96, 64), **usage)


def assert_views(found: Operand, wanted: Operand) -> None:
    assert (found.canonical, tuple(found.shape)) == (wanted.canonical, tuple(wanted.shape))
    for a, b in zip(found.buffers, wanted.buffers, strict=True):
        assert (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def test_a_plain_operand():
    x = torch.randn(2, 3)
    operand = plain_operand(x)
    assert operand.buffers[0] is x
    assert operand.quantizer is None
    assert operand.as_rows() is None
    assert_views(operand.transpose(), plain_operand(x.t()))


@formats
def test_the_rows_of_a_weight_behind_t(case: FormatCase):
    weight = weight_of(case)
    behind = operand_of(weight.t())
    rows = behind.as_rows()
    assert rows is not None
    assert rows.quantizer == weight.quantizer
    assert_views(rows, operand_of(weight))
    assert_views(rows.transpose(), behind)


@formats
def test_other_operands_have_no_rows_behind_t(case: FormatCase):
    """A weight itself; the transpose of one with both usages, whose rowwise data are its own."""
    assert operand_of(weight_of(case)).as_rows() is None
    both = weight_of(case, columnwise=True)
    assert operand_of(both).as_rows() is None
    assert operand_of(both.t()).as_rows() is None


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_batch_has_no_rows_behind_t(name: str):
    behind = operand_of(weight_of(FormatCase(name, 0.0)).t())
    assert behind._replace(shape=(1, *behind.shape)).as_rows() is None
