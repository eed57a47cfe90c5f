"""Plans: how a sequence of operations runs under one recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from qtensor.ops.fusions import Step
from qtensor.ops.operation import BasicOperation, FusedOperation


class ForwardStep(NamedTuple):
    """A step of the forward pass, with what is known of it before any call."""

    op: Any
    first: int
    last: int
    is_split: bool
    takes_extra: bool
    makes_extra: bool
    publishes: bool
    reader: BasicOperation | None
    """The operation behind it, where that gets its input as it asks for it."""


class Plan:
    """How a sequence runs under one recipe.

    Attributes:
        forward: steps in the order of the forward pass.
        backward: steps in the order of the backward pass.
        grad_reads: for each operation whether it gets its gradient as it asks for it.
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
        self.backward: tuple[Step, ...] = tuple(backward)
        self.grad_reads = _reading(backward, len(ops), fusing, first=False)
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


def _known(step: Step, ops: Sequence[BasicOperation], reads: Sequence[bool]) -> ForwardStep:
    own, following = ops[step.first : step.last + 1], step.last + 1
    kind = type(step.op)
    base = BasicOperation if isinstance(step.op, BasicOperation) else FusedOperation
    return ForwardStep(
        *step,
        step.op.is_split,
        any(op.num_extra_inputs for op in own),
        any(op.num_extra_outputs for op in own),
        _overrides(kind, base, "published_by_op") or _overrides(kind, BasicOperation, "published"),
        ops[following] if following < len(ops) and reads[following] else None,
    )


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
