"""Find storage and tensor classes by the names that flatten contexts and pickles hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qtensor.core.errors import QTensorError, fail

if TYPE_CHECKING:
    from qtensor.storage.base import QuantizedTensorStorage

_CLASSES: dict[str, type[QuantizedTensorStorage]] = {}


def register(cls: type[QuantizedTensorStorage]) -> None:
    """Register a storage or tensor class by its qualname.

    Raises:
        QTensorError: a class of another module has the name.
    """
    known = _CLASSES.get(cls.__qualname__)
    if known is not None and known.__module__ != cls.__module__:
        fail(
            f"class {cls.__qualname__}",
            "names of storage and tensor classes are unique",
            f"one in {known.__module__} and one in {cls.__module__}",
            "Rename one of them",
        )
    _CLASSES[cls.__qualname__] = cls


def lookup(name: str) -> type[Any]:
    """Return the class with that name.

    Raises:
        QTensorError: no class has the name; the message lists the known names.
    """
    if name not in _CLASSES:
        raise QTensorError(
            f"unflatten: the class must be a registered one; got {name!r}. "
            f"Import the module that defines it; known: {', '.join(sorted(_CLASSES))}."
        )
    return _CLASSES[name]


def registered() -> tuple[type[QuantizedTensorStorage], ...]:
    """Return all storage and tensor classes."""
    return tuple(_CLASSES.values())
