"""Checks that all quantizers share: types of options, live state, usages."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from qtensor.errors import DtypeError, fail
from qtensor.formats import Element

_TORCH_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
PLAIN_TYPES = (bool, int, float, str)


def check_options(quantizer: Any) -> None:
    """Refuse options that are no plain values, have another type than their default, or leave no usage.

    Raises:
        DtypeError: a tensor, process group or other object; the message says where live state goes.
        QTensorError: a wrong type of value, or no usage.
    """
    name = f"quantizer[{quantizer.format}]"
    for field in dataclasses.fields(quantizer):
        value = getattr(quantizer, field.name)
        if type(value) not in PLAIN_TYPES:
            fail(
                name,
                "options are plain values; tensors, generators and process groups are arguments of the call",
                f"{field.name}={type(value).__name__}",
                "Pass it to quantize(x, scale=, generator=, amax_reduction_group=) instead",
                DtypeError,
            )
        expected = type(field.default)
        if type(value) is not expected and not (expected is float and type(value) is int):
            fail(name, f"{field.name} must be a {expected.__name__}", repr(value), "Pass such a value")
        if type(value) is not expected:
            object.__setattr__(quantizer, field.name, expected(value))
    if not (quantizer.rowwise or quantizer.columnwise):
        fail(name, "at least one usage is needed", "rowwise=False, columnwise=False", "Ask for rowwise or columnwise")


def check_choice(quantizer: Any, option: str, legal: tuple[Any, ...]) -> None:
    """Refuse a value of ``option`` that is not in ``legal``.

    Raises:
        QTensorError: with the legal values.
    """
    value = getattr(quantizer, option)
    if value not in legal:
        choices = ", ".join(repr(v) for v in legal)
        fail(f"quantizer[{quantizer.format}]", f"{option} must be one of {choices}", repr(value), "Choose one of them")


def element_name(dtype: Any) -> Any:
    """The name of an element given as a torch dtype; other values pass through to be checked."""
    return _TORCH_ELEMENTS.get(dtype, dtype) if isinstance(dtype, torch.dtype) else dtype


def find_element(elements: tuple[Element, ...], name: str) -> Element:
    """The element of that name among a format's."""
    return next(e for e in elements if e.name == name)


def canonical_value(value: Any) -> str:
    """An option as it stands in a canonical string."""
    return repr(value) if isinstance(value, float) else str(value)
