"""The library's own fused operations and their entries in the table of fusions.

On a CPU they save passes over memory and calls, not roundings. Each gives the same bytes as the
operations that it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from qtensor.library.pointwise import SCALE, SCALE_ADD, add
from qtensor.ops.activation import ACTIVATIONS
from qtensor.ops.extra import AddExtraInput, MakeExtraOutput, check_extra
from qtensor.ops.fusions import FUSIONS, Fusion
from qtensor.ops.grouped_linear import GroupedLinear, GroupedProduct
from qtensor.ops.handover import Input, Request, produce
from qtensor.ops.linear import BasicLinear, Bias, Product, bias_gradient
from qtensor.ops.norm import LayerNorm, RMSNorm
from qtensor.ops.operation import (
    BackwardContext,
    BasicOperation,
    Extra,
    FusedOperation,
    GradExtra,
    Kwargs,
    OperationContext,
)
from qtensor.ops.simple import ConstantScale
from qtensor.recipes import Recipe

Grad = Tensor | None
Grads = Sequence[Grad]


class _Fused(FusedOperation):
    """Base of the fused operations.

    The class itself is the builder: ``cls(operations, recipe)``.
    """

    reads_requests = True

    def __init__(self, basic_ops: Sequence[BasicOperation], recipe: Recipe | None = None) -> None:
        super().__init__(basic_ops)


# ---- forward


class _ForwardLinear(_Fused):
    """Base of fused forwards: a product with its bias in one rounding, then ``finish``."""

    linear: BasicLinear
    bias: Bias | None
    last: BasicOperation

    def __init__(self, basic_ops: Sequence[BasicOperation], recipe: Recipe | None = None) -> None:
        super().__init__(basic_ops)
        # Set in __dict__, so that they do not become submodules.
        bias = basic_ops[1] if isinstance(basic_ops[1], Bias) else None
        self.__dict__.update(linear=basic_ops[0], bias=bias, last=basic_ops[-1])

    def finish(self, y: Tensor, extra: Extra, kwargs: Kwargs, request: Request | None) -> Any:
        """Return the result of the operations after product and bias."""
        raise NotImplementedError

    def finish_ctx(self, ctx: OperationContext, y: Tensor, kwargs: dict[str, Any]) -> None:
        """Save what the backward of the last operation needs."""

    def fuser_forward_compute(
        self,
        input: Input,
        *,
        basic_op_extra_inputs: Extra,
        basic_op_kwargs: Kwargs,
        next_op_input_request: Request | None = None,
    ) -> tuple[Any, Extra, Product]:
        """Return the result, and the product for ``fuser_forward_save_ctx``."""
        bias = None if self.bias is None else self.bias.bias
        call = basic_op_kwargs[0]["call"]
        product = self.linear.multiply(input, call, bias, input.dtype)
        y = self.finish(
            product.forward.out, basic_op_extra_inputs, basic_op_kwargs, next_op_input_request
        )
        return y, [()] * len(self.basic_ops), product

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input: Input,
        returned: Product,
        *,
        basic_op_extra_inputs: Extra,
        basic_op_kwargs: Kwargs,
    ) -> None:
        """Save what each operation would save alone."""
        self.linear.save_operands(basic_op_ctxs[0], returned)
        if self.bias is not None:
            self.bias.op_forward_save_ctx(basic_op_ctxs[1], None, None)
        self.finish_ctx(basic_op_ctxs[-1], returned.forward.out, basic_op_kwargs[-1])

    def published_by_op(self, returned: Product) -> list[list[Tensor]]:
        """Return the product's maxima."""
        return [returned.forward.amaxes]


class ForwardLinearBiasActivation(_ForwardLinear):
    """Forward of [BasicLinear, Bias], with or without an activation after them."""

    def finish(self, y: Tensor, extra: Extra, kwargs: Kwargs, request: Request | None) -> Any:
        """Return the activation."""
        last = self.basic_ops[-1]
        if isinstance(last, Bias):
            return produce(y, request)
        return last.op_forward_compute(y, next_op_input_request=request, **kwargs[-1])[0]

    def finish_ctx(self, ctx: OperationContext, y: Tensor, kwargs: dict[str, Any]) -> None:
        """Save the activation's input."""
        last = self.basic_ops[-1]
        if not isinstance(last, Bias):
            last.op_forward_save_ctx(ctx, y, None, **kwargs)


class ForwardLinearBiasAdd(_ForwardLinear):
    """Forward of [BasicLinear, AddExtraInput], with or without a Bias between them."""

    def finish(self, y: Tensor, extra: Extra, kwargs: Kwargs, request: Request | None) -> Any:
        """Return the sum."""
        (other,) = extra[-1]
        check_extra(self.last, y, other)
        return produce(add(y, other), request)


class ForwardLinearScaleAdd(_ForwardLinear):
    """Forward of [BasicLinear, ConstantScale, AddExtraInput]; a Bias may follow BasicLinear."""

    def finish(self, y: Tensor, extra: Extra, kwargs: Kwargs, request: Request | None) -> Any:
        """Return the scaled sum, computed in one pass."""
        (other,) = extra[-1]
        check_extra(self.last, y, other)
        factor = self.basic_ops[-2].scale
        return produce(SCALE_ADD(y, factor, other), request)


