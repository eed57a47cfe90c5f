"""GroupedLinear as an operation; the group sizes are an extra input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.core.errors import check
from qtensor.functional.grouped.args import NO_SPLITS, GroupedBwdArgs, GroupedFwdArgs, Splits
from qtensor.functional.grouped.grouped_function import (
    GroupedForward,
    grouped_backward,
    grouped_forward_impl,
    grouped_setup_ctx,
    restored,
)
from qtensor.functional.linear.main_grad import report_when_accumulated
from qtensor.functional.linear.saved import with_tensors
from qtensor.modules.grouped_linear import GroupedLinear as GroupedModule
from qtensor.modules.input_checks import check_layer_input
from qtensor.ops.extra import check_channel
from qtensor.ops.handover import Request, produce
from qtensor.ops.operation import (
    BackwardContext,
    BasicOperation,
    Extra,
    GradExtra,
    Kwargs,
    OperationContext,
    operation_label,
)

GroupedProduct = tuple[GroupedForward, GroupedFwdArgs]
"""The results of the products of all groups, and their arguments."""


class GroupedLinear(GroupedModule, BasicOperation):
    """Linear layers over groups of the input's rows.

    The group sizes, int64 (num_gemms,), are an extra input.

    Args:
        num_gemms: number of groups.
        in_features: K.
        out_features: N.
        bias: True to add a bias to each group.
        channel: channel that brings the group sizes (see ``ExtraInput``); None if the caller passes
            them.
        **options: options of ``qtensor.GroupedLinear``, except ``return_bias``.
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
        rule = "an operation returns one tensor, to which the bias has been added"
        fix = "Remove return_bias"
        check(not options.get("return_bias"), "GroupedLinear", rule, "return_bias=True", fix)
        super().__init__(num_gemms, in_features, out_features, bias, **options)
        check_channel(self.label, channel)
        self.input_channels = (channel,)

    forward = BasicOperation.forward  # type: ignore[assignment]

    @property
    def label(self) -> str:
        """Name of the operation in messages."""
        return f"{operation_label(self)}[{self.name}]" if self.name else operation_label(self)

    def plan_key(self) -> str:
        """Return the key of the active recipe."""
        return self._recipe_key()

    def forward_kwargs(self, like: Tensor, input_requires_grad: bool) -> dict[str, Any]:
        """Return the arguments that follow from recipe and state, without input and splits."""
        weights, training = self._parameters_of("weight"), torch.is_grad_enabled()
        biases = self._parameters_of("bias") if self.use_bias else ()
        call = GroupedFwdArgs(like, weights, biases, NO_SPLITS, input_requires_grad)
        call.wanted = tuple([i for i, w in enumerate(weights) if training and w.requires_grad])
        call.bias_requires_grad = training and any([b.requires_grad for b in biases])
        call.plan = self._grouped_plan(input_requires_grad, bool(call.wanted))
        self._complete_groups(call, like)
        return {"call": call}

    def multiply(
        self, input: Tensor, m_splits: Tensor, call: GroupedFwdArgs, known: Splits | None = None
    ) -> GroupedProduct:
        """Compute the forward without side effects.

        If ``known`` holds checked splits, ``m_splits`` is not read again.
        """
        check_layer_input(self.label, input, self.weight0, call.plan, self._options)
        args = with_tensors(call, input, call.weights, call.biases)
        args.dtype = input.dtype
        args.splits = self._splits(input, m_splits) if known is None else known
        return grouped_forward_impl(args), args

    def save_operands(self, ctx: OperationContext, returned: GroupedProduct) -> None:
        """Save the operands of dgrad and wgrad in ``ctx``."""
        result, args = returned
        ctx.args = bwd = GroupedBwdArgs()
        ctx.save_for_backward(*grouped_setup_ctx(bwd, args, result))

    def fuser_forward_compute(
        self,
        input: Tensor,
        *,
        basic_op_extra_inputs: Extra,
        basic_op_kwargs: Kwargs,
        next_op_input_request: Request | None = None,
    ) -> tuple[Any, Extra, GroupedProduct]:
        """Compute the products of all groups."""
        product = self.multiply(input, basic_op_extra_inputs[0][0], basic_op_kwargs[0]["call"])
        return produce(product[0].out, next_op_input_request), [()], product

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input: Tensor,
        returned: GroupedProduct,
        **_: object,
    ) -> None:
        """Save the operands of dgrad and wgrad."""
        self.save_operands(basic_op_ctxs[0], returned)

    def fuser_backward(
        self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor, **_: object
    ) -> tuple[Any, list[Any], GradExtra]:
        """Return dgrad, the wgrads and the gradients of the biases."""
        ctx = basic_op_ctxs[0]
        args = restored(ctx.args, ctx.saved_tensors, grad_output)
        wgrads, dgrad, grad_biases = grouped_backward(args, grad_output)
        grads = wgrads
        if grad_biases:
            grads = [g for pair in zip(wgrads, grad_biases, strict=True) for g in pair]
        dgrad = dgrad if dgrad is None else produce(dgrad, ctx.grad_input_request)
        return dgrad, [grads], [(None,)]

    def published_by_op(self, returned: GroupedProduct) -> list[list[Tensor]]:
        """Return the maxima of inputs and weights under delayed scaling."""
        return [returned[0].amaxes]

    def published_count(self, kwargs: dict[str, Any]) -> int:
        """Return the number of maxima: one for the inputs, one for each weight."""
        first, second, _ = kwargs["call"].plan.delayed
        return first + second * self.num_gemms

    def report_on(self, out: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return ``out``; its backward notifies the weights that ``main_grad`` is updated."""
        wgrad = kwargs["call"].wgrad
        added = wgrad is not None and bool(wgrad.main_grads)
        return report_when_accumulated(out, self._states["weight"].report) if added else out

    def after_forward(self, published: list[Tensor], kwargs: dict[str, Any]) -> None:
        """Record the maxima."""
        self._record(published, "weight", kwargs["call"].plan)
