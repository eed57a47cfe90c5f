"""Linear layers as operations: ``BasicLinear``, ``Bias`` and ``Linear``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtensor.core.errors import check
from qtensor.functional.linear.args import DelayedCall, LinearBwdArgs, LinearFwdArgs, Wgrad
from qtensor.functional.linear.layer_plan import LinearPlan
from qtensor.functional.linear.linear_function import (
    LinearForward,
    linear_backward,
    linear_forward_impl,
    linear_setup_ctx,
    restored,
)
from qtensor.functional.linear.main_grad import report_when_accumulated
from qtensor.functional.operands import Quantized
from qtensor.functional.site import Site
from qtensor.library.norm import BIAS_GRAD
from qtensor.library.pointwise import BIAS_ADD
from qtensor.modules.input_checks import check_alignment, check_layer_input, check_width
from qtensor.modules.linear import LinearBase
from qtensor.modules.options import Call
from qtensor.modules.parameters import initial_bias, own_part
from qtensor.modules.sharded_parameters import set_values
from qtensor.ops.handover import UNROUNDED, Input, Request, Unrounded, Value
from qtensor.ops.operation import (
    BackwardContext,
    BasicOperation,
    FusedOperation,
    OperationContext,
    operation_label,
)

State = dict[str, Any]
"""A state dict."""
_NONE = (False, False, False)
_NO_SEEDS = (None, None, None)


class LinearCall(NamedTuple):
    """The arguments of one call of a linear layer: plain values and tensors of state."""

    plan: LinearPlan
    inp_requires_grad: bool
    weight_requires_grad: bool
    delayed: DelayedCall | None
    seeds: tuple[Tensor | None, Tensor | None, Tensor | None]
    wgrad: Wgrad | None
    site: Site | None = None


class Product(NamedTuple):
    """The result of a product, and its arguments."""

    forward: LinearForward
    args: LinearFwdArgs


def _row(scales: Tensor | None, role: int) -> Tensor | None:
    return None if scales is None else scales[role : role + 1]


class BasicLinear(LinearBase, BasicOperation):
    """``x @ weight.T``, quantized as the active recipe says.

    Args:
        in_features: K.
        out_features: N.
        **options: options of ``qtensor.Linear``, except ``bias`` and ``return_bias``: device,
            params_dtype, recipe, name, init_method, quantized_params, parallel_mode, tp_group,
            sequence_parallel, fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input.

    Raises:
        QTensorError: the arguments do not fit.
    """

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        rule = "an operation returns one tensor, to which the bias has been added"
        fix = "Remove return_bias"
        check(not options.get("return_bias"), "BasicLinear", rule, "return_bias=True", fix)
        super().__init__(in_features, out_features, bias=False, **options)

    forward = BasicOperation.forward  # type: ignore[assignment]

    @property
    def label(self) -> str:
        """Name of the operation in messages."""
        return f"{operation_label(self)}[{self.name}]" if self.name else operation_label(self)

    def plan_key(self) -> str:
        """Return the key of the active recipe."""
        return self._recipe_key()

    def forward_kwargs(self, like: Tensor, input_requires_grad: bool) -> dict[str, Any]:
        """Return the arguments of this call that follow from recipe and state."""
        weight, options = self.weight, self._options
        wgrad = torch.is_grad_enabled() and weight.requires_grad
        plan = self._plan(input_requires_grad, wgrad, "weight", options)
        later = options.fuse_wgrad_accumulation or options.delay_wgrad_compute
        if not (later or options.save_original_input) and plan.delayed == plan.stochastic == _NONE:
            return {"call": LinearCall(plan, input_requires_grad, wgrad, None, _NO_SEEDS, None)}
        args = LinearFwdArgs(like, weight, None, input_requires_grad, wgrad)
        args.plan = plan
        self._complete(args, like, "weight", options, Call())
        call = LinearCall(plan, input_requires_grad, wgrad, args.delayed, args.seeds, args.wgrad)
        return {"call": call}

    def input_request(self, kwargs: dict[str, Any]) -> Request | None:
        """Request the input in the format that fprop and wgrad read, or None."""
        call, split = kwargs["call"], self._options.parallel
        gathered = split is not None and split.sequence and split.mode == "column"
        original = self._options.save_original_input or (
            call.plan.backward_override == "high_precision" and call.weight_requires_grad
        )
        if not call.plan.input or gathered or original:
            return None
        scales = call.delayed.scales if call.plan.delayed[0] else None
        return Request(call.plan.input, _row(scales, 0), call.seeds[0])

    def grad_output_request(self, kwargs: dict[str, Any]) -> Request | None:
        """Request the gradient in the format that dgrad and wgrad read, or None."""
        call, split = kwargs["call"], self._options.parallel
        gathered = split is not None and split.sequence and split.mode == "row"
        if not call.plan.grad_output or gathered:
            return None
        scales = call.delayed.scales if call.plan.delayed[2] else None
        return Request(call.plan.grad_output, _row(scales, 2), call.seeds[2])

    def _args(
        self, input: Input, bias: Tensor | None, call: LinearCall, dtype: torch.dtype
    ) -> LinearFwdArgs:
        weight, options = self.weight, self._options
        plain: Any = input
        quantized: Quantized | None = None
        if isinstance(input, Quantized):
            plain, quantized = None, input
            check_width(self.label, quantized, weight.shape[1])
            check_alignment(self.label, weight, call.plan, options)
        else:
            check_layer_input(self.label, input, weight, call.plan, options)
        args = LinearFwdArgs(plain, weight, bias, call.inp_requires_grad, call.weight_requires_grad)
        args.plan, args.dtype, args.quantized_input = call.plan, dtype, quantized
        args.delayed, args.seeds, args.wgrad = call.delayed, call.seeds, call.wgrad
        args.site = call.site
        args.parallel = options.parallel
        args.save_original_input = options.save_original_input
        return args

    def multiply(
        self, input: Input, call: LinearCall, bias: Tensor | None, dtype: torch.dtype
    ) -> Product:
        """Compute the forward without side effects.

        ``bias`` is added before the one rounding to ``dtype``.
        """
        args = self._args(input, bias, call, dtype)
        return Product(linear_forward_impl(args), args)

    def save_operands(self, ctx: OperationContext, returned: Product) -> None:
        """Save the operands of dgrad and wgrad in ``ctx``."""
        result, args = returned
        ctx.args = bwd = LinearBwdArgs()
        ctx.save_for_backward(*linear_setup_ctx(bwd, args, result))

    def op_forward_compute(
        self, input: Input, *, call: LinearCall, next_op_input_request: Request | None = None
    ) -> tuple[Tensor | Unrounded, Product]:
        """Return the product."""
        unrounded = next_op_input_request is not None and not next_op_input_request.canonical
        if unrounded and self._options.parallel is None:
            result = self.multiply(input, call, None, torch.float32)
            return Unrounded(result.forward.out, input.dtype), result
        result = self.multiply(input, call, None, input.dtype)
        return result.forward.out, result

    def op_forward_save_ctx(
        self, ctx: OperationContext, input: Value, returned: Product, *, call: LinearCall
    ) -> None:
        """Save the operands of dgrad and wgrad."""
        self.save_operands(ctx, returned)

    def op_backward(
        self, ctx: BackwardContext, grad_output: Input
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return dgrad and wgrad."""
        quantized = grad_output if isinstance(grad_output, Quantized) else None
        plain = None if isinstance(grad_output, Quantized) else grad_output
        args = restored(ctx.args, ctx.saved_tensors, plain, quantized)
        wgrad, dgrad, _ = linear_backward(args)
        return dgrad, [wgrad]

    def published(self, returned: Product) -> list[Tensor]:
        """Return the maxima of input and weight under delayed scaling."""
        return returned.forward.amaxes

    def published_count(self, kwargs: dict[str, Any]) -> int:
        """Return the number of maxima: one for each of input and weight under delayed scaling."""
        return sum(kwargs["call"].plan.delayed[:2])

    @property
    def reports(self) -> bool:
        """True if gradients are added to ``main_grad``."""
        return self._options.fuse_wgrad_accumulation

    def report_on(self, out: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return ``out``; its backward notifies the weight that ``main_grad`` is updated."""
        wgrad = kwargs["call"].wgrad
        added = wgrad is not None and wgrad.main_grad is not None
        return report_when_accumulated(out, self._states["weight"].report) if added else out

    def after_forward(self, published: list[Tensor], kwargs: dict[str, Any]) -> None:
        """Record the maxima."""
        self._record(published, "weight", kwargs["call"].plan)


class Bias(BasicOperation):
    """Add a bias over the last dim: ``x + bias``.

    Args:
        size: size of the last dim.
        device: device of the parameter; "meta" leaves it without data until ``reset_parameters``.
        dtype: dtype of the parameter; torch's default dtype if None.
    """

    reads_unrounded = True

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        right = isinstance(size, int) and not isinstance(size, bool) and size > 0
        check(right, self.label, "size must be a positive integer", repr(size), "Fix the size")
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        if not self.bias.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to zero."""
        nn.init.zeros_(self.bias)

    def input_request(self, kwargs: dict[str, Any]) -> Request | None:
        """Request the float32 sums of a product, so that they are rounded once."""
        return UNROUNDED

    def op_forward_compute(
        self, input: Tensor | Unrounded, *, next_op_input_request: Request | None = None
    ) -> tuple[Tensor, None]:
        """Return the sum."""
        if isinstance(input, Unrounded):
            return BIAS_ADD(input.sums, self.bias, input.dtype), None
        return BIAS_ADD(input, self.bias, input.dtype), None

    def op_forward_save_ctx(
        self, ctx: OperationContext, input: Value | None, returned: None
    ) -> None:
        """Save the bias's dtype."""
        ctx.dtype = self.bias.dtype
        ctx.bias_requires_grad = self.bias.requires_grad

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Tensor, list[Any]]:
        """Return the gradient unchanged, and its sum over rows."""
        return grad_output, [bias_gradient(grad_output, ctx)]

    def extra_repr(self) -> str:
        """Return the size."""
        return f"size={self.bias.numel()}"


