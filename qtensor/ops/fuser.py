"""Runs a sequence of operations by a plan of fused ones, in one autograd function."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from qtensor.errors import DtypeError, check, fail
from qtensor.library.pointwise import add
from qtensor.ops.fusions import EPOCH, Step, fuse
from qtensor.ops.handover import Request
from qtensor.ops.operation import (
    BackwardContext,
    BasicOperation,
    OperationContext,
    parameters_of,
)
from qtensor.recipes import compile_constant

HAND_OVER_FROM = 2**16
"""Elements of the input. On a CPU a smaller product is a single call that quantizes its operands itself."""
_NUMBERS = itertools.count()
_FUSERS: weakref.WeakValueDictionary[int, OperationFuser] = weakref.WeakValueDictionary()


class Plan:
    """How a sequence runs under one recipe.

    Attributes:
        forward: steps in the order of the forward pass.
        backward: steps in the order of the backward pass.
        reads: for each operation whether it gets its input as it asks for it.
        grad_reads: for each operation whether it gets its gradient as it asks for it.
        run_outside: runs the sequence out of sight of a tracer, where an operation has a single form; else None.
    """

    def __init__(
        self, ops: Sequence[BasicOperation], forward: Any, backward: Any, fusing: bool
    ) -> None:
        self.forward: tuple[Step, ...] = forward
        self.backward: tuple[Step, ...] = backward
        self.reads = _reading(forward, len(ops), fusing, first=True)
        self.grad_reads = _reading(backward, len(ops), fusing, first=False)
        self.run_outside: Any = None
        single = [step.op.label for step in forward if not step.op.is_split]
        if single:
            # Dynamo shows the reason where it breaks the graph, and in the error of fullgraph=True.
            names = ", ".join(single)
            reason = f"{names}: the single form of a forward (op_forward, fuser_forward) is not traced. Define "
            reason += "op_forward_compute and op_forward_save_ctx instead."
            self.run_outside = torch.compiler.disable(_run, reason=reason)


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


class Call(NamedTuple):
    """One call of a fuser: values, and tensors that are no parameters."""

    fuser: OperationFuser
    plan: Plan
    kwargs: list[dict[str, Any]]
    first: int
    """Place of the first operation that takes part in backward."""
    input_requires_grad: bool
    hands_over: bool
    """Operations may make quantized tensors for each other."""


class Forward(NamedTuple):
    """What a forward pass leaves behind."""

    out: Any
    extra_outputs: list[Tensor]
    contexts: list[OperationContext]
    published: dict[int, list[Tensor]]
    """By the place of the operation."""


@compile_constant
def _plan_name(number: int, keys: tuple[str, ...], first: int, epoch: int) -> str:
    """The attribute of a fuser under which the plan for these values lies; it is made where there is none.

    Plans are attributes of their own, so that a compiled graph of one does not depend on there being others.
    """
    fuser = _FUSERS[number]
    name = f"plan_{len(fuser.plan_names)}"
    fuser.plan_names.append(name)
    ops = fuser.ops
    steps = fuse(ops, keys, first) if fuser.fusing else fuse_nothing(ops, first)
    setattr(fuser, name, Plan(ops, *steps, fuser.fusing))
    return name


def fuse_nothing(ops: Sequence[BasicOperation], first: int) -> tuple[Any, Any]:
    """Steps of single operations."""
    steps = [Step(op, i, i) for i, op in enumerate(ops)]
    return tuple(steps), tuple(steps[first:])[::-1]


class OperationFuser:
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
        self.has_extra = any([*self.input_channels, *self.output_channels])
        self.n_extra_inputs = self._connect()
        self.n_extra_outputs = [names.count(None) for names in self.output_channels]

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
        import copy  # noqa: PLC0415

        return OperationFuser([copy.deepcopy(op, memo) for op in self.ops], self.fusing)

    def _first(self, input_: Any, extra_inputs: Sequence[Tensor]) -> int:
        """Place of the first operation that takes part in backward."""
        if input_.requires_grad:
            return 0
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

    def __call__(self, input_: Any, *extra_inputs: Tensor) -> Any:
        """The output, then the extra outputs that no channel takes."""
        plan, first = self.plan(input_, extra_inputs)
        outside = plan.run_outside is not None and torch.compiler.is_compiling()
        run = plan.run_outside if outside else _run
        return run(self, plan, first, input_, extra_inputs)

    def plan(self, input_: Any, extra_inputs: Sequence[Tensor]) -> tuple[Plan, int]:
        """(the plan for a call, place of the first operation that takes part in backward).

        Raises:
            QTensorError: another number of extra inputs than the operations take.
        """
        self._check(input_, extra_inputs)
        count = len(self.ops)
        first = self._first(input_, extra_inputs) if torch.is_grad_enabled() else count
        keys = tuple([op.plan_key() for op in self.ops])
        return getattr(self, _plan_name(self.number, keys, first, EPOCH.number)), first

    def _check(self, input_: Any, extra_inputs: Sequence[Tensor]) -> None:
        label = f"sequence of {len(self.ops)} operations"
        rule = "input and extra inputs must be tensors"
        for t in (input_, *extra_inputs):
            if not isinstance(t, Tensor):
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


def channels(given: tuple[str | None, ...], count: int) -> tuple[str | None, ...]:
    """A channel or None for each extra tensor of an operation."""
    return given if given else (None,) * count


def _run(
    fuser: OperationFuser, plan: Plan, first: int, input_: Any, extra_inputs: Sequence[Tensor]
) -> Any:
    """A call whose plan is known."""
    ops = fuser.ops
    asks = bool(torch.is_grad_enabled() and input_.requires_grad)
    kwargs = [
        op.forward_kwargs(input_, place > first or (place == 0 and asks))
        for place, op in enumerate(ops)
    ]
    call = Call(fuser, plan, kwargs, first, asks, _hands_over(input_))
    if first == len(ops):
        result = execute(call, input_, extra_inputs, False)
        out, extra_outputs, published = result.out, result.extra_outputs, result.published
    else:
        parameters = [p for op in ops for p in parameters_of(op)]
        out, *rest = FuserFunction.apply(input_, call, *parameters, *extra_inputs)
        n_extra = sum(fuser.n_extra_outputs)
        extra_outputs, published = rest[:n_extra], {}
        start = n_extra
        for place, op in enumerate(ops):
            count = op.published_count(kwargs[place])
            if count:
                published[place] = rest[start : start + count]
                start += count
            out = op.report_on(out, kwargs[place])
    for place, found in published.items():
        ops[place].after_forward(found, kwargs[place])
    return (out, *extra_outputs) if extra_outputs else out


def _hands_over(input_: Any) -> bool:
    """Whether operations hand over quantized tensors; it changes no byte.

    In compiled code always: a graph for each side of a bound on its sizes would be one too many.
    """
    if torch.compiler.is_compiling() or not input_.is_cpu:
        return True
    return bool(input_.numel() >= HAND_OVER_FROM)


def split(flat: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Consecutive parts of the given lengths."""
    parts, start = [], 0
    for count in counts:
        parts.append(list(flat[start : start + count]))
        start += count
    return parts


