"""The methods that hand the tensors of a module to a recorder; Dynamo traces them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtensor.debug.op import BEGIN_FORWARD, RECORD_GROUPS, RECORD_TENSOR, SINKS
from qtensor.errors import fail
from qtensor.functional.grouped_args import GroupedFwdArgs, Splits
from qtensor.functional.plan import LinearPlan
from qtensor.functional.saved import with_tensors
from qtensor.storage.base import QuantizedTensorStorage


class Site(NamedTuple):
    """One recorded layer, as the methods that Dynamo traces see it."""

    ticket: Tensor
    """Number of the layer, int64 (1,) on the CPU."""
    forward_token: Tensor
    """Number of the recorder, int64 (1,) on the CPU; forward graphs write to it."""
    backward_token: Tensor
    """Number of the recorder for backward graphs, which must not write what forward saved."""
    roles: tuple[str, ...]
    formats: dict[str, str] | None
    """Role -> canonical text of a quantizer to try; None for the quantizers of the layer."""


class Recorded(NamedTuple):
    """The state of a module that is recorded."""

    site: Site | None
    """The layer; None if each weight is a layer of its own. Its ticket has a number for each group
    of a grouped layer."""
    weights: dict[str, Site]
    """Name of a weight -> its site."""
    transposed: bool
    """Whether the weights are stored as (K, N), and recorded as (N, K)."""
    previous: Callable[..., Any] | None
    """The module's own method if it is not that of its class."""


class Counted(NamedTuple):
    """The state of the module whose calls are counted as forward passes."""

    token: Tensor
    """Number of the recorder, int64 (1,) on the CPU."""
    previous: Callable[..., Any] | None


class Ragged(NamedTuple):
    """The groups of the rows of a tensor, and a factor of delayed scaling for each."""

    splits: Splits
    scales: Tensor | None


def replace_method(module: nn.Module, method: str, state: Recorded | Counted) -> Callable[[], None]:
    """Make a module hand its tensors to a recorder, and return a function that undoes it.

    Raises:
        QTensorError: the module is being recorded already.
    """
    own = module.__dict__
    attribute = "_counted"
    function: Callable[..., Any] = counting_forward
    if isinstance(state, Recorded):
        attribute = "_recorded"
        function = _METHODS.get(method, recording_forward)
    if attribute in own:
        rule = "a model has one recording at a time"
        fix = "Leave the other `with` block first"
        fail("debug.record", rule, f"a {type(module).__name__} that is being recorded", fix)
    before = own.get(method)
    own[attribute] = state._replace(previous=before)
    own[method] = types.MethodType(function, module)

    def restore() -> None:
        own.pop(attribute, None)
        if before is None:
            own.pop(method, None)
        else:
            own[method] = before

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
    site: Any = state.site
    if is_idle(site):
        if state.previous is not None:
            return state.previous(*args, **kwargs)
        return type(self).forward(self, *args, **kwargs)
    texts = {} if site.formats is None else site.formats
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {n: v for n, v in kwargs.items() if n != "input"}
    x = args[0] if args else None
    has_input = isinstance(x, Tensor) and x.is_floating_point()
    if has_input:
        args = (watch(x, "grad_input", site, texts), *args[1:])
    if state.previous is not None:
        out = state.previous(*args, **kwargs)
    else:
        out = type(self).forward(self, *args, **kwargs)
    if has_input:
        record(args[0], "input", site, texts)
    for name, weight_site in state.weights.items():
        weight = getattr(self, name)
        record(weight.t() if state.transposed else weight, "weight", weight_site, texts)
    if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
        return (output(out[0], site, texts), *out[1:])
    return output(out, site, texts) if isinstance(out, Tensor) else out


def recording_linear(
    self: Any, input: Any, weight: str, w: Any, bias: Any, options: Any, call: Any
) -> Tensor:
    """Run ``QuantizedModule._local_linear``, and record the operands as its GEMMs see them.

    ``w`` is the part (N, K) of the weight that this rank computes with.
    """
    state: Recorded = self._recorded
    site, compute = state.weights[weight], type(self)._local_linear
    if is_idle(site):
        return compute(self, input, weight, w, bias, options, call)
    training = torch.is_grad_enabled()
    dgrad, wgrad = training and input.requires_grad, training and w.requires_grad
    plan = self._plan(dgrad, wgrad, weight, options)
    texts = plan_texts(site, plan)
    x = watch(input, "grad_input", site, texts)
    out = compute(self, x, weight, w, bias, options, call)
    scales: list[Tensor | None] = [None, None, None]
    if any(plan.delayed) and site.formats is None:
        # The call has computed the factors of this step; a later step replaces them.
        factors = self._delayed(weight).scale
        scales = [factors[i : i + 1].clone() if d else None for i, d in enumerate(plan.delayed)]
    record(x, "input", site, texts, scales[0])
    record(w, "weight", site, texts, scales[1])
    return output(out, site, texts, scales[2])


