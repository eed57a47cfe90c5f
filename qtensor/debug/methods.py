"""Make modules hand their tensors to a recorder.

Layers of qtensor tell a site of them (``functional.debugging``). The forward of other modules is
replaced by a function that Dynamo traces.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtensor.core.dtensors import local_part
from qtensor.core.errors import check
from qtensor.debug.layer_site import LayerSite, joined
from qtensor.debug.op import BEGIN_FORWARD
from qtensor.modules.grouped_linear import GroupedLinear
from qtensor.storage.base import QuantizedTensorStorage


class Recorded(NamedTuple):
    """The state of a module of torch that is recorded."""

    site: LayerSite
    weights: dict[str, LayerSite]
    """Name of a weight -> its site."""
    transposed: bool
    """Whether the weights are stored as (K, N), and recorded as (N, K)."""
    previous: Callable[..., Any] | None = None
    """The module's own forward if it has another one than its class."""


class Counted(NamedTuple):
    """The state of the module whose calls are counted as forward passes."""

    token: Tensor
    """Number of the recorder, int64 (1,) on the CPU."""
    previous: Callable[..., Any] | None = None


def _check_free(module: nn.Module, free: bool) -> None:
    rule = "a model has one recording at a time"
    got = f"a {type(module).__name__} that is being recorded"
    check(free, "debug.record", rule, got, "Leave the other `with` block first")


def set_sites(module: Any, sites: dict[str, LayerSite]) -> Callable[[], None]:
    """Make the layers of a module tell sites of their tensors; return a function that undoes it.

    ``sites`` has a site for each weight; the weights of a grouped layer share a state.
    """
    if isinstance(module, GroupedLinear):
        sites = {"weight": joined(sites)}
    states = {name: module._states[name] for name in sites}
    _check_free(module, all([state.site is None for state in states.values()]))
    for name, state in states.items():
        state.site = sites[name]

    def restore() -> None:
        for state in states.values():
            state.site = None

    return restore


def replace_forward(module: nn.Module, state: Recorded | Counted) -> Callable[[], None]:
    """Make the forward of a module call a recorder, and return a function that undoes it."""
    own = module.__dict__
    is_layer = isinstance(state, Recorded)
    attribute = "_recorded" if is_layer else "_counted"
    _check_free(module, attribute not in own)
    before = own.get("forward")
    own[attribute] = state._replace(previous=before)
    function = recording_forward if is_layer else counting_forward
    own["forward"] = types.MethodType(function, module)

    def restore() -> None:
        own.pop(attribute, None)
        if before is None:
            own.pop("forward")
        else:
            own["forward"] = before

    return restore


def counting_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Begin a forward pass of the model, and run it."""
    state: Counted = self._counted
    BEGIN_FORWARD(state.token)
    if state.previous is not None:
        return state.previous(*args, **kwargs)
    return type(self).forward(self, *args, **kwargs)


def recording_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module, and record its input, weights, output and gradients."""
    state: Recorded = self._recorded
    site = state.site
    if site.is_idle():
        if state.previous is not None:
            return state.previous(*args, **kwargs)
        return type(self).forward(self, *args, **kwargs)
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {n: v for n, v in kwargs.items() if n != "input"}
    has_input = bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()
    if has_input:
        args = (watch(args[0], "grad_input", site), *args[1:])
    if state.previous is not None:
        out = state.previous(*args, **kwargs)
    else:
        out = type(self).forward(self, *args, **kwargs)
    if has_input:
        site.take("input", args[0])
    for name, weight_site in state.weights.items():
        weight = getattr(self, name)
        weight_site.take("weight", weight.t() if state.transposed else weight)
    if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
        return (output(out[0], site), *out[1:])
    return output(out, site) if isinstance(out, Tensor) else out


def output(out: Tensor, site: LayerSite) -> Tensor:
    """Record the output (..., N) and return it; backward records its gradient."""
    site.take("output", out)
    return watch(out, "grad_output", site)


def watch(x: Tensor, role: str, site: LayerSite) -> Tensor:
    """Return ``x``; backward records its gradient."""
    plain = not isinstance(x, QuantizedTensorStorage)
    if role in site.roles and plain and torch.is_grad_enabled() and x.requires_grad:
        return WatchGradient.apply(x, role, site)
    return x


class WatchGradient(torch.autograd.Function):
    """Return a tensor unchanged, and record its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, role: str, site: LayerSite) -> Tensor:
        """Return ``x``, as a copy if it is an output, which the caller may change in place."""
        # Attributes, not saved tensors: a checkpoint that runs again after the recording saves
        # the same number of tensors.
        ctx.role, ctx.site = role, site
        return x.clone() if role == "grad_output" else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Record the gradient, and return it."""
        ctx.site.take(ctx.role, grad)
        return grad, None, None


def gradient_hooks(parameter: Tensor, site: LayerSite, transposed: bool) -> list[Any]:
    """Record the gradient (N, K) of a parameter, or (K, N) if ``transposed``; return the hooks.

    The gradient of a sharded parameter (FSDP2) does not come from autograd: FSDP sets ``grad`` and
    calls the hooks that run after accumulation. So those hooks record if the other one did not run.
    """
    passed = False

    def record(grad: Tensor) -> None:
        grad = local_part(grad).detach()
        site.take("grad_weight", grad.t() if transposed else grad)

    def from_autograd(grad: Tensor | None) -> None:
        nonlocal passed
        passed = True
        if grad is not None:  # otherwise the layer has told of it
            record(grad)

    def from_fsdp(leaf: Tensor) -> None:
        nonlocal passed
        if not passed and leaf.grad is not None:
            record(leaf.grad)
        passed = False

    hooks = [parameter.register_hook(from_autograd)]
    if hasattr(parameter, "placements"):
        hooks.append(parameter.register_post_accumulate_grad_hook(from_fsdp))
    return hooks