def bias_gradient(grad_output: Tensor, ctx: BackwardContext) -> Tensor | None:
    """Return the gradient of a ``Bias``; ``ctx`` is the context of its forward."""
    if not ctx.bias_requires_grad:
        return None
    grad = BIAS_GRAD(grad_output)
    return grad if grad.dtype == ctx.dtype else grad.to(ctx.dtype)


class Linear(FusedOperation):
    """A linear layer: ``BasicLinear`` and, with a bias, ``Bias``.

    A ``state_dict`` of ``torch.nn.Linear`` loads into it, and the other way round.

    Args:
        in_features: K.
        out_features: N.
        bias: True to add a bias (N,).
        **options: see ``BasicLinear``.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, **options: Any
    ) -> None:
        linear = BasicLinear(in_features, out_features, **options)
        basic_ops: list[BasicOperation] = [linear]
        if bias:
            like = linear.weight
            dtype = options.get("params_dtype") or options.get("dtype")
            basic_ops.append(Bias(like.shape[0], device=options.get("device"), dtype=dtype))
        super().__init__(basic_ops)
        self.linear = linear
        if bias:
            self.bias_op = basic_ops[1]
            if not linear.weight.is_meta:
                self._reset_bias()
        self.register_state_dict_post_hook(_flat_names)
        self.register_load_state_dict_pre_hook(_nested_names)

    def backward_dw(self) -> None:
        """Compute the delayed wgrad; see ``qtensor.Linear`` with ``delay_wgrad_compute=True``."""
        self.linear.backward_dw()

    def reset_parameters(self) -> None:
        """Initialise the parameters like ``torch.nn.Linear``."""
        self.linear.reset_parameters()
        if len(self.basic_ops) > 1:
            self._reset_bias()

    def _reset_bias(self) -> None:
        whole = initial_bias(self.linear.out_features, self.linear.in_features, self.bias)
        set_values(self.bias, own_part(whole, self.bias.shape, self.linear._rank))

    @property
    def weight(self) -> nn.Parameter:
        """Weight of the ``BasicLinear``."""
        return self.linear.weight

    @property
    def bias(self) -> Any:
        """Bias of the ``Bias`` operation, or None without one."""
        return self.basic_ops[1].bias if len(self.basic_ops) > 1 else None


def _flat_names(module: Linear, state: State, prefix: str, metadata: object) -> None:
    """Rename ``linear.weight`` and ``bias_op.bias`` to ``weight`` and ``bias``."""
    for inner in ("linear.", "bias_op."):
        for key in [k for k in state if k.startswith(prefix + inner)]:
            state[prefix + key[len(prefix + inner) :]] = state.pop(key)


def _nested_names(module: Linear, state: State, prefix: str, *_: object) -> None:
    """Rename ``weight`` and ``bias`` back before loading."""
    for key in [k for k in state if k.startswith(prefix)]:
        name = key[len(prefix) :]
        if name == "bias":
            state[f"{prefix}bias_op.bias"] = state.pop(key)
        elif name == "weight" or name.startswith("_delayed_scaling."):
            state[f"{prefix}linear.{name}"] = state.pop(key)
