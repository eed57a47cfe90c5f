"""Weight gradients whose computation is delayed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.functional.operands import multiply
from qtensor.library.gradient import GEMM_ACCUMULATE, take_postponed


def delayed_wgrad(dtype: torch.dtype, key: int) -> Tensor:
    """Return the oldest postponed weight gradient (N, K) of the layer ``key``.

    Raises:
        QTensorError: none is postponed.
    """
    with torch.no_grad():
        return multiply(*take_postponed(key), "NT", dtype)


def accumulate(weight: Any, key: int, into_main_grad: bool) -> None:
    """Add the oldest postponed weight gradient of a layer to ``weight.grad`` or ``main_grad``.

    Raises:
        QTensorError: none is postponed.
    """
    if into_main_grad:
        dy, x = take_postponed(key)
        overwrite = bool(getattr(weight, "overwrite_main_grad", False))
        with torch.no_grad():
            GEMM_ACCUMULATE(weight.main_grad, *dy, *x, "NT", overwrite)
        weight.grad_added_to_main_grad = True
        return
    grad = delayed_wgrad(weight.dtype, key)
    if weight.grad is None:
        weight.grad = grad
    else:
        weight.grad.add_(grad)
