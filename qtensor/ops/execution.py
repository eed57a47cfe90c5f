"""Forward and backward passes of a planned sequence, in one autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import QTensorError
from qtensor.ops.checks import check_gradients, check_list, name_operation
from qtensor.ops.handover import Request, Value
from qtensor.ops.operation import (
    COMPUTED,
    GRADIENTS,
    BackwardContext,
    FusibleOperation,
    OperationContext,
    check_tuple,
    refuse_result,
)
from qtensor.ops.routes import Routes, Wiring
from qtensor.ops.sequence_plan import ForwardStep, SequencePlan

_COMPUTED = ("the output", "extra outputs of each operation", "data for save_ctx")
_LISTS = (tuple, list)
_GRADIENTS = (
    "gradient of the input",
    "gradients of parameters",
    "gradients of extra inputs",
)


class Call(NamedTuple):
    """One call of a fuser: values, and tensors other than parameters."""

    fuser: Wiring
    plan: SequencePlan
    kwargs: list[dict[str, Any]]
    first: int
    """Index of the first operation that takes part in backward."""
    input_requires_grad: bool
    hands_over: bool
    """True if operations pass each other quantized tensors."""
    traced: bool
    n_parameters: tuple[int, ...]
    """Number of parameters of each operation; empty if no backward can follow."""


class Forward(NamedTuple):
    """The state of a forward pass."""

    call: Call
    extra_inputs: list[Tensor]
    """Extra inputs of the caller that no operation has taken yet."""
    channels: dict[str, Tensor]
    """Extra tensors inside the sequence, by channel."""
    extra_outputs: list[Tensor]
    contexts: list[OperationContext]
    """Contexts of all operations; empty if nothing is saved."""
    published: dict[int, list[Tensor]]
    """Tensors that operations publish, by the operation's index."""
    begun: list[Any]
    """Operations of the steps that have begun, for error messages."""


def execute(
    call: Call, input: Tensor, extra_inputs: Sequence[Tensor], saving: bool
) -> tuple[Any, Forward]:
    """Run the forward and return (the output, the state).

    If ``saving``, the operations save in contexts what backward needs.
    """
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
                result = check_tuple(op, "op_forward_compute", result, COMPUTED)
            y, returned = result
            if first >= first_saving:
                op.op_forward_save_ctx(contexts[first], x, returned, **own)
            if publishes and (published := op.published(returned)):
                run.published[first] = published
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


def _by_fuser_functions(run: Forward, step: ForwardStep, x: Value, request: Request | None) -> Any:
    """Run a step through the ``fuser_`` functions, and return its output."""
    op, first, last, _, publishes, form, inputs, outputs = step
    own, ctxs = run.call.kwargs[first : last + 1], run.contexts[first : last + 1]
    extra = _take_extra_inputs(run, inputs) if inputs else [()] * len(own)
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
        y, extras = check_tuple(op, "fuser_forward", result, _COMPUTED[:2])
    else:
        result = op.fuser_forward_compute(
            x,
            basic_op_extra_inputs=extra,
            basic_op_kwargs=own,
            next_op_input_request=request,
        )
        y, extras, returned = check_tuple(op, "fuser_forward_compute", result, _COMPUTED)
        if ctxs and last >= run.call.first:
            op.fuser_forward_save_ctx(
                ctxs, x, returned, basic_op_extra_inputs=extra, basic_op_kwargs=own
            )
        if publishes:
            for index, tensors in enumerate(op.published_by_op(returned), first):
                if tensors:
                    run.published[index] = tensors
    if outputs:
        _distribute(run, op, outputs, extras)
    return y


def _put(run: Forward, channel: str | None, t: Tensor) -> None:
    """Put an extra output into its channel, or return it to the caller."""
    if channel is None:
        # Return a view: autograd replaces a tensor that is both an input and an output.
        run.extra_outputs.append(t.view_as(t))
    else:
        run.channels[channel] = t


def _take_extra_inputs(
    run: Forward, inputs: Sequence[tuple[str | None, ...]]
) -> list[tuple[Tensor, ...]]:
    """Return the extra inputs of each operation of a step."""
    extra_inputs, channels = run.extra_inputs, run.channels
    return [
        tuple([extra_inputs.pop(0) if name is None else channels[name] for name in names])
        for names in inputs
    ]


