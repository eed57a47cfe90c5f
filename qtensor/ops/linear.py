"""Matrix products, with and without a bias."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtensor.errors import check
from qtensor.functional.linear import (
    LinearForward,
    _linear_backward,
    _linear_forward_impl,
    _linear_setup_ctx,
    _restored,
)
from qtensor.functional.linear_args import DelayedCall, LinearBwdArgs, LinearFwdArgs, Wgrad
from qtensor.functional.main_grad import reporting
from qtensor.functional.operands import Quantized
from qtensor.functional.plan import LinearPlan
from qtensor.library.direct import direct
from qtensor.library.norm import BIAS_GRAD
from qtensor.library.pointwise import BIAS_ADD
from qtensor.modules.base import Call
from qtensor.modules.linear import Linear as LinearModule
from qtensor.ops.handover import UNROUNDED, Request, Unrounded
from qtensor.ops.operation import (
    BackwardContext,
    BasicOperation,
    FusedOperation,
    OperationContext,
    placed,
)

_bias_add = direct(BIAS_ADD, 0, 1)
_bias_grad = direct(BIAS_GRAD, 0)
_NONE = (False, False, False)
_NO_SEEDS = (None, None, None)


class LinearCall(NamedTuple):
    """What one call of a linear layer is made with: plain values, and tensors of state."""

    plan: LinearPlan
    inp_requires_grad: bool
    weight_requires_grad: bool
    delayed: DelayedCall | None
    seeds: tuple[Tensor | None, Tensor | None, Tensor | None]
    wgrad: Wgrad | None


class Product(NamedTuple):
    """What a product returned, and its arguments."""

    forward: LinearForward
    args: LinearFwdArgs


def _row(scales: Tensor | None, role: int) -> Tensor | None:
    return None if scales is None else scales[role : role + 1]


class BasicLinear(LinearModule, BasicOperation):
    """``x @ weight.T``, quantized by the recipe in force.

    Args:
        in_features: K.
        out_features: N.
        **options: those of ``qtensor.Linear`` but for ``bias`` and ``return_bias``: device, params_dtype, recipe, name,
            init_method, quantized_params, parallel_mode, tp_group, sequence_parallel, fuse_wgrad_accumulation,
            delay_wgrad_compute, save_original_input.

    Raises:
        QTensorError: arguments that do not fit.
    """

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        rule = "an operation returns one tensor, with the bias in it"
        fix = "Leave return_bias out"
        check(not options.get("return_bias"), "BasicLinear", rule, "return_bias=True", fix)
        super().__init__(in_features, out_features, bias=False, **options)

    forward = BasicOperation.forward  # type: ignore[assignment]

    @property
    def label(self) -> str:
        """How messages name the operation."""
        return f"{placed(self)}[{self.name}]" if self.name else placed(self)

    def plan_key(self) -> str:
        """The recipe in force."""
        return self._recipe_key()

    def forward_kwargs(self, like: Tensor, input_requires_grad: bool) -> dict[str, Any]:
        """What recipe and state say about this call."""
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
        """Quantized as fprop and wgrad read it."""
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
        """Quantized as dgrad and wgrad read it."""
        call, split = kwargs["call"], self._options.parallel
        gathered = split is not None and split.sequence and split.mode == "row"
        if not call.plan.grad_output or gathered:
            return None
        scales = call.delayed.scales if call.plan.delayed[2] else None
        return Request(call.plan.grad_output, _row(scales, 2), call.seeds[2])

    def _args(
        self, input: Any, bias: Tensor | None, call: LinearCall, dtype: torch.dtype
    ) -> LinearFwdArgs:
        weight, options = self.weight, self._options
        plain: Any = input
        made: Any = None
        if isinstance(input, Quantized):
            plain, made = None, input
            self._check_features(made, weight.shape[1])
            self._check_alignment(weight, call.plan, options)
        else:
            self._check_input(input, weight, call.plan, options)
        args = LinearFwdArgs(plain, weight, bias, call.inp_requires_grad, call.weight_requires_grad)
        args.plan, args.dtype, args.made = call.plan, dtype, made
        args.delayed, args.seeds, args.wgrad = call.delayed, call.seeds, call.wgrad
        args.parallel = options.parallel
        args.save_original_input = options.save_original_input
        return args

    def multiply(
        self, input: Any, call: LinearCall, bias: Tensor | None, dtype: torch.dtype
    ) -> Product:
        """The forward, pure; ``bias`` is added before the one rounding to ``dtype``."""
        args = self._args(input, bias, call, dtype)
        return Product(_linear_forward_impl(args), args)

    def keep(self, ctx: OperationContext, returned: Product) -> None:
        """Note what backward needs of ``multiply``."""
        result, args = returned
        bwd = LinearBwdArgs()
        saved = _linear_setup_ctx(bwd, args, result.out, result.ctx_attrs, result.tensors_to_save)
        ctx.args = bwd
        ctx.save_for_backward(*saved)

    def op_forward_compute(
        self, input: Any, *, call: LinearCall, next_op_input_request: Request | None = None
    ) -> tuple[Any, Product]:
        """The product."""
        unrounded = next_op_input_request is not None and not next_op_input_request.canonical
        if unrounded and self._options.parallel is None:
            result = self.multiply(input, call, None, torch.float32)
            return Unrounded(result.forward.out, input.dtype), result
        result = self.multiply(input, call, None, input.dtype)
        return result.forward.out, result

    def op_forward_save_ctx(
        self, ctx: OperationContext, input: Any, returned: Product, *, call: LinearCall
    ) -> None:
        """Operands of dgrad and wgrad."""
        self.keep(ctx, returned)

    def op_backward(self, ctx: BackwardContext, grad_output: Any) -> tuple[Any, list[Any]]:
        """Dgrad and wgrad."""
        made = grad_output if isinstance(grad_output, Quantized) else None
        plain = grad_output if made is None else None
        args = _restored(ctx.args, ctx.saved_tensors, plain, made)
        wgrad, dgrad, _ = _linear_backward(args)
        return dgrad, [wgrad]

    def published(self, returned: Product) -> list[Tensor]:
        """Maxima of input and weight under delayed scaling."""
        return returned.forward.amaxes

    def published_count(self, kwargs: dict[str, Any]) -> int:
        """One for each of the two that is scaled so."""
        return sum(kwargs["call"].plan.delayed[:2])

    @property
    def reports(self) -> bool:
        """Where gradients are added to ``main_grad``."""
        return self._options.fuse_wgrad_accumulation

    def report_on(self, out: Any, kwargs: dict[str, Any]) -> Any:
        """Tells the weight when its gradient has been added to ``main_grad``."""
        wgrad = kwargs["call"].wgrad
        added = wgrad is not None and wgrad.main_grad is not None
        return reporting(out, self._states["weight"].report) if added else out

    def after_forward(self, published: list[Tensor], kwargs: dict[str, Any]) -> None:
        """Note the maxima."""
        self._record(published, "weight", kwargs["call"].plan)


class Bias(BasicOperation):
    """``x + bias`` over the last dim.

    Args:
        size: of the last dim.
        device: of the parameter; "meta" leaves it without data until ``reset_parameters``.
        dtype: of the parameter; torch's default dtype if None.
    """

    reads_unrounded = True

    def __init__(self, size: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        right = isinstance(size, int) and not isinstance(size, bool) and size > 0
        check(right, self.label, "size must be a positive integer", repr(size), "Mend it")
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        if not self.bias.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros."""
        nn.init.zeros_(self.bias)

    def input_request(self, kwargs: dict[str, Any]) -> Request | None:
        """The sums of a product, so that they are rounded once."""
        return UNROUNDED

    def op_forward_compute(
        self, input: Any, *, next_op_input_request: Request | None = None
    ) -> tuple[Tensor, None]:
        """The sum."""
        if isinstance(input, Unrounded):
            return _bias_add(input.sums, self.bias, input.dtype), None
        return _bias_add(input, self.bias, input.dtype), None

    def op_forward_save_ctx(self, ctx: OperationContext, input: Any, returned: None) -> None:
        """Nothing but the bias's dtype."""
        ctx.dtype = self.bias.dtype
        ctx.bias_requires_grad = self.bias.requires_grad

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Tensor, list[Any]]:
        """The gradient as it is, and its sum over rows."""
        return grad_output, [bias_gradient(grad_output, ctx)]

    def extra_repr(self) -> str:
        """The size."""
        return f"size={self.bias.numel()}"


