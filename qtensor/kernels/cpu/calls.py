"""Ops that C++ answers without Python where their program is known: what a compiled graph calls, it calls often.

The dispatcher takes longer to call a Python kernel than a small layer takes to compute. Here it calls C++, which looks for a
program by all that a program depends on (shapes, dtypes, texts), allocates the outputs and runs it; for any other call the op's
Python kernel runs, and may leave its program behind. Needs torch's own headers, and is therefore a library of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from qtensor.errors import QTensorError
from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.program import Program

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_KEPT: list[Program] = []
"""What C++ holds addresses of."""

Places = Sequence[tuple[int, int]]
"""(tensor of the call, or -1 - the output; bytes behind its start) of each address of a program."""


@functools.cache
def _handle() -> Any:
    """The library, or None where there are no kernels or it cannot be built."""
    if isinstance(native.library(), str) or platform.system() != "Linux":
        return None
    try:
        # Only a process that computes needs the compiler cache.
        from qtensor.build import build  # noqa: PLC0415
        from qtensor.kernels.cpu.sources import calls_build_spec  # noqa: PLC0415

        handle = ctypes.CDLL(str(build(calls_build_spec())))
        handle.qt_take.argtypes = (ctypes.c_char_p, _POINTER, ctypes.c_int)
        handle.qt_learn.argtypes = (_POINTER, _POINTER, _SIZE, _SIZE)
    except (QTensorError, OSError, AttributeError):
        # The Python kernels give the same bytes.
        return None
    return handle


@functools.cache
def take(name: str, packs_first: bool) -> bool:
    """Have C++ called first for an op of qtensor on a CPU; False where it cannot be.

    Args:
        name: of the op.
        packs_first: its first tensor may have any strides.
    """
    handle, kernels = _handle(), native.library()
    if handle is None or isinstance(kernels, str):
        return False
    run = ctypes.cast(kernels.run, _POINTER).value
    handle.qt_take(name.encode(), run, packs_first)
    return True


def learn(program: Program, places: Places, cleared: Sequence[bool] = ()) -> None:
    """Have the call that C++ left to Python, and those like it, answered by a program from now on.

    Args:
        program: what computes it.
        places: where its addresses come from.
        cleared: which outputs start as zeros.
    """
    at = array("q", [word for place in places for word in place])
    bits = sum(1 << i for i, zeros in enumerate(cleared) if zeros)
    if _handle().qt_learn(program.address, at.buffer_info()[0], len(places), bits) == 0:
        _KEPT.append(program)


@contextlib.contextmanager
def left_to_python() -> Iterator[None]:
    """A region in which C++ answers nothing: for tests that compare the two."""
    handle = _handle()
    before = 0 if handle is None else handle.qt_serve(0)
    try:
        yield
    finally:
        if handle is not None:
            handle.qt_serve(before)
