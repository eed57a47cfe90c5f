"""SequencePlan and run a sequence of operations."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from qtensor.core.errors import ArgumentTypeError, check, fail
from qtensor.core.torch_state import constant_in_graphs
from qtensor.ops.execution import Call, FuserFunction, execute
from qtensor.ops.fusions import EPOCH, Step, fuse
from qtensor.ops.operation import BasicOperation, FusibleOperation, parameters_of
from qtensor.ops.routes import Wiring
from qtensor.ops.sequence_plan import SequencePlan, channels

HAND_OVER_FROM = 2**16
"""Smallest input, in elements, for which operations pass each other quantized tensors on a CPU.

A smaller product is a single call that quantizes its own operands.
"""
_NOTHING: dict[str, Any] = {}
"""Keyword arguments of operations that have none."""
_NUMBERS = itertools.count()
_FUSERS: weakref.WeakValueDictionary[int, OperationFuser] = weakref.WeakValueDictionary()


MOST_PLANS = 64
"""Plans that a fuser keeps. Each recipe and each first operation with a gradient has its own."""


@constant_in_graphs
def _plan_name(number: int, keys: tuple[str, ...], first: int, epoch: int) -> str:
    """Return the name of the fuser's attribute that holds the plan for these values.

    The plan is created if needed; beyond ``MOST_PLANS`` the oldest one is dropped.

    Each plan is a separate attribute, so a compiled graph depends only on its own plan. A
    graph whose plan was dropped is compiled again.
    """
    fuser = _FUSERS[number]
    values = (keys, first, epoch)
    name = fuser.plan_names.get(values)
    if name is not None:
        return name
    name = f"plan_{fuser.plans_made}"
    fuser.plans_made += 1
    by_index = dict(zip(fuser.keyed, keys, strict=True))
    every = [by_index.get(index, "") for index in range(len(fuser.ops))]
    setattr(fuser, name, fuser.make_plan(every, first))
    fuser.plan_names[values] = name
    if len(fuser.plan_names) > MOST_PLANS:
        delattr(fuser, fuser.plan_names.pop(next(iter(fuser.plan_names))))
    return name


def fuse_nothing(ops: Sequence[BasicOperation], first: int) -> tuple[Any, Any]:
    """Return the steps without any fusion: one for each operation."""
    steps = [Step(op, i, i) for i, op in enumerate(ops)]
    return tuple(steps), tuple(steps[first:])[::-1]


class OperationFuser(Wiring):
    """Plans and runs a sequence of basic operations.

    Composite operations are replaced by their basic operations.

    Raises:
        QTensorError: an operation occurs twice, or channels do not match.
    """

    def __init__(self, ops: Sequence[Any], fusing: bool = True) -> None:
        self.ops: tuple[BasicOperation, ...] = tuple([
            basic for op in ops for basic in op.basic_ops
        ])
        self.fusing = fusing
        # Collected once: asking each operation in a call is too slow (hot path).
        self.keyed = self._overriding("plan_key")
        self.prepared = self._overriding("forward_kwargs")
        self.asking = self._overriding("grad_output_request")
        self.stateful = self._overriding("published_count")
        self.reporting = tuple([index for index, op in enumerate(self.ops) if op.reports])
        self.plan_names: dict[tuple[tuple[str, ...], int, int], str] = {}
        self.plans_made = 0
        self.recorded: OperationFuser | None = None
        """The fuser that runs instead while ``qtensor.debug`` records."""
        self.number = next(_NUMBERS)
        _FUSERS[self.number] = self
        for index, op in enumerate(self.ops):
            twice = any(op is other for other in self.ops[:index])
            rule = "an operation may occur only once in a sequence"
            check(not twice, op.label, rule, f"it again at {index}", "Create another operation")
        self.input_channels = [channels(op.input_channels, op.num_extra_inputs) for op in self.ops]
        self.output_channels = [
            channels(op.output_channels, op.num_extra_outputs) for op in self.ops
        ]
        self.n_extra_inputs = self._connect()
        self.n_extra_outputs = [names.count(None) for names in self.output_channels]

    def _overriding(self, *names: str) -> tuple[int, ...]:
        """Return the indices of the operations whose class overrides one of these functions."""
        return tuple([
            index
            for index, op in enumerate(self.ops)
            if any(getattr(type(op), n) is not getattr(BasicOperation, n) for n in names)
        ])

    def _connect(self) -> int:
        """Check the channels, and return the number of extra inputs that the caller passes."""
        filled: dict[str, int] = {}
        external = 0
        for op in self.ops:
            for channel in channels(op.input_channels, op.num_extra_inputs):
                if channel is None:
                    external += 1
                    continue
                rule = f"channel {channel!r} must be filled earlier in the sequence"
                known = ", ".join(filled) or "no channel"
                fix = f"Put MakeExtraOutput(channel={channel!r}) before it"
                check(channel in filled, op.label, rule, known, fix)
            for channel in channels(op.output_channels, op.num_extra_outputs):
                if channel is None:
                    continue
                rule = f"channel {channel!r} may be filled only once in a sequence"
                check(channel not in filled, op.label, rule, "it again", "Choose another name")
                filled[channel] = 1
        return external

    def make_plan(self, keys: Sequence[str], first: int) -> SequencePlan:
        """Return the plan for the keys of the recipes of all operations.

        ``first`` is the index of the first operation that takes part in backward.
        """
        ops = self.ops
        steps = fuse(ops, keys, first) if self.fusing else fuse_nothing(ops, first)
        return SequencePlan(ops, steps, self.fusing, run_plan)

    def __deepcopy__(self, memo: dict[int, Any]) -> OperationFuser:
        return OperationFuser([copy.deepcopy(op, memo) for op in self.ops], self.fusing)

    def _first(self, extra_inputs: Sequence[Tensor]) -> int:
        """Return the index of the first operation in backward, if the input takes no part."""
        taken = 0
        for index, op in enumerate(self.ops):
            for p in parameters_of(op):
                if p.requires_grad:
                    return index
            for channel in self.input_channels[index]:
                if channel is None:
                    if extra_inputs[taken].requires_grad:
                        return index
                    taken += 1
        return len(self.ops)

    def __call__(self, input: Tensor, *extra_inputs: Tensor) -> Any:
        """Return the output, followed by the extra outputs that go to the caller."""
        plan, first = self.plan(input, extra_inputs)
        run: Callable[..., Any] = run_plan
        if plan.run_outside is not None and torch.compiler.is_compiling():
            run = plan.run_outside
        return run(self, plan, first, input, extra_inputs)

    def plan(self, input: Tensor, extra_inputs: Sequence[Tensor]) -> tuple[SequencePlan, int]:
        """Return the plan for a call and the index of the first operation in backward.

        Raises:
            QTensorError: the number of extra inputs is wrong.
        """
        if extra_inputs or self.n_extra_inputs or not isinstance(input, Tensor):
            self._check(input, extra_inputs)
        first = len(self.ops)
        if torch.is_grad_enabled():
            first = 0 if input.requires_grad else self._first(extra_inputs)
        keys = tuple([self.ops[index].plan_key() for index in self.keyed])
        return getattr(self, _plan_name(self.number, keys, first, EPOCH.number)), first

    def _check(self, input: object, extra_inputs: Sequence[Tensor]) -> None:
        for t in (input, *extra_inputs):
            if not isinstance(t, Tensor):
                label = f"sequence of {len(self.ops)} operations"
                rule = "input and extra inputs must be tensors"
                fail(label, rule, type(t).__name__, "Pass tensors", ArgumentTypeError)
        if len(extra_inputs) != self.n_extra_inputs:
            self.refuse(len(extra_inputs))

    def refuse(self, count: int) -> NoReturn:
        """Raise the error for a wrong number of extra inputs.

        ``count`` is the number that was passed.
        """
        wanting = [
            op.label
            for op, names in zip(self.ops, self.input_channels, strict=True)
            if None in names
        ]
        label = f"sequence of {len(self.ops)} operations"
        takers = ", ".join(wanting) or "no operation"
        rule = f"it takes {self.n_extra_inputs} extra inputs, for {takers}"
        fail(label, rule, count, "Pass them after the input")


def run_plan(
    fuser: OperationFuser,
    plan: SequencePlan,
    first: int,
    input: Tensor,
    extra_inputs: Sequence[Tensor],
) -> Any:
    """Run a call with a known plan."""
    ops = fuser.ops
    asks = bool(torch.is_grad_enabled() and input.requires_grad)
    kwargs: list[dict[str, Any]] = [_NOTHING] * len(ops)
    for index in fuser.prepared:
        kwargs[index] = ops[index].forward_kwargs(input, index > first or (index == 0 and asks))
    parameters: list[Any] = []
    counts = []
    if first < len(ops):
        for op in ops:
            own = parameters_of(op) if op._parameters or op._modules else ()
            parameters += own
            counts.append(len(own))
    traced = torch.compiler.is_compiling()
    # Handing over quantized tensors changes no bytes. Compiled code always does it: a bound on
    # sizes would need a graph for each side.
    hands_over = traced or not input.is_cpu or input.numel() >= HAND_OVER_FROM
    call = Call(fuser, plan, kwargs, first, asks, hands_over, traced, tuple(counts))
    if first == len(ops):
        out, run = execute(call, input, extra_inputs, False)
        extra_outputs, published = run.extra_outputs, run.published
    else:
        out, *rest = FuserFunction.apply(input, call, *parameters, *extra_inputs)
        start = n_extra = sum(fuser.n_extra_outputs)
        extra_outputs, published = rest[:n_extra], {}
        for index in fuser.stateful if start < len(rest) else ():
            count = ops[index].published_count(kwargs[index])
            if count:
                published[index] = rest[start : start + count]
                start += count
        for index in fuser.reporting:
            out = ops[index].report_on(out, kwargs[index])
    for index, tensors in published.items():
        ops[index].after_forward(tensors, kwargs[index])
    return (out, *extra_outputs) if extra_outputs else out


FusibleOperation.fuser_class = OperationFuser