def recording_groups(self: Any, args: GroupedFwdArgs) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Run ``GroupedLinear._local_grouped``, and record the tensors of each group."""
    state: Recorded = self._recorded
    site: Any = state.site
    compute = type(self)._local_grouped
    if is_idle(site):
        return compute(self, args)
    texts = plan_texts(site, args.plan)
    ragged = ragged_roles(site, args)
    x = watch(args.inp, "grad_input", site, texts, Ragged(args.splits, None))
    out, workspace, amaxes = compute(self, with_tensors(args, x, args.weights, args.biases))
    record(x, "input", site, texts, ragged[0])
    record_weights(args, state.weights, texts, ragged[1].scales)
    record(out, "output", site, texts, Ragged(args.splits, None))
    return watch(out, "grad_output", site, texts, ragged[2]), workspace, amaxes


def plan_texts(site: Site, plan: LinearPlan) -> dict[str, str]:
    """Return role -> canonical text of the quantizers of a layer's operands."""
    if site.formats is not None:
        return site.formats
    return {"input": plan.input, "weight": plan.weight, "grad_output": plan.grad_output}


def ragged_roles(site: Site, args: Any) -> list[Ragged]:
    """Return the groups and factors of input, weight and grad_output of a grouped layer."""
    splits, delayed = args.splits, args.delayed
    if delayed is None or site.formats is not None:
        return [Ragged(splits, None)] * 3
    # A later step replaces the factors.
    factors = delayed.scales.clone().split(splits.groups)
    pairs = zip(factors, args.plan.delayed, strict=True)
    return [Ragged(splits, factor if used else None) for factor, used in pairs]


def record_weights(
    args: GroupedFwdArgs, sites: dict[str, Site], texts: dict[str, str], scales: Tensor | None
) -> None:
    """Record the weight of each group."""
    for i, (weight, site) in enumerate(zip(args.weights, sites.values(), strict=True)):
        record(weight, "weight", site, texts, None if scales is None else scales[i : i + 1])


def is_idle(site: Site) -> bool:
    """Return whether eager code can leave out the records of this step."""
    if torch.compiler.is_compiling():
        return False
    sink = SINKS.get(int(site.forward_token))
    return sink is None or not sink.active


def output(out: Any, site: Site, texts: dict[str, str], scale: Tensor | None = None) -> Any:
    """Record the output (..., N) and return it; backward records its gradient."""
    record(out, "output", site, texts)
    return watch(out, "grad_output", site, texts, scale)


def record(
    x: Any, role: str, site: Site, texts: dict[str, str], scale: Tensor | Ragged | None = None
) -> None:
    """Hand a plain or quantized tensor, or the rows of groups, to the recorder."""
    if role not in site.roles or x.is_meta:
        return
    if isinstance(x, QuantizedTensorStorage) and isinstance(scale, Ragged):
        x = x.dequantize()
    if isinstance(x, QuantizedTensorStorage):
        hand_over_buffers(x.buffers(), (x._quantizer.canonical, x.shape), role, site)
    else:
        hand_over(x.detach(), role, texts.get(role, ""), site, scale)


def hand_over(
    x: Tensor,
    role: str,
    text: str,
    site: Site,
    scale: Tensor | Ragged | None = None,
    backward: bool = False,
) -> None:
    """Call the op that hands a plain tensor, or the rows of each group, to the recorder."""
    ticket, token = site.ticket, site.backward_token if backward else site.forward_token
    if isinstance(scale, Ragged):
        RECORD_GROUPS(x, role, text, ticket, token, *scale.splits, scale.scales)
    else:
        RECORD_TENSOR([x], "", x.shape, role, text, ticket, token, scale)


def hand_over_buffers(
    buffers: list[Tensor], stored: tuple[str, Any], role: str, site: Site, backward: bool = False
) -> None:
    """Hand the buffers of a quantized tensor to the recorder.

    ``stored`` is the canonical text of its quantizer, and its shape.
    """
    ticket, token = site.ticket, site.backward_token if backward else site.forward_token
    RECORD_TENSOR(buffers, *stored, role, "", ticket, token)


def watch(
    x: Any, role: str, site: Site, texts: dict[str, str], scale: Tensor | Ragged | None = None
) -> Any:
    """Return ``x``; backward hands its gradient to the recorder."""
    plain = not isinstance(x, QuantizedTensorStorage)
    if role in site.roles and plain and torch.is_grad_enabled() and x.requires_grad:
        return WatchGradient.apply(x, role, texts.get(role, ""), site, scale)
    return x


class WatchGradient(torch.autograd.Function):
    """Return a tensor unchanged, and record its gradient in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, role: str, quantizer: str, site: Site, scale: Tensor | Ragged | None
    ) -> Tensor:
        """Return ``x``, as a copy if it is an output, which the caller may change in place."""
        # Attributes, not saved tensors: a checkpoint that runs again after the recording saves
        # the same number of tensors.
        ctx.role, ctx.quantizer, ctx.site, ctx.scale = role, quantizer, site, scale
        return x.clone() if role == "grad_output" else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Record the gradient, and return it."""
        hand_over(grad, ctx.role, ctx.quantizer, ctx.site, ctx.scale, True)
        return grad, None, None, None, None


_METHODS: dict[str, Callable[..., Any]] = {
    "_local_linear": recording_linear,
    "_local_grouped": recording_groups,
}
