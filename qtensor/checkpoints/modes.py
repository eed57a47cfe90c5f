"""Read and write files with real tensors in memory, whatever modes the caller has entered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

from qtensor.checkpoints.errors import Place, refuse

P = ParamSpec("P")
R = TypeVar("R")


def in_memory(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that makes its tensors on the CPU, where mapped files are.

    ``torch.device("meta")`` or ``torch.set_default_device("cuda")`` of the caller would place the
    tables of a decoder, or a padded factor, on another device than the codes.

    Raises:
        CheckpointError: when called, if new tensors hold no data, as in a ``FakeTensorMode``.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _on_the_cpu():
            return function(*args, **kwargs)

    return run


def _on_the_cpu() -> AbstractContextManager[Any]:
    probe = torch.empty(0)
    if type(probe) is not torch.Tensor:
        rule = "files are read and written as tensors with data"
        fix = "Leave the mode first; .table() of an open checkpoint has shapes and dtypes"
        refuse(Place(), rule, f"a mode that makes a {type(probe).__name__}", fix)
    # Entering a device costs more, and every call of torch in it.
    return nullcontext() if probe.device.type == "cpu" else torch.device("cpu")
