"""Prepare the input of a linear layer before its product: transform it, then quantize it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

from torch import nn
from torch.utils.hooks import RemovableHandle

from qtensor.core.graphs import forget_graphs

TRANSFORM, QUANTIZER = "input_transform", "input_quantizer"
"""Names of submodules of a layer, in the order in which they see the input."""
_HANDLE = "_input_hook"


class InputStep(nn.Module):
    """Base of these submodules. Buffers keep their dtype in ``model.to(torch.bfloat16)``."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move the buffers to the device to which ``fn`` moves tensors; keep their dtypes."""
        for name, tensor in self._buffers.items():
            if tensor is not None:
                moved = fn(tensor)
                kept = moved.dtype == tensor.dtype
                self._buffers[name] = moved if kept else tensor.to(moved.device)
        for child in self.children() if recurse else ():
            child._apply(fn)
        return self


def _prepare_input(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Transform and quantize the first argument of a layer, before its forward."""
    # nn.Linear names its argument "input", and Conv1D names it "x".
    key = "input" if "input" in kwargs else "x"
    x = args[0] if args else kwargs[key]
    for name in (TRANSFORM, QUANTIZER):
        step = layer._modules.get(name)
        if step is not None:
            x = step(x)
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, key: x})


def set_input_step(layer: nn.Module, name: str, step: InputStep | None) -> None:
    """Let a linear layer prepare its inputs by a submodule, or no longer if it is None.

    Code that is compiled already is compiled again at its next call.
    """
    layer._modules.pop(name, None)
    if step is not None:
        layer.add_module(name, step)
    steps = [own for own in (TRANSFORM, QUANTIZER) if own in layer._modules]
    if steps and _HANDLE not in layer.__dict__:
        handle = layer.register_forward_pre_hook(_prepare_input, with_kwargs=True)
        layer.__dict__[_HANDLE] = handle
    if not steps and _HANDLE in layer.__dict__:
        cast(RemovableHandle, layer.__dict__.pop(_HANDLE)).remove()
    forget_graphs()
