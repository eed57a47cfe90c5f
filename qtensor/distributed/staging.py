"""Copy a state dict for ``torch.distributed.checkpoint.async_save``.

torch's own stager asks each tensor for the address of its memory. A quantized tensor has several
buffers and therefore no single address, so asking for it raises an error. The stager of this module
copies quantized tensors without asking.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from qtensor.core.dtensors import is_dtensor


class Stager:
    """Copies state dicts with quantized tensors to the CPU: ``async_save(..., async_stager=...)``.

    ``async_save`` saves the copy in a thread or another process, while training goes on. The copy
    is complete when ``async_save`` returns.
    """

    should_synchronize_after_execute = False
    """Tells torch that there is nothing to wait for after ``stage``."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state dict; its tensors keep shapes and dtypes, and are on the CPU."""
        with torch.no_grad():
            staged: dict[str, Any] = pytree.tree_map(_copied, state_dict)
        return staged

    def synchronize_staging(self) -> None:
        """Return at once, because ``stage`` has copied everything."""

    def close(self) -> None:
        """Return at once: nothing is kept between two saves."""


def _copied(value: Any) -> Any:
    if is_dtensor(value):
        copied: Any = value.detach()
        copied._local_tensor = _copied(value._local_tensor)
        return copied
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
