"""Small CPU calls answered in C++, without Python.

The dispatcher needs longer to enter a Python kernel than a small layer needs to compute. This
package therefore registers one C++ kernel for the ops of `OPS` on the CPU (`src/small_calls.cpp`).
It serves a call in three steps:

1. Describe the call: shapes, dtypes and alignment of its tensors, its strings and its numbers.
2. If a program is known for that description, allocate the outputs and run the program over the
   addresses of this call's tensors, without entering Python.
3. Otherwise run the op's Python kernel. When a description comes for the second time, Python plans
   a program for it (`planners.py`, `program.py`) and passes it to C++ (`answers.py`).

Calls from Python of ops that write none of their arguments take steps 1 and 2 before torch prepares
them for its dispatcher (`direct.py`, `src/direct_calls.cpp`).

The ops on the state of delayed scaling (`STATE_KERNELS`) need no program: C++ checks the sizes of
their tensors and computes (`src/delayed_calls.cpp`).

The results have the bytes of the Python kernels. `QTENSOR_SMALL_CALLS=0` leaves the package out,
and so does a machine that cannot compile against torch's headers. All calls still work then, but a
small call takes longer.

| file | content |
|---|---|
| `program.py` | a list of kernel steps over a table of addresses, and the builder of such lists |
| `calls.py` | the arguments of a call, and its program with the sources of its addresses |
| `products.py` | the programs of products |
| `planners.py` | for each op, the program of a call and where its addresses come from |
| `direct.py` | puts C++ between ops and torch's dispatcher |
| `answers.py` | loads the C++ kernel, and passes programs to it after a call |
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from typing import Any

from qtensor.kernels.cpu.small_calls.answers import STATE_KERNELS, library, offer, offer_state
from qtensor.kernels.cpu.small_calls.calls import Parse
from qtensor.kernels.cpu.small_calls.planners import PLANNERS
from qtensor.kernels.cpu.small_calls.products import refuse_gemm
from qtensor.kernels.gemm import IN_FRONT
from qtensor.kernels.gemm.problem import Problem

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
