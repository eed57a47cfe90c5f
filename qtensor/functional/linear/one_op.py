"""A linear layer as one op of a traced program.

With this op Dynamo sees a layer as one call. It would otherwise trace every function that the layer
calls, which makes compilation slower, but not the program. The op is composite: the compiler
decomposes it into the ops of forward and backward, so no program that runs contains it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.encoding import decode_list, encode_list
from qtensor.core.version import fingerprint
from qtensor.functional.linear.args import DelayedCall, LinearFwdArgs
from qtensor.functional.linear.layer_plan import linear_plan, plan_of_texts
from qtensor.functional.linear.linear_function import run_linear
from qtensor.functional.operands import split_seeds
from qtensor.recipes import compile_constant

_LIBRARY = torch.library.Library("qtensor_composite", "DEF")
_LIBRARY.define(
    "linear(Tensor inp, Tensor weight, Tensor? bias, str plan, "
    "Tensor? seeds=None, Tensor[]? delayed=None) -> Tensor[]"
)
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


class OneOp(NamedTuple):
    """A layer as the op takes it.

    Attributes:
        text: the plan as text, "" if the op cannot compute the layer.
        multiple: in_features and out_features must be multiples of it.
        takes_state: the op needs seeds, or the factors of delayed scaling.
    """

    text: str
    multiple: int = 1
    takes_state: bool = False


@compile_constant
def one_op(key: str, roles: str, dtype: torch.dtype, dgrad: bool, wgrad: bool) -> OneOp:
    """Return the layer of a call, as the op takes it.

    The text holds everything that decides what the op computes, the version of the code included:
    the caches of compiled programs, which other processes read, are keyed by what Dynamo saw, and
    Dynamo sees neither the functions that a key numbers nor how the op is decomposed.

    Args:
        key: key of the active recipe, "" for high precision.
        roles: "module/name", for the recipe's roles.
        dtype: dtype of the input.
        dgrad: the input needs a gradient.
        wgrad: the weight needs a gradient.
    """
    if dtype not in _FLOATING:
        return OneOp("")
    module, _, name = roles.partition("/")
    plan = linear_plan(key, module, name, dgrad, wgrad)
    texts = (plan.input, plan.weight, plan.grad_output, plan.backward_override or "")
    gradients = (name for name, wanted in (("dgrad", dgrad), ("wgrad", wgrad)) if wanted)
    text = encode_list((*texts, "+".join(gradients), fingerprint()), "|")
    return OneOp(text, plan.multiple, any(plan.delayed) or any(plan.stochastic))


def _linear(
    inp: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: str,
    seeds: Tensor | None = None,
    delayed: list[Tensor] | None = None,
) -> list[Tensor]:
    *texts, override, gradients, _ = decode_list(plan, "|")
    dgrad, wgrad = "dgrad" in gradients, "wgrad" in gradients
    needs_bias = torch.is_grad_enabled() and bias is not None and bias.requires_grad
    args = LinearFwdArgs(inp, weight, bias, dgrad, wgrad, needs_bias)
    args.plan = plan_of_texts(*texts, override or None, dgrad, wgrad)
    args.dtype = inp.dtype
    if seeds is not None:
        args.seeds = split_seeds(seeds, args.plan.stochastic)
    if delayed is not None:
        scales, ticket, report = delayed
        args.delayed = DelayedCall(scales, ticket, report=report)
    out, _, amaxes = run_linear(args)
    return [out, *amaxes]


_LIBRARY.impl("linear", _linear, "CompositeImplicitAutograd")
LINEAR = torch.ops.qtensor_composite.linear.default
"""Compute a layer by the plan of ``one_op``: [output (..., N), amaxes (1,) of delayed scaling].

``inp`` is (..., K), ``weight`` (N, K), ``bias`` (N,). ``seeds`` (n,) int64 holds one seed for each
operand that is rounded stochastically, and ``delayed`` is [scales, ticket, report] of a
``DelayedCall``.
"""
