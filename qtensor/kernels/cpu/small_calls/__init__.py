"""Small CPU calls answered in C++, without Python.

docs/kernels.md ("Small calls") explains how. The C++ is in `src/small_calls.cpp`, and in
`src/delayed_calls.cpp` for the ops on the state of delayed scaling (`STATE_KERNELS`).

| file | content |
|---|---|
| `program.py` | a list of kernel steps over a table of addresses, and the builder of such lists |
| `calls.py` | the arguments of a call, and its program with the sources of its addresses |
| `products.py` | the programs of products |
| `planners.py` | for each op, the program of a call and where its addresses come from |
| `library.py` | loads the C++ library |
| `answers.py` | registers the C++ kernel, and passes programs to it after a call |
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from typing import Any

from qtensor.kernels.cpu.small_calls.answers import STATE_KERNELS, library, offer, offer_state
from qtensor.kernels.cpu.small_calls.calls import Parse
from qtensor.kernels.cpu.small_calls.planners import PLANNERS
from qtensor.kernels.cpu.small_calls.products import refuse_gemm
from qtensor.kernels.products import IN_FRONT
from qtensor.kernels.products.problem import Problem

OPS = tuple(PLANNERS)
"""Names of the ops whose small calls C++ answers."""


def is_enabled() -> bool:
    """Return False if the environment variable QTENSOR_SMALL_CALLS is 0."""
    return os.environ.get("QTENSOR_SMALL_CALLS") != "0"


def install(observers: MutableMapping[str, Callable[[Any, Any], None]], parse: Parse) -> None:
    """Observe the Python kernels of `OPS`, so that C++ answers small calls that are repeated.

    Args:
        observers: op name -> the function to call with (outputs, arguments) after the op's Python
            kernel.
        parse: canonical text -> quantizer.
    """
    IN_FRONT["small_calls"] = _refuse_product
    if is_enabled():
        observers.update({name: offer(name, parse) for name in OPS})
        observers.update({name: offer_state(name) for name in STATE_KERNELS})


def _refuse_product(problem: Problem) -> str | None:
    """Return why C++ does not answer a product, or None if it does once the call comes again."""
    if not is_enabled():
        return "switched off by QTENSOR_SMALL_CALLS=0"
    if library() is None:
        return "its library is not built; run: qtensor kernels build"
    return refuse_gemm(problem)
