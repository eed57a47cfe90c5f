"""Let C++ answer calls from Python before torch prepares them for its dispatcher."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from qtensor.errors import QTensorError

_POINTER, _OBJECT = ctypes.c_void_p, ctypes.py_object


@functools.cache
def maker() -> Callable[..., Any] | None:
    """Return `qt_direct_op` of direct_calls.cpp, or None where its library is not built.

    This function compiles nothing. `qtensor.kernels.build` builds the library with the CPU kernels.
    """
    try:
        # Only a process that computes needs the compiler cache.
        from qtensor.build import build, is_built  # noqa: PLC0415
        from qtensor.kernels.cpu.sources import direct_calls_build_spec  # noqa: PLC0415

        spec = direct_calls_build_spec()
        if not is_built(spec):
            return None
        make = ctypes.PyDLL(str(build(spec))).qt_direct_op
    except (QTensorError, OSError, AttributeError):
        return None  # All calls take the dispatcher.
    make.restype, make.argtypes = _OBJECT, (_POINTER, _POINTER, _OBJECT, _OBJECT, _OBJECT)
    return make


def install(small_calls: Any, names: Iterable[str]) -> None:
    """Put the functions of direct_calls.cpp between ops and what they call.

    An op of torch (`OpOverload`) calls its attribute `_op`. The function that takes its place
    answers the calls for which a program is known, and passes all others on.

    Args:
        small_calls: the library of small calls.
        names: ops that it has registered. Those that write one of their arguments stay as they
            are, because the dispatcher raises the version counter of a tensor that is written.
    """
    for name in names:
        op = getattr(torch.ops.qtensor, name).default
        if not op._schema.is_mutable and hasattr(op, "_op"):
            op._op = direct_op(small_calls, op, name, op._op)


def direct_op(small_calls: Any, op: Any, name: str, dispatched: Any) -> Any:
    """Return the function to call in place of `dispatched`, which torch made for an op."""
    make = maker()
    if make is None:
        return dispatched
    small_calls.qt_registered_op.restype = small_calls.qt_enabled.restype = _POINTER
    address = small_calls.qt_registered_op(name.encode())
    arguments = op._schema.arguments
    defaults = [a.default_value if a.has_default_value() else ... for a in arguments]
    names = tuple([a.name for a in arguments])
    return make(address, small_calls.qt_enabled(), dispatched, names, tuple(defaults))
