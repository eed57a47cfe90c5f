"""Plans a sequence of operations by values, and runs it."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from qtensor.errors import DtypeError, check, fail
from qtensor.ops.execution import Call, FuserFunction, Wiring, execute
from qtensor.ops.fusions import EPOCH, Step, fuse
from qtensor.ops.operation import BasicOperation, FusibleOperation, parameters_of
from qtensor.ops.plan import Plan, channels
from qtensor.recipes import compile_constant

HAND_OVER_FROM = 2**16
"""Elements of the input. On a CPU a smaller product is a single call that quantizes its operands itself."""
_NOTHING: dict[str, Any] = {}
"""Keyword arguments of operations that have none."""
_NUMBERS = itertools.count()
_FUSERS: weakref.WeakValueDictionary[int, OperationFuser] = weakref.WeakValueDictionary()


@compile_constant
def _plan_name(number: int, keys: tuple[str, ...], first: int, epoch: int) -> str:
    """The attribute of a fuser under which the plan for these values lies; it is made where there is none.

    Plans are attributes of their own, so that a compiled graph of one does not depend on there being others.
    """
    fuser = _FUSERS[number]
    name = f"plan_{len(fuser.plan_names)}"
    fuser.plan_names.append(name)
    ops = fuser.ops
    by_place = dict(zip(fuser.keyed, keys, strict=True))
    every = [by_place.get(place, "") for place in range(len(ops))]
    steps = fuse(ops, every, first) if fuser.fusing else fuse_nothing(ops, first)
    setattr(fuser, name, Plan(ops, steps, fuser.fusing, _run))
    return name


def fuse_nothing(ops: Sequence[BasicOperation], first: int) -> tuple[Any, Any]:
    """Steps of single operations."""
    steps = [Step(op, i, i) for i, op in enumerate(ops)]
    return tuple(steps), tuple(steps[first:])[::-1]


class OperationFuser(Wiring):
    """Plans and runs a sequence of basic operations.

    Args:
        ops: operations; composite ones are taken apart.
        fusing: False: run each operation by itself.

    Raises:
        QTensorError: an operation that is there twice, or channels that do not fit.
    """

    def __init__(self, ops: Sequence[Any], fusing: bool = True) -> None:
        self.ops: tuple[BasicOperation, ...] = tuple([
            basic for op in ops for basic in op.basic_ops
        ])
        self.fusing = fusing
        # Most operations have nothing to say here, and a small block is called in the time of a few such questions.
        self.keyed = self._overriding("plan_key")
        self.prepared = self._overriding("forward_kwargs")
        self.asking = self._overriding("grad_output_request")
        self.stateful = self._overriding("published_count")
        self.reporting = tuple([place for place, op in enumerate(self.ops) if op.reports])
        self.plan_names: list[str] = []
        self.number = next(_NUMBERS)
        _FUSERS[self.number] = self
        for place, op in enumerate(self.ops):
            twice = any(op is other for other in self.ops[:place])
            rule = "an operation stands in a sequence once"
            check(not twice, op.label, rule, f"it again at {place}", "Make another one")
        self.input_channels = [channels(op.input_channels, op.num_extra_inputs) for op in self.ops]
        self.output_channels = [
            channels(op.output_channels, op.num_extra_outputs) for op in self.ops
        ]
        self.n_extra_inputs = self._connect()
        self.n_extra_outputs = [names.count(None) for names in self.output_channels]

    def _overriding(self, *names: str) -> tuple[int, ...]:
        """Places of the operations whose class defines one of these itself."""
        return tuple([
            place
            for place, op in enumerate(self.ops)
            if any(getattr(type(op), n) is not getattr(BasicOperation, n) for n in names)
        ])

    def _connect(self) -> int:
        """Check the channels; returns how many extra inputs the caller passes."""
        made: dict[str, int] = {}
        external = 0
        for op in self.ops:
            for channel in channels(op.input_channels, op.num_extra_inputs):
                if channel is None:
                    external += 1
                    continue
                rule = f"channel {channel!r} must be made earlier in the sequence"
                known = ", ".join(made) or "no channel"
                fix = f"Put MakeExtraOutput(channel={channel!r}) before it"
                check(channel in made, op.label, rule, known, fix)
            for channel in channels(op.output_channels, op.num_extra_outputs):
                if channel is None:
                    continue
                rule = f"channel {channel!r} is made once in a sequence"
                check(channel not in made, op.label, rule, "it again", "Choose another name")
                made[channel] = 1
        return external

    def __deepcopy__(self, memo: Any) -> OperationFuser:
        return OperationFuser([copy.deepcopy(op, memo) for op in self.ops], self.fusing)

    def _first(self, extra_inputs: Sequence[Tensor]) -> int:
        """Place of the first operation that takes part in backward, of an input that does not."""
        taken = 0
        for place, op in enumerate(self.ops):
            for p in parameters_of(op):
                if p.requires_grad:
                    return place
            for channel in self.input_channels[place]:
                if channel is None:
                    if extra_inputs[taken].requires_grad:
                        return place
                    taken += 1
        return len(self.ops)

    def __call__(self, input: Any, *extra_inputs: Tensor) -> Any:
        """The output, then the extra outputs that no channel takes."""
        plan, first = self.plan(input, extra_inputs)
        outside = plan.run_outside is not None and torch.compiler.is_compiling()
        run = plan.run_outside if outside else _run
        return run(self, plan, first, input, extra_inputs)

    def plan(self, input: Any, extra_inputs: Sequence[Tensor]) -> tuple[Plan, int]:
        """(the plan for a call, place of the first operation that takes part in backward).

        Raises:
            QTensorError: another number of extra inputs than the operations take.
        """
        if extra_inputs or self.n_extra_inputs or not isinstance(input, Tensor):
            self._check(input, extra_inputs)
        first = len(self.ops)
        if torch.is_grad_enabled():
            first = 0 if input.requires_grad else self._first(extra_inputs)
        keys = tuple([self.ops[place].plan_key() for place in self.keyed])
        return getattr(self, _plan_name(self.number, keys, first, EPOCH.number)), first

    def _check(self, input: Any, extra_inputs: Sequence[Tensor]) -> None:
        for t in (input, *extra_inputs):
            if not isinstance(t, Tensor):
                label = f"sequence of {len(self.ops)} operations"
                rule = "input and extra inputs must be tensors"
                fail(label, rule, type(t).__name__, "Pass tensors", DtypeError)
        if len(extra_inputs) != self.n_extra_inputs:
            self.refuse(len(extra_inputs))

    def refuse(self, given: int) -> NoReturn:
        """Refuse another number of extra inputs than the operations take.

        Raises:
            QTensorError: with the operations that take them.
        """
        wanting = [
            op.label
            for op, names in zip(self.ops, self.input_channels, strict=True)
            if None in names
        ]
        label = f"sequence of {len(self.ops)} operations"
        rule = f"it takes {self.n_extra_inputs} extra inputs, for {', '.join(wanting) or 'no operation'}"
        fail(label, rule, given, "Pass them behind the input")


def _run(
    fuser: OperationFuser, plan: Plan, first: int, input: Any, extra_inputs: Sequence[Tensor]
) -> Any:
    """A call whose plan is known."""
    ops = fuser.ops
    asks = bool(torch.is_grad_enabled() and input.requires_grad)
    kwargs: list[dict[str, Any]] = [_NOTHING] * len(ops)
    for place in fuser.prepared:
        kwargs[place] = ops[place].forward_kwargs(input, place > first or (place == 0 and asks))
    parameters: list[Any] = []
    counts = []
    if first < len(ops):
        for op in ops:
            own = parameters_of(op) if op._parameters or op._modules else ()
            parameters += own
            counts.append(len(own))
    traced = torch.compiler.is_compiling()
    # It changes no byte. In compiled code always: a graph for each side of a bound on its sizes would be one too many.
    hands_over = traced or not input.is_cpu or input.numel() >= HAND_OVER_FROM
    call = Call(fuser, plan, kwargs, first, asks, hands_over, traced, tuple(counts))
    if first == len(ops):
        out, run = execute(call, input, extra_inputs, False)
        extra_outputs, published = run.extra_outputs, run.published
    else:
        out, *rest = FuserFunction.apply(input, call, *parameters, *extra_inputs)
        start = n_extra = sum(fuser.n_extra_outputs)
        extra_outputs, published = rest[:n_extra], {}
        for place in fuser.stateful if start < len(rest) else ():
            count = ops[place].published_count(kwargs[place])
            if count:
                published[place] = rest[start : start + count]
                start += count
        for place in fuser.reporting:
            out = ops[place].report_on(out, kwargs[place])
    for place, found in published.items():
        ops[place].after_forward(found, kwargs[place])
    return (out, *extra_outputs) if extra_outputs else out


FusibleOperation.fuser_class = OperationFuser
