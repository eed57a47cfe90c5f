"""Load the library of CPU kernels, or a piece of it, and declare its functions."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from qtensor.core.errors import QTensorError
from qtensor.kernels.cpu.structs import ABI, CQuantizer

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class Library:
    """The loaded kernels.

    Attributes:
        handle: the library, whose functions are those of c_interface.cpp and finish.cpp.

    Raises:
        OSError: the system cannot load the library, or it is not one of this version of qtensor.
    """

    def __init__(self, path: str) -> None:
        self.handle = _opened(path, _ARGUMENTS)


LISTENERS: list[Callable[[Library], None]] = []
"""Functions to call with the kernels once they are loaded."""


def _opened(path: str, names: Iterable[str]) -> ctypes.CDLL:
    """Load a library and declare its functions, so that one without them is refused."""
    handle = ctypes.CDLL(path)
    expected = ABI * 1000 + ctypes.sizeof(CQuantizer)
    try:
        interface = handle.qt_abi()
        if interface != expected:
            raise OSError(f"{path} has interface {interface}, this qtensor {expected}")
        for name in names:
            getattr(handle, name).argtypes = _ARGUMENTS[name]
    except AttributeError as error:
        raise OSError(f"{path} is not a library of CPU kernels: {error}") from None
    return handle


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("qt_quantize", "qt_dequantize", "qt_linear", "qt_integer_products"), (ctypes.c_char_p,)
    ),
    **dict.fromkeys(("qt_norm", "qt_sum_rows", "qt_activation"), (_POINTER, _SIZE)),
    "qt_fused": (_POINTER, _POINTER, _SIZE, ctypes.c_char_p),
    "qt_linear_all": (_POINTER, _SIZE, _SIZE),
    "qt_finish": (_POINTER,),
    "qt_widen": (_POINTER, _SIZE, _SIZE, _POINTER),
}


def function_of(path: Path, name: str) -> Callable[..., int]:
    """Return a function of a piece of the library.

    Raises:
        OSError: as `Library`.
    """
    function: Callable[..., int] = getattr(_opened(str(path), (name,)), name)
    return function


def serve(isa: str, path: Path) -> Library | str:
    """Load the kernels and pass them to `LISTENERS`; or, after a warning, return why not."""
    try:
        kernels = _load(isa, path)
    except (QTensorError, OSError) as error:
        return do_without(str(error))
    for listener in LISTENERS:
        listener(kernels)
    return kernels


def do_without(reason: str) -> str:
    """Warn that there are no kernels, and return the reason."""
    warnings.warn(
        f"qtensor runs without its native CPU kernels (same bytes, many times slower): {reason}",
        RuntimeWarning,
        stacklevel=3,
    )
    return reason


def _load(isa: str, path: Path) -> Library:
    # Only a process that computes needs the compiler cache.
    from qtensor.kernels.cpu import prebuilt  # noqa: PLC0415

    try:
        return Library(str(path))
    except OSError as error:
        try:
            replacement = prebuilt.replace(isa, path)
        except QTensorError as second:
            raise OSError(f"{error}; and it cannot be compiled again: {second}") from None
        if replacement is None:
            raise
    return Library(str(replacement))
