"""What a sequence checks of its operations: which one refused its input, and that results have the form that was agreed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qtensor.errors import DtypeError, QTensorError, UnsupportedError, fail


def name_operation(op: Any, error: QTensorError) -> None:
    """Have an error's message name the operation in which it came up, and its place."""
    text = str(error)
    if not any(basic.label in text for basic in op.basic_ops):
        labels = " to ".join(dict.fromkeys((op.basic_ops[0].label, op.basic_ops[-1].label)))
        error.args = (f"{labels}: {text}",)


def parts(op: Any, name: str, result: Any, form: tuple[str, ...]) -> Any:
    """What a function of an operation returned.

    Args:
        op: the operation.
        name: of the function.
        result: what it returned.
        form: what it is to return, as words.

    Raises:
        QTensorError: something else.
    """
    if not isinstance(result, tuple) or len(result) != len(form):
        kind = type(result).__name__
        got = f"{kind} of {len(result)}" if isinstance(result, tuple) else kind
        refuse_result(op, name, f"return ({', '.join(form)})", got)
    return result


def refuse_result(op: Any, name: str, must: str, got: object) -> None:
    """Refuse what a function of an operation returned.

    Raises:
        QTensorError: always.
    """
    fail(op.basic_ops[0].label, f"its {name} must {must}", got, "Mend the class", DtypeError)


def listed(op: Any, name: str, what: str, found: Any, count: int) -> Sequence[Any]:
    """A list of as many results as there are tensors for them.

    Raises:
        QTensorError: something else.
    """
    if not isinstance(found, (tuple, list)) or len(found) != count:
        got = len(found) if isinstance(found, (tuple, list)) else type(found).__name__
        refuse_result(op, name, f"return {what}, {count}", got)
    return found


def gradients(op: Any, found: Any, count: int) -> Sequence[Any]:
    """A gradient or None for each parameter of an operation, ``count`` of them.

    Raises:
        QTensorError: its backward returned another number of them.
    """
    if not isinstance(found, (tuple, list)) or len(found) != count:
        rule = f"its backward must return a gradient or None for each of its {count} parameters"
        got = len(found) if isinstance(found, (tuple, list)) else type(found).__name__
        fail(op.label, rule, got, "Return them in the order of parameters()")
    return found


def refuse_hooks(ops: Sequence[Any]) -> None:
    """Refuse a call that would leave out hooks of operations.

    Raises:
        QTensorError: with the operation that has some.
    """
    for op in ops:
        if any(hooks_of(op)):
            rule = (
                "hooks of operations cannot run in a sequence, which does not call them one by one"
            )
            fix = "Put the hook on the sequence, or a module of your own there"
            fail(op.label, rule, "one or more", fix, UnsupportedError)


def hooks_of(op: Any) -> list[Any]:
    """The tables of an operation's hooks."""
    return [
        op._forward_pre_hooks,
        op._forward_hooks,
        op._backward_pre_hooks,
        op._backward_hooks,
    ]
