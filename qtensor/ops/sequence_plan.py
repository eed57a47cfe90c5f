"""``SequencePlan``: how a sequence of operations runs under one recipe."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from qtensor.ops.fusions import Step
from qtensor.ops.operation import BasicOperation, FusedOperation, FusibleOperation

Form = Literal["passes", "plain", "split", "single"]
"""How a step runs.

"passes": it returns its input, so nothing is called. "plain": a basic operation whose ``op_``
functions are called directly. "split": through ``fuser_forward_compute``. "single": through
``fuser_forward``.
"""


class ForwardStep(NamedTuple):
    """A step of the forward pass, with everything that is known before a call.

    ``first`` and ``last`` are the indices of the operations that it runs.
    """

    op: Any
    first: int
    last: int
    reader: BasicOperation | None
    """The next operation, if this step makes its input as requested; else None."""
    publishes: bool
    form: Form
    inputs: Sequence[tuple[str | None, ...]]
    """Channels of the extra inputs of each operation; () if there are no extra inputs."""
    outputs: Sequence[tuple[str | None, ...]]
    """Channels of the extra outputs of each operation; () if there are no extra outputs."""


class BackwardStep(NamedTuple):
    """A step of the backward pass, with everything that is known before a call."""

    op: Any
    first: int
    last: int
    reader: int
    """Index of the previous operation, if this step makes its gradient as requested; else -1."""
    is_plain: bool
    inputs: Sequence[tuple[str | None, ...]]
    """Channels of the extra inputs of each operation."""
    outputs: Sequence[tuple[str | None, ...]]
    """Channels of the extra outputs of each operation; () if there are no extra outputs."""


class WatchedStep:
    """Stands for the operation of a step. Subclasses define the ``fuser_`` functions they watch."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __getattr__(self, name: str) -> Any:
        return getattr(self.op, name)


class SequencePlan:
    """How a sequence runs under one recipe.

    Attributes:
        forward: steps in the order of the forward pass.
        backward: steps in the order of the backward pass.
        run_outside: runs the sequence outside a traced graph, if an operation has only the single
            form of the forward; else None.
    """

    def __init__(
        self,
        ops: Sequence[BasicOperation],
        steps: tuple[Sequence[Step], Sequence[Step]],
        fusing: bool,
        run: Callable[..., Any],
    ) -> None:
        forward, backward = steps
        reads = _forwarded_requests(forward, len(ops), fusing, first=True)
        self.forward: tuple[ForwardStep, ...] = tuple([
            _forward_step(s, ops, reads) for s in forward
        ])
        reads = _forwarded_requests(backward, len(ops), fusing, first=False)
        self.backward: tuple[BackwardStep, ...] = tuple([
            BackwardStep(
                *step,
                step.first - 1 if step is not backward[-1] and reads[step.first - 1] else -1,
                _inherits(step.op, "fuser_backward"),
                *_channels(ops[step.first : step.last + 1]),
            )
            for step in backward
        ])
        self.run_outside: Callable[..., Any] | None = None
        single = [step.op.label for step in forward if not step.op.is_split]
        if single:
            # Dynamo prints the reason when it breaks the graph, and in the error of fullgraph=True.
            names = ", ".join(single)
            reason = f"{names}: the single form of a forward (op_forward, fuser_forward) is not "
            reason += "traced. Define op_forward_compute and op_forward_save_ctx instead."
            self.run_outside = torch.compiler.disable(run, reason=reason)

    def watched(self, watch: Callable[[ForwardStep | BackwardStep], WatchedStep]) -> SequencePlan:
        """Return a plan whose steps call the ``fuser_`` functions of ``watch(step)``."""
        plan = copy.copy(self)
        plan.forward = tuple([
            s._replace(op=watch(s), form="single" if s.form == "single" else "split")
            for s in self.forward
        ])
        plan.backward = tuple([s._replace(op=watch(s), is_plain=False) for s in self.backward])
        return plan


def _overrides(kind: type, base: type, name: str) -> bool:
    return getattr(kind, name, None) not in (None, getattr(base, name))


def _inherits(op: FusibleOperation, *names: str) -> bool:
    """Return True if ``op`` has no extra tensors and inherits these functions."""
    return (
        isinstance(op, BasicOperation)
        and not (op.num_extra_inputs or op.num_extra_outputs)
        and all(getattr(type(op), n) is getattr(BasicOperation, n) for n in names)
    )


def _form(op: FusibleOperation) -> Form:
    if not op.is_split:
        return "single"
    if vars(type(op)).get("passes_input"):
        return "passes"
    functions = ("fuser_forward_compute", "fuser_forward_save_ctx", "published_by_op")
    return "plain" if _inherits(op, *functions) else "split"


def _forward_step(step: Step, ops: Sequence[BasicOperation], reads: Sequence[bool]) -> ForwardStep:
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
    """Return the channels of the extra inputs and extra outputs of operations.

    The second is () if there are no extra outputs.
    """
    outputs = [channels(op.output_channels, op.num_extra_outputs) for op in ops]
    inputs = [channels(op.input_channels, op.num_extra_inputs) for op in ops]
    return inputs, outputs if any(outputs) else ()


def channels(names: tuple[str | None, ...], count: int) -> tuple[str | None, ...]:
    """Return a channel or None for each of ``count`` extra tensors of an operation."""
    return names if names else (None,) * count


def _forwarded_requests(
    steps: Sequence[Step], count: int, fusing: bool, first: bool
) -> tuple[bool, ...]:
    """Return, for each operation, True if its request reaches the operation before it."""
    forwarded = [False] * count
    for step in steps:
        if isinstance(step.op, BasicOperation):
            # Sums are rounded once with and without fusing: it is part of the result, not a fusion.
            forwarded[step.first] = fusing or (first and step.op.reads_unrounded)
        elif step.op.reads_requests:
            forwarded[step.first if first else step.last] = True
    return tuple(forwarded)
