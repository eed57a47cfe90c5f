"""Swapping the linear layers of a model: ``convert_`` and ``revert_``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from qtensor.core.dtensors import is_dtensor
from qtensor.core.errors import ArgumentTypeError, QTensorError, fail
from qtensor.functional.linear.layer_plan import alignment, weight_canonical
from qtensor.modules.conversion import Conversion, LayerReport
from qtensor.modules.in_place import is_held, plain_class, with_base
from qtensor.modules.linear import Linear
from qtensor.modules.parameters import FLOATING, stored_canonical
from qtensor.modules.quantized_module import QuantizedModule
from qtensor.modules.state import LinearState
from qtensor.quantizers import Quantizer
from qtensor.recipes import Recipe, role_quantizers
from qtensor.storage.base import QuantizedTensorStorage

Filter = Callable[[nn.Module, str], bool]
Owners = dict[Tensor, list[tuple[nn.Module, str]]]

_FEATURES = {"in_features", "out_features"}
_INITIAL = "_high_precision_init_val"


class Place(NamedTuple):
    """A position in a model: ``parent._modules[key]``, and the path from the root."""

    parent: nn.Module
    key: str
    name: str


class Request(NamedTuple):
    """The arguments of ``convert_``."""

    recipe: Recipe | None
    filter_fn: Filter | None
    quantized_params: bool

    @property
    def key(self) -> str:
        """The key of the recipe; "" without one."""
        return "" if self.recipe is None else self.recipe.key

    def operands(self, kind: str, name: str) -> dict[str, Quantizer | None]:
        """Return the quantizers of a layer's operands, by tensor role."""
        return role_quantizers(self.key, kind, name) if self.key else {}


class Weight(NamedTuple):
    """A weight of a layer: the attribute, the parameter, and the layer's kind and name."""

    attribute: str
    parameter: Any
    kind: str
    name: str


def convert_(
    model: nn.Module,
    recipe: Recipe | None,
    filter_fn: Filter | None = None,
    *,
    quantized_params: bool = False,
) -> Conversion:
    """Swap the ``nn.Linear`` layers inside a model for ``qtensor.Linear``, in place.

    A new layer holds the same ``Parameter`` objects as the old one, so that optimizers, tied
    weights and checkpoints stay valid. Hooks, the training mode and other attributes are kept too.
    The ``name`` of a new layer is its path in the model. A layer of qtensor only gets the recipe.
    In a model that ``fully_shard`` or ``parallelize_module`` has sharded, each layer stays the same
    object and changes its class, because torch remembers the object.
    If ``convert_`` raises an error, the model is unchanged.

    Args:
        model: the root. It is changed in place.
        recipe: the new layers use it outside every ``qtensor.autocast`` region. If None, they
            follow ``qtensor.autocast`` alone.
        filter_fn: ``(module, name) -> bool`` selects layers; None selects all. A layer that stands
            in several places is swapped if the answer is True for each of its names.
        quantized_params: store the weights quantized, as the recipe reads them, those of layers of
            qtensor too. They become new ``Parameter`` objects without the high-precision values:
            create the optimizer afterwards.

    Returns:
        The layers that were swapped, and those that were skipped with the reason. Its repr is a
        table.

    Raises:
        QTensorError: ``model`` is itself a linear layer, which cannot be swapped in place;
            ``quantized_params`` without a recipe; arguments of another type.
    """
    _check_root("convert_", model, nn.Linear)
    if not (recipe is None or isinstance(recipe, Recipe)):
        fix = "Pass a recipe, for example qtensor.recipes.MXFP8BlockScaling()"
        fail("convert_", "recipe must be a recipe object", repr(recipe), fix, ArgumentTypeError)
    if not (filter_fn is None or callable(filter_fn)):
        rule = "filter_fn must be a function of a module and its name"
        fail("convert_", rule, repr(filter_fn), "Pass one that returns a bool", ArgumentTypeError)
    if quantized_params and recipe is None:
        rule = "quantized_params needs a recipe, which says how weights are quantized"
        fail("convert_", rule, "none", "Pass recipe=")
    request = Request(recipe, filter_fn, quantized_params)
    layers = _find(model, (nn.Linear, QuantizedModule))
    owners = _owners(model)
    held = is_held(model)
    obstacles = {m: _convert_obstacle(m, p, request, owners, held) for m, p in layers.items()}
    swapped, skipped = [], []
    for module, places in layers.items():
        if obstacles[module]:
            skipped.append(_report(module, places, obstacles[module]))
            continue
        if isinstance(module, QuantizedModule):
            module.recipe = recipe
            note = "was converted; recipe set"
        else:
            note = "sharded; the same object with another class" if held else ""
            swap = _become_quantized if held else _quantized_layer
            new = swap(module, places[0].name, recipe)
            _put(places, new)
            module = new
        stored = [w for w in _weights_of(module, module.name) if _is_to_be_stored(w, request)]
        if stored:
            _store_quantized(module, stored)
            count = "weight" if len(stored) == 1 else f"{len(stored)} weights"
            note = f"{note}; {count} quantized".removeprefix("; ")
        swapped.append(_report(module, places, note))
    title = f"convert_ to {'qtensor.autocast' if recipe is None else type(recipe).__name__}"
    return Conversion(title, tuple(swapped), tuple(skipped))


