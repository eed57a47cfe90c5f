"""Plans: how a sequence of operations runs under one recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from qtensor.ops.fusions import Step
from qtensor.ops.operation import BasicOperation, FusedOperation

Form = Literal["passes", "plain", "split", "single"]
"""How a step runs: it hands on its input and nothing needs to be called; a basic operation by its ``op_`` functions, called
without those around them; by ``fuser_forward_compute``; by ``fuser_forward``."""


class ForwardStep(NamedTuple):
    """A step of the forward pass, with what is known of it before any call."""

    op: Any
    first: int
    last: int
    reader: BasicOperation | None
    """The operation behind it, where that gets its input as it asks for it."""
    publishes: bool
    form: Form
    inputs: Sequence[tuple[str | None, ...]]
    """Channels of the extra inputs of each operation, () where there are none at all."""
    outputs: Sequence[tuple[str | None, ...]]
    """Likewise of the extra outputs."""


class BackwardStep(NamedTuple):
    """A step of the backward pass, likewise."""

    op: Any
    first: int
    last: int
    reader: int
    """Place of the operation before it, where that gets its gradient as it asks for it; else -1."""
    is_plain: bool
    inputs: Sequence[tuple[str | None, ...]]
    """Channels of the extra inputs of each operation."""
    outputs: Sequence[tuple[str | None, ...]]
    """Likewise of the extra outputs, () where there are none at all."""


class Plan:
    """How a sequence runs under one recipe.

    Attributes:
        forward: steps in the order of the forward pass.
        backward: steps in the order of the backward pass.
        run_outside: runs the sequence out of sight of a tracer, where an operation has a single form; else None.
    """

    def __init__(
        self,
        ops: Sequence[BasicOperation],
        steps: tuple[Sequence[Step], Sequence[Step]],
        fusing: bool,
        run: Callable[..., Any],
    ) -> None:
        forward, backward = steps
        reads = _reading(forward, len(ops), fusing, first=True)
        self.forward: tuple[ForwardStep, ...] = tuple([_known(s, ops, reads) for s in forward])
        reads = _reading(backward, len(ops), fusing, first=False)
        self.backward: tuple[BackwardStep, ...] = tuple([
            BackwardStep(
                *step,
                step.first - 1 if step is not backward[-1] and reads[step.first - 1] else -1,
                _inherits(step.op, "fuser_backward"),
                *_channels(ops[step.first : step.last + 1]),
            )
            for step in backward
        ])
        self.run_outside: Any = None
        single = [step.op.label for step in forward if not step.op.is_split]
        if single:
            # Dynamo shows the reason where it breaks the graph, and in the error of fullgraph=True.
            names = ", ".join(single)
            reason = f"{names}: the single form of a forward (op_forward, fuser_forward) is not traced. Define "
            reason += "op_forward_compute and op_forward_save_ctx instead."
            self.run_outside = torch.compiler.disable(run, reason=reason)


def _overrides(kind: type, base: type, name: str) -> bool:
    return getattr(kind, name, None) not in (None, getattr(base, name))


def _inherits(op: Any, *names: str) -> bool:
    """Whether an operation without extra tensors has these functions from ``BasicOperation``."""
    return (
        isinstance(op, BasicOperation)
        and not (op.num_extra_inputs or op.num_extra_outputs)
        and all(getattr(type(op), n) is getattr(BasicOperation, n) for n in names)
    )


def _form(op: Any) -> Form:
    if not op.is_split:
        return "single"
    if vars(type(op)).get("passes_input"):
        return "passes"
    functions = ("fuser_forward_compute", "fuser_forward_save_ctx", "published_by_op")
    return "plain" if _inherits(op, *functions) else "split"


def _known(step: Step, ops: Sequence[BasicOperation], reads: Sequence[bool]) -> ForwardStep:
    op, first, last = step
    own, following = ops[first : last + 1], last + 1
    kind = type(op)
    base = BasicOperation if isinstance(op, BasicOperation) else FusedOperation
    inputs, outputs = _channels(own)
    return ForwardStep(
        op,
        first,
        last,
        ops[following] if following < len(ops) and reads[following] else None,
        _overrides(kind, base, "published_by_op") or _overrides(kind, BasicOperation, "published"),
        _form(op),
        inputs if any(inputs) else (),
        outputs,
    )


def _channels(ops: Sequence[BasicOperation]) -> tuple[Any, Any]:
    """Channels of the extra inputs of operations, and of their extra outputs, () where there are none of these."""
    outputs = [channels(op.output_channels, op.num_extra_outputs) for op in ops]
    inputs = [channels(op.input_channels, op.num_extra_inputs) for op in ops]
    return inputs, outputs if any(outputs) else ()


def channels(given: tuple[str | None, ...], count: int) -> tuple[str | None, ...]:
    """A channel or None for each extra tensor of an operation."""
    return given if given else (None,) * count


def _reading(steps: Sequence[Step], count: int, fusing: bool, first: bool) -> tuple[bool, ...]:
    """For each operation whether what it asks for is passed on to who makes it."""
    found = [False] * count
    for step in steps:
        if isinstance(step.op, BasicOperation):
            # That sums are rounded once is no fusion but what the result is.
            found[step.first] = fusing or (first and step.op.reads_unrounded)
        elif step.op.reads_requests:
            found[step.first if first else step.last] = True
    return tuple(found)
