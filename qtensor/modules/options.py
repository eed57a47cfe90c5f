"""Options of the constructors and calls of linear layers, as plain values."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from qtensor.core.errors import UnsupportedError, check, fail
from qtensor.functional.linear.layer_plan import LinearPlan, is_requantization_safe
from qtensor.functional.ranks.dtensors import SequenceExchange
from qtensor.functional.ranks.parallel import Parallel


class Call(NamedTuple):
    """The options of one call of a module.

    Attributes:
        is_first_microbatch: True quantizes the weight and stores the result, False uses the stored
            result, and None stores nothing.
        noop: one element, read on its device. Non-zero leaves the stored weight as it is.
        output_quantizer: canonical string of the output's quantizer; "" for a plain output.
        seeds: seeds of input, weight and gradient, if they were drawn before the call.
    """

    is_first_microbatch: bool | None = None
    noop: Tensor | None = None
    output_quantizer: str = ""
    seeds: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None

    def without_output(self) -> tuple[Call, str]:
        """Return the call with a plain output, and the quantizer of its output."""
        return self._replace(output_quantizer=""), self.output_quantizer


class LinearOptions(NamedTuple):
    """The constructor options of a linear layer that its calls need, as plain values.

    Attributes:
        exchange: set by parallel styles: a layer of DTensors gathers and splits the rows of a
            sequence itself, as ``sequence_parallel`` does.
        placements: of a weight that is a DTensor; () for a plain weight. Set in each call.
    """

    module: str = "linear"
    name: str = ""
    parallel: Parallel | None = None
    save_original_input: bool = False
    delay_wgrad_compute: bool = False
    fuse_wgrad_accumulation: bool = False
    exchange: SequenceExchange | None = None
    placements: tuple[Any, ...] = ()


def one_op_roles(options: LinearOptions) -> str:
    """Return "module/name" if compiled code can run the layer as one op, else ""."""
    if options.parallel is not None or options.save_original_input:
        return ""
    scheduled = options.delay_wgrad_compute or options.fuse_wgrad_accumulation
    return "" if scheduled else f"{options.module}/{options.name}"


def check_features(label: str, **sizes: int) -> None:
    """Refuse sizes that are not positive integers."""
    for name, size in sizes.items():
        right = isinstance(size, int) and not isinstance(size, bool) and size > 0
        check(right, label, f"{name} must be a positive integer", repr(size), "Fix the size")


def check_original_input(label: str, plan: LinearPlan) -> None:
    """Refuse ``save_original_input`` if backward would quantize the input to other bytes."""
    if plan.backward_override is None and not is_requantization_safe(plan.input):
        rule = (
            "save_original_input quantizes the input again in backward, which must give the "
            "same bytes"
        )
        fix = "Build the module with save_original_input=False for this recipe"
        fail(f"{label} input", rule, plan.input, fix, UnsupportedError)