def revert_(model: nn.Module, filter_fn: Filter | None = None) -> Conversion:
    """Swap the ``qtensor.Linear`` layers inside a model for ``nn.Linear``, in place.

    The new layers hold the same ``Parameter`` objects. Weights that are stored quantized become
    plain parameters with the dequantized values. Everything else on a layer is kept, except the
    state of delayed scaling.

    Args:
        model: the root. It is changed in place.
        filter_fn: as for ``convert_``.

    Returns:
        The layers that were swapped, and those that were skipped with the reason. Its repr is a
        table.

    Raises:
        QTensorError: ``model`` is itself a linear layer, which cannot be swapped in place.
    """
    _check_root("revert_", model, Linear)
    layers = _find(model, QuantizedModule)
    owners = _owners(model)
    held = is_held(model)
    obstacles = {m: _revert_obstacle(m, p, filter_fn, owners, held) for m, p in layers.items()}
    swapped, skipped = [], []
    plain: dict[Any, nn.Parameter] = {}
    for module, places in layers.items():
        if obstacles[module]:
            skipped.append(_report(module, places, obstacles[module]))
            continue
        stored = module._stored["weight"]
        new = _become_plain(module) if held else _plain_layer(module, plain)
        _put(places, new)
        note = f"weight dequantized from {stored.partition('(')[0]}" if stored else ""
        swapped.append(_report(new, places, note))
    return Conversion("revert_ to nn.Linear", tuple(swapped), tuple(skipped))


# ---- the layers of a model


def _check_root(op: str, model: object, kind: type[nn.Module]) -> None:
    if not isinstance(model, nn.Module):
        rule = "model must be a torch.nn.Module"
        fail(op, rule, type(model).__name__, "Pass one", ArgumentTypeError)
    if isinstance(model, kind) and not (kind is nn.Linear and isinstance(model, QuantizedModule)):
        rule = "layers are swapped inside of their parent, and the root has none"
        fix = "Pass the module that holds it, or wrap it: holder = nn.Sequential(layer)"
        fail(op, rule, f"a bare {type(model).__name__}", f"{fix}; its new layer is holder[0]")


def _places(parent: nn.Module, path: str = "") -> Iterator[tuple[nn.Module, Place]]:
    """Yield each module below ``parent`` with its place, in the order of ``named_modules``."""
    for key, child in parent._modules.items():
        if child is not None:
            name = f"{path}.{key}" if path else key
            yield child, Place(parent, key, name)
            yield from _places(child, name)


def _find(
    model: nn.Module, kinds: type[nn.Module] | tuple[type[nn.Module], ...]
) -> dict[Any, list[Place]]:
    """Return all places of each module of these kinds; the name of the root is ""."""
    layers: dict[Any, list[Place]] = {}
    if isinstance(model, kinds):
        layers[model] = [Place(model, "", "")]
    for module, place in _places(model):
        if isinstance(module, kinds):
            layers.setdefault(module, []).append(place)
    return layers


def _owners(model: nn.Module) -> Owners:
    """Return the modules that hold each parameter, with the parameter's path in each."""
    owners: Owners = {}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{path}.{key}" if path else key
                owners.setdefault(parameter, []).append((module, name))
    return owners


def _report(module: nn.Module, places: list[Place], note: str) -> LayerReport:
    names = [p.name or "(root)" for p in places]
    if len(names) > 1:
        note = f"{note}; also {', '.join(names[1:])}".removeprefix("; ")
    sizes = (getattr(module, "in_features", "?"), getattr(module, "out_features", "?"))
    return LayerReport(names[0], f"{sizes[0]} -> {sizes[1]}", note)


# ---- why a layer is skipped


def _filtered(module: nn.Module, places: list[Place], filter_fn: Filter | None) -> str:
    if filter_fn is None or all([filter_fn(module, place.name) for place in places]):
        return ""
    return "filtered"


