"""How an op is defined: body = allocate + fill, fake = allocate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

LIBRARY = torch.library.Library("qtensor", "DEF")

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Nothing in a fill is differentiable; below autograd its torch ops cost a tenth less."""

FILLS: dict[str, Callable[..., None]] = {}
"""Op name -> what writes its outputs. A backend replaces an entry; schema, allocation and fake stay."""


def leaf_op(
    schema: str,
    allocate: Callable[..., Any],
    fill: Callable[..., None],
    tags: Sequence[torch.Tag] = (),
) -> Callable[..., Any]:
    """Define ``qtensor::<schema>``.

    ``allocate(*args)`` makes the outputs from shapes, dtypes and devices alone and serves real, fake and meta tensors;
    ``fill(outputs, *args)`` writes them and runs on real tensors only. ``Library.define`` costs about 2 us a call where
    the ``custom_op`` decorator costs 7 to 9.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=tuple(tags))
    FILLS[name] = fill

    def body(*args: Any, **kwargs: Any) -> Any:
        outputs = allocate(*args, **kwargs)
        FILLS[name](outputs, *args, **kwargs)
        return outputs

    LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qtensor::{name}", allocate, lib=LIBRARY)
    return getattr(torch.ops.qtensor, name).default
