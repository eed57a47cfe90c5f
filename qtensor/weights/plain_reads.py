"""Warn of code that computes with the plain weight of a layer that ``prepare_qat_`` has prepared.

Only the layer's own ``forward`` reads the quantized weight. A module that multiplies by
``layer.weight`` itself trains the plain weight, and computes with the quantized one after
``convert_qat_``. The first forward pass of the model with gradients, in eager code, shows it. Parts
of the model that are compiled run that one pass in eager code, too: torch does not compile all
functions below a mode.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from qtensor.core.graphs import without_graphs
from qtensor.core.texts import some
from qtensor.weights.aware import QuantizationAware


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
        classes: Sequence[type],
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


class _Watched:
    """``forward`` of a model before its first pass with gradients.

    Unlike a pair of hooks, it also leaves the mode after an interrupt.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before = model.__dict__.get("forward")
        self.is_done = False

    @property
    def own(self) -> Callable[..., Any]:
        """The forward of the model itself."""
        return self.before or functools.partial(type(self.model).forward, self.model)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_done or is_compiling() or not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        with without_graphs(), _PlainReads(self.model) as mode:
            output = self.own(*args, **kwargs)
        self.is_done = True  # another library may have wrapped this object
        unwatch(self.model)
        if mode.names:
            warnings.warn(
                f"prepare_qat_: code outside of the layer computes with the plain "
                f"{some(mode.names)}. After convert_qat_ it computes with the quantized weight, "
                "for which it was not trained. Let it call the layer, or leave the layer out with "
                "filter_fn.",
                stacklevel=2,
            )
        return output


def watch(model: nn.Module) -> None:
    """Let the first forward pass of a model with gradients warn of such code."""
    if not isinstance(model.__dict__.get("forward"), _Watched):
        model.forward = _Watched(model)


def unwatch(model: nn.Module) -> None:
    """Give a model and its submodules their own ``forward`` back."""
    for module in model.modules():
        watched = module.__dict__.get("forward")
        if isinstance(watched, _Watched):
            del module.forward
            if watched.before is not None:
                module.forward = watched.before