def _convert_obstacle(
    module: nn.Module, places: list[Place], request: Request, owners: Owners, held: bool
) -> str:
    """Return the reason for which ``convert_`` skips a layer; "" if it converts the layer."""
    if filtered := _filtered(module, places, request.filter_fn):
        return filtered
    if not isinstance(module, QuantizedModule) and (obstacle := _plain_obstacle(module)):
        return obstacle
    weights = _weights_of(module, places[0].name)
    for weight in weights:
        if obstacle := _weight_obstacle(weight, request):
            return obstacle
    for weight in weights:
        if _is_to_be_stored(weight, request):
            if held:
                torch_ = "fully_shard and parallelize_module"
                return f"its weight is sharded; convert with quantized_params before {torch_}"
            if obstacle := _tie_obstacle(module, weight.parameter, owners):
                return obstacle
    return ""


def _weights_of(module: Any, name: str) -> list[Weight]:
    """Return the weights of a linear layer; ``name`` is for a layer of torch, which has none."""
    if not isinstance(module, QuantizedModule):
        return [Weight("weight", module.weight, "linear", name)]
    found = []
    for state in module._states:
        options, own = module._layer_options(state), module._weights(state)
        for attribute, parameter in module._parameters.items():
            if any([parameter is weight for weight in own]):
                found.append(Weight(attribute, parameter, options.module, options.name))
    return found


def _plain_obstacle(module: Any) -> str:
    """Return the reason for which a plain layer cannot be replaced, or ""."""
    if plain_class(module) is not nn.Linear:
        return f"{type(module).__name__} is a subclass of nn.Linear, with a forward of its own"
    values = vars(module)
    if values["_parameters"].keys() != {"weight", "bias"}:
        return f"its parameters are {', '.join(values['_parameters'])}, not weight and bias"
    if "forward" in values or values.get("_compiled_call_impl") is not None:
        return "its forward was replaced or compiled on the layer itself"
    if taken := sorted(values.keys() & _fields_of(Linear) - _FEATURES):
        return f"qtensor.Linear has attributes of the same name: {', '.join(taken)}"
    if tuple(module.weight.shape) != (module.out_features, module.in_features):
        return f"its weight is of shape {tuple(module.weight.shape)}"
    return ""


def _weight_obstacle(layer: Weight, request: Request) -> str:
    """Return the reason for which the recipe cannot read a weight (N, K), or ""."""
    weight = layer.parameter
    stored = stored_canonical(weight)
    kind = type(weight)
    if not stored and kind is not nn.Parameter and not is_dtensor(weight):
        return f"its weight is a {kind.__name__}"
    if weight.dtype not in FLOATING:
        return f"its weight is {weight.dtype}; float32, bfloat16 and float16 can be quantized"
    if weight.numel() == 0:
        return "its weight has no elements"
    rows, columns = weight.shape[-2:]
    for role, quantizer in request.operands(layer.kind, layer.name).items():
        multiple = 1 if quantizer is None else alignment(quantizer.canonical)
        if rows % multiple or columns % multiple:
            return f"features must be multiples of {multiple} for the {role} in {quantizer.format}"  # type: ignore[union-attr]
    if stored:
        try:
            weight_canonical(stored, request.key, layer.kind, layer.name, False)
        except QTensorError:
            return f"its weight is stored as {stored.partition('(')[0]}; qtensor.revert_ it first"
    return ""


def _is_to_be_stored(weight: Weight, request: Request) -> bool:
    """Return whether the caller wants a quantized weight and this one is plain."""
    if not request.quantized_params or stored_canonical(weight.parameter):
        return False
    return request.operands(weight.kind, weight.name)["weight"] is not None


def _tie_obstacle(module: nn.Module, weight: Tensor, owners: Owners) -> str:
    """Return the reason for which a weight cannot be replaced by a quantized one, or ""."""
    others = [name for owner, name in owners[weight] if owner is not module]
    if others:
        return f"its weight is tied to {', '.join(others)} and cannot be stored quantized"
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "its weight has hooks, which a new parameter would lose"
    return ""


def _revert_obstacle(
    module: Any, places: list[Place], filter_fn: Filter | None, owners: Owners, held: bool
) -> str:
    """Return the reason for which ``revert_`` skips a layer; "" if it reverts the layer."""
    if filtered := _filtered(module, places, filter_fn):
        return filtered
    if plain_class(module) is not Linear:
        return f"{type(module).__name__} has no counterpart in torch.nn"
    options = module._options
    asked = {
        "parallel_mode": options.parallel is not None,
        "return_bias": module.return_bias,
        "fuse_wgrad_accumulation": options.fuse_wgrad_accumulation,
        "delay_wgrad_compute": options.delay_wgrad_compute,
    }
    if used := [name for name, value in asked.items() if value]:
        return f"nn.Linear has no {', '.join(used)}"
    if "forward" in vars(module) or vars(module).get("_compiled_call_impl") is not None:
        return "its forward was replaced or compiled on the layer itself"
    if module._stored["weight"]:
        if held:
            return "its weight is sharded and stored quantized"
        holders = owners[module.weight]
        foreign = [name for owner, name in holders if type(owner) is not Linear]
        if foreign:
            return f"its quantized weight is tied to {', '.join(foreign)}"
    return ""


