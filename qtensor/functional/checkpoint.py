"""Activation checkpointing under a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint as torch_checkpoint

from qtensor.autocasting import captured, restored
from qtensor.library.recomputation import Tape, running

Result = TypeVar("Result")


def checkpoint(
    function: Callable[..., Result], *args: object, use_reentrant: bool = False, **kwargs: Any
) -> Result:
    """Return ``function(*args)``, which backward computes again as this call computes it.

    Backward often runs outside of the ``qtensor.autocast`` region of the forward, and after delayed
    scaling has taken further steps. The second run has the recipe and the factors of the first one.

    Args:
        function: runs at once, and again in the backward pass.
        *args: arguments of ``function``.
        use_reentrant: as in ``torch.utils.checkpoint.checkpoint``.
        **kwargs: options of torch's function or, without ``use_reentrant``, arguments of
            ``function``.
    """
    state = captured()
    tape = Tape()
    has_run = False

    def run(*inputs: object, **options: object) -> Result:
        nonlocal has_run
        if torch.compiler.is_compiling():
            # Dynamo would write the tape before or after the program, not while it runs.
            with restored(state):
                return function(*inputs, **options)
        again, has_run = has_run, True
        with restored(state), running(tape, again):
            return function(*inputs, **options)

    return torch_checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)
