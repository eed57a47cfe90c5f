"""Swapping the linear layers of a model: ``convert_`` and ``revert_``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from qtensor.core.dtensors import is_dtensor
from qtensor.core.errors import ArgumentTypeError, QTensorError, fail
from qtensor.functional.linear.layer_plan import alignment, weight_canonical
from qtensor.modules.conversion import Conversion, LayerReport
from qtensor.modules.convert_attention import (
    attention_obstacle,
    attention_weights,
    avoid_nested_tensors,
    parts_of,
    plain_attention,
    quantized_attention,
    without_inner,
)
from qtensor.modules.in_place import is_held, plain_class
from qtensor.modules.linear import Linear
from qtensor.modules.parameters import FLOATING, stored_canonical
from qtensor.modules.quantized_module import QuantizedModule
from qtensor.modules.swap import (
    Place,
    Weight,
    become_plain,
    become_quantized,
    fields_of,
    plain_layer,
    put,
    quantized_layer,
    store_quantized,
)
from qtensor.modules.torch_attention import TorchMultiheadAttention
from qtensor.quantizers import Quantizer
from qtensor.recipes import Recipe, role_quantizers

Filter = Callable[[nn.Module, str], bool]
Owners = dict[Tensor, list[tuple[nn.Module, str]]]

_FEATURES = {"in_features", "out_features"}


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


def convert_(
    model: nn.Module,
    recipe: Recipe | None,
    filter_fn: Filter | None = None,
    *,
    quantized_params: bool = False,
) -> Conversion:
    """Swap the ``nn.Linear`` layers inside a model for ``qtensor.Linear``, in place.

    An ``nn.MultiheadAttention`` becomes a subclass of it whose projections and, under a recipe with
    ``fp8_dpa``, attention are those of qtensor; parameters keep their names. So does the one inside
    an ``nn.TransformerEncoderLayer``, whose own code stays.

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
    _check_root("convert_", model, (nn.Linear, nn.MultiheadAttention))
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
    layers = _find(model, (nn.Linear, nn.MultiheadAttention, QuantizedModule))
    owners = _owners(model)
    held = is_held(model)
    obstacles = {m: _convert_obstacle(m, p, request, owners, held) for m, p in layers.items()}
    without_inner(layers, obstacles, nn.MultiheadAttention)
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
            swap: Callable[..., Any] = become_quantized if held else quantized_layer
            if isinstance(module, nn.MultiheadAttention):
                note, swap = "with its out_proj", quantized_attention
            new = swap(module, places[0].name, recipe)
            put(places, new)
            module = new
        stored = []
        for layer in parts_of(module):
            own = [w for w in _weights_of(layer, layer.name) if _is_to_be_stored(w, request)]
            if own:
                store_quantized(layer, own)
            stored += own
        if stored:
            count = "weight" if len(stored) == 1 else f"{len(stored)} weights"
            note = f"{note}; {count} quantized".removeprefix("; ")
        swapped.append(_report(module, places, note))
    avoid_nested_tensors(model)
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
    _check_root("revert_", model, (Linear, TorchMultiheadAttention))
    layers = _find(model, QuantizedModule)
    owners = _owners(model)
    held = is_held(model)
    obstacles = {m: _revert_obstacle(m, p, filter_fn, owners, held) for m, p in layers.items()}
    without_inner(layers, obstacles, TorchMultiheadAttention)
    swapped, skipped = [], []
    plain: dict[Any, nn.Parameter] = {}
    for module, places in layers.items():
        if obstacles[module]:
            skipped.append(_report(module, places, obstacles[module]))
            continue
        stored = parts_of(module)[-1]._stored["weight"]
        back = plain_layer if type(module) is Linear else plain_attention
        new = become_plain(module) if held else back(module, plain)
        put(places, new)
        note = f"weight dequantized from {stored.partition('(')[0]}" if stored else ""
        swapped.append(_report(new, places, note))
    return Conversion("revert_ to nn.Linear", tuple(swapped), tuple(skipped))


# ---- the layers of a model


def _check_root(op: str, model: object, kind: tuple[type[nn.Module], ...]) -> None:
    if not isinstance(model, nn.Module):
        rule = "model must be a torch.nn.Module"
        fail(op, rule, type(model).__name__, "Pass one", ArgumentTypeError)
    ours = op == "convert_" and isinstance(model, QuantizedModule)
    if isinstance(model, kind) and not ours:
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
    if isinstance(module, nn.MultiheadAttention):
        sizes = (module.embed_dim, 3 * module.embed_dim)
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
    if not isinstance(module, QuantizedModule):
        is_attention = isinstance(module, nn.MultiheadAttention)
        obstacle = attention_obstacle(module, held) if is_attention else _plain_obstacle(module)
        if obstacle:
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
        if isinstance(module, nn.MultiheadAttention):
            return attention_weights(module, name)
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
    if taken := sorted(values.keys() & fields_of(Linear) - _FEATURES):
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
    own = parts_of(module)
    others = [name for owner, name in owners[weight] if owner not in own]
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
    if plain_class(module) not in (Linear, TorchMultiheadAttention):
        return f"{type(module).__name__} has no counterpart in torch.nn"
    if isinstance(module, TorchMultiheadAttention):
        return "it is sharded" if held else ""
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
