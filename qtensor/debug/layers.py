"""Find the layers of a model, and make them hand their tensors to a recorder.

A recorded layer has a method of its own in its ``__dict__``, in place of the method of its class.
Dynamo guards this place: a compiled model runs another graph while it is recorded, and its first
graph again afterwards. So a model that is not recorded has no cost.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtensor.debug.op import BEGIN_FORWARD, RECORD_TENSOR, SINKS
from qtensor.errors import fail
from qtensor.modules.base import QuantizedModule
from qtensor.modules.grouped_linear import GroupedLinear
from qtensor.ops.operation import FusibleOperation
from qtensor.ops.sequential import Sequential
from qtensor.storage.base import QuantizedTensorStorage

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of names that torch.compile, FSDP and checkpoint wrappers add."""


class Site(NamedTuple):
    """One recorded layer, as the methods that Dynamo traces see it."""

    ticket: Tensor
    """Number of the layer, int64 (1,) on the CPU."""
    forward_token: Tensor
    """Number of the recorder, int64 (1,) on the CPU; forward graphs write to it."""
    backward_token: Tensor
    """The same for backward graphs, which must not write what a forward graph saved."""
    roles: tuple[str, ...]
    formats: dict[str, str] | None
    """Role -> canonical text of a quantizer to try; None for the quantizers of the layer."""


class Recorded(NamedTuple):
    """The state of a module that is recorded."""

    site: Site | None
    """The layer; None if each weight is a layer of its own."""
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


class Layer(NamedTuple):
    """A layer that can be recorded."""

    name: str
    module: nn.Module
    weights: tuple[str, ...]
    method: str
    """The method that is replaced: "forward", or "_local_linear" of qtensor's own layers."""

    def label(self, weight: str) -> str:
        """Return the name under which a weight is recorded."""
        return self.name if len(self.weights) == 1 else _joined(self.name, weight)

    def labels(self) -> tuple[str, ...]:
        """Return the names of the layer in records: its own, and those of several weights."""
        labels = [self.label(weight) for weight in self.weights]
        own = () if self.method == "_local_linear" else (self.name,)
        return tuple(dict.fromkeys([*own, *labels]))


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of ``torch.compile`` and ``DistributedDataParallel`` wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def clean_name(name: str) -> str:
    """Return a module's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' ``Conv1D``: a linear layer with a (K, N) weight."""
    library: Any = sys.modules.get("transformers.pytorch_utils")
    return library is not None and isinstance(module, library.Conv1D)


def find_layers(model: nn.Module) -> Iterator[Layer]:
    """Yield the layers of a model that can be recorded.

    These are linear layers, qtensor's modules, and modules with quantized parameters. A
    ``qtensor.ops.Sequential`` is one layer, because its operations run fused.
    """
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        name = clean_name(name)
        if isinstance(module, FusibleOperation | Sequential):
            inside |= set(module.modules())
            yield Layer(name, module, (), "forward")
        elif isinstance(module, QuantizedModule) and not isinstance(module, GroupedLinear):
            inside |= set(module.modules())
            yield Layer(name, module, tuple(module._states), "_local_linear")
        else:
            own = dict(module.named_parameters(recurse=False))
            quantized = [n for n, p in own.items() if isinstance(p, QuantizedTensorStorage)]
            if isinstance(module, nn.Linear | GroupedLinear) or is_conv1d(module):
                # FSDP's flat parameters leave a view in place of the weight.
                quantized = [n for n in own if n.startswith("weight")] or ["weight"]
            if quantized:
                yield Layer(name, module, tuple(quantized), "forward")


def replace_method(module: nn.Module, method: str, state: Recorded | Counted) -> Callable[[], None]:
    """Make a module hand its tensors to a recorder, and return a function that undoes it.

    Raises:
        QTensorError: the module is being recorded already.
    """
    own = module.__dict__
    attribute, function = "_counted", counting_forward
    if isinstance(state, Recorded):
        attribute = "_recorded"
        function = recording_linear if method == "_local_linear" else recording_forward
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


