"""Where the weight gradient of a layer goes if backward does not return it."""

from __future__ import annotations

from torch import Tensor

from qtensor.core.dtensors import local_part
from qtensor.core.errors import fail
from qtensor.functional.linear.args import Wgrad
from qtensor.modules.options import LinearOptions
from qtensor.modules.state import LinearState


def main_grad_of(label: str, weight: Tensor) -> tuple[Tensor, bool]:
    """Return this rank's part of ``weight.main_grad``, and whether backward overwrites it.

    The tensor is an alias: the caller may change ``main_grad`` between forward and
    backward.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        rule = "fuse_wgrad_accumulation adds to weight.main_grad"
        fix = (
            "Set weight.main_grad = torch.zeros_like(weight, dtype=torch.float32). Under "
            "fully_shard, which computes with a gathered copy of the weight, build the layer "
            "with fuse_wgrad_accumulation=False"
        )
        fail(label, rule, "none", fix)
    return local_part(main_grad).data, bool(getattr(weight, "overwrite_main_grad", False))


def weight_gradient(
    label: str, weight: Tensor, state: LinearState, options: LinearOptions
) -> Wgrad:
    """Return where a call puts the gradient of ``weight`` (N, K) that it does not return."""
    if options.delay_wgrad_compute:
        return Wgrad(key=state.key)
    return Wgrad(*main_grad_of(label, weight))
