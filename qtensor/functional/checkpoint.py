"""Activation checkpointing under a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from qtensor.autocasting import captured, restored


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any
) -> Any:
    """``torch.utils.checkpoint.checkpoint`` whose second run is under the recipe of the first.

    Backward often runs outside of the ``qtensor.autocast`` region of the forward; torch's own
    function would then compute again in high precision.

    Args:
        function: what to run, now and again in the backward pass.
        *args: of ``function``.
        use_reentrant: as in torch.
        **kwargs: of torch's function or, without ``use_reentrant``, of ``function``.
    """
    state = captured()

    def run(*inputs: Any, **options: Any) -> Any:
        with restored(state):
            return function(*inputs, **options)

    return torch_checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)
