"""Layers that compute with quantized weights while an optimizer trains plain ones.

Such a layer holds its weights as before, as plain parameters. Its attribute ``weight`` is a
property: while the layer's ``forward`` runs, it quantizes the parameter, so that the layer's own
code computes with the quantized tensor, as it does after ``convert_qat_``, by the same kernels. All
other code, such as that of ``fully_shard``, sees the parameter. The gradient passes the rounding
unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from qtensor.modules.in_place import empty_of, plain_class, with_base
from qtensor.quantizers import Quantizer

_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
"""Classes of layers by their own class and the names of their weights."""


class QuantizationAware:
    """Base class of layers that quantize their weights in ``forward``.

    Attributes:
        weight_quantizers: quantizers by the names of the parameters.
        weights_are_transposed: whether parameters are stored as (K, N).
        is_computing: whether ``forward`` runs.
        quantized_names: names of the quantized parameters of all layers of the class.
    """

    weight_quantizers: dict[str, Quantizer]
    weights_are_transposed: bool
    is_computing: bool
    quantized_names: tuple[str, ...]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer's own ``forward`` computes with quantized weights."""
        before = self.is_computing
        self.is_computing = True
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.is_computing = before

    def extra_repr(self: Any) -> str:
        """Return the text of the layer's own class, and the formats of its weights."""
        own = super().extra_repr()  # type: ignore[misc]
        formats = [f"{n}=trained as {q.canonical}" for n, q in self.weight_quantizers.items()]
        return ", ".join([*([own] if own else []), *formats])

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        own = type(self)
        return _rebuild, (empty_of(_class_before(own)), own.quantized_names), self.__dict__


def become_aware(module: Any, quantizers: Mapping[str, Quantizer], transposed: bool) -> None:
    """Let a layer compute with quantized weights."""
    own = plain_class(module)
    module.is_computing = False
    module.weight_quantizers = dict(quantizers)
    module.weights_are_transposed = transposed
    module.__class__ = with_base(type(module), own, _class_of(own, tuple(quantizers)))


def become_unaware(module: Any) -> None:
    """Give a layer its own class back."""
    own = plain_class(module)
    module.__class__ = with_base(type(module), own, _class_before(own))
    del module.weight_quantizers, module.weights_are_transposed, module.is_computing


def _class_of(own: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a class like ``own`` that computes with the quantized parameters ``names``."""
    if (own, names) not in _CLASSES:
        members: dict[str, Any] = {name: _property(name) for name in names}
        title = f"QuantizationAware{own.__name__}"
        members |= {"__module__": own.__module__, "__doc__": own.__doc__, "class_before": own}
        members["quantized_names"] = names
        _CLASSES[own, names] = type(title, (QuantizationAware, own), members)
    return _CLASSES[own, names]


def factor_name(parameter: str) -> str:
    """Return the name of the submodule with the learned factor of a parameter."""
    return f"{parameter}_factor"


def _class_before(own: Any) -> type[nn.Module]:
    before: type[nn.Module] = own.class_before
    return before


def _property(name: str) -> property:
    def quantized(self: Any) -> Tensor | None:
        parameter: Tensor | None = self._parameters[name]
        if parameter is None or not self.is_computing:
            return parameter
        factor = self._modules.get(factor_name(name))
        if factor is None:
            quantize = self.weight_quantizers[name]
        else:
            quantize = functools.partial(factor, count=parameter.numel())
        if self.weights_are_transposed:
            return quantize(parameter.t()).t()
        return quantize(parameter)

    return property(quantized)


def _rebuild(before: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Return an empty layer, whose state pickle sets; ``before`` has its class of before."""
    made = _class_of(type(before), names)
    return made.__new__(made)
