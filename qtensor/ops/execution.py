"""Forward and backward passes of a planned sequence, in one autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.ops.checks import gradients, listed, named, parts, refuse_result
from qtensor.ops.handover import Request
from qtensor.ops.operation import (
    BackwardContext,
    BasicOperation,
    OperationContext,
    parameters_of,
)
from qtensor.ops.plan import Plan
from qtensor.ops.routes import Routes

_COMPUTED = ("the output", "extra outputs of each operation", "what save_ctx is to see")
_GRADIENTS = ("gradient of the input", "gradients of parameters", "gradients of extra inputs")


class Wiring:
    """Operations, and which extra tensors go where.

    Attributes:
        ops: basic operations.
        input_channels, output_channels: a channel or None for each extra tensor of each operation.
        has_extra: there are any.
        n_extra_inputs: those that the caller passes.
        n_extra_outputs: those of each operation that the caller gets.
    """

    ops: tuple[BasicOperation, ...]
    input_channels: list[tuple[str | None, ...]]
    output_channels: list[tuple[str | None, ...]]
    has_extra: bool
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


class Forward(NamedTuple):
    """What a forward pass leaves behind."""

    out: Any
    extra_outputs: list[Tensor]
    contexts: list[OperationContext]
    published: dict[int, list[Tensor]]
    """By the place of the operation."""


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
    for op, first, last, is_split, takes_extra, makes_extra, publishes, reader in plan.forward:
        following = last + 1
        own = kwargs[first:following]
        extra: list[tuple[Tensor, ...]] = [()] * len(own)
        if takes_extra:
            extra = _given(fuser.input_channels[first:following], outside, made)
        request = None
        if reader is not None and (call.hands_over or reader.reads_unrounded):
            request = reader.input_request(kwargs[following])
        ctxs = contexts[first:following]
        if is_split:
            result = named(
                op,
                op.fuser_forward_compute,
                x,
                basic_op_extra_inputs=extra,
                basic_op_kwargs=own,
                next_op_input_request=request,
            )
            y, extras, returned = parts(op, "fuser_forward_compute", result, _COMPUTED)
            if saving and last >= call.first:
                op.fuser_forward_save_ctx(
                    ctxs, x, returned, basic_op_extra_inputs=extra, basic_op_kwargs=own
                )
            if publishes:
                for offset, found in enumerate(op.published_by_op(returned)):
                    if found:
                        published[first + offset] = found
        else:
            result = named(
                op,
                op.fuser_forward,
                ctxs or [OperationContext(False) for _ in own],
                x,
                basic_op_extra_inputs=extra,
                basic_op_kwargs=own,
                next_op_input_request=request,
            )
            y, extras = parts(op, "fuser_forward", result, _COMPUTED[:2])
        if y is None:
            refuse_result(op, "forward", "return its output", None)
        if makes_extra:
            _distribute(op, fuser.output_channels[first:following], extras, extra_outputs, made)
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
    op: Any,
    names: Sequence[tuple[str | None, ...]],
    extras: Sequence[Sequence[Tensor]],
    outside: list[Tensor],
    made: dict[str, Tensor],
) -> None:
    """The extra outputs of each operation of a step into their channels, or to the caller."""
    listed(op, "forward", "extra outputs of each operation", extras, len(names))
    for channels_, outs in zip(names, extras, strict=True):
        listed(op, "forward", "extra outputs", outs, len(channels_))
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
        routes = Routes(fuser, grads)
        dy = grad
        for op, start, last in plan.backward:
            own = contexts[start : last + 1]
            before = start - 1
            if before >= first and plan.grad_reads[before]:
                own[0].grad_input_request = contexts[before].grad_output_request
            incoming = routes.incoming(start, last)
            result = named(op, op.fuser_backward, own, dy, basic_op_grad_extra_outputs=incoming)
            dy, params, extras = parts(op, "fuser_backward", result, _GRADIENTS)
            if dy is None and start > first:
                refuse_result(op, "backward", "return the gradient of its input", None)
            listed(op, "fuser_backward", "gradients of each operation", params, len(own))
            for offset, found in enumerate(params):
                grad_params[start + offset] = found
            routes.outgoing(op, start, last, extras)
        flat: list[Any] = []
        for place, op in enumerate(fuser.ops):
            count = len(parameters_of(op))
            flat += gradients(op, grad_params[place], count, place >= first)
        needs_input = first == 0 and ctx.needs_input_grad[0]
        return (dy if needs_input else None, None, *flat, *routes.outside())


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
