"""Load the C++ library of small calls, which is compiled against torch."""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

from qtensor.core.errors import QTensorError
from qtensor.kernels.cpu import native

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


@functools.cache
def load() -> Any:
    """Return the C++ library, or None where it is not built.

    This function compiles nothing. `qtensor.kernels.build` builds the library with the CPU kernels.
    """
    if isinstance(native.library(), str) or platform.system() != "Linux":
        return None
    try:
        # Only a process that computes needs the compiler cache.
        from qtensor.build.cache import build, is_built  # noqa: PLC0415
        from qtensor.kernels.cpu.sources import small_calls_build_spec  # noqa: PLC0415

        spec = small_calls_build_spec()
        if not is_built(spec):
            return None
        handle = ctypes.CDLL(str(build(spec)))
        handle.qt_register_op.argtypes = (ctypes.c_char_p, _POINTER, ctypes.c_int)
        handle.qt_wants_program.argtypes = (ctypes.c_char_p,)
        handle.qt_register_state_op.argtypes = (ctypes.c_char_p, _POINTER)
        handle.qt_remember.argtypes = (ctypes.c_char_p, _POINTER, _POINTER, _SIZE, _SIZE)
    except (QTensorError, OSError, AttributeError):
        # The Python kernels give the same bytes.
        return None
    return handle
