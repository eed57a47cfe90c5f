"""What the ops of a linear layer compute, as one string.

The library makes and reads these texts. One string is cheaper to pass than seven arguments.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from qtensor.core.compile_constants import compile_constant
from qtensor.core.encoding import decode_list, encode_list
from qtensor.core.errors import fail


class ForwardPlan(NamedTuple):
    """What ``linear_forward`` computes, apart from its tensors.

    Attributes:
        x_quantizer: canonical text of the quantizer of the input.
        x_kept: canonical text of the buffers of the input that are returned, "" for none.
        weight_quantizer: as for the input.
        weight_kept: as for the input.
        dtype: of the product.
    """

    x_quantizer: str
    x_kept: str
    weight_quantizer: str
    weight_kept: str
    dtype: torch.dtype


class BackwardPlan(NamedTuple):
    """What ``linear_backward`` computes, apart from its tensors.

    Attributes:
        quantizer: canonical text of the quantizer of the gradient.
        x_kept: canonical text of the kept buffers of the input, "" if the weight has no gradient.
        weight_kept: canonical text of the kept buffers of the weight, "" if the input has none.
        dtype: of the gradient of the input.
        weight_dtype: of the gradient of the weight.
        bias: return the gradient of the bias.
    """

    quantizer: str
    x_kept: str
    weight_kept: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias: bool


def plan_text(plan: ForwardPlan | BackwardPlan) -> str:
    """Return the text of a plan."""
    return encode_list([str(value).removeprefix("torch.") for value in plan], "|")


@compile_constant
def forward_text(*fields: Any) -> str:
    """Return the text of the ``ForwardPlan`` with these fields."""
    return plan_text(ForwardPlan(*fields))


@compile_constant
def backward_text(*fields: Any) -> str:
    """Return the text of the ``BackwardPlan`` with these fields."""
    return plan_text(BackwardPlan(*fields))


@functools.lru_cache(maxsize=4096)
def forward_plan(text: str) -> ForwardPlan:
    """Return the plan of a text that ``forward_text`` made."""
    x, x_kept, weight, weight_kept, dtype = _fields(text, 5)
    return ForwardPlan(x, x_kept, weight, weight_kept, _dtype(dtype))


@functools.lru_cache(maxsize=4096)
def backward_plan(text: str) -> BackwardPlan:
    """Return the plan of a text that ``backward_text`` made."""
    quantizer, x_kept, weight_kept, dtype, weight_dtype, bias = _fields(text, 6)
    dtypes = _dtype(dtype), _dtype(weight_dtype)
    return BackwardPlan(quantizer, x_kept, weight_kept, *dtypes, bias == "True")


_MAKERS = "forward_text or backward_text of qtensor.core.linear_plans"


def _fields(text: str, count: int) -> list[str]:
    fields = decode_list(text, "|")
    if len(fields) != count:
        fail("linear", f"the plan must have {count} fields", repr(text), f"Make it with {_MAKERS}")
    return fields


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        fail("linear", "the plan must name a torch dtype", repr(name), f"Make it with {_MAKERS}")
    return dtype
