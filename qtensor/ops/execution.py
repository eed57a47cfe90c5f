"""Forward and backward passes of a planned sequence, in one autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.errors import fail
from qtensor.library.pointwise import add
from qtensor.ops.handover import Request
from qtensor.ops.operation import (
    BackwardContext,
    BasicOperation,
    OperationContext,
    parameters_of,
)
from qtensor.ops.plan import Plan


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
            if publishes:
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
        if makes_extra:
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

    def __init__(self, fuser: Wiring, grads: Sequence[Any]) -> None:
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
