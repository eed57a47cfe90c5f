"""The table of fusions: patterns of neighbouring operations, and builders of fused operations.

The fuser walks through a sequence. At each position it takes the first entry whose pattern matches
and whose builder returns an operation. The fuser itself knows no specific operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qtensor.core.errors import ArgumentTypeError, fail
from qtensor.ops.operation import BasicOperation, FusedOperation
from qtensor.recipes import Recipe, parse_recipe

Builder = Callable[[Sequence[Any], Recipe | None], FusedOperation | None]
Kinds = type | tuple[type, ...]


class Fusion(NamedTuple):
    """An entry of the table.

    Attributes:
        pattern: a class or a tuple of classes for each operation, in the order of the sequence.
            Subclasses do not match, because they may compute something else.
        builder: called with the operations and the active recipe (or None); returns the fused
            operation, or None to leave them unfused.
        directions: ("forward",), ("backward",), or both for one object that serves both passes.
    """

    pattern: tuple[Kinds, ...]
    builder: Builder
    directions: tuple[str, ...]


FUSIONS: list[Fusion] = []
"""The registered fusions; those at the front are tried first."""


class _Epoch:
    """Counts changes of the table; each change makes existing plans obsolete."""

    number = 0


EPOCH = _Epoch()


def _register(
    pattern: Sequence[Kinds], builder: Builder, directions: tuple[str, ...], prepend: bool
) -> None:
    if not isinstance(pattern, (list, tuple)):
        rule, fix = (
            "a pattern must be a list of classes",
            "Pass a list, for example [BasicLinear, Bias]",
        )
        fail("register_fusion", rule, repr(pattern), fix, ArgumentTypeError)
    kinds = [k for entry in pattern for k in (entry if isinstance(entry, tuple) else (entry,))]
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BasicOperation)):
            rule = "a pattern must consist of classes of basic operations"
            fix = "Pass a list, for example [BasicLinear, Bias]"
            fail("register_fusion", rule, repr(kind), fix, ArgumentTypeError)
    if len(pattern) == 0:
        fail("register_fusion", "a pattern must not be empty", "none", "Pass at least one class")
    if not callable(builder):
        fail("register_fusion", "the builder must be callable", repr(builder), "Pass the class")
    fusion = Fusion(tuple(pattern), builder, directions)
    FUSIONS.insert(0 if prepend else len(FUSIONS), fusion)
    EPOCH.number += 1


def register_forward_fusion(
    pattern: Sequence[Kinds], builder: Builder, *, prepend: bool = True
) -> None:
    """Register a fusion of neighbouring operations in forward passes.

    Args:
        pattern: for each operation a class of basic operations, or a tuple of classes.
        builder: called with the operations and the active recipe (or None). Returns a
            ``FusedOperation`` over exactly these operations, or None to leave them unfused.
        prepend: True to try this fusion before those that are registered already.

    Raises:
        QTensorError: the pattern or the builder is not valid.
    """
    _register(pattern, builder, ("forward",), prepend)


def register_backward_fusion(
    pattern: Sequence[Kinds], builder: Builder, *, prepend: bool = True
) -> None:
    """Register a fusion in backward passes; see ``register_forward_fusion``.

    The pattern is in the order of the sequence, not of the backward pass.
    """
    _register(pattern, builder, ("backward",), prepend)


def register_forward_backward_fusion(
    pattern: Sequence[Kinds], builder: Builder, *, prepend: bool = True
) -> None:
    """Register a fusion by one object that serves both passes; see ``register_forward_fusion``."""
    _register(pattern, builder, ("forward", "backward"), prepend)


def unregister_fusion(builder: Builder) -> None:
    """Remove every fusion with this builder from the table."""
    FUSIONS[:] = [entry for entry in FUSIONS if entry.builder is not builder]
    EPOCH.number += 1


class Step(NamedTuple):
    """One operation of a plan, with the indices of the basic operations that it replaces."""

    op: BasicOperation | FusedOperation
    first: int
    last: int


def _fits(entry: Fusion, ops: Sequence[BasicOperation]) -> bool:
    if len(entry.pattern) != len(ops):
        return False
    return all(
        type(op) in (kinds if isinstance(kinds, tuple) else (kinds,))
        for op, kinds in zip(ops, entry.pattern, strict=True)
    )


def _built(entry: Fusion, ops: Sequence[BasicOperation], key: str) -> FusedOperation | None:
    """Return the operation that the builder makes of matching operations, after checking it."""
    result = entry.builder(ops, parse_recipe(key) if key else None)
    if result is None:
        return None
    label = f"fusion at {ops[0].label}"
    if not isinstance(result, FusedOperation):
        rule = "a builder must return a FusedOperation or None"
        fail(label, rule, repr(result), "Fix the builder", ArgumentTypeError)
    if len(result.basic_ops) != len(ops) or any(
        a is not b for a, b in zip(result.basic_ops, ops, strict=True)
    ):
        rule = "the fused operation must replace exactly the operations that were passed"
        got = ", ".join(op.label for op in result.basic_ops) or "none"
        fail(label, rule, got, "Pass them on to FusedOperation.__init__")
    defined = {"forward": result.has_forward, "backward": result.has_backward}
    for direction in entry.directions:
        if not defined[direction]:
            rule = f"a {direction} fusion needs an operation with a fused {direction}"
            fail(label, rule, type(result).__name__, f"Define fuser_{direction} in the class")
    return result


def fuse(
    ops: Sequence[BasicOperation],
    keys: Sequence[str],
    first: int,
    table: Sequence[Fusion] = FUSIONS,
) -> tuple[Any, Any]:
    """Return (steps of the forward, steps of the backward in the order of the backward).

    The keys are the active recipes', "" for none; ``first`` is the index of the first
    operation in backward.
    """
    forward: dict[int, Step] = {}
    backward: dict[int, Step] = {}
    for directions in (("forward", "backward"), ("forward",), ("backward",)):
        entries = [e for e in table if e.directions == directions]
        lowest = first if "backward" in directions else 0
        index = lowest
        while index < len(ops):
            step = _step_at(entries, ops, keys, index, _taken(directions, forward, backward))
            if step is None:
                index += 1
                continue
            for direction in directions:
                target = forward if direction == "forward" else backward
                target[step.first] = step
            index = step.last + 1
    return _filled(ops, forward, 0), _filled(ops, backward, first)[::-1]


def _taken(
    directions: tuple[str, ...], forward: dict[int, Step], backward: dict[int, Step]
) -> set[int]:
    steps = [
        step
        for direction in directions
        for step in (forward if direction == "forward" else backward).values()
    ]
    return {index for step in steps for index in range(step.first, step.last + 1)}


def _step_at(
    entries: list[Fusion],
    ops: Sequence[BasicOperation],
    keys: Sequence[str],
    index: int,
    taken: set[int],
) -> Step | None:
    for entry in entries:
        stop = index + len(entry.pattern)
        chosen = ops[index:stop]
        if taken.intersection(range(index, stop)) or not _fits(entry, chosen):
            continue
        key = next((k for k in keys[index:stop] if k), "")
        fused = _built(entry, chosen, key)
        if fused is not None:
            return Step(fused, index, stop - 1)
    return None


def _filled(ops: Sequence[BasicOperation], fused: dict[int, Step], first: int) -> tuple[Step, ...]:
    """Return all steps: the fused ones, and one for each operation that is not fused."""
    steps, index = [], first
    while index < len(ops):
        step = fused.get(index, Step(ops[index], index, index))
        steps.append(step)
        index = step.last + 1
    return tuple(steps)
