"""Facts about parameters and inputs that all linear layers look up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.dtensor import local_part
from qtensor.storage.shards import GatheredWeight

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def follows_calls() -> bool:
    """Return whether Dynamo compiles this call; it does not while it exports a program."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()


def stored_canonical(parameter: Any) -> str:
    """Return the canonical string of a parameter's quantizer; "" for a plain parameter."""
    own = local_part(parameter)
    # A weight in high precision that fully_shard gathers quantized reaches the layer so.
    return own._whole_quantizer().canonical if isinstance(own, GatheredWeight) else ""


def activation_dtype(input: Tensor) -> Tensor:
    """Return the input, converted to the dtype of ``torch.autocast`` if that is enabled."""
    device = input.device.type
    # torch.autocast does not know the meta device, and raises there.
    if device != "meta" and torch.is_autocast_enabled(device):
        return input.to(torch.get_autocast_dtype(device))
    return input
