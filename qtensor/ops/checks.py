"""Checks of operations in a sequence, with errors that name the operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from qtensor.core.errors import QTensorError, UnsupportedError, fail
from qtensor.ops.operation import FusibleOperation, refuse_result


def name_operation(op: FusibleOperation, error: QTensorError) -> None:
    """Add the operation and its index to an error's message, unless they are in it already."""
    message = str(error)
    if not any(basic.label in message for basic in op.basic_ops):
        labels = " to ".join(dict.fromkeys((op.basic_ops[0].label, op.basic_ops[-1].label)))
        error.args = (f"{labels}: {message}",)


def check_list(op: FusibleOperation, name: str, what: str, items: Any, count: int) -> Sequence[Any]:
    """Return ``items``, after checking that it is a list of ``count`` results."""
    if not isinstance(items, (tuple, list)) or len(items) != count:
        got = len(items) if isinstance(items, (tuple, list)) else type(items).__name__
        refuse_result(op, name, f"return {count} {what}", got)
    return items


def check_gradients(op: FusibleOperation, items: Any, count: int) -> Sequence[Any]:
    """Return ``items``, after checking that it holds a gradient or None for each parameter."""
    if not isinstance(items, (tuple, list)) or len(items) != count:
        rule = f"its backward must return a gradient or None for each of its {count} parameters"
        got = len(items) if isinstance(items, (tuple, list)) else type(items).__name__
        fail(op.label, rule, got, "Return them in the order of parameters()")
    return items


def refuse_hooks(ops: Sequence[FusibleOperation]) -> None:
    """Raise an error if an operation has hooks, which a sequence would not call."""
    for op in ops:
        if any(hooks_of(op)):
            rule = "a sequence does not call operations one by one, so their hooks cannot run"
            fix = "Register the hook on the sequence, or on a module of your own in its place"
            fail(op.label, rule, "one or more", fix, UnsupportedError)


def hooks_of(op: nn.Module) -> list[dict[int, Any]]:
    """Return the dictionaries of an operation's hooks."""
    return [
        op._forward_pre_hooks,
        op._forward_hooks,
        op._backward_pre_hooks,
        op._backward_hooks,
    ]