# ---- methods of recorded modules, which Dynamo traces


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
    if _is_idle(site):
        if state.previous is not None:
            return state.previous(*args, **kwargs)
        return type(self).forward(self, *args, **kwargs)
    texts = _texts(self, site)
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {n: v for n, v in kwargs.items() if n != "input"}
    x = args[0] if args else None
    has_input = isinstance(x, Tensor) and x.is_floating_point()
    if has_input:
        args = (_watch(x, "grad_input", site, texts), *args[1:])
    if state.previous is not None:
        out = state.previous(*args, **kwargs)
    else:
        out = type(self).forward(self, *args, **kwargs)
    if has_input:
        _record(args[0], "input", site, texts)
    for name, weight_site in state.weights.items():
        weight = getattr(self, name)
        _record(weight.t() if state.transposed else weight, "weight", weight_site, texts)
    if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
        return (_output(out[0], site, texts), *out[1:])
    return _output(out, site, texts) if isinstance(out, Tensor) else out


def recording_linear(
    self: Any, input: Any, weight: str, w: Any, bias: Any, options: Any, call: Any
) -> Tensor:
    """Run ``QuantizedModule._local_linear``, and record the operands as its GEMMs see them.

    ``w`` is the part (N, K) of the weight that this rank computes with.
    """
    state: Recorded = self._recorded
    site, compute = state.weights[weight], type(self)._local_linear
    if _is_idle(site):
        return compute(self, input, weight, w, bias, options, call)
    training = torch.is_grad_enabled()
    dgrad, wgrad = training and input.requires_grad, training and w.requires_grad
    plan = self._plan(dgrad, wgrad, weight, options)
    texts = site.formats
    if texts is None:
        texts = {"input": plan.input, "weight": plan.weight, "grad_output": plan.grad_output}
    x = _watch(input, "grad_input", site, texts)
    out = compute(self, x, weight, w, bias, options, call)
    scales: list[Tensor | None] = [None, None, None]
    if any(plan.delayed) and site.formats is None:
        # The call has computed the factors of this step; a later step replaces them.
        factors = self._delayed(weight).scale
        scales = [factors[i : i + 1].clone() if d else None for i, d in enumerate(plan.delayed)]
    _record(x, "input", site, texts, scales[0])
    _record(w, "weight", site, texts, scales[1])
    return _output(out, site, texts, scales[2])


def _is_idle(site: Site) -> bool:
    """Return whether eager code can leave out the records of this step."""
    if torch.compiler.is_compiling():
        return False
    sink = SINKS.get(int(site.forward_token))
    return sink is None or not sink.active


def _texts(self: Any, site: Site) -> dict[str, str]:
    """Return role -> canonical text of the quantizers of a module that is not a linear layer."""
    if site.formats is not None:
        return site.formats
    if isinstance(self, GroupedLinear):
        plan = self._grouped_plan(self._recipe_key(), torch.is_grad_enabled(), True)
        if not any(plan.delayed):
            return {"input": plan.input, "weight": plan.weight, "grad_output": plan.grad_output}
    return {}


def _output(out: Any, site: Site, texts: dict[str, str], scale: Tensor | None = None) -> Any:
    """Record the output (..., N) and return it; backward records its gradient."""
    _record(out, "output", site, texts)
    return _watch(out, "grad_output", site, texts, scale)


def _record(
    x: Any, role: str, site: Site, texts: dict[str, str], scale: Tensor | None = None
) -> None:
    """Hand a plain or quantized tensor to the recorder."""
    if role not in site.roles or x.is_meta:
        return
    ticket, token = site.ticket, site.forward_token
    if isinstance(x, QuantizedTensorStorage):
        text = x._quantizer.canonical
        RECORD_TENSOR(x.buffers(), text, x.shape, role, "", ticket, token)
    else:
        text = texts.get(role, "")
        RECORD_TENSOR([x.detach()], "", x.shape, role, text, ticket, token, scale)


def _watch(
    x: Any, role: str, site: Site, texts: dict[str, str], scale: Tensor | None = None
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
        ctx: Any, x: Tensor, role: str, quantizer: str, site: Site, scale: Tensor | None
    ) -> Tensor:
        """Return ``x``, as a copy if it is an output, which the caller may change in place."""
        # Attributes, not saved tensors: a checkpoint that runs again after the recording saves
        # the same number of tensors.
        ctx.role, ctx.quantizer, ctx.site, ctx.scale = role, quantizer, site, scale
        return x.clone() if role == "grad_output" else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Record the gradient, and return it."""
        site = ctx.site
        token = site.backward_token
        RECORD_TENSOR(
            [grad], "", grad.shape, ctx.role, ctx.quantizer, site.ticket, token, ctx.scale
        )
        return grad, None, None, None, None
