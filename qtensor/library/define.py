"""How an op is defined: body = allocate + fill, fake = allocate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

LIBRARY = torch.library.Library("qtensor", "DEF")

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Nothing in a fill is differentiable; below autograd its torch ops cost a tenth less."""

BODIES: dict[str, Callable[..., Any]] = {}
"""Op name -> what the dispatcher calls for real tensors."""

FILLS: dict[str, Callable[..., None]] = {}
"""Op name -> what writes its outputs. A backend replaces an entry; schema, allocation and fake stay."""


def leaf_op(
    schema: str,
    allocate: Callable[..., Any],
    fill: Callable[..., None],
    tags: Sequence[torch.Tag] = (),
    learn: Callable[..., None] | None = None,
    at_once: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define ``qtensor::<schema>``.

    ``allocate(*args)`` makes the outputs from shapes, dtypes and devices alone and serves real, fake and meta tensors;
    ``fill(outputs, *args)`` writes them and runs on real tensors only. ``Library.define`` costs about 2 us a call where
    the ``custom_op`` decorator costs 7 to 9. ``at_once(*args)`` is asked first on real tensors: the same outputs, written,
    or None. ``learn(outputs, *args)`` follows the body where the dispatcher made the call.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=tuple(tags))
    FILLS[name] = fill

    def in_two_steps(*args: Any, **kwargs: Any) -> Any:
        outputs = allocate(*args, **kwargs)
        FILLS[name](outputs, *args, **kwargs)
        return outputs

    body = in_two_steps
    if at_once is not None:
        quick = at_once

        def body(*args: Any, **kwargs: Any) -> Any:
            outputs = quick(*args, **kwargs) if FILLS[name] is fill else None
            return in_two_steps(*args, **kwargs) if outputs is None else outputs

    def body_and_learn(*args: Any, **kwargs: Any) -> Any:
        outputs = body(*args, **kwargs)
        learn(outputs, *args, **kwargs)  # type: ignore[misc]
        return outputs

    BODIES[name] = body
    LIBRARY.impl(name, body if learn is None else body_and_learn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qtensor::{name}", allocate, lib=LIBRARY)
    return getattr(torch.ops.qtensor, name).default


def below_dispatch(op: Any, tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """``op``, or its body where the dispatcher would call nothing else: for handlers, which run below every key.

    A call with lists of tensors and sizes takes the dispatcher 16 us. Modes (fake, proxy, counters), function transforms
    and tensors with a dispatch of their own still see the op.

    Args:
        op: of ``leaf_op``.
        tensors: the arguments that could have a dispatch of their own.
    """
    transform = torch._C._functorch.peek_interpreter_stack()
    if torch._C._len_torch_dispatch_stack() or transform is not None:
        return op
    for t in tensors:
        if type(t) not in _PLAIN:
            return op
    return BODIES[op._opname]


_PLAIN = (torch.Tensor, torch.nn.Parameter)
