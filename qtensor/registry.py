"""The former home of ``parse``, which files name that older versions have written."""

from qtensor.core.quantizer_registry import parse

__all__ = ["parse"]
