"""Let C++ answer calls from Python before torch prepares them for its dispatcher."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch


def install(path: str, names: Iterable[str]) -> None:
    """Put the functions of `direct_calls.cpp` between ops and what they call.

    An op of torch (`OpOverload`) calls its attribute `_op`. The function that takes its place
    answers the calls for which a program is known, and passes all others on.

    Args:
        path: of the library of small calls.
        names: ops that it has registered. Those that write one of their arguments stay as they
            are, because the dispatcher counts what is written.
    """
    try:
        make = ctypes.PyDLL(path).qt_direct_op
    except AttributeError:
        return  # The library was compiled without the headers of Python.
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_char_p, *3 * (ctypes.py_object,))
    for name in names:
        op: Any = getattr(torch.ops.qtensor, name).default
        if not op._schema.is_mutable:
            op._op = make(name.encode(), op._op, *signature(op))


def signature(op: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the names and the defaults of an op's arguments; Ellipsis is no default."""
    arguments = op._schema.arguments
    defaults = [a.default_value if a.has_default_value() else ... for a in arguments]
    return tuple([a.name for a in arguments]), tuple(defaults)
