"""Defines the ops of qtensor: one schema, one NamedTuple of arguments, one allocation and one fill each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

LIBRARY = torch.library.Library("qtensor", "DEF")

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context for the torch ops of a fill: nothing in it is differentiable, and each op costs a tenth less."""

BODIES: dict[str, Callable[..., Any]] = {}
"""Op name -> the function that the dispatcher calls for real tensors; it takes the op's arguments."""

FILLS: dict[str, Callable[[Any, Any], None]] = {}
"""Op name -> ``fill(outputs, args)``. A test or a backend may replace an entry; schema and fake stay."""


class Shortcuts(NamedTuple):
    """Ways around ``allocate`` and ``fill`` for calls that were met before.

    Attributes:
        at_once: ``at_once(args)`` is asked first on real tensors. It returns the written outputs, or None.
        learn: ``learn(outputs, args)`` runs after each call that came through the dispatcher.
    """

    at_once: Callable[[Any], Any] | None = None
    learn: Callable[[Any, Any], None] | None = None


ARGUMENTS: dict[str, type[Any]] = {}
"""Op name -> the NamedTuple of its arguments."""


def leaf_op(
    schema: str,
    arguments: type[Any],
    allocate: Callable[[Any], Any],
    fill: Callable[[Any, Any], None],
    tags: Sequence[torch.Tag] = (),
    shortcuts: Shortcuts | None = None,
) -> Callable[..., Any]:
    """Define ``qtensor::<schema>`` and return its overload.

    ``Library.define`` costs about 2 us a call where the ``custom_op`` decorator costs 7 to 9.

    Args:
        schema: name, arguments and results, as ``torch.library`` writes them.
        arguments: a NamedTuple with the names and defaults of the schema's arguments. Each call binds
            its arguments to it once.
        allocate: ``allocate(args)`` makes the outputs from shapes, dtypes and devices alone. It serves
            real, fake and meta tensors.
        fill: ``fill(outputs, args)`` writes the outputs. It runs on real tensors only.
        tags: of the op.
        shortcuts: ways around both for calls that were met before.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=tuple(tags))
    FILLS[name], ARGUMENTS[name] = fill, arguments
    at_once, learn = shortcuts or (None, None)

    def compute(args: Any) -> Any:
        if at_once is not None and FILLS[name] is fill:
            outputs = at_once(args)
            if outputs is not None:
                return outputs
        outputs = allocate(args)
        FILLS[name](outputs, args)
        return outputs

    def body(*args: Any, **kwargs: Any) -> Any:
        return compute(arguments(*args, **kwargs))

    def body_and_learn(*args: Any, **kwargs: Any) -> Any:
        bound = arguments(*args, **kwargs)
        outputs = compute(bound)
        learn(outputs, bound)  # type: ignore[misc]
        return outputs

    def fake(*args: Any, **kwargs: Any) -> Any:
        return allocate(arguments(*args, **kwargs))

    BODIES[name] = body
    LIBRARY.impl(name, body if learn is None else body_and_learn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qtensor::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.qtensor, name).default


def no_outputs(args: Any) -> None:
    """Allocate nothing: for ops that only write to their arguments."""


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
