"""The table of fusions: patterns of neighbouring operations, and what builds one operation out of them.

The fuser walks a sequence from its start and takes, at each place, the first entry whose pattern fits and whose builder
returns an operation. It knows no operation itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qtensor.errors import DtypeError, fail
from qtensor.ops.operation import BasicOperation, FusedOperation
from qtensor.recipes import Recipe, parse_recipe

Builder = Callable[[Sequence[Any], Recipe | None], FusedOperation | None]
Kinds = type | tuple[type, ...]


class Fusion(NamedTuple):
    """An entry of the table.

    Attributes:
        pattern: a class, or a tuple of classes, for each operation in the order of the sequence. The classes themselves, not
            subclasses, which may compute something else.
        builder: (the operations, the recipe in force or None) -> the fused operation, or None to leave them alone.
        directions: "forward", "backward" or both, for one object that serves both.
    """

    pattern: tuple[Kinds, ...]
    builder: Builder
    directions: tuple[str, ...]


FUSIONS: list[Fusion] = []


class _Epoch:
    """Counts changes of the table: plans are made anew after one."""

    number = 0


EPOCH = _Epoch()


def _register(
    pattern: Sequence[Kinds], builder: Builder, directions: tuple[str, ...], prepend: bool
) -> None:
    kinds = [k for place in pattern for k in (place if isinstance(place, tuple) else (place,))]
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BasicOperation)):
            rule = "a pattern is made of classes of basic operations"
            fail("register_fusion", rule, repr(kind), "Pass [BasicLinear, Bias], say", DtypeError)
    if len(pattern) == 0:
        fail("register_fusion", "a pattern has an operation", "none", "Pass one class at least")
    if not callable(builder):
        fail("register_fusion", "the builder must be callable", repr(builder), "Pass the class")
    entry = Fusion(tuple(pattern), builder, directions)
    FUSIONS.insert(0 if prepend else len(FUSIONS), entry)
    EPOCH.number += 1


def register_forward_fusion(
    pattern: Sequence[Kinds], builder: Builder, *, prepend: bool = True
) -> None:
    """Fuse neighbouring operations in forward passes.

    Args:
        pattern: a class of basic operations, or a tuple of them, for each place.
        builder: (operations, recipe or None) -> a ``FusedOperation`` over exactly these, or None to leave them alone.
        prepend: try it before those that are there.

    Raises:
        QTensorError: something else.
    """
    _register(pattern, builder, ("forward",), prepend)


def register_backward_fusion(
    pattern: Sequence[Kinds], builder: Builder, *, prepend: bool = True
) -> None:
    """Fuse neighbouring operations, in the order of the sequence, in backward passes; see ``register_forward_fusion``."""
    _register(pattern, builder, ("backward",), prepend)


def register_forward_backward_fusion(
    pattern: Sequence[Kinds], builder: Builder, *, prepend: bool = True
) -> None:
    """Fuse neighbouring operations by one object that serves both passes; see ``register_forward_fusion``."""
    _register(pattern, builder, ("forward", "backward"), prepend)


def unregister_fusion(builder: Builder) -> None:
    """Take every entry with this builder out of the table."""
    FUSIONS[:] = [entry for entry in FUSIONS if entry.builder is not builder]
    EPOCH.number += 1


class Step(NamedTuple):
    """One operation of a plan, and the places of the basic operations that it stands for."""

    op: Any
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
    """What the builder makes of operations that fit, checked.

    Raises:
        QTensorError: something that cannot stand for them.
    """
    result = entry.builder(ops, parse_recipe(key) if key else None)
    if result is None:
        return None
    label = f"fusion at {ops[0].label}"
    if not isinstance(result, FusedOperation):
        rule = "a builder returns a FusedOperation or None"
        fail(label, rule, repr(result), "Mend the builder", DtypeError)
    if len(result.basic_ops) != len(ops) or any(
        a is not b for a, b in zip(result.basic_ops, ops, strict=True)
    ):
        rule = "the fused operation must stand for exactly the operations that were passed"
        got = ", ".join(op.label for op in result.basic_ops) or "none"
        fail(label, rule, got, "Hand them on to FusedOperation.__init__")
    for direction in entry.directions:
        if not getattr(result, f"has_{direction}"):
            rule = f"a {direction} fusion needs an operation with a fused {direction}"
            fail(label, rule, type(result).__name__, f"Define fuser_{direction} in the class")
    return result


def fuse(ops: Sequence[BasicOperation], keys: Sequence[str], first: int) -> tuple[Any, Any]:
    """(steps of the forward, steps of the backward in its own order).

    Args:
        ops: the basic operations of a sequence.
        keys: of the recipe in force for each, "" for none.
        first: place of the first operation that takes part in backward.
    """
    forward: dict[int, Step] = {}
    backward: dict[int, Step] = {}
    for directions in (("forward", "backward"), ("forward",), ("backward",)):
        entries = [e for e in FUSIONS if e.directions == directions]
        lowest = first if "backward" in directions else 0
        place = lowest
        while place < len(ops):
            step = _step_at(entries, ops, keys, place, _taken(directions, forward, backward))
            if step is None:
                place += 1
                continue
            for direction in directions:
                target = forward if direction == "forward" else backward
                target[step.first] = step
            place = step.last + 1
    return _filled(ops, forward, 0), _filled(ops, backward, first)[::-1]


def _taken(directions: tuple[str, ...], forward: Any, backward: Any) -> set[int]:
    steps = [
        step
        for direction in directions
        for step in (forward if direction == "forward" else backward).values()
    ]
    return {place for step in steps for place in range(step.first, step.last + 1)}


def _step_at(
    entries: list[Fusion],
    ops: Sequence[BasicOperation],
    keys: Sequence[str],
    place: int,
    taken: set[int],
) -> Step | None:
    for entry in entries:
        stop = place + len(entry.pattern)
        chosen = ops[place:stop]
        if taken.intersection(range(place, stop)) or not _fits(entry, chosen):
            continue
        key = next((k for k in keys[place:stop] if k), "")
        fused = _built(entry, chosen, key)
        if fused is not None:
            return Step(fused, place, stop - 1)
    return None


def _filled(ops: Sequence[BasicOperation], found: dict[int, Step], first: int) -> tuple[Step, ...]:
    """The steps, with single operations where nothing was fused."""
    steps, place = [], first
    while place < len(ops):
        step = found.get(place, Step(ops[place], place, place))
        steps.append(step)
        place = step.last + 1
    return tuple(steps)
