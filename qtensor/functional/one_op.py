"""A linear layer as one op of a traced program.

Dynamo would follow a layer through every function that it calls, and guard each of them at every call of the compiled program.
It sees one op here. The op is composite: what compiles the program decomposes it into the ops of the layer's two directions,
so that it is in no program that runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.functional.linear import run_linear
from qtensor.functional.linear_args import LinearFwdArgs
from qtensor.functional.plan import LinearPlan, alignment, linear_plan
from qtensor.recipes import compile_constant
from qtensor.version import fingerprint

_LIBRARY = torch.library.Library("qtensor_composite", "DEF")
_LIBRARY.define("linear(Tensor inp, Tensor weight, Tensor? bias, str plan, str code) -> Tensor")
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_NONE = (False,) * 3


@compile_constant
def plan_text(key: str, roles: str, dtype: torch.dtype, dgrad: bool, wgrad: bool) -> str:
    """The plan of a layer for the one op; "" where the layer reads more than the op is given.

    It says all that the op does: a key may name functions of this process, and programs are cached for others.

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
    return "|".join((*texts, plan.backward_override or "", str(dgrad), str(wgrad)))


@compile_constant
def multiple_of(text: str) -> int:
    """What features must be multiples of under a plan."""
    operands = text.split("|")[:2]
    return max(alignment(operand) for operand in operands) if operands[0] else 1


@compile_constant
def code() -> str:
    """Caches of compiled programs are keyed by what Dynamo saw, which does not show how the op is decomposed."""
    return fingerprint()


def _linear(inp: Tensor, weight: Tensor, bias: Tensor | None, plan: str, code: str) -> Tensor:
    x, w, dy, saved_x, saved_w, override, dgrad, wgrad = plan.split("|")
    needs_bias = torch.is_grad_enabled() and bias is not None and bias.requires_grad
    args = LinearFwdArgs(inp, weight, bias, dgrad == "True", wgrad == "True", needs_bias)
    args.plan = LinearPlan(x, w, dy, _NONE, _NONE, override or None, saved_x, saved_w)
    args.dtype = inp.dtype
    out: Tensor = run_linear(args)[0]
    return out


_LIBRARY.impl("linear", _linear, "CompositeImplicitAutograd")
LINEAR = torch.ops.qtensor_composite.linear.default
"""The layer under the plan of ``plan_text``; ``code`` is what ``code()`` says."""
