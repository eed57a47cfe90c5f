"""Activation checkpointing under a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from qtensor.autocasting import captured, restored


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any
) -> Any:
    """Return ``function(*args)``, which backward computes again under the recipe of this call.

    Backward often runs outside of the ``qtensor.autocast`` region of the forward; torch's own
    function would then compute again in high precision.

    Args:
        function: runs at once, and again in the backward pass.
        *args: arguments of ``function``.
        use_reentrant: as in ``torch.utils.checkpoint.checkpoint``.
        **kwargs: options of torch's function or, without ``use_reentrant``, arguments of
            ``function``.
    """
    state = captured()

    def run(*inputs: Any, **options: Any) -> Any:
        with restored(state):
            return function(*inputs, **options)

    return torch_checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)