class ForwardGroupedMLP(_Fused):
    """Forward of [GroupedLinear, activation, GroupedLinear].

    If both read the same group sizes, the host reads them once.
    """

    def fuser_forward_compute(
        self,
        input: Tensor,
        *,
        basic_op_extra_inputs: Extra,
        basic_op_kwargs: Kwargs,
        next_op_input_request: Request | None = None,
    ) -> tuple[Any, Extra, Any]:
        """Return the result, and the results of both products for ``fuser_forward_save_ctx``."""
        first, activation, second = self.basic_ops
        sizes, second_sizes = basic_op_extra_inputs[0][0], basic_op_extra_inputs[2][0]
        hidden = first.multiply(input, sizes, basic_op_kwargs[0]["call"])
        a, _ = activation.op_forward_compute(hidden[0].out)
        known = hidden[1].splits if second_sizes is sizes else None
        out = second.multiply(a, second_sizes, basic_op_kwargs[2]["call"], known)
        return produce(out[0].out, next_op_input_request), [()] * 3, (hidden, out)

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input: Tensor,
        returned: tuple[GroupedProduct, GroupedProduct],
        **_: object,
    ) -> None:
        """Save what each operation would save alone."""
        first, activation, second = self.basic_ops
        hidden, out = returned
        first.save_operands(basic_op_ctxs[0], hidden)
        activation.op_forward_save_ctx(basic_op_ctxs[1], hidden[0].out, None)
        second.save_operands(basic_op_ctxs[2], out)

    def published_by_op(
        self, returned: tuple[GroupedProduct, GroupedProduct]
    ) -> list[list[Tensor]]:
        """Return the maxima of both products."""
        hidden, out = returned
        return [hidden[0].amaxes, [], out[0].amaxes]


# ---- backward


class _FusedBackward(_Fused):
    """Base of fused backwards of two operations: the second's backward, then ``finish``."""

    def finish(self, dx: Grad, ctx: BackwardContext, extra: Grads) -> tuple[Grad, Grads]:
        """Return the gradients of the input and of the parameters of the first operation."""
        raise NotImplementedError

    def fuser_backward(
        self,
        basic_op_ctxs: list[BackwardContext],
        grad_output: Input,
        *,
        basic_op_grad_extra_outputs: GradExtra,
    ) -> tuple[Any, list[Any], GradExtra]:
        """Return the gradients of input and parameters."""
        ctx, last = basic_op_ctxs
        dx, grads = self.basic_ops[1].op_backward(last, grad_output)
        dx, first = self.finish(dx, ctx, basic_op_grad_extra_outputs[0])
        dx = dx if dx is None else produce(dx, ctx.grad_input_request)
        return dx, [first, grads], [(), ()]


class BackwardActivationBias(_FusedBackward):
    """Backward of [Bias, activation]: one gradient serves the bias and, quantized, the product."""

    def finish(self, dx: Grad, ctx: BackwardContext, extra: Grads) -> tuple[Grad, Grads]:
        """Return the gradient unchanged, and the gradient of the bias."""
        return dx, [None if dx is None else bias_gradient(dx, ctx)]


class _BackwardAdd(_FusedBackward):
    """Base of the backwards that begin with MakeExtraOutput."""

    def finish(self, dx: Grad, ctx: BackwardContext, extra: Grads) -> tuple[Grad, Grads]:
        """Return the sum with the gradient of the other branch."""
        (other,) = extra
        return dx if other is None or dx is None else add(dx, other), ()


class BackwardAddNorm(_BackwardAdd):
    """Backward of [MakeExtraOutput, RMSNorm or LayerNorm]: adds the residual branch's gradient."""


class BackwardLinearAdd(_BackwardAdd):
    """Backward of [MakeExtraOutput, BasicLinear]: adds the other branch's gradient to dgrad."""


class BackwardLinearScale(_FusedBackward):
    """Backward of [ConstantScale, BasicLinear]: dgrad times the factor."""

    def finish(self, dx: Grad, ctx: BackwardContext, extra: Grads) -> tuple[Grad, Grads]:
        """Return the gradient times the factor."""
        return dx if dx is None else SCALE(dx, self.basic_ops[0].scale), ()


_FORWARD: list[tuple[tuple[Any, ...], Any]] = [
    ((BasicLinear, Bias, ConstantScale, AddExtraInput), ForwardLinearScaleAdd),
    ((BasicLinear, ConstantScale, AddExtraInput), ForwardLinearScaleAdd),
    ((BasicLinear, Bias, AddExtraInput), ForwardLinearBiasAdd),
    ((BasicLinear, AddExtraInput), ForwardLinearBiasAdd),
    ((BasicLinear, Bias, ACTIVATIONS), ForwardLinearBiasActivation),
    ((BasicLinear, Bias), ForwardLinearBiasActivation),
    ((GroupedLinear, ACTIVATIONS, GroupedLinear), ForwardGroupedMLP),
]
_BACKWARD: list[tuple[tuple[Any, ...], Any]] = [
    ((Bias, ACTIVATIONS), BackwardActivationBias),
    ((MakeExtraOutput, (RMSNorm, LayerNorm)), BackwardAddNorm),
    ((MakeExtraOutput, BasicLinear), BackwardLinearAdd),
    ((ConstantScale, BasicLinear), BackwardLinearScale),
]
FUSIONS += [Fusion(pattern, builder, ("forward",)) for pattern, builder in _FORWARD]
FUSIONS += [Fusion(pattern, builder, ("backward",)) for pattern, builder in _BACKWARD]


def fusions_of_users() -> list[Fusion]:
    """Return the entries of the table that are not the library's own."""
    return [
        entry
        for entry in FUSIONS
        if not (isinstance(entry.builder, type) and issubclass(entry.builder, _Fused))
    ]