def bias_gradient(grad_output: Tensor, ctx: BackwardContext) -> Tensor | None:
    """The gradient of a ``Bias``, by what its forward noted."""
    if not ctx.bias_requires_grad:
        return None
    found = _bias_grad(grad_output)
    return found if found.dtype == ctx.dtype else found.to(ctx.dtype)


class Linear(FusedOperation):
    """``BasicLinear`` and, with a bias, ``Bias``.

    A ``state_dict`` of ``torch.nn.Linear`` loads into it and back.

    Args:
        in_features: K.
        out_features: N.
        bias: add a bias (N,).
        **options: see ``BasicLinear``.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, **options: Any
    ) -> None:
        linear = BasicLinear(in_features, out_features, **options)
        parts: list[BasicOperation] = [linear]
        if bias:
            like = linear.weight
            dtype = options.get("params_dtype") or options.get("dtype")
            parts.append(Bias(like.shape[0], device=options.get("device"), dtype=dtype))
        super().__init__(parts)
        self.linear = linear
        if bias:
            self.bias_op = parts[1]
            if not linear.weight.is_meta:
                self._reset_bias()
        self.register_state_dict_post_hook(_flat_names)
        self.register_load_state_dict_pre_hook(_nested_names)

    def backward_dw(self) -> None:
        """See ``qtensor.Linear``, under ``delay_wgrad_compute=True``."""
        self.linear.backward_dw()

    def reset_parameters(self) -> None:
        """Initialise as ``torch.nn.Linear`` does."""
        self.linear.reset_parameters()
        if len(self.basic_ops) > 1:
            self._reset_bias()

    def _reset_bias(self) -> None:
        bound = 1 / self.linear.in_features**0.5
        with torch.no_grad():
            whole = nn.init.uniform_(self.bias.new_empty(self.linear.out_features), -bound, bound)
            self.bias.copy_(self.linear._own_part(whole))

    @property
    def weight(self) -> nn.Parameter:
        """Of ``BasicLinear``."""
        return self.linear.weight

    @property
    def bias(self) -> Any:
        """Of ``Bias``, None where there is none."""
        return self.basic_ops[1].bias if len(self.basic_ops) > 1 else None


def _flat_names(module: Linear, state: Any, prefix: str, metadata: Any) -> None:
    """``linear.weight`` and ``bias_op.bias`` as ``weight`` and ``bias``."""
    for inner in ("linear.", "bias_op."):
        for key in [k for k in state if k.startswith(prefix + inner)]:
            state[prefix + key[len(prefix + inner) :]] = state.pop(key)


def _nested_names(module: Linear, state: Any, prefix: str, *args: Any) -> None:
    """The reverse, before loading."""
    for key in [k for k in state if k.startswith(prefix)]:
        name = key[len(prefix) :]
        if name == "bias":
            state[f"{prefix}bias_op.bias"] = state.pop(key)
        elif name == "weight" or name.startswith("_delayed_scaling."):
            state[f"{prefix}linear.{name}"] = state.pop(key)
