"""Check options of all quantizers: their types, their values and the usages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from qtensor.core.errors import ArgumentTypeError, fail
from qtensor.core.formats import Element

if TYPE_CHECKING:
    from qtensor.quantizers.base import Quantizer

_TORCH_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
PLAIN_TYPES = (bool, int, float, str)
Option = bool | int | float | str
"""The value of an option."""


CALL_ARGUMENTS = ("out", "scale", "generator", "amax_reduction_group", "noop_flag")
"""Arguments of a call, which users often mistake for options."""


def refuse_unknown(format_name: str, names: tuple[str, ...], options: Iterable[str]) -> None:
    """Refuse options that the format does not have.

    Raises:
        ArgumentTypeError: the option is an argument of a call; the message says so.
        QTensorError: the option is unknown; the message lists the options.
    """
    for name in options:
        if name in CALL_ARGUMENTS:
            fail(
                f"quantizer[{format_name}]",
                "a quantizer is a value; tensors, generators and groups are arguments of the call",
                name,
                f"Pass it to the call: quantizer.quantize(x, {name}=...)",
                ArgumentTypeError,
            )
        if name not in names:
            fail(
                f"quantizer[{format_name}]",
                "the option must be one of the format's",
                name,
                f"Choose among: {', '.join(names)}",
            )


def check_options(quantizer: Quantizer) -> None:
    """Refuse options that are not plain values, have the wrong type, or leave no usage.

    Raises:
        ArgumentTypeError: an option is a tensor, a process group or another object.
        QTensorError: an option has a wrong type or value, or no usage is left.
    """
    name = f"quantizer[{quantizer.format}]"
    for field in dataclasses.fields(quantizer):
        value = getattr(quantizer, field.name)
        if field.name == "dtype" and isinstance(value, torch.dtype):
            value = _TORCH_ELEMENTS.get(value, str(value))
            object.__setattr__(quantizer, field.name, value)
        if type(value) not in (*PLAIN_TYPES, type(None), list, tuple, dict):
            fail(
                name,
                "options are plain values; tensors and groups are arguments of the call",
                f"{field.name}={type(value).__name__}",
                "Pass it to quantize(x, scale=, generator=, amax_reduction_group=) instead",
                ArgumentTypeError,
            )
        expected = type(field.default)
        if type(value) is not expected and not (expected is float and type(value) is int):
            fail(
                name,
                f"{field.name} must be a {expected.__name__}",
                repr(value),
                "Pass such a value",
            )
        if type(value) is not expected:
            object.__setattr__(quantizer, field.name, expected(value))
        if isinstance(value, int | float) and expected is float and not 0 <= value < math.inf:
            fail(
                name,
                f"{field.name} must be finite and not negative",
                repr(value),
                "Pass such a value",
            )
    if not (quantizer.rowwise or quantizer.columnwise):
        fail(
            name,
            "at least one usage is needed",
            "rowwise=False, columnwise=False",
            "Ask for rowwise or columnwise",
        )


def check_choice(quantizer: Quantizer, option: str, legal: tuple[Option, ...]) -> None:
    """Refuse a value of ``option`` that is not in ``legal``.

    Raises:
        QTensorError: the value is not legal; the message lists the legal values.
    """
    value = getattr(quantizer, option)
    if value not in legal:
        choices = ", ".join(repr(v) for v in legal)
        fail(
            f"quantizer[{quantizer.format}]",
            f"{option} must be one of {choices}",
            repr(value),
            "Choose one of them",
        )


def find_element(elements: tuple[Element, ...], name: str | torch.dtype) -> Element:
    """Return the format's element with that name or torch dtype.

    Raises:
        QTensorError: there is no such element; the message lists the legal names.
    """
    name = _TORCH_ELEMENTS.get(name, str(name)) if isinstance(name, torch.dtype) else name
    for element in elements:
        if element.name == name:
            return element
    legal = ", ".join(e.name for e in elements)
    fail("dtype", f"the element must be one of {legal}", repr(name), "Choose one of them")


def option_word(value: object) -> str:
    """Return an option's value as a word of the canonical text (``encode_call`` escapes it)."""
    return f"{value!r}" if isinstance(value, float) else f"{value}"
