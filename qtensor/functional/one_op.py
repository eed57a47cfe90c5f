"""A linear layer as one op of a traced program.

Dynamo would follow a layer through every function that it calls, and guard each of them at every call of the compiled program.
It sees one op here. The op is composite: what compiles the program decomposes it into the ops of the layer's two directions,
so that it is in no program that runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.functional.linear import run_linear
from qtensor.functional.linear_args import LinearFwdArgs
from qtensor.functional.plan import LinearPlan, linear_plan
from qtensor.library.packed import (
    LINEAR_BACKWARD_PACKED,
    LINEAR_FORWARD_PACKED,
    Backward,
    Forward,
)
from qtensor.recipes import compile_constant
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.version import fingerprint

_LIBRARY = torch.library.Library("qtensor_composite", "DEF")
_LIBRARY.define("linear(Tensor inp, Tensor weight, Tensor? bias, str plan) -> Tensor")
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_NONE = (False,) * 3


@compile_constant
def plan_text(key: str, roles: str, dtype: torch.dtype, dgrad: bool, wgrad: bool) -> str:
    """The plan of a layer for the one op, behind it what features must be multiples of; "" where the op is given too little.

    It says all that the op does, and by what code: programs are cached for other processes by what Dynamo saw. A key may name
    functions of this one, and how the op is decomposed Dynamo does not see.

    Args:
        key: of the recipe in force, "" for high precision.
        roles: "module/name", for the recipe's roles.
        dtype: of the input.
        dgrad: the input needs a gradient.
        wgrad: the weight needs a gradient.
    """
    module, _, name = roles.partition("/")
    plan = linear_plan(key, module, name, dgrad, wgrad)
    if dtype not in _FLOATING or any(plan.delayed) or any(plan.stochastic):
        return ""
    texts = (plan.input, plan.weight, plan.grad_output, plan.saved_input, plan.saved_weight)
    flags = (plan.backward_override or "", str(dgrad), str(wgrad))
    return "|".join((*texts, *flags, fingerprint(), str(plan.multiple)))


class PackedLinearFunction(torch.autograd.Function):
    """``LinearFunction`` for what the ops of ``library.packed`` say."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None, forward: str, backward: str
    ) -> Tensor:
        """The product."""
        x = inp if inp.ndim == 2 else inp.reshape(-1, inp.shape[-1])
        out, saved = LINEAR_FORWARD_PACKED(x, weight, bias, forward)
        ctx.save_for_backward(saved)
        ctx.plan, ctx.shape = backward, inp.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out if inp.ndim == 2 else out.view(*inp.shape[:-1], out.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of (inp, weight, bias) and the texts."""
        (saved,), shape = ctx.saved_tensors, ctx.shape
        dy = grad if grad.ndim == 2 else grad.reshape(-1, grad.shape[-1])
        found = LINEAR_BACKWARD_PACKED(dy, saved, shape[-1], ctx.plan)
        plan = Backward(*ctx.plan.split("|"))
        dgrad = found.pop(0) if plan.weight_kept else None
        wgrad = found.pop(0) if plan.x_kept else None
        grad_bias = found.pop(0) if plan.bias else None
        if grad_bias is not None and grad_bias.dtype != ctx.bias_dtype:
            grad_bias = grad_bias.to(ctx.bias_dtype)
        if dgrad is not None and len(shape) != 2:
            dgrad = dgrad.view(shape)
        return dgrad, wgrad, grad_bias, None, None


def _packed_plans(
    inp: Any, weight: Tensor, plan: LinearPlan, needs_bias: bool
) -> tuple[str, str] | None:
    """The texts of the packed ops, or None where they do not serve: on a GPU, parts of a buffer are tensors to be made."""
    if not (inp.is_cpu and plan.input and plan.weight) or isinstance(inp, QuantizedTensorStorage):
        return None
    if not plan.grad_output or not (plan.saved_input or plan.saved_weight):
        return None
    dtype = str(weight.dtype).removeprefix("torch.")
    forward = Forward(plan.input, plan.saved_input, plan.weight, plan.saved_weight)
    bias = "bias" if needs_bias else ""
    backward = Backward(plan.grad_output, plan.saved_input, plan.saved_weight, dtype, bias)
    return "|".join(forward), "|".join(backward)


def _linear(inp: Tensor, weight: Tensor, bias: Tensor | None, plan: str) -> Tensor:
    x, w, dy, saved_x, saved_w, override, dgrad, wgrad, _, _ = plan.split("|")
    needs_bias = torch.is_grad_enabled() and bias is not None and bias.requires_grad
    args = LinearFwdArgs(inp, weight, bias, dgrad == "True", wgrad == "True", needs_bias)
    args.plan = LinearPlan(x, w, dy, _NONE, _NONE, override or None, saved_x, saved_w)
    args.dtype = inp.dtype
    texts = _packed_plans(inp, weight, args.plan, needs_bias)
    if texts is not None:
        return PackedLinearFunction.apply(inp, weight, bias, *texts)
    out: Tensor = run_linear(args)[0]
    return out


_LIBRARY.impl("linear", _linear, "CompositeImplicitAutograd")
LINEAR = torch.ops.qtensor_composite.linear.default
"""The layer under the plan of ``plan_text``."""