def execute(call: Call, input_: Any, extra_inputs: Sequence[Tensor], saving: bool) -> Forward:
    """The forward pass; ``saving``: note in contexts what backward needs."""
    fuser, plan, kwargs = call.fuser, call.plan, call.kwargs
    ops = fuser.ops
    contexts = [
        OperationContext(place > call.first or (place == 0 and call.input_requires_grad))
        for place in range(len(ops) if saving else 0)
    ]
    published: dict[int, list[Tensor]] = {}
    outside = list(extra_inputs)
    made: dict[str, Tensor] = {}
    extra_outputs: list[Tensor] = []
    x = input_
    for op, first, last in plan.forward:
        following = last + 1
        own = kwargs[first:following]
        extra = (
            _given(fuser.input_channels[first:following], outside, made)
            if fuser.has_extra
            else [()] * (following - first)
        )
        request = None
        if following < len(ops) and plan.reads[following]:
            reader = ops[following]
            if call.hands_over or reader.reads_unrounded:
                request = reader.input_request(kwargs[following])
        ctxs = contexts[first:following]
        if op.is_split:
            y, extras, returned = op.fuser_forward_compute(
                x,
                basic_op_extra_inputs=extra,
                basic_op_kwargs=own,
                next_op_input_request=request,
            )
            if saving and last >= call.first:
                op.fuser_forward_save_ctx(
                    ctxs, x, returned, basic_op_extra_inputs=extra, basic_op_kwargs=own
                )
            for offset, found in enumerate(op.published_by_op(returned)):
                if found:
                    published[first + offset] = found
        else:
            y, extras = op.fuser_forward(
                ctxs or [OperationContext(False) for _ in own],
                x,
                basic_op_extra_inputs=extra,
                basic_op_kwargs=own,
                next_op_input_request=request,
            )
        if fuser.has_extra:
            _distribute(fuser.output_channels[first:following], extras, extra_outputs, made)
        x = y
    return Forward(x, extra_outputs, contexts, published)


def _given(
    names: Sequence[tuple[str | None, ...]], outside: list[Tensor], made: dict[str, Tensor]
) -> list[tuple[Tensor, ...]]:
    """The extra inputs of each operation of a step; those of the caller are taken off ``outside``."""
    return [
        tuple([outside.pop(0) if channel is None else made[channel] for channel in channels_])
        for channels_ in names
    ]


def _distribute(
    names: Sequence[tuple[str | None, ...]],
    extras: Sequence[Sequence[Tensor]],
    outside: list[Tensor],
    made: dict[str, Tensor],
) -> None:
    """The extra outputs of each operation of a step into their channels, or to the caller."""
    for channels_, outs in zip(names, extras, strict=True):
        for channel, t in zip(channels_, outs, strict=True):
            if channel is None:
                # Autograd gives an input that is returned another identity.
                outside.append(t.view_as(t))
            else:
                made[channel] = t


