"""Let ``print(model)`` show the formats of weights, in layers that keep their classes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from qtensor.quantizers import Quantizer


class WeakMethod:
    """Call a function with a module that holds this object, without a cycle of references.

    A copy of the module, by ``deepcopy`` or pickle, gets an object of its own.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        """Take a function whose first argument is the module."""
        self._function, self._module = function, weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns."""
        return self._function(self._module(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakMethod:
        module = self._module()
        copied: Any = memo.get(id(module), module)
        return WeakMethod(self._function, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakMethod, (self._function, self._module())


def show_formats(module: nn.Module) -> None:
    """Let the repr of a module end with the formats of its quantized parameters."""
    if not isinstance(vars(module).get("extra_repr"), WeakMethod) and _formats(module):
        module.extra_repr = WeakMethod(_described, module)  # type: ignore[method-assign]


def _formats(module: nn.Module) -> list[str]:
    found = {n: getattr(p, "quantizer", None) for n, p in module._parameters.items()}
    return [f"{n}={q.canonical}" for n, q in found.items() if isinstance(q, Quantizer)]


def _described(module: nn.Module) -> str:
    own = type(module).extra_repr(module)
    return ", ".join([*([own] if own else []), *_formats(module)])
