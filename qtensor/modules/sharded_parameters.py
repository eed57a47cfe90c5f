"""Parameters that torch has sharded over ranks: initial values, and delayed gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.core.dtensors import is_dtensor
from qtensor.core.errors import UnsupportedError, fail
from qtensor.functional.linear.delayed_wgrad import accumulate, delayed_wgrad


def set_values(parameter: Any, values: Tensor) -> None:
    """Copy whole values, of the shape of ``parameter``, into the parameter.

    If the parameter is sharded, each rank gets its part of the values of the first rank of the
    mesh, even if the ranks drew other values.
    """
    with torch.no_grad():
        if not is_dtensor(parameter):
            parameter.copy_(values)
            return
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - takes a second

        mesh = parameter.device_mesh
        parts = distribute_tensor(values, mesh, parameter.placements)
        # An offloaded parameter is on the CPU, and its mesh is not.
        parameter.to_local().copy_(parts.to_local())


def check_not_sharded(label: str, parameter: Any) -> None:
    """Refuse to replace a sharded parameter by a quantized one."""
    if is_dtensor(parameter):
        rule = (
            "the values of quantized_params are set before the layer is sharded, because a shard "
            "of plain values cannot become a shard of codes"
        )
        got = f"a weight with the placements {parameter.placements}"
        fix = "Call reset_parameters() or load the weights before fully_shard"
        fail(label, rule, got, fix, UnsupportedError)


def backward_dw(label: str, weight: Any, key: int, into_main_grad: bool) -> None:
    """Compute the oldest postponed weight gradient of the layer ``key`` and accumulate it.

    The gradient of a weight that ``fully_shard`` has sharded is averaged over the ranks of the
    mesh, so that all ranks must call this function. It is reduced in its own dtype. With
    ``into_main_grad`` it is added to ``weight.main_grad`` instead of ``weight.grad``.

    Raises:
        QTensorError: no gradient is postponed, or the weight is split in a way that its gradient
            (N, K) does not have.
    """
    if not is_dtensor(weight):
        accumulate(weight, key, into_main_grad)
        return
    grad = delayed_wgrad(weight.dtype, key)
    if grad.shape != weight.shape or into_main_grad:
        rule = "the gradient must have the shape of the whole weight and go to weight.grad"
        got = f"{tuple(grad.shape)} for {tuple(weight.shape)} with {weight.placements}"
        fix = "Build the layer with delay_wgrad_compute=False"
        fail(f"{label} backward_dw", rule, got, fix, UnsupportedError)
    from torch.distributed.tensor import DTensor, Partial  # noqa: PLC0415 - takes a second

    mesh = weight.device_mesh
    sums = DTensor.from_local(grad / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
    mean = sums.redistribute(placements=weight.placements)
    if weight.grad is None:
        weight.grad = mean
    else:
        weight.grad.add_(mean)
