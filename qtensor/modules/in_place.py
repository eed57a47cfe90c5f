"""Layers that change their class instead of being replaced, in models that torch has sharded.

``fully_shard`` and ``parallelize_module`` remember module objects: ``fully_shard`` puts the
gathered parameters into them. A new layer in the place of such an object would keep its shard of
the weight for ever.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from qtensor.core.dtensors import is_dtensor

_MADE: dict[tuple[type[Any], type[Any]], type[Any]] = {}
"""Classes that ``with_base`` made, by the class of a layer and the new base."""


def _fsdp_module() -> type[Any] | None:
    # Importing torch.distributed.fsdp takes a second, and a sharded model has imported it.
    module = sys.modules.get("torch.distributed.fsdp")
    return getattr(module, "FSDPModule", None)


def is_held(model: nn.Module) -> bool:
    """Return whether torch has sharded a model or a part of it, and remembers its modules."""
    kind = _fsdp_module()
    if kind is not None and any([isinstance(module, kind) for module in model.modules()]):
        return True
    return any([is_dtensor(parameter) for parameter in model.parameters()])


def plain_class(module: nn.Module) -> type[Any]:
    """Return the class of a module without what ``fully_shard`` put in front of it."""
    kind, own = _fsdp_module(), type(module)
    if kind is not None and own.__bases__[:1] == (kind,) and len(own.__bases__) == 2:
        return own.__bases__[1]
    return own


def empty_of(own: type[Any]) -> Any:
    """Return an instance without state: pickle stores it where it cannot store a class itself."""
    return object.__new__(own)


def with_base(own: type[Any], old: type[Any], new: type[Any]) -> type[Any]:
    """Return ``new``, or a class like ``own`` that derives from ``new`` instead of ``old``."""
    if own is old:
        return new
    if (own, new) not in _MADE:
        bases = tuple([new if base is old else base for base in own.__bases__])
        names = {k: v for k, v in vars(own).items() if k not in ("__dict__", "__weakref__")}
        _MADE[own, new] = type(own.__name__, bases, names)
    return _MADE[own, new]
