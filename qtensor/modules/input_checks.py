"""Check the input of a layer before anything is computed."""

from __future__ import annotations

from torch import Tensor

from qtensor.core.dtensors import part_of
from qtensor.core.errors import DtypeError, fail
from qtensor.functional.linear.layer_plan import LinearPlan, alignment
from qtensor.functional.operands import Quantized
from qtensor.functional.ranks.parallel import check_input
from qtensor.modules.options import LinearOptions
from qtensor.modules.parameters import FLOATING


def check_width(label: str, input: Tensor | Quantized, columns: int) -> None:
    """Refuse an input (..., K) whose last dim is not in_features."""
    if input.ndim == 0 or input.shape[-1] != columns:
        rule = f"its last dim must be in_features, {columns}"
        fail(f"{label} input", rule, tuple(input.shape), "Fix the input or the module")


def check_layer_input(
    label: str, input: Tensor, weight: Tensor, plan: LinearPlan, options: LinearOptions
) -> None:
    """Refuse an input (..., K) that the weight (N, K), the recipe or the options do not fit."""
    check_width(label, input, weight.shape[1])
    if input.dtype not in FLOATING:
        rule = "it must be float32, bfloat16 or float16"
        fail(f"{label} input", rule, input.dtype, "Convert it first", DtypeError)
    if input.device != weight.device:
        rule = f"it must be on the weight's device, {weight.device}"
        fail(f"{label} input", rule, input.device, "Move one of them")
    if options.parallel is not None:
        check_input(label, input.shape, options.parallel)
    check_alignment(label, weight, plan, options)


def check_alignment(label: str, weight: Tensor, plan: LinearPlan, options: LinearOptions) -> None:
    """Refuse a weight (N, K) whose sizes the formats of the recipe cannot divide into blocks."""
    rows, columns = weight.shape
    if not (rows % plan.multiple or columns % plan.multiple):
        return
    part = "" if options.parallel is None else ", of each rank's part,"
    if options.placements:
        part = f", of each rank's part ({part_of(options.placements)}),"
    for role, canonical in (("input", plan.input), ("weight", plan.weight)):
        multiple = alignment(canonical)
        if rows % multiple or columns % multiple:
            rule = f"in_features and out_features{part} must be multiples of {multiple}"
            got = f"{columns} and {rows}"
            fix = "Pad them, or run the layer under qtensor.autocast(enabled=False)"
            fail(f"{label} {role}[{canonical.partition('(')[0]}]", rule, got, fix)
