"""Initial values of parameters, and facts about parameters and inputs, for all linear layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.dtensor import local_part
from qtensor.layout import Shape
from qtensor.storage.shards import GatheredWeight

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def follows_calls() -> bool:
    """Return whether Dynamo compiles this call; it does not while it exports a program."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()


def stored_canonical(parameter: Any) -> str:
    """Return the canonical string of a parameter's quantizer; "" for a plain parameter."""
    own = local_part(parameter)
    # A weight in high precision that fully_shard gathers quantized reaches the layer so.
    return own._whole_quantizer().canonical if isinstance(own, GatheredWeight) else ""


def activation_dtype(input: Tensor) -> Tensor:
    """Return the input, converted to the dtype of ``torch.autocast`` if that is enabled."""
    device = input.device.type
    # torch.autocast does not know the meta device, and raises there.
    if device != "meta" and torch.is_autocast_enabled(device):
        return input.to(torch.get_autocast_dtype(device))
    return input


def initial_weight(
    shape: Shape, like: Tensor, init_method: Callable[[Tensor], Any] | None
) -> Tensor:
    """Return initial values of a weight, in the dtype and on the device of ``like``.

    Args:
        shape: (N, K).
        like: the parameter, or this rank's part of it.
        init_method: fills the values in place; None initialises as ``torch.nn.Linear`` does.
    """
    values = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    with torch.no_grad():
        if init_method is None:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5))
        else:
            init_method(values)
    return values


def initial_bias(size: int, in_features: int, like: Tensor) -> Tensor:
    """Return initial values (size,) of a bias, as ``torch.nn.Linear`` has them for a fan-in."""
    bound = 1 / math.sqrt(in_features)
    return nn.init.uniform_(torch.empty(size, dtype=like.dtype, device=like.device), -bound, bound)
