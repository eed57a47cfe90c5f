"""Errors of the library: every message states the rule, the value seen and the way out."""

from __future__ import annotations

from typing import NoReturn


class QTensorError(ValueError):
    """A user mistake: a bad dtype, shape, option, usage or operand."""


class DtypeError(QTensorError, TypeError):
    """A tensor of a dtype, layout or kind that the operation does not take."""


class UnsupportedError(QTensorError, NotImplementedError):
    """Something that does not exist here; the message names what does instead."""


class BuildError(QTensorError):
    """Native code that could not be compiled, linked or put into the cache."""


class CompilerNotFound(BuildError):
    """No compiler that runs; the message names the places that were tried."""


def fail(
    op: str, rule: str, got: object, fix: str, error: type[QTensorError] = QTensorError
) -> NoReturn:
    """Raise ``error`` with the message "op: rule; got values. Fix.".

    Args:
        op: the operation, with the format in brackets where one is involved: ``quantize[mxfp8]``.
        rule: what must hold.
        got: the values seen.
        fix: what the caller can do about it, a sentence without its full stop.
        error: the class to raise.

    Raises:
        QTensorError: always.
    """
    raise error(f"{op}: {rule}; got {got}. {fix}.")


def check(
    condition: bool,
    op: str,
    rule: str,
    got: object,
    fix: str,
    error: type[QTensorError] = QTensorError,
) -> None:
    """``fail(...)`` unless ``condition`` holds."""
    if not condition:
        fail(op, rule, got, fix, error)
