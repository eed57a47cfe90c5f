"""Forward and backward passes of a planned sequence, in one autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.errors import QTensorError
from qtensor.ops.checks import gradients, listed, name_operation, parts, refuse_result
from qtensor.ops.handover import Request
from qtensor.ops.operation import (
    COMPUTED,
    GRADIENTS,
    BackwardContext,
    BasicOperation,
    OperationContext,
)
from qtensor.ops.plan import ForwardStep, Plan
from qtensor.ops.routes import Routes

_COMPUTED = ("the output", "extra outputs of each operation", "what save_ctx is to see")
_LISTS = (tuple, list)
_GRADIENTS = ("gradient of the input", "gradients of parameters", "gradients of extra inputs")


class Wiring:
    """Operations, and which extra tensors go where.

    Attributes:
        ops: basic operations.
        input_channels, output_channels: a channel or None for each extra tensor of each operation.
        asking: places of the operations that may ask for their gradient in a format.
        n_extra_inputs: those that the caller passes.
        n_extra_outputs: those of each operation that the caller gets.
    """

    ops: tuple[BasicOperation, ...]
    input_channels: list[tuple[str | None, ...]]
    output_channels: list[tuple[str | None, ...]]
    asking: tuple[int, ...]
    n_extra_inputs: int
    n_extra_outputs: list[int]


class Call(NamedTuple):
    """One call of a fuser: values, and tensors that are no parameters."""

    fuser: Wiring
    plan: Plan
    kwargs: list[dict[str, Any]]
    first: int
    """Place of the first operation that takes part in backward."""
    input_requires_grad: bool
    hands_over: bool
    """Operations may make quantized tensors for each other."""
    traced: bool
    n_parameters: tuple[int, ...]
    """Of each operation, where a backward may follow."""


class Forward(NamedTuple):
    """A forward pass: what it works with, and what it leaves behind."""

    call: Call
    given: list[Tensor]
    """Extra inputs of the caller that no operation has taken yet."""
    made: dict[str, Tensor]
    """By their channels."""
    extra_outputs: list[Tensor]
    contexts: list[OperationContext]
    """None where nothing is to be saved."""
    published: dict[int, list[Tensor]]
    """By the place of the operation."""
    begun: list[Any]
    """Operations of the steps so far."""


def execute(
    call: Call, input: Any, extra_inputs: Sequence[Tensor], saving: bool
) -> tuple[Any, Forward]:
    """(the output, the pass); ``saving``: note in contexts what backward needs."""
    contexts = [OperationContext() for _ in call.kwargs] if saving else []
    for context in contexts[: call.first + 1]:
        context.input_requires_grad = call.input_requires_grad
    run = Forward(call, list(extra_inputs), {}, [], contexts, {}, [])
    if call.traced:
        return _forward(run, input), run
    try:
        return _forward(run, input), run
    except QTensorError as error:
        name_operation(run.begun[-1], error)
        raise


def _forward(run: Forward, x: Any) -> Any:
    call, contexts = run.call, run.contexts
    kwargs, hands_over = call.kwargs, call.hands_over
    begin, first_saving = run.begun.append, call.first if contexts else len(kwargs)
    for step in call.plan.forward:
        op, first, last, reader, publishes, form, _, outputs = step
        begin(op)
        request = None
        if reader is not None and (hands_over or reader.reads_unrounded):
            request = reader.input_request(kwargs[last + 1])
        if form == "plain":
            own = kwargs[first]
            result = op.op_forward_compute(x, next_op_input_request=request, **own)
            if type(result) is not tuple or len(result) != 2:
                result = parts(op, "op_forward_compute", result, COMPUTED)
            y, returned = result
            if first >= first_saving:
                op.op_forward_save_ctx(contexts[first], x, returned, **own)
            if publishes and (found := op.published(returned)):
                run.published[first] = found
        elif form == "passes" and request is None:
            y = x
            for names in outputs:
                for channel in names:
                    _put(run, channel, x)
        else:
            y = _by_fuser_functions(run, step, x, request)
        if y is None:
            refuse_result(op, "forward", "return its output", None)
        x = y
    return x


def _by_fuser_functions(run: Forward, step: ForwardStep, x: Any, request: Request | None) -> Any:
    """The output of a step."""
    op, first, last, _, publishes, form, inputs, outputs = step
    own, ctxs = run.call.kwargs[first : last + 1], run.contexts[first : last + 1]
    extra = _given(run, inputs) if inputs else [()] * len(own)
    if form == "single":
        if not ctxs:
            ctxs = [OperationContext() for _ in own]
            for ctx in ctxs:
                ctx.input_requires_grad = False
        result = op.fuser_forward(
            ctxs,
            x,
            basic_op_extra_inputs=extra,
            basic_op_kwargs=own,
            next_op_input_request=request,
        )
        y, extras = parts(op, "fuser_forward", result, _COMPUTED[:2])
    else:
        result = op.fuser_forward_compute(
            x,
            basic_op_extra_inputs=extra,
            basic_op_kwargs=own,
            next_op_input_request=request,
        )
        y, extras, returned = parts(op, "fuser_forward_compute", result, _COMPUTED)
        if ctxs and last >= run.call.first:
            op.fuser_forward_save_ctx(
                ctxs, x, returned, basic_op_extra_inputs=extra, basic_op_kwargs=own
            )
        if publishes:
            for place, found in enumerate(op.published_by_op(returned), first):
                if found:
                    run.published[place] = found
    if outputs:
        _distribute(run, op, outputs, extras)
    return y


def _put(run: Forward, channel: str | None, t: Tensor) -> None:
    """An extra output into its channel, or to the caller."""
    if channel is None:
        # Autograd gives an input that is returned another identity.
        run.extra_outputs.append(t.view_as(t))
    else:
        run.made[channel] = t


def _given(run: Forward, inputs: Sequence[tuple[str | None, ...]]) -> list[tuple[Tensor, ...]]:
    """The extra inputs of each operation of a step."""
    given, made = run.given, run.made
    return [
        tuple([given.pop(0) if channel is None else made[channel] for channel in names])
        for names in inputs
    ]


def _distribute(
    run: Forward,
    op: Any,
    outputs: Sequence[tuple[str | None, ...]],
    extras: Sequence[Sequence[Tensor]],
) -> None:
    """The extra outputs of each operation of a step into their channels, or to the caller."""
    listed(op, "forward", "extra outputs of each operation", extras, len(outputs))
    for names, outs in zip(outputs, extras, strict=True):
        listed(op, "forward", "extra outputs", outs, len(names))
        for channel, t in zip(names, outs, strict=True):
            _put(run, channel, t)


class Backward(NamedTuple):
    """A backward pass: what it works with, and what it leaves behind."""

    ctx: Any
    contexts: list[BackwardContext]
    routes: Routes
    parameters: dict[int, Any]
    """Gradients of an operation's parameters, by its place."""
    begun: list[Any]
    """Operations of the steps so far."""


