"""Find codes and factors that no group of a layout takes."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from qtensor.checkpoints.containers.base import TensorInfo

_WEIGHTS = ("weight", "weight_packed")
_FACTORS = (
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "scale",
    "scales",
    "qscale_weight",
)
"""Last name parts of the factors of a module's weight, in one layout or another."""
_STACKED = ("_scale", "_scale_inv", "_scales_inv", "_scales", "_weight_scale")
"""What follows the name of stacked experts in the name of their factor."""


def leftovers(
    tensors: Mapping[str, TensorInfo], used: Container[str]
) -> Iterator[tuple[TensorInfo, str]]:
    """Yield each tensor that cannot be a plain one, and the rule that it breaks.

    These are float8 and FP4 tensors, E8M0 factors, and packed codes: uint8 or int8 tensors that are
    the ``weight`` of a module, that have three dims, or beside which a factor lies.
    """
    for name, info in tensors.items():
        last = name.rpartition(".")[2]
        if name in used or ("scale" in last and info.dtype != "F8_E8M0"):
            continue
        codes = info.dtype in ("F8_E4M3", "F8_E5M2", "F4") and bool(info.shape)
        if info.dtype in ("U8", "I8") and len(info.shape) > 1:
            codes = len(info.shape) > 2 or last in _WEIGHTS or _has_factor(tensors, name)
        if codes:
            yield info, "a quantized weight has the dtype, the name and the factors of the layout"
        elif info.dtype == "F8_E8M0" and info.shape:
            yield info, "each factor has a weight that the layout knows"


def _has_factor(tensors: Mapping[str, TensorInfo], name: str) -> bool:
    """Return True if a tensor that is named as a factor lies beside another one."""
    module = name.rpartition(".")[0]
    beside = [name + suffix for suffix in _STACKED]
    beside += [f"{module}.{last}" if module else last for last in _FACTORS]
    return any(other in tensors for other in beside)
