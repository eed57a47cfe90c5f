"""Load the C++ kernel that answers small calls, and pass programs to it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch

from qtensor.errors import QTensorError
from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.small_calls.planners import PLANNERS, Arguments, Parse
from qtensor.kernels.cpu.small_calls.program import Program

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_PACKS_FIRST = ("quantize", "linear_backward")
"""Ops whose first tensor may have any strides. C++ copies it if it is not contiguous."""
_OWNED: list[Program] = []
"""Programs that C++ runs. They live as long as the process."""


@functools.cache
def library() -> Any:
    """Return the C++ library with all ops registered, or None where it is not built.

    This function compiles nothing. `qtensor.kernels.build` builds the library with the CPU kernels.
    """
    kernels = native.library()
    if isinstance(kernels, str) or platform.system() != "Linux":
        return None
    try:
        # Only a process that computes needs the compiler cache.
        from qtensor.build import build, is_built  # noqa: PLC0415
        from qtensor.kernels.cpu.sources import small_calls_build_spec  # noqa: PLC0415

        spec = small_calls_build_spec()
        if not is_built(spec):
            return None
        handle = ctypes.CDLL(str(build(spec)))
        handle.qt_register_op.argtypes = (ctypes.c_char_p, _POINTER, ctypes.c_int)
        handle.qt_wants_program.argtypes = (ctypes.c_char_p,)
        handle.qt_remember.argtypes = (ctypes.c_char_p, _POINTER, _POINTER, _SIZE, _SIZE)
    except (QTensorError, OSError, AttributeError):
        # The Python kernels give the same bytes.
        return None
    run = ctypes.cast(kernels.run, _POINTER).value
    for name in PLANNERS:
        handle.qt_register_op(name.encode(), run, name in _PACKS_FIRST)
    return handle


def offer(name: str, parse: Parse) -> Callable[[Any, Any], None]:
    """Return the observer of an op's Python kernel: it plans a program if C++ asks for one.

    C++ asks when the description of a call comes for the second time, while the Python kernel runs.
    """
    label = name.encode()
    plan = PLANNERS[name]

    def observe(outputs: Any, args: Any) -> None:
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        if not tensors or not tensors[0].is_cpu:
            return
        handle = library()
        if handle is None or not handle.qt_wants_program(label):
            return
        call = plan(Arguments(args), tensors, parse)
        if call is None:
            return
        sources = array("q", [number for source in call.addresses for number in source])
        cleared = sum(1 << i for i in call.cleared)
        address = sources.buffer_info()[0]
        program = call.program
        if handle.qt_remember(label, program.address, address, len(call.addresses), cleared) == 0:
            _OWNED.append(program)

    return observe


@contextlib.contextmanager
def left_to_python() -> Iterator[None]:
    """Leave all calls in a region to Python, for tests and benchmarks that compare the two ways."""
    handle = library()
    before = 0 if handle is None else handle.qt_enable(0)
    try:
        yield
    finally:
        if handle is not None:
            handle.qt_enable(before)