def _backward(run: Backward, dy: Any) -> Any:
    """The gradient of the input."""
    ctx, contexts, routes = run.ctx, run.contexts, run.routes
    counts, ops = ctx.n_parameters, ctx.fuser.ops
    for step in ctx.plan.backward:
        op, first, last, reader, is_plain, inputs, outputs = step
        run.begun.append(op)
        if reader >= 0:
            contexts[first].grad_input_request = contexts[reader].grad_output_request
        if is_plain:
            result = op.op_backward(contexts[first], dy)
            if type(result) is not tuple or len(result) != 2:
                result = parts(op, "op_backward", result, GRADIENTS)
            dx, params = result
            if type(params) not in _LISTS or len(params) != counts[first]:
                params = gradients(op, params, counts[first])
            run.parameters[first] = params
        else:
            own = contexts[first : last + 1]
            incoming = routes.incoming(first, outputs) if outputs else [()] * len(own)
            result = op.fuser_backward(own, dy, basic_op_grad_extra_outputs=incoming)
            dx, by_op, extras = parts(op, "fuser_backward", result, _GRADIENTS)
            listed(op, "fuser_backward", "gradients of each operation", by_op, len(own))
            for place, params in enumerate(by_op, first):
                run.parameters[place] = gradients(ops[place], params, counts[place])
            routes.outgoing(op, first, inputs, extras)
        if dx is None and first > ctx.first:
            refuse_result(op, "backward", "return the gradient of its input", None)
        dy = dx
    return dy


