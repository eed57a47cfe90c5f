"""Warn of code that computes with the plain weight of a layer that ``prepare_qat_`` has prepared.

Only the layer's own ``forward`` reads the quantized weight. A module that multiplies by
``layer.weight`` itself trains the plain weight, and computes with the quantized one after
``convert_qat_``. The first forward pass of the model with gradients, in eager code, shows it. Parts
of the model that are compiled run that one pass in eager code, too: torch does not compile all
functions below a mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from qtensor.core.graphs import without_graphs
from qtensor.core.texts import some
from qtensor.weights.aware import QuantizationAware

_WATCH = "_qat_watch"
"""Attribute of the root: the handles of its hooks, and a `_Watch` while a forward pass runs."""


class _PlainReads(TorchFunctionMode):
    """Note the prepared layers whose parameter is an argument of a differentiable function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names: dict[str, None] = {}
        self._layers: dict[int, tuple[str, Any]] = {}
        for name, module in model.named_modules():
            own = module.weight_quantizers if isinstance(module, QuantizationAware) else ()
            for each in own:
                place = f"{name}.{each}" if name else each
                self._layers[id(module._parameters[each])] = place, module

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad:
            for argument in (*args, *(kwargs or {}).values()):
                name, layer = self._layers.get(id(argument), ("", None))
                if layer is not None and not layer.is_computing:
                    self.names[name] = None
        return result


class _Watch(NamedTuple):
    mode: _PlainReads
    stack: ExitStack


def watch(model: nn.Module) -> None:
    """Let the first forward pass of a model with gradients warn of such code."""
    if _WATCH not in model.__dict__:
        begin = model.register_forward_pre_hook(_begin)
        end = model.register_forward_hook(_end, always_call=True)
        model.__dict__[_WATCH] = [begin, end, None]


def unwatch(model: nn.Module) -> None:
    """Remove the hooks from a model and its submodules."""
    for module in model.modules():
        for handle in module.__dict__.pop(_WATCH, ())[:2]:
            handle.remove()


def _begin(model: nn.Module, args: tuple[Any, ...]) -> None:
    if is_compiling() or not torch.is_grad_enabled() or model.__dict__[_WATCH][2] is not None:
        return
    with ExitStack() as stack:
        stack.enter_context(without_graphs())
        mode = stack.enter_context(_PlainReads(model))
        model.__dict__[_WATCH][2] = _Watch(mode, stack.pop_all())


def _end(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if is_compiling() or model.__dict__[_WATCH][2] is None:
        return
    (mode, stack), model.__dict__[_WATCH][2] = model.__dict__[_WATCH][2], None
    stack.close()
    if output is None:
        return  # the forward pass raised an error
    unwatch(model)
    if mode.names:
        warnings.warn(
            f"prepare_qat_: code outside of the layer computes with the plain {some(mode.names)}. "
            "After convert_qat_ it computes with the quantized weight, for which it was not "
            "trained. Let it call the layer, or leave the layer out with filter_fn.",
            stacklevel=2,
        )
