"""Find the name of a parameter by its memory, for errors of calls that know a tensor alone.

``fully_shard``, ``distribute_tensor`` and ``parallelize_module`` hand the tensors of a model to the
library without their names. The modules of the program are searched, which takes a fraction of a
second in a large program; only errors pay for it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from qtensor.dtensor import local_part
from qtensor.errors import QTensorError


@contextlib.contextmanager
def names_parameter(t: Any, name: str = "") -> Iterator[None]:
    """Let errors of this block name a parameter; ``name_parameter`` describes the arguments."""
    try:
        yield
    except QTensorError as error:
        name_parameter(error, t, name)
        raise


def name_parameter(error: QTensorError, t: Any, name: str = "") -> None:
    """Put the name of a parameter before the message of an error, unless the message has it.

    Args:
        error: its message is changed.
        t: the parameter, or a tensor that shares its memory.
        name: the name if it is known; otherwise it is searched.
    """
    name = name or parameter_name(t)
    if name and name not in str(error):
        error.args = (f"{name}: {error}",)


def parameter_name(t: Any) -> str:
    """Return the name of the parameter that shares memory with ``t``, such as "0.up.weight".

    The name begins at the outermost module that holds the parameter. It is empty if no module holds
    it.
    """
    memory = _memory(t)
    if memory is None:
        return ""
    # type() and not isinstance(): a proxy among the objects may run code when asked for its class.
    modules: list[Any] = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    parents = {
        id(child): (module, name)
        for module in modules
        for name, child in module.__dict__.get("_modules", {}).items()
    }
    for module in modules:
        for name, parameter in module.__dict__.get("_parameters", {}).items():
            if parameter is not None and _memory(local_part(parameter)) == memory:
                return ".".join([*_path(module, parents), name])
    return ""


def _path(module: Any, parents: dict[int, tuple[Any, str]]) -> list[str]:
    """Return the names on the way from the outermost module to ``module``."""
    path: list[str] = []
    seen = set()
    while id(module) in parents and id(module) not in seen:
        seen.add(id(module))
        module, name = parents[id(module)]
        path.insert(0, name)
    return path


def _memory(t: Any) -> int | None:
    """Return the address of the first buffer; None if it has no memory of its own."""
    first = t.buffers()[0] if hasattr(t, "buffers") else getattr(t, "_high_precision", t)
    if type(first) not in (Tensor, nn.Parameter) or first.is_meta:
        return None
    return first.untyped_storage().data_ptr() or None