def _distribute(
    run: Forward,
    op: FusibleOperation,
    outputs: Sequence[tuple[str | None, ...]],
    extras: Sequence[Sequence[Tensor]],
) -> None:
    """Put the extra outputs of a step's operations into their channels, or return them."""
    check_list(op, "forward", "extra outputs of each operation", extras, len(outputs))
    for names, outs in zip(outputs, extras, strict=True):
        check_list(op, "forward", "extra outputs", outs, len(names))
        for channel, t in zip(names, outs, strict=True):
            _put(run, channel, t)


class Backward(NamedTuple):
    """The state of a backward pass."""

    ctx: Any
    contexts: list[BackwardContext]
    routes: Routes
    parameters: dict[int, Any]
    """Gradients of the parameters, by the operation's index."""
    begun: list[Any]
    """Operations of the steps that have begun, for error messages."""


def _backward(run: Backward, dy: Value) -> Any:
    """Run the backward, and return the gradient of the input."""
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
                result = check_tuple(op, "op_backward", result, GRADIENTS)
            dx, params = result
            if type(params) not in _LISTS or len(params) != counts[first]:
                params = check_gradients(op, params, counts[first])
            run.parameters[first] = params
        else:
            own = contexts[first : last + 1]
            incoming = routes.incoming(first, outputs) if outputs else [()] * len(own)
            result = op.fuser_backward(own, dy, basic_op_grad_extra_outputs=incoming)
            dx, by_op, extras = check_tuple(op, "fuser_backward", result, _GRADIENTS)
            check_list(op, "fuser_backward", "check_gradients of each operation", by_op, len(own))
            for index, params in enumerate(by_op, first):
                run.parameters[index] = check_gradients(ops[index], params, counts[index])
            routes.outgoing(op, first, inputs, extras)
        if dx is None and first > ctx.first:
            refuse_result(op, "backward", "return the gradient of its input", None)
        dy = dx
    return dy


class FuserFunction(torch.autograd.Function):
    """The autograd function of a sequence, for eager and compiled code."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: Call, *tensors: Tensor) -> Any:
        """Return (output, *extra outputs, *published tensors).

        ``tensors`` are the parameters, followed by the extra inputs.
        """
        fuser, first_extra = call.fuser, len(tensors) - call.fuser.n_extra_inputs
        out, run = execute(call, input, tensors[first_extra:], True)
        flat: list[Tensor | None] = []
        ctx.gradient_requests = _gradient_requests(call, flat) if call.hands_over else ()
        saved = [context.to_save for context in run.contexts]
        for context in run.contexts:
            context.to_save = ()
        # One list after the other: Dynamo before torch 2.13 cannot add an iterator to a list.
        for tensors_to_save in saved:
            flat += tensors_to_save
        ctx.save_for_backward(*flat)
        # Only values: compiled autograd loses tensors that are attributes of a context.
        ctx.plan, ctx.fuser, ctx.contexts = call.plan, fuser, run.contexts
        ctx.counts, ctx.first = tuple(map(len, saved)), call.first
        ctx.n_parameters = call.n_parameters
        if out is input:
            out = input.view_as(input)
        if not run.published:
            return (out, *run.extra_outputs)
        published = [t for tensors in run.published.values() for t in tensors]
        ctx.mark_non_differentiable(*published)
        return (out, *run.extra_outputs, *published)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *grads: Tensor) -> Any:
        """Return the gradients of (input, call, *parameters, *extra inputs)."""
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
        for index, count in enumerate(ctx.n_parameters):
            if count:
                flat += run.parameters[index] if index >= ctx.first else (None,) * count
        needs_input = ctx.first == 0 and ctx.needs_input_grad[0]
        return (dx if needs_input else None, None, *flat, *run.routes.outside())


def _gradient_requests(call: Call, tensors: list[Tensor | None]) -> tuple[tuple[int, str], ...]:
    """Return (index, canonical string) of each request for a quantized gradient.

    The scale and the seed of each request are appended to ``tensors``.
    """
    requests = []
    for index in call.fuser.asking:
        request = call.fuser.ops[index].grad_output_request(call.kwargs[index])
        if request is not None:
            requests.append((index, request.canonical))
            tensors += [request.scale, request.seed]
    return tuple(requests)


def _backward_contexts(ctx: Any) -> list[BackwardContext]:
    """Return the contexts together with their saved tensors."""
    requests = ctx.gradient_requests
    saved, start, contexts = ctx.saved_tensors, 2 * len(requests), []
    for context, count in zip(ctx.contexts, ctx.counts, strict=True):
        contexts.append(BackwardContext(context, saved[start : start + count]))
        start += count
    for i, (index, canonical) in enumerate(requests):
        scale, seed = saved[2 * i], saved[2 * i + 1]
        contexts[index].grad_output_request = Request(canonical, scale, seed)
    return contexts
