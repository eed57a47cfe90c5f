"""Weight gradients whose computation is delayed."""

from __future__ import annotations

from typing import Any

import torch

from qtensor.library.gemm import GEMM
from qtensor.library.gradient import GEMM_ACCUMULATE, take_postponed


def backward_dw(weight: Any, key: int, into_main_grad: bool) -> None:
    """Compute the oldest postponed weight gradient of the layer ``key`` and accumulate it.

    Raises:
        QTensorError: none is postponed.
    """
    pair = take_postponed(key)
    with torch.no_grad():
        if into_main_grad:
            overwrite = bool(getattr(weight, "overwrite_main_grad", False))
            GEMM_ACCUMULATE(weight.main_grad, *pair, "NT", overwrite)
            weight.grad_added_to_main_grad = True
            return
        grad = GEMM(*pair, "NT", weight.dtype)
        if weight.grad is None:
            weight.grad = grad
        else:
            weight.grad.add_(grad)
