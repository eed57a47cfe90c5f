"""Speak with the libraries from which a model comes, or which have changed it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import nn

if TYPE_CHECKING:
    from qtensor.modules.conversion import LayerReport

_CLASSES = {
    ("transformers", "PreTrainedModel"): "qtensor.integrations.transformers",
    ("diffusers.models.modeling_utils", "ModelMixin"): "qtensor.integrations.diffusers",
}
"""Module of a library and class of its models -> our module with the function ``adopt``.

Our module is imported for such a model alone, so that qtensor does not need the library."""


def tell_libraries(model: nn.Module) -> None:
    """Let each model of a library, ``model`` or a part of it, be saved by its own method.

    With a release of the library that qtensor does not support, saving raises an error.
    """
    for (library, kind), name in _CLASSES.items():
        found = getattr(sys.modules.get(library), kind, None)
        for part in _outermost(model, found) if found is not None else ():
            with contextlib.suppress(ImportError):
                importlib.import_module(name).adopt(part)


def _outermost(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    """Return the modules of a class that lie in no other one of it."""
    if isinstance(module, kind):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, kind)


def observing_caches(model: nn.Module) -> Any:
    """Return the module with the cache that observes keys and values of a model of transformers.

    Models of other libraries fill no cache: None.
    """
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if kind is None or not isinstance(model, kind):
        return None
    return importlib.import_module("qtensor.integrations.observed_cache")


def library_changes(model: nn.Module) -> tuple[dict[str, Any], list[LayerReport]]:
    """Return the changes by name that adapters of PEFT make, and adapters that cannot be merged.

    See ``qtensor.integrations.peft.changes``. Without PEFT in the process, there are none.
    """
    if "peft" not in sys.modules:
        return {}, []
    integration = importlib.import_module("qtensor.integrations.peft")
    return cast("tuple[dict[str, Any], list[LayerReport]]", integration.changes(model))