class FuserFunction(torch.autograd.Function):
    """The one place where a sequence meets autograd, in eager and compiled code alike."""

    @staticmethod
    def forward(ctx: Any, input: Any, call: Call, *tensors: Tensor) -> Any:
        """(output, *extra outputs, *what the operations publish).

        ``tensors`` are the parameters, which the operations know, then the extra inputs.
        """
        fuser, first_extra = call.fuser, len(tensors) - call.fuser.n_extra_inputs
        out, run = execute(call, input, tensors[first_extra:], True)
        flat: list[Tensor | None] = []
        ctx.texts = _gradient_requests(call, flat) if call.hands_over else ()
        saved = [context.to_save for context in run.contexts]
        for context in run.contexts:
            context.to_save = ()
        # One list after the other: Dynamo before torch 2.13 cannot add an iterator to a list.
        for tensors_to_save in saved:
            flat += tensors_to_save
        ctx.save_for_backward(*flat)
        # Values alone: compiled autograd loses tensors that are attributes of a context.
        ctx.plan, ctx.fuser, ctx.contexts = call.plan, fuser, run.contexts
        ctx.counts, ctx.first = tuple(map(len, saved)), call.first
        ctx.n_parameters = call.n_parameters
        if out is input:
            out = input.view_as(input)
        if not run.published:
            return (out, *run.extra_outputs)
        published = [t for found in run.published.values() for t in found]
        ctx.mark_non_differentiable(*published)
        return (out, *run.extra_outputs, *published)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *grads: Tensor) -> Any:
        """Gradients of (input, call, *parameters, *extra inputs)."""
        run = Backward(ctx, _backward_contexts(ctx), Routes(ctx.fuser, grads), {}, [])
        if torch.compiler.is_compiling():
            dx = _backward(run, grad)
        else:
            try:
                dx = _backward(run, grad)
            except QTensorError as error:
                if run.begun:
                    name_operation(run.begun[-1], error)
                raise
        flat: list[Any] = []
        for place, count in enumerate(ctx.n_parameters):
            if count:
                flat += run.parameters[place] if place >= ctx.first else (None,) * count
        needs_input = ctx.first == 0 and ctx.needs_input_grad[0]
        return (dx if needs_input else None, None, *flat, *run.routes.outside())


def _gradient_requests(call: Call, tensors: list[Tensor | None]) -> tuple[tuple[int, str], ...]:
    """How operations ask for their gradients, by their places; two tensors each go to ``tensors``."""
    found = []
    for place in call.fuser.asking:
        request = call.fuser.ops[place].grad_output_request(call.kwargs[place])
        if request is not None:
            found.append((place, request.canonical))
            tensors += [request.scale, request.seed]
    return tuple(found)


def _backward_contexts(ctx: Any) -> list[BackwardContext]:
    """The contexts with their tensors."""
    saved, start, found = ctx.saved_tensors, 2 * len(ctx.texts), []
    for context, count in zip(ctx.contexts, ctx.counts, strict=True):
        found.append(BackwardContext(context, saved[start : start + count]))
        start += count
    for i, (place, text) in enumerate(ctx.texts):
        found[place].grad_output_request = Request(text, saved[2 * i], saved[2 * i + 1])
    return found
