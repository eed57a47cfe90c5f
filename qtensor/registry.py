"""Provide ``parse`` under the name that files of older versions contain."""

from qtensor.core.quantizer_registry import parse

__all__ = ["parse"]
