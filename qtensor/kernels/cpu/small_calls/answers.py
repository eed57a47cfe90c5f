"""Register the C++ kernel that answers small calls, and pass programs to it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch

from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.small_calls.calls import Arguments, Parse
from qtensor.kernels.cpu.small_calls.library import load
from qtensor.kernels.cpu.small_calls.planners import PLANNERS
from qtensor.kernels.cpu.small_calls.program import Program

_PACKS_FIRST = ("quantize", "quantize_", "linear_backward", "weight_gemm")
"""Ops whose first tensor may have any strides. C++ copies it if it is not contiguous."""
_OWNED: list[Program] = []
"""Programs that C++ runs. They live as long as the process."""

STATE_KERNELS = {
    "delayed_begin_": "qt_delayed_begin",
    "record_amax_": "qt_record_amax",
    "record_gradient_amax_": "qt_record_gradient_amax",
    "advance_step_": None,
}
"""Ops on the state of delayed scaling, and the function of the CPU kernels that each one calls."""


@functools.cache
def library() -> Any:
    """Return the C++ library with all ops registered, or None where it is not built."""
    handle, kernels = load(), native.library()
    if handle is None or isinstance(kernels, str):
        return None
    run = ctypes.cast(kernels.run, ctypes.c_void_p).value
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
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs or ())
        if not (tensors[0] if tensors else args[0]).is_cpu:
            return
        handle = library()
        if handle is None or not handle.qt_wants_program(label):
            return
        arguments = Arguments(args)
        # Only `plan_gemm` knows what to do with transposed matrices.
        if name != "gemm" and not arguments.are_contiguous(int(name in _PACKS_FIRST)):
            return
        call = plan(arguments, tensors, parse)
        if call is None:
            return
        sources = array("q", [number for source in call.addresses for number in source])
        cleared = sum(1 << i for i in call.cleared)
        address = sources.buffer_info()[0]
        program = call.program
        if handle.qt_remember(label, program.address, address, len(call.addresses), cleared) == 0:
            _OWNED.append(program)

    return observe


def offer_state(name: str) -> Callable[[Any, Any], None]:
    """Return the observer of an op on the state of delayed scaling.

    It registers the op's C++ kernel at the first call on a CPU. The kernel needs no program: it
    checks its arguments and computes.
    """
    function = STATE_KERNELS[name]
    is_registered = False

    def observe(outputs: Any, args: Any) -> None:
        nonlocal is_registered
        if is_registered or not args[0].is_cpu:
            return
        is_registered = True
        handle, kernels = library(), native.library()
        if handle is None or isinstance(kernels, str):
            return
        kernel = None if function is None else getattr(kernels.handle, function)
        handle.qt_register_state_op(
            name.encode(), kernel and ctypes.cast(kernel, ctypes.c_void_p).value
        )

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
