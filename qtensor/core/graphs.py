"""Keep compiled graphs away from hooks: torch does not check which hooks a module has."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

_DYNAMO = "torch._dynamo"
"""Without this module nothing is compiled, and importing it takes seconds."""


def without_graphs() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled code runs in eager mode, so that hooks are called."""
    if _DYNAMO not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def forget_graphs() -> None:
    """Let compiled code be compiled again at its next call, with the hooks of that time."""
    if _DYNAMO in sys.modules:
        torch.compiler.reset()
