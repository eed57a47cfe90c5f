"""Layers that compute with quantized weights while an optimizer trains plain ones.

Such a layer holds its weights as before, as plain parameters. Its attribute ``weight`` is a
property, which quantizes the parameter: the layer's own code then computes with the quantized
tensor, as it does after ``convert_qat_``, by the same kernels. The gradient passes the rounding
unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from qtensor.modules.in_place import plain_class, with_base
from qtensor.quantizers import Quantizer

_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
"""Classes of layers by their own class and the names of their weights."""


class QuantizationAware:
    """Marks a layer whose weights are quantized whenever they are read.

    Attributes:
        weight_quantizers: quantizers by the names of the parameters.
        weights_are_transposed: whether parameters are stored as (K, N).
    """

    weight_quantizers: dict[str, Quantizer]
    weights_are_transposed: bool

    def extra_repr(self: Any) -> str:
        """Return what the layer shows of itself, and the formats."""
        own = super().extra_repr()  # type: ignore[misc]
        formats = [f"{n}=trained as {q.canonical}" for n, q in self.weight_quantizers.items()]
        return ", ".join([*([own] if own else []), *formats])

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (_class_before(type(self)), tuple(self.weight_quantizers)), self.__dict__


def become_aware(module: Any, quantizers: Mapping[str, Quantizer], transposed: bool) -> None:
    """Let a layer quantize its weights whenever they are read."""
    own = plain_class(module)
    module.weight_quantizers = dict(quantizers)
    module.weights_are_transposed = transposed
    module.__class__ = with_base(type(module), own, _class_of(own, tuple(quantizers)))


def become_unaware(module: Any) -> None:
    """Give a layer its own class back."""
    own = plain_class(module)
    module.__class__ = with_base(type(module), own, _class_before(own))
    del module.weight_quantizers, module.weights_are_transposed


def _class_of(own: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a class like ``own`` whose attributes ``names`` are quantized."""
    if (own, names) not in _CLASSES:
        members: dict[str, Any] = {name: _property(name) for name in names}
        title = f"QuantizationAware{own.__name__}"
        members |= {"__module__": own.__module__, "__doc__": own.__doc__, "class_before": own}
        _CLASSES[own, names] = type(title, (QuantizationAware, own), members)
    return _CLASSES[own, names]


def _class_before(own: Any) -> type[nn.Module]:
    before: type[nn.Module] = own.class_before
    return before


def _property(name: str) -> property:
    def quantized(self: Any) -> Tensor | None:
        parameter = self._parameters[name]
        if parameter is None:
            return None
        quantizer = self.weight_quantizers[name]
        if self.weights_are_transposed:
            return quantizer(parameter.t()).t()
        return quantizer(parameter)

    return property(quantized)


def _rebuild(own: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Return an empty layer, whose state pickle sets."""
    made = _class_of(own, names)
    return made.__new__(made)
