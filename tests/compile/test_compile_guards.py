"""What a compiled graph asks again at every call: little of the library, since each question costs
as much as a small kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import FormatCase, formats

import qtensor
from qtensor.quantizers.call import QuantizerConstants, constants_of

MOST = 14
"""Guards on names of the library: its modules and functions that a call of ``quantize`` runs
through.
"""


def guarded(function: Callable[..., Any], *args: Any) -> list[str]:
    """Sources of all guards of a compiled function."""
    names: list[str] = []

    def note(entries: Any) -> list[bool]:
        names.extend(entry.name for entry in entries)
        return [True] * len(entries)

    torch._dynamo.reset()
    compiled = torch.compile(
        function, backend="eager", fullgraph=True, options={"guard_filter_fn": note}
    )
    compiled(*args)
    assert names
    return names


def of_library(names: list[str]) -> list[str]:
    return [name for name in names if "__import_qtensor" in name]


@formats
def test_a_format_by_name(case: FormatCase) -> None:
    """Nothing of the quantizer's own is asked: neither options, nor slots, nor attributes of its
    class.
    """
    x, name = torch.randn(32, 64), case.name
    call = {"scale": torch.ones(1)} if case.quantizer().needs_scale else {}
    for options in ({}, {"columnwise": True}):
        names = guarded(lambda x, given=options | call: qtensor.quantize(x, name, **given), x)
        assert not [n for n in names if "_CLASSES" in n or ".spec" in n or "slots" in n]
        if not call:  # With a scale, what checks it is asked, too.
            assert len(of_library(names)) <= MOST + 10 * bool(options), of_library(names)


def test_a_quantizer_that_is_at_hand() -> None:
    """Its text and its type."""
    quantizer, x = qtensor.quantizer("mxfp8", columnwise=True), torch.randn(32, 64)
    names = guarded(lambda x: quantizer(x).dequantize(), x)
    assert not [n for n in names if ".spec" in n or "slots" in n or ".rowwise" in n]
    assert len([n for n in names if "quantizer" in n and "canonical" in n]) == 1


@formats
def test_facts_are_those_of_the_quantizer(case: FormatCase) -> None:
    for options in case.each_option():
        quantizer = case.quantizer(**options)
        constants = constants_of(quantizer.canonical)
        for name in QuantizerConstants._fields:
            assert getattr(constants, name) == getattr(quantizer, name)


def test_what_is_wrong_is_told_in_a_compiled_region_too() -> None:
    x = torch.randn(32, 64)
    for call in (
        lambda x: qtensor.quantize(x, "mxfp8", rowwise=False),
        lambda x: qtensor.quantize(x, "no_such_format"),
        lambda x: qtensor.quantize(x, "mxfp8", scale=x),
        lambda x: qtensor.quantize(x, "fp8_delayed"),
        lambda x: qtensor.quantizer("fp8_delayed")(x),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"QTensorError|Observed exception"):
            torch.compile(call, backend="eager", fullgraph=True)(x)


def test_a_copy_of_a_value_is_the_value() -> None:
    """Guards compare with a copy that they hold."""
    quantizer = qtensor.quantizer("nvfp4", columnwise=True)
    assert copy.deepcopy(quantizer) is quantizer
    assert copy.deepcopy([quantizer, quantizer.canonical])[0] is quantizer
