"""The linear layers of a model whose weights can be quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qtensor.errors import ArgumentTypeError, fail
from qtensor.modules.base import FLOATING, QuantizedModule
from qtensor.modules.in_place import plain_class
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.texts import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Filter = Callable[[nn.Module, str], bool]


def linear_layers(
    op: str, model: Any, filter_fn: Filter | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the linear layers by name, and the reason for each one whose weight stays as it is.

    Args:
        op: the caller's name, for errors.
        model: the root; it may be a layer itself, whose name is "".
        filter_fn: ``(module, name) -> bool`` selects layers; None selects all.

    Returns:
        The layers to quantize, in the model's order, and the reasons, by name.

    Raises:
        ArgumentTypeError: ``model`` is not a module, or ``filter_fn`` not a function.
    """
    if not isinstance(model, nn.Module):
        rule = "model must be a torch.nn.Module"
        fail(op, rule, type(model).__name__, "Pass one", ArgumentTypeError)
    if not (filter_fn is None or callable(filter_fn)):
        rule = "filter_fn must be a function of a module and its name"
        fail(op, rule, repr(filter_fn), "Pass one that returns a bool", ArgumentTypeError)
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    layers, skipped = {}, {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | QuantizedModule):
            continue
        reason = (
            "filtered" if filter_fn and not filter_fn(module, name) else _obstacle(module, holders)
        )
        if reason:
            skipped[name] = reason
        else:
            layers[name] = module
    return layers, skipped


def _obstacle(module: Any, holders: Mapping[int, list[str]]) -> str:
    """Return the reason for which a layer's weight is not replaced by a quantized one, or ""."""
    if isinstance(module, QuantizedModule):
        return "it quantizes its operands itself; use qtensor.convert_ with quantized_params=True"
    if plain_class(module) is not nn.Linear:
        return f"{type(module).__name__} is a subclass of nn.Linear, with a forward of its own"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is not a parameter"
    if isinstance(weight, QuantizedTensorStorage):
        return f"its weight is quantized already: {weight._quantizer.canonical}"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if weight.dtype not in FLOATING:
        return f"its weight is {weight.dtype}; float32, bfloat16 and float16 can be quantized"
    if weight.numel() == 0:
        return "its weight has no elements"
    if len(names := holders[id(weight)]) > 1:
        return f"its weight is tied: {', '.join(names)}"
    return ""


def set_weight(layer: nn.Module, weight: Tensor) -> None:
    """Replace a layer's weight by a frozen parameter that holds ``weight``."""
    layer.weight = nn.Parameter(weight, requires_grad=False)


@contextmanager
def replaced(layers: Iterable[Any], weights: Iterable[Tensor]) -> Iterator[None]:
    """Replace the weights of some layers inside the block."""
    layers = list(layers)
    own = [layer.weight for layer in layers]
    try:
        for layer, weight in zip(layers, weights, strict=True):
            set_weight(layer, weight)
        yield
    finally:
        for layer, weight in zip(layers, own, strict=True):
            layer.weight = weight


def match(op: str, patterns: Iterable[str], names: Iterable[str], what: str) -> dict[str, str]:
    """Return the first pattern that matches each name; names without one are left out.

    Args:
        op: the caller's name, for errors.
        patterns: names or globs (``*``, ``?``, ``[...]``), most important first.
        names: names of layers.
        what: the argument that holds the patterns, for errors.

    Raises:
        QTensorError: a pattern matches no name.
    """
    patterns, names = list(patterns), list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            rule = f"each pattern of {what} must match a linear layer that can be quantized"
            fail(op, rule, repr(pattern), f"Choose among the layers: {some(names) or '(none)'}")
    found = {}
    for name in names:
        first = next((p for p in patterns if fnmatchcase(name, p)), None)
        if first is not None:
            found[name] = first
    return found
