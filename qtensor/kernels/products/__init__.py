"""Matrix products of quantized operands: the backends, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qtensor.kernels.products.problem import Problem

IN_FRONT: dict[str, Callable[[Problem], str | None]] = {}
"""Name of a program that answers products before ``choice.py`` does -> its refusal.

A refusal is a function of the problem: it returns why the program does not answer, or None. These
programs serve CPUs.
"""
