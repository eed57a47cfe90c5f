"""Grouped linear, its splits as an extra input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.errors import check
from qtensor.functional.grouped_args import NO_SPLITS, GroupedBwdArgs, GroupedFwdArgs, Splits
from qtensor.functional.grouped_linear import (
    GroupedForward,
    _grouped_backward,
    _grouped_forward_impl,
    _grouped_setup_ctx,
    _restored,
)
from qtensor.functional.main_grad import reporting
from qtensor.modules.grouped_linear import GroupedLinear as GroupedModule
from qtensor.ops.extra import check_channel
from qtensor.ops.handover import Request, produce
from qtensor.ops.operation import BackwardContext, BasicOperation, OperationContext, placed


class GroupedLinear(GroupedModule, BasicOperation):
    """Linear layers over groups of the input's rows; the group sizes, int64 (num_gemms,), are an extra input.

    Args:
        num_gemms: number of groups.
        in_features: K.
        out_features: N.
        bias: add a bias to each group.
        channel: take the group sizes from this channel (see ``ExtraInput``); None: from the caller.
        **options: those of ``qtensor.GroupedLinear`` but for ``return_bias``.
    """

    num_extra_inputs = 1

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        channel: str | None = None,
        **options: Any,
    ) -> None:
        rule = "an operation returns one tensor, with the bias in it"
        fix = "Leave return_bias out"
        check(not options.get("return_bias"), "GroupedLinear", rule, "return_bias=True", fix)
        super().__init__(num_gemms, in_features, out_features, bias, **options)
        check_channel(self.label, channel)
        self.input_channels = (channel,)

    forward = BasicOperation.forward  # type: ignore[assignment]

    @property
    def label(self) -> str:
        """How messages name the operation."""
        return f"{placed(self)}[{self.name}]" if self.name else placed(self)

    def plan_key(self) -> str:
        """The recipe in force."""
        return self._recipe_key()

    def forward_kwargs(self, like: Tensor, input_requires_grad: bool) -> dict[str, Any]:
        """What recipe and state say about this call: arguments that lack input and splits."""
        weights, training = self._named("weight"), torch.is_grad_enabled()
        biases = self._named("bias") if self.use_bias else ()
        call = GroupedFwdArgs(like, weights, biases, NO_SPLITS, input_requires_grad)
        call.wanted = tuple([i for i, w in enumerate(weights) if training and w.requires_grad])
        call.bias_requires_grad = training and any([b.requires_grad for b in biases])
        call.plan = self._grouped_plan(self._recipe_key(), input_requires_grad, bool(call.wanted))
        self._complete_groups(call, like)
        return {"call": call}

    def multiply(
        self, input: Tensor, m_splits: Tensor, call: GroupedFwdArgs, known: Splits | None = None
    ) -> tuple[GroupedForward, GroupedFwdArgs]:
        """The forward, pure; ``known``: checked splits, for which ``m_splits`` is not read again."""
        self._check_input(input, self.weight0, call.plan, self._options)
        args = call.with_tensors(input, call.weights, call.biases)
        args.dtype = input.dtype
        args.splits = self._splits(input, m_splits) if known is None else known
        return _grouped_forward_impl(args), args

    def keep(self, ctx: OperationContext, returned: tuple[GroupedForward, GroupedFwdArgs]) -> None:
        """Note what backward needs of ``multiply``."""
        result, args = returned
        ctx.args = bwd = GroupedBwdArgs()
        saved = _grouped_setup_ctx(bwd, args, result.ctx_attrs, result.tensors_to_save)
        ctx.save_for_backward(*saved)

    def fuser_forward_compute(
        self,
        input: Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        basic_op_kwargs: list[dict[str, Any]],
        next_op_input_request: Request | None = None,
    ) -> tuple[Any, list[tuple[()]], tuple[GroupedForward, GroupedFwdArgs]]:
        """The products."""
        found = self.multiply(input, basic_op_extra_inputs[0][0], basic_op_kwargs[0]["call"])
        return produce(found[0].out, next_op_input_request), [()], found

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input: Tensor,
        returned: tuple[GroupedForward, GroupedFwdArgs],
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        basic_op_kwargs: list[dict[str, Any]],
    ) -> None:
        """Operands of dgrad and wgrad."""
        self.keep(basic_op_ctxs[0], returned)

    def fuser_backward(
        self,
        basic_op_ctxs: list[BackwardContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> tuple[Any, list[Any], list[tuple[None]]]:
        """dgrad, wgrads and gradients of the biases."""
        ctx = basic_op_ctxs[0]
        args = _restored(ctx.args, ctx.saved_tensors, grad_output)
        wgrads, dgrad, grad_biases = _grouped_backward(args, grad_output)
        grads = wgrads
        if grad_biases:
            grads = [g for pair in zip(wgrads, grad_biases, strict=True) for g in pair]
        dgrad = dgrad if dgrad is None else produce(dgrad, ctx.grad_input_request)
        return dgrad, [grads], [(None,)]

    def published_by_op(self, returned: Any) -> list[list[Tensor]]:
        """Maxima of inputs and weights under delayed scaling."""
        return [returned[0].amaxes]

    def published_count(self, kwargs: dict[str, Any]) -> int:
        """One for the inputs, one for each weight."""
        first, second, _ = kwargs["call"].plan.delayed
        return first + second * self.num_gemms

    def report_on(self, out: Any, kwargs: dict[str, Any]) -> Any:
        """Tells the weights when their gradients have been added to ``main_grad``."""
        wgrad = kwargs["call"].wgrad
        added = wgrad is not None and bool(wgrad.main_grads)
        return reporting(out, self._states["weight"].report) if added else out

    def after_forward(self, published: list[Tensor], kwargs: dict[str, Any]) -> None:
        """Note the maxima."""
        self._record_groups(published, kwargs["call"].plan)
