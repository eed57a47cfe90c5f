"""Ask torch about the call that runs now, where torch documents no way to ask.

docs/architecture.md lists each private name with the test that watches it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.graph import Node
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


no_torch_function: Any = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of a class whose calls go to the dispatcher at once."""

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Return the number that autograd gives to the next node of this thread."""

backward_node: Callable[[], Node | None] = torch._C._current_autograd_node
"""Return the node that the backward pass of this thread runs, or None."""

forward_mode_enabled: Callable[[], bool] = torch._C._is_fwd_grad_enabled
"""Return whether forward-mode differentiation is on; a function of autograd turns it off."""

_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_in_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


def has_modes() -> bool:
    """Return whether a dispatch mode is active, such as fake tensors."""
    return bool(_modes())


def active_modes() -> list[Any]:
    """Return the active dispatch modes."""
    return _get_current_dispatch_mode_stack()


def watched() -> bool:
    """Return True if a dispatch mode, transform, profiler or trace observes ops."""
    return bool(_modes() or _transform() is not None or _profiled() or torch.jit.is_tracing())


def in_autocast(device: torch.device) -> bool:
    """Return whether ``torch.autocast`` is on for a kind of device; some kinds have none."""
    if not _in_any_autocast():  # every product asks, and most programs have none
        return False
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def in_forward_mode() -> bool:
    """Return whether forward-mode gradients are computed."""
    return forward_ad._current_level >= 0


def in_transform() -> bool:
    """Return whether a transform of ``torch.func`` runs."""
    return _transform() is not None


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


def has_saved_tensor_hooks() -> bool:
    """Return whether hooks pack what autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def saved_tensor_hooks() -> list[tuple[FunctionType, FunctionType]]:
    """Return the hooks that pack and unpack what autograd saves, the innermost first."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return hooks


def is_composite(op: OpOverload) -> bool:
    """Return whether torch decomposes an op into others before dispatch, but in inference mode."""
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


OWN_KEY_NAME = "DeferredInit"
"""Dispatch key that only quantized tensors have.

torch reserves it for a library that is no longer developed, and gives it no meaning of its own.
"""


def _own_key() -> Any:
    """Return a set with this key; None if torch lacks it."""
    try:
        return torch._C.DispatchKeySet(torch._C._dispatch_key_parse(OWN_KEY_NAME))
    except (AttributeError, RuntimeError):
        return None


OWN_KEY = _own_key()


def without_own_key() -> Any:
    """Return a context in which ops do not see the key, and run as torch has them."""
    return torch._C._ExcludeDispatchKeyGuard(OWN_KEY)


def keep_out_dynamo(code: CodeType) -> None:
    """Have Dynamo run a function, and what it calls, as they are.

    Dynamo skips the code of torch's own layers. Where such a layer is compiled by itself, it would
    compile the frames below, and it cannot trace ours. ``torch.compiler.disable`` would do more at
    each call, and imports Dynamo.
    """
    eval_frame: Any = getattr(torch._C._dynamo, "eval_frame", None)
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
