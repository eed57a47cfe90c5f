"""Values that a compiled graph takes for granted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from qtensor.core.torch_state import constant_in_graphs

_CACHES: list[Any] = []


def forget_constants() -> None:
    """Compute all constants again; graphs that are compiled keep theirs.

    Registering a quantizer class calls this function, because constants hold parsed quantizers.
    """
    for cached in _CACHES:
        cached.cache_clear()


def compile_constant(function: Callable[..., Any]) -> Any:
    """Return a cached ``function`` of plain values; compiled code sees its result as a constant.

    Dynamo guards nothing that it reads of the result: what decides must be in the arguments.
    """
    cached = functools.lru_cache(maxsize=4096)(function)
    _CACHES.append(cached)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return cached(*args)

    return constant_in_graphs(call)
