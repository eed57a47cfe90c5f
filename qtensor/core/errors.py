"""Define the library's errors; every message states the rule, the value and a fix."""

from __future__ import annotations

import sys
from typing import NoReturn


class QTensorError(ValueError):
    """Signal a user mistake: a bad dtype, shape, option, usage or operand."""


class ArgumentTypeError(QTensorError, TypeError):
    """Signal an argument of the wrong Python type, such as a number where a module is needed."""


class DtypeError(ArgumentTypeError):
    """Signal a tensor with a dtype or layout that the operation does not take."""


class UnsupportedError(QTensorError, NotImplementedError):
    """Signal an operation that the library does not have; the message names an alternative."""


class IndexRangeError(QTensorError, IndexError):
    """Signal an index outside the dim of a tensor."""


class BuildError(QTensorError):
    """Signal native code that could not be compiled, linked or put into the cache."""


class CompilerNotFound(BuildError):
    """Signal that no compiler runs; the message lists the paths that were tried."""


def this_rank() -> str:
    """Return "rank r of n" in a program of several ranks, else an empty string."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return ""
    size = dist.get_world_size()
    return f"rank {dist.get_rank()} of {size}" if size > 1 else ""


def fail(
    op: str, rule: str, got: object, fix: str, error: type[QTensorError] = QTensorError
) -> NoReturn:
    """Raise ``error`` with the message "op: rule; got values. Fix.".

    In a program of several ranks, the rank follows ``op``.

    Args:
        op: the operation, with the format in brackets if there is one: ``quantize[mxfp8]``.
        rule: the condition that must hold.
        got: the values that broke the rule.
        fix: a sentence, without its full stop, that tells the caller how to proceed.
        error: the class to raise.

    Raises:
        QTensorError: always.
    """
    rank = this_rank()
    place = f" ({rank})" if rank else ""
    raise error(f"{op}{place}: {rule}; got {got}. {fix}.")


def is_number(value: object) -> bool:
    """Return whether a value is a Python number that options take: a bool is not one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check(
    condition: bool,
    op: str,
    rule: str,
    got: object,
    fix: str,
    error: type[QTensorError] = QTensorError,
) -> None:
    """Raise the error of ``fail`` if ``condition`` is false.

    Raises:
        QTensorError: ``condition`` is false.
    """
    if not condition:
        fail(op, rule, got, fix, error)