# ---- the swap


@functools.cache
def _fields_of(kind: Callable[..., nn.Module]) -> frozenset[str]:
    """Return the attributes that a layer's constructor adds to a plain ``nn.Module``."""
    return frozenset(vars(kind(1, 1, device="meta"))) - frozenset(vars(nn.Module()))


def _quantized_layer(old: nn.Linear, name: str, recipe: Recipe | None) -> Linear:
    rows, columns = old.weight.shape
    # On "meta" nothing is allocated, initialised or drawn from a generator.
    new = Linear(columns, rows, old.bias is not None, "meta", recipe=recipe, name=name)
    _carry_over(old, new)
    new.weight, new.bias = old.weight, old.bias
    new.quantized_params = isinstance(old.weight, QuantizedTensorStorage)
    return new


def _become_quantized(old: Any, name: str, recipe: Recipe | None) -> Linear:
    """Turn a sharded ``nn.Linear`` into a ``Linear``, and return it."""
    rows, columns = old.weight.shape
    made = vars(Linear(columns, rows, old.bias is not None, "meta", recipe=recipe, name=name))
    for key in _fields_of(Linear) - _fields_of(nn.Linear):
        vars(old)[key] = made[key]
    old._states, old._stored = {}, {"weight": "", "bias": ""}
    old.__class__ = with_base(type(old), nn.Linear, Linear)
    old._own_state("weight", LinearState(old.weight.device))
    return old


def _become_plain(old: nn.Module) -> nn.Module:
    """Turn a sharded ``Linear`` back into an ``nn.Linear``, and return it."""
    old.__class__ = with_base(type(old), Linear, nn.Linear)
    for key in _fields_of(Linear) - _fields_of(nn.Linear):
        del vars(old)[key]
    return old


def _plain_layer(old: Linear, plain: dict[Any, nn.Parameter]) -> nn.Linear:
    """Return an ``nn.Linear`` with the parameters of ``old``.

    ``plain`` maps each quantized weight to its plain successor, so that tied weights stay tied.
    """
    new = nn.Linear(old.in_features, old.out_features, old.bias is not None, "meta")
    _carry_over(old, new)
    weight: Any = old.weight
    if isinstance(weight, QuantizedTensorStorage):
        if weight not in plain:
            with torch.no_grad():
                plain[weight] = _successor(weight, weight.dequantize())
        weight = plain[weight]
    new.weight, new.bias = weight, old.bias
    return new


def _store_quantized(layer: QuantizedModule, weights: list[Weight]) -> None:
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
            made[old] = _successor(old, values)
        setattr(layer, weight.attribute, made[old])


def _successor(old: Any, values: Tensor) -> nn.Parameter:
    """Return a parameter with new values and with the gradient and attributes of ``old``."""
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    own = {*vars(old.detach()), *vars(new), "_is_param", _INITIAL}
    for key, value in vars(old).items():
        if key not in own:
            setattr(new, key, value)
    new.grad = old.grad
    return new


def _carry_over(old: nn.Module, new: nn.Module) -> None:
    """Copy attributes and hooks from ``old`` to ``new``, but not what their constructors set.

    Both modules share the dicts of hooks, so that a handle that a caller holds removes its hook.
    """
    kinds: tuple[Any, Any] = (type(old), type(new))
    own = {"_parameters", *_fields_of(kinds[0]), *_fields_of(kinds[1])}
    for key, value in vars(old).items():
        if key not in own:
            vars(new)[key] = value
    hooks: Any = new._load_state_dict_pre_hooks
    for hook in hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)


def _put(places: list[Place], new: nn.Module) -> None:
    for place in places:
        setattr(place.parent, place.key, new)
        if isinstance(place.parent, nn.TransformerEncoderLayer):
            _set_fast_path(place.parent)


def _set_fast_path(layer: nn.TransformerEncoderLayer) -> None:
    """Set torch's code for the activation; 0 keeps evaluation from bypassing the layers."""
    activation, code = layer.activation, 0
    if type(layer.linear1) is nn.Linear and type(layer.linear2) is nn.Linear:
        if activation is functional.relu or isinstance(activation, nn.ReLU):
            code = 1
        elif activation is functional.gelu or isinstance(activation, nn.GELU):
            code = 2
    layer.activation_relu_or_gelu = code
