"""Replace a layer by another one that holds its parameters, hooks and attributes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from qtensor.modules.in_place import with_base
from qtensor.modules.linear import Linear
from qtensor.modules.quantized_module import QuantizedModule
from qtensor.modules.state import LinearState
from qtensor.recipes import Recipe
from qtensor.storage.base import QuantizedTensorStorage

_INITIAL = "_high_precision_init_val"


class Place(NamedTuple):
    """A position in a model: ``parent._modules[key]``, and the path from the root."""

    parent: nn.Module
    key: str
    name: str


class Weight(NamedTuple):
    """A weight of a layer: the attribute, the parameter, and the layer's kind and name."""

    attribute: str
    parameter: Any
    kind: str
    name: str


@functools.cache
def fields_of(kind: Callable[..., nn.Module]) -> frozenset[str]:
    """Return the attributes that a layer's constructor adds to a plain ``nn.Module``."""
    return frozenset(vars(kind(1, 1, device="meta"))) - frozenset(vars(nn.Module()))


def quantized_layer(old: nn.Linear, name: str, recipe: Recipe | None) -> Linear:
    """Return a ``Linear`` with the parameters of ``old``."""
    rows, columns = old.weight.shape
    # On "meta" nothing is allocated, initialised or drawn from a generator.
    new = Linear(columns, rows, old.bias is not None, "meta", recipe=recipe, name=name)
    carry_over(old, new)
    new.weight, new.bias = old.weight, old.bias
    new.quantized_params = isinstance(old.weight, QuantizedTensorStorage)
    return new


def become_quantized(old: Any, name: str, recipe: Recipe | None) -> Linear:
    """Turn a sharded ``nn.Linear`` into a ``Linear``, and return it."""
    rows, columns = old.weight.shape
    made = vars(Linear(columns, rows, old.bias is not None, "meta", recipe=recipe, name=name))
    for key in fields_of(Linear) - fields_of(nn.Linear):
        vars(old)[key] = made[key]
    old._states, old._stored = {}, {"weight": "", "bias": ""}
    old.__class__ = with_base(type(old), nn.Linear, Linear)
    old._own_state("weight", LinearState(old.weight.device))
    return old


def become_plain(old: nn.Module) -> nn.Module:
    """Turn a sharded ``Linear`` back into an ``nn.Linear``, and return it."""
    old.__class__ = with_base(type(old), Linear, nn.Linear)
    for key in fields_of(Linear) - fields_of(nn.Linear):
        del vars(old)[key]
    return old


def plain_layer(old: Linear, plain: dict[Any, nn.Parameter]) -> nn.Linear:
    """Return an ``nn.Linear`` with the parameters of ``old``.

    ``plain`` maps each quantized weight to its plain successor, so that tied weights stay tied.
    """
    new = nn.Linear(old.in_features, old.out_features, old.bias is not None, "meta")
    carry_over(old, new)
    new.weight, new.bias = plain_weight(old.weight, plain), old.bias
    return new


def plain_weight(weight: Any, plain: dict[Any, nn.Parameter]) -> Any:
    """Return a weight, or its plain successor if it is stored quantized; see ``plain_layer``."""
    if isinstance(weight, QuantizedTensorStorage):
        if weight not in plain:
            with torch.no_grad():
                plain[weight] = successor(weight, weight.dequantize())
        weight = plain[weight]
    return weight


def store_quantized(layer: QuantizedModule, weights: list[Weight]) -> None:
    """Replace weights of a layer by quantized ones, unless they have no data (meta)."""
    layer.quantized_params = True
    options: dict[Any, Any] = {}
    for state in layer._states:
        options.update(dict.fromkeys(layer._weights(state), layer._layer_options(state)))
    made: dict[Any, nn.Parameter] = {}
    for weight in weights:
        old = weight.parameter
        if old.is_meta:
            continue
        if old not in made:
            values = layer._quantized_parameter(old.detach(), options[old])
            made[old] = successor(old, values)
        setattr(layer, weight.attribute, made[old])


def successor(old: Any, values: Tensor) -> nn.Parameter:
    """Return a parameter with new values and with the gradient and attributes of ``old``."""
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    own = {*vars(old.detach()), *vars(new), "_is_param", _INITIAL}
    for key, value in vars(old).items():
        if key not in own:
            setattr(new, key, value)
    new.grad = old.grad
    return new


def carry_over(old: nn.Module, new: nn.Module) -> None:
    """Copy attributes and hooks from ``old`` to ``new``, but not what their constructors set.

    Both modules share the dicts of hooks, so that a handle that a caller holds removes its hook.
    """
    kinds: tuple[Any, Any] = (type(old), type(new))
    own = {"_parameters", *fields_of(kinds[0]), *fields_of(kinds[1])}
    for key, value in vars(old).items():
        if key not in own:
            vars(new)[key] = value
    hooks: Any = new._load_state_dict_pre_hooks
    for hook in hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)


def put(places: list[Place], new: nn.Module) -> None:
    """Set a layer at all of its places in the model."""
    for place in places:
        setattr(place.parent, place.key, new)
        if isinstance(place.parent, nn.TransformerEncoderLayer):
            _set_fast_path(place.parent)


def _set_fast_path(layer: nn.TransformerEncoderLayer) -> None:
    """Set torch's code for the activation; 0 keeps evaluation from bypassing the layers."""
    activation, code = layer.activation, 0
    own = (layer.linear1, layer.linear2, layer.self_attn)
    if [type(part) for part in own] == [nn.Linear, nn.Linear, nn.MultiheadAttention]:
        if activation is functional.relu or isinstance(activation, nn.ReLU):
            code = 1
        elif activation is functional.gelu or isinstance(activation, nn.GELU):
            code = 2
    layer.activation_relu_or_gelu = code
