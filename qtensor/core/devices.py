"""The device of a call: which one is current, and whether its work is captured in a CUDA graph."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from qtensor.core.errors import fail

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a CUDA device is current, which is cheap if it is so already.

    It leaves no context on a device that the process did not use before, as ``cudaSetDevice`` does.
    """
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _NOTHING
    return torch.cuda.device(device)


def captured(device: torch.device) -> bool:
    """Return True if the work of a device goes into a CUDA graph instead of running."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_not_captured(device: torch.device, op: str, rule: str, fix: str) -> None:
    """Refuse a call that a CUDA graph of a device's work could not repeat.

    Raises:
        QTensorError: with the rule and the fix.
    """
    if captured(device):
        fail(op, rule, "a call while a CUDA graph is captured", fix)