class FuserFunction(torch.autograd.Function):
    """The one place where a sequence meets autograd, in eager and compiled code alike."""

    @staticmethod
    def forward(ctx: Any, input_: Any, call: Call, *tensors: Tensor) -> Any:
        """(output, *extra outputs, *what the operations publish).

        ``tensors`` are the parameters, which the operations know, then the extra inputs.
        """
        fuser = call.fuser
        result = execute(call, input_, tensors[len(tensors) - fuser.n_extra_inputs :], True)
        flat: list[Tensor | None] = []
        counts, texts = [], []
        for op, context, kw in zip(fuser.ops, result.contexts, call.kwargs, strict=True):
            request = op.grad_output_request(kw) if call.hands_over else None
            if request is None:
                texts.append("")
            else:
                texts.append(request.canonical)
                flat += [request.scale, request.seed]
            flat += context.to_save
            counts.append(len(context.to_save))
            context.to_save = ()
        ctx.save_for_backward(*flat)
        # Values alone: compiled autograd loses tensors that are attributes of a context.
        ctx.plan, ctx.fuser, ctx.contexts = call.plan, fuser, result.contexts
        ctx.counts, ctx.texts, ctx.first = tuple(counts), tuple(texts), call.first
        published = [t for found in result.published.values() for t in found]
        if published:
            ctx.mark_non_differentiable(*published)
        out = result.out
        if out is input_:
            out = input_.view_as(input_)
        return (out, *result.extra_outputs, *published)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *grads: Tensor) -> Any:
        """Gradients of (input, call, *parameters, *extra inputs)."""
        fuser, plan, first = ctx.fuser, ctx.plan, ctx.first
        contexts = _backward_contexts(ctx)
        grad_params: list[Sequence[Any]] = [()] * len(fuser.ops)
        routes = _Routes(fuser, grads)
        dy = grad
        for op, start, last in plan.backward:
            own = contexts[start : last + 1]
            before = start - 1
            if before >= first and plan.grad_reads[before]:
                own[0].grad_input_request = contexts[before].grad_output_request
            dy, params, extras = op.fuser_backward(
                own, dy, basic_op_grad_extra_outputs=routes.incoming(start, last)
            )
            for offset, found in enumerate(params):
                grad_params[start + offset] = found
            routes.outgoing(start, extras)
        flat: list[Any] = []
        for place, op in enumerate(fuser.ops):
            flat += _checked(op, grad_params[place], place >= first)
        needs_input = first == 0 and ctx.needs_input_grad[0]
        return (dy if needs_input else None, None, *flat, *routes.outside())


def _checked(op: BasicOperation, found: Sequence[Any], took_part: bool) -> list[Any]:
    """A gradient or None for each parameter of an operation.

    Raises:
        QTensorError: its backward returned another number of them.
    """
    count = len(parameters_of(op))
    if not took_part:
        return [None] * count
    if len(found) != count:
        rule = f"its backward must return a gradient or None for each of its {count} parameters"
        fail(op.label, rule, len(found), "Return them in the order of parameters()")
    return list(found)


class _Routes:
    """Where the gradients of extra tensors go: along channels, from the caller and to it."""

    def __init__(self, fuser: OperationFuser, grads: Sequence[Any]) -> None:
        self.fuser = fuser
        self.grads = split(grads, fuser.n_extra_outputs) if fuser.has_extra else []
        self.by_channel: dict[str, Any] = {}
        self.to_caller: dict[int, list[Any]] = {}

    def incoming(self, first: int, last: int) -> list[tuple[Any, ...]]:
        """Gradients of the extra outputs of the operations of a step."""
        if not self.fuser.has_extra:
            return [()] * (last - first + 1)
        return [
            tuple([
                self.grads[place].pop(0) if channel is None else self.by_channel.get(channel)
                for channel in self.fuser.output_channels[place]
            ])
            for place in range(first, last + 1)
        ]

    def outgoing(self, first: int, extras: Sequence[Sequence[Any]]) -> None:
        """Take the gradients of the extra inputs of the operations of a step."""
        if not self.fuser.has_extra:
            return
        for offset, extra in enumerate(extras):
            names = self.fuser.input_channels[first + offset]
            for channel, grad in zip(names, extra, strict=True):
                if channel is None:
                    self.to_caller.setdefault(first + offset, []).append(grad)
                elif grad is not None:
                    known = self.by_channel.get(channel)
                    self.by_channel[channel] = grad if known is None else add(known, grad)

    def outside(self) -> list[Any]:
        """Gradients of the caller's extra inputs, None for those of operations that took no part."""
        found: list[Any] = []
        if self.fuser.n_extra_inputs:
            for place, names in enumerate(self.fuser.input_channels):
                count = names.count(None)
                found += self.to_caller.get(place, [None] * count) if count else []
        return found


def _backward_contexts(ctx: Any) -> list[BackwardContext]:
    """The contexts with their tensors."""
    saved, start, found = ctx.saved_tensors, 0, []
    for context, count, text in zip(ctx.contexts, ctx.counts, ctx.texts, strict=True):
        request = None
        if text:
            request = Request(text, saved[start], saved[start + 1])
            start += 2
        tensors = saved[start : start + count]
        found.append(BackwardContext(context, tensors, request, None))
        start += count
    return found
