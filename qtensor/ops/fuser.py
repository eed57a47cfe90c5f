"""Runs a sequence of operations by a plan of fused ones, in one autograd function."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from qtensor.errors import DtypeError, check, fail
from qtensor.library.direct import direct
from qtensor.library.pointwise import ADD
from qtensor.ops.fusions import EPOCH, Step, fuse
from qtensor.ops.handover import Request
from qtensor.ops.operation import (
    BackwardContext,
    BasicOperation,
    OperationContext,
    parameters_of,
)
from qtensor.recipes import compile_constant

_add = direct(ADD, 0, 1)
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


class Forward(NamedTuple):
    """What a forward pass leaves behind."""

    out: Any
    extra_outputs: list[Tensor]
    contexts: list[OperationContext]
    published: list[list[Tensor]]


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
        self.n_extra_inputs = self._connect()

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
            for channel in channels(op.input_channels, op.num_extra_inputs):
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
            op.label for op in self.ops if None in channels(op.input_channels, op.num_extra_inputs)
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
    call = Call(fuser, plan, kwargs, first, asks)
    if first < len(ops):
        parameters = [p for op in ops for p in parameters_of(op)]
        out, *rest = FuserFunction.apply(input_, call, *parameters, *extra_inputs)
        counts = [op.published_count(kw) for op, kw in zip(ops, kwargs, strict=True)]
        start = len(rest) - sum(counts)
        extra_outputs, published = rest[:start], split(rest[start:], counts)
    else:
        result = execute(call, input_, extra_inputs, False)
        out, extra_outputs, published = result.out, result.extra_outputs, result.published
    for op, found, kw in zip(ops, published, kwargs, strict=True):
        if found:
            op.after_forward(found, kw)
        if first < len(ops):
            out = op.report_on(out, kw)
    return (out, *extra_outputs) if extra_outputs else out


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
        for place in range(len(ops))
    ]
    published: list[list[Tensor]] = [[] for _ in ops]
    outside = list(extra_inputs)
    made: dict[str, Tensor] = {}
    extra_outputs: list[Tensor] = []
    x = input_
    for step in plan.forward:
        op, places = step.op, range(step.first, step.last + 1)
        extra = []
        for place in places:
            basic = ops[place]
            given = [
                outside.pop(0) if channel is None else made[channel]
                for channel in channels(basic.input_channels, basic.num_extra_inputs)
            ]
            extra.append(tuple(given))
        following = step.last + 1
        request = None
        if following < len(ops) and plan.reads[following]:
            request = ops[following].input_request(kwargs[following])
        own = [kwargs[place] for place in places]
        saves = saving and step.last >= call.first
        ctxs = contexts[step.first : following]
        if op.is_split:
            y, extras, returned = op.fuser_forward_compute(
                x,
                basic_op_extra_inputs=extra,
                basic_op_kwargs=own,
                next_op_input_request=request,
            )
            if saves:
                op.fuser_forward_save_ctx(
                    ctxs, x, returned, basic_op_extra_inputs=extra, basic_op_kwargs=own
                )
            for place, found in zip(places, op.published_by_op(returned), strict=True):
                published[place] = found
        else:
            y, extras = op.fuser_forward(
                ctxs,
                x,
                basic_op_extra_inputs=extra,
                basic_op_kwargs=own,
                next_op_input_request=request,
            )
        for place, outs in zip(places, extras, strict=True):
            names = channels(ops[place].output_channels, ops[place].num_extra_outputs)
            for channel, t in zip(names, outs, strict=True):
                if channel is None:
                    # Autograd gives an input that is returned another identity.
                    extra_outputs.append(t.view_as(t))
                else:
                    made[channel] = t
        x = y
    return Forward(x, extra_outputs, contexts, published)


class FuserFunction(torch.autograd.Function):
    """The one place where a sequence meets autograd, in eager and compiled code alike."""

    @staticmethod
    def forward(ctx: Any, input_: Any, call: Call, *tensors: Tensor) -> Any:
        """(output, *extra outputs, *what the operations publish).

        ``tensors`` are the parameters, which the operations know, then the extra inputs.
        """
        ops, n_parameters = call.fuser.ops, len(tensors) - call.fuser.n_extra_inputs
        result = execute(call, input_, tensors[n_parameters:], True)
        flat: list[Tensor | None] = []
        counts, texts = [], []
        for op, context, kw in zip(ops, result.contexts, call.kwargs, strict=True):
            request = op.grad_output_request(kw)
            texts.append(None if request is None else request.canonical)
            flat += [None, None] if request is None else [request.scale, request.seed]
            flat += context.to_save
            counts.append(2 + len(context.to_save))
            context.to_save = ()
        ctx.save_for_backward(*flat)
        # Values alone: compiled autograd loses tensors that are attributes of a context.
        ctx.plan, ctx.ops, ctx.contexts = call.plan, ops, result.contexts
        ctx.counts, ctx.texts, ctx.first = tuple(counts), tuple(texts), call.first
        ctx.n_extra_outputs = len(result.extra_outputs)
        published = [t for found in result.published for t in found]
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
        ops, first = ctx.ops, ctx.first
        saved = split(ctx.saved_tensors, ctx.counts)
        contexts = [
            _backward_context(context, tensors, text)
            for context, tensors, text in zip(ctx.contexts, saved, ctx.texts, strict=True)
        ]
        incoming = list(grads[: ctx.n_extra_outputs])
        grad_params: list[list[Any]] = [[None] * len(parameters_of(op)) for op in ops]
        by_channel: dict[str, Any] = {}
        outside: list[list[Any]] = [[] for _ in ops]
        extra_grads = _outside_grads(ops, incoming)
        dy = grad
        for step in ctx.plan.backward:
            places = range(step.first, step.last + 1)
            own = contexts[step.first : step.last + 1]
            before = step.first - 1
            if before >= first and ctx.plan.grad_reads[before]:
                own[0].grad_input_request = contexts[before].grad_output_request
            given = [
                tuple(
                    extra_grads[place].pop(0) if channel is None else by_channel.get(channel)
                    for channel in channels(
                        ops[place].output_channels, ops[place].num_extra_outputs
                    )
                )
                for place in places
            ]
            dy, params, extras = step.op.fuser_backward(own, dy, basic_op_grad_extra_outputs=given)
            for place, found, extra in zip(places, params, extras, strict=True):
                _check_count(ops[place], found, grad_params[place])
                grad_params[place] = list(found)
                names = channels(ops[place].input_channels, ops[place].num_extra_inputs)
                for channel, g in zip(names, extra, strict=True):
                    if channel is None:
                        outside[place].append(g)
                    elif g is not None:
                        known = by_channel.get(channel)
                        by_channel[channel] = g if known is None else _add(known, g)
        for place in range(first):
            names = channels(ops[place].input_channels, ops[place].num_extra_inputs)
            outside[place] = [None] * names.count(None)
        needs_input = first == 0 and ctx.needs_input_grad[0]
        return (
            dy if needs_input else None,
            None,
            *[g for found in grad_params for g in found],
            *[g for found in outside for g in found],
        )


def _backward_context(
    context: OperationContext, tensors: Sequence[Any], text: str | None
) -> BackwardContext:
    scale, seed, *rest = tensors
    request = None if text is None else Request(text, scale, seed)
    return BackwardContext(context, rest, request, None)


def _outside_grads(ops: Sequence[BasicOperation], grads: Sequence[Any]) -> list[list[Any]]:
    """The gradients of the extra outputs that the caller got, by operation."""
    counts = [channels(op.output_channels, op.num_extra_outputs).count(None) for op in ops]
    return split(grads, counts)


def _check_count(op: BasicOperation, found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Refuse a backward that returned gradients for other parameters than there are.

    Raises:
        QTensorError: with both numbers.
    """
    rule = f"its backward must return a gradient or None for each of its {len(wanted)} parameters"
    fix = "Return them in the order of parameters()"
    check(len(found) == len(wanted), op.label, rule, len(found), fix)
