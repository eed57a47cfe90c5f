"""Initial values of parameters, and facts about parameters and inputs, for all linear layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.core.buffer_shapes import Shape
from qtensor.core.dtensors import local_part
from qtensor.modules.options import LinearOptions
from qtensor.quantizers import Quantizer
from qtensor.recipes import Role, parse_recipe, role_quantizers
from qtensor.storage.ranks.fully_shard import GatheredWeight

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def follows_calls() -> bool:
    """Return whether Dynamo compiles this call; it does not while it exports a program."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()


def stored_canonical(parameter: Tensor | None) -> str:
    """Return the canonical string of a parameter's quantizer; "" for a plain parameter."""
    own = local_part(parameter)
    # Under fully_shard the layer may see a MasterWeight, whose gathered form is quantized.
    return own._whole_quantizer().canonical if isinstance(own, GatheredWeight) else ""


def weight_quantizer(key: str, options: LinearOptions) -> Quantizer | None:
    """Return the quantizer, with both usages, of a weight that a layer stores quantized.

    None if the recipe with this key reads the layer's weight in high precision.
    """
    quantizer = role_quantizers(key, options.module, options.name)["weight"]
    if quantizer is not None and quantizer.needs_scale:
        quantizer = parse_recipe(key).own_quantizer(Role("output", options.module, options.name))
    return None if quantizer is None else quantizer.with_usage(rowwise=True, columnwise=True)


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

    ``init_method`` fills the values (N, K) in place; None initialises as ``torch.nn.Linear`` does.
    """
    values = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    with torch.no_grad():
        if init_method is None:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5))
        else:
            init_method(values)
    return values


def own_part(whole: Tensor, shape: Shape, rank: int, halves: int = 1) -> Tensor:
    """Return a rank's part, of shape ``shape``, of a whole parameter; split dims split evenly.

    With two ``halves`` the part consists of the rank's part of each half, concatenated.
    """
    if halves > 1:
        shape = (shape[0] // halves, *shape[1:])
        return torch.cat([own_part(half, shape, rank) for half in whole.chunk(halves)])
    for dim, size in enumerate(shape):
        if whole.shape[dim] != size:
            whole = whole.narrow(dim, rank * size, size).clone()
    return whole


def initial_bias(size: int, in_features: int, like: Tensor) -> Tensor:
    """Return initial values (size,) of a bias, as ``torch.nn.Linear`` has them for a fan-in."""
    bound = 1 / math.sqrt(in_features)
    return nn.init.uniform_(torch.empty(size, dtype=like.dtype, device=like.device), -bound, bound)
