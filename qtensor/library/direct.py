"""Ops called without the dispatcher, where it would do nothing but call their bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qtensor.library.define import BODIES

_PLAIN = (Tensor, torch.nn.Parameter)
_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_profiled = torch._C._autograd._profiler_enabled
_traced = torch._C._get_tracing_state


def watched() -> bool:
    """Whether something looks at ops: a dispatch mode (fakes, proxies, counters), a transform, the profiler, a trace."""
    return bool(_modes() or _transform() is not None or _profiled() or _traced() is not None)


def _is_lazy(t: Tensor) -> bool:
    """Whether the dispatcher would compute the tensor's values first: a negated view, zeros without memory."""
    return t.is_neg() or t._is_zerotensor()


def direct(op: Any, *places: int, native: Callable[..., bool] | None = None) -> Callable[..., Any]:
    """``op`` as a function for code that runs below autograd; a call with lists of tensors saves up to 16 us.

    Args:
        op: of ``leaf_op``.
        *places: positions of the arguments (tensors or lists of them) that could have a dispatch of their own.
        native: says of the arguments of a call whether the dispatcher has something faster than the body.
    """
    body = BODIES[op._opname]

    def call(*args: Any) -> Any:
        # A tracer must see the op; it folds this question to a constant and knows none of those below.
        if (
            torch.compiler.is_compiling()
            or (native is not None and not _modes() and native(*args))
            or watched()
        ):
            return op(*args)
        for place in places:
            value = args[place]
            first = value[0] if isinstance(value, list) else value
            if type(first) not in _PLAIN or first.is_meta or _is_lazy(first):
                return op(*args)
        return body(*args)

    return call
