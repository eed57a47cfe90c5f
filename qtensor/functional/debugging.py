"""Tell ``qtensor.debug`` of the tensors of a layer. Modules and operations both do it here."""

from __future__ import annotations

from torch import Tensor

from qtensor.functional.grouped.args import GroupedBwdArgs, GroupedFwdArgs, Splits
from qtensor.functional.linear.args import LinearBwdArgs, LinearFwdArgs
from qtensor.functional.operands import Quantized
from qtensor.storage.base import QuantizedTensorStorage

_OPERANDS = {"input": 0, "weight": 1, "grad_output": 2}
"""Role of each operand of the products -> its place in a ``LinearPlan``."""


def asks_for(args: LinearBwdArgs | GroupedBwdArgs, role: str) -> bool:
    """Return whether a layer is recorded with a tensor of this role, which it would not compute."""
    return args.site is not None and args.site.asks_for(role)


def tell_debug(
    args: LinearFwdArgs | LinearBwdArgs | GroupedFwdArgs | GroupedBwdArgs,
    role: str,
    x: Tensor | QuantizedTensorStorage | Quantized | None,
    splits: Splits | None = None,
    group: int | None = None,
) -> None:
    """Hand a tensor of a call to the site of the layer, if the layer is recorded.

    Args:
        args: the arguments of the forward or backward.
        role: see ``Site.take``.
        x: plain or quantized; None for a gradient that is not computed.
        splits: the groups of the rows of ``x``.
        group: the group whose weight ``x`` is.
    """
    if args.site is None or x is None:
        return
    quantizer, scale = "", None
    if role in _OPERANDS:
        place = _OPERANDS[role]
        quantizer = args.plan[:3][place]
        if args.delayed is not None and args.plan.delayed[place]:
            count = args.delayed.scales.shape[0] // 3
            scale = args.delayed.scales[place * count : (place + 1) * count]
            scale = scale if group is None else scale[group : group + 1]
    args.site.take(role, x, quantizer, scale, splits, group)
