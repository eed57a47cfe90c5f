"""Matrix products of quantized operands: the backends, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qtensor.kernels.gemm.problem import Problem

IN_FRONT: dict[str, Callable[[Problem], str | None]] = {}
"""Functions that may answer a product before the table of ``choice.py``, by name.

Each returns None if it answers, else the reason why it does not.
"""
