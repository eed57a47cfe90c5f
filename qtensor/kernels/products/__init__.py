"""Matrix products of quantized operands: the backends, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable

LISTENERS: list[Callable[[], object]] = []
"""Functions to call when ``choice.py`` forgets its choices."""
