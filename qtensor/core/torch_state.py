"""Ask torch about the call that runs now, where torch documents no way to ask.

docs/architecture.md lists each private name with the test that watches it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context in which ops record no gradient."""

without_autocast = torch._C._DisableAutocast
"""Context in which ``torch.autocast`` does not round operands."""

without_modes = _disable_current_modes
"""Context without dispatch modes, such as fake tensors."""


def has_modes() -> bool:
    """Return whether a dispatch mode is active, such as fake tensors."""
    return bool(torch._C._len_torch_dispatch_stack())


def active_modes() -> list[Any]:
    """Return the active dispatch modes."""
    return _get_current_dispatch_mode_stack()


def watched() -> bool:
    """Return True if a dispatch mode, transform, profiler or trace observes ops."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or in_transform()
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
    )


def in_transform() -> bool:
    """Return whether a transform of ``torch.func`` runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def backward_id() -> int:
    """Return the number of the backward pass that this thread runs; -1 outside of one."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether this thread runs a backward pass, where checkpoints compute layers again."""
    return backward_id() != -1


def context_of_backward() -> contextvars.Context | None:
    """Return the context variables of the caller of ``backward()``, in a thread of autograd."""
    if not torch._C._is_key_in_tls("context"):
        return None
    context: contextvars.Context | None = torch._C._get_obj_in_tls("context")
    return context


def constant_in_graphs(function: Callable[..., Any]) -> Any:
    """Mark a function whose result is a constant of a graph: Dynamo calls it while tracing.

    ``torch.compiler.assume_constant_result`` does the same, and imports Dynamo, which is slow.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
