"""Compare two models layer by layer on the same inputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.core.buffer_shapes import rows_cols
from qtensor.core.errors import ArgumentTypeError, check, fail
from qtensor.core.graphs import without_graphs
from qtensor.core.texts import some
from qtensor.debug.error_report import compare_chunk, decibel
from qtensor.debug.layers import clean_name, find_layers, run_by, unwrapped
from qtensor.debug.logits import Scores
from qtensor.ops.sequential import Sequential
from qtensor.storage.base import QuantizedTensorStorage

OP = "debug.compare"


@dataclass
class LayerDifference:
    """The difference between the outputs of one layer in two models, over all calls."""

    layer: str
    calls: int = 0
    equal: bool = True
    """Whether all values are equal."""
    max_abs_error: float = 0.0
    not_finite: int = 0
    """Values that are NaN or infinite in one of the models; the errors leave them out."""
    note: str = ""
    """The reason if outputs cannot be compared."""
    signal: float = field(default=0.0, repr=False)
    noise: float = field(default=0.0, repr=False)

    @property
    def sqnr_db(self) -> float:
        """10 log10(sum a^2 / sum (a - b)^2) of the outputs a and b; inf for equal outputs."""
        return decibel(self.signal, self.noise)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add the outputs of one call."""
        self.calls += 1
        if a.shape != b.shape:
            self.equal = False
            self.note = f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}"
            return
        self.equal &= bool(((a == b) | (a.isnan() & b.isnan())).all())
        if not a.numel():
            return
        a, b = (t.reshape(rows_cols(t.shape)) for t in (a, b))
        chunk = compare_chunk(a, b, torch.ones(1, 1, dtype=torch.float32), math.inf)
        self.signal += chunk.signal.item()
        self.noise += chunk.noise.item()
        self.max_abs_error = max(self.max_abs_error, chunk.error.max().item())
        self.not_finite += int(chunk.not_finite)


@dataclass
class Comparison:
    """The result of ``compare``; ``str()`` is a table in the order in which the layers run."""

    layers: list[LayerDifference] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    """Layers that only one of the models has or runs."""
    unused: tuple[str, ...] = ()
    """Layers of both models that neither runs."""
    top1: float = math.nan
    """Share of positions where both models rank the same class first."""
    kl: float = math.nan
    """Mean over positions of KL(softmax(a) || softmax(b)), in nats."""
    output: LayerDifference = field(default_factory=lambda: LayerDifference("output"))
    """The difference of the models' outputs."""

    @property
    def equal(self) -> bool:
        """True if both models ran the same layers, and all outputs have equal values."""
        compared = [layer for layer in (*self.layers, self.output) if layer.calls]
        return bool(compared) and not self.missing and all(layer.equal for layer in compared)

    @property
    def first(self) -> LayerDifference | None:
        """The first layer whose outputs differ; None if all are equal."""
        return next((layer for layer in self.layers if not layer.equal), None)

    @property
    def worst(self) -> LayerDifference | None:
        """The layer with the lowest SQNR; None without layers."""
        return min(self.layers, key=lambda layer: layer.sqnr_db, default=None)

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the layers as columns: name -> list of values, for ``pandas.DataFrame(...)``."""
        names = ("layer", "calls", "equal", "sqnr_db", "max_abs_error", "not_finite", "note")
        return {name: [getattr(layer, name) for layer in self.layers] for name in names}

    def __str__(self) -> str:
        first = self.first
        lines = [
            f"top-1 agreement {self.top1:.2%}, KL {self.kl:.4g} nats, "
            f"output SQNR {self.output.sqnr_db:.2f} dB",
            "no layer differs" if first is None else f"first layer that differs: {first.layer}",
        ]
        if self.equal:
            lines[1] = "equal: all outputs have equal values"
        if self.missing:
            lines.append(f"{len(self.missing)} layers in one model only: {some(self.missing)}")
        if self.unused:
            lines.append(f"{len(self.unused)} layers did not run: {some(self.unused)}")
        width = max([5, *(len(layer.layer) for layer in self.layers)])
        lines.append(f"{'layer':<{width}}  {'SQNR dB':>8}  {'max error':>10}  NaN/inf")
        for layer in self.layers:
            numbers = f"{layer.sqnr_db:>8.2f}  {layer.max_abs_error:>10.4g}  {layer.not_finite:>7}"
            lines.append(f"{layer.layer:<{width}}  {layer.note or numbers}")
        return "\n".join(lines)


def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    inputs: object,
    layers: str | Iterable[str] | None = None,
) -> Comparison:
    """Return how the outputs of two models and of their layers differ.

    Both models run without gradients, in the modes that they have (call ``eval()`` before), from
    the same random state. Compiled models run in eager mode. The outputs of the layers of
    ``model_a`` for one batch are kept on the CPU until ``model_b`` has run.

    Args:
        model_a: the model to compare with, for example in high precision.
        model_b: the other model.
        inputs: the argument of a call: a tensor; a tuple of positional arguments; a mapping of
            keyword arguments; or a list of these, one for each batch.
        layers: patterns of names of modules. Default: modules without children, and the layers that
            ``record`` knows. Layers are compared if both models have their name.

    Returns:
        The differences. Logits are the output if it is a tensor, its ``logits``, or its first
        tensor; their last dim is the classes.

    Raises:
        QTensorError: there are no inputs, a pattern matches no layer, or no name is in both models.
    """
    for model in (model_a, model_b):
        rule = "both models must be torch.nn.Module"
        check(isinstance(model, nn.Module), OP, rule, type(model).__name__, "Pass modules")
    batches = inputs if isinstance(inputs, list) else [inputs]
    check(bool(batches), OP, "there must be an input", "an empty list", "Pass at least one batch")
    calls = [_arguments(batch) for batch in batches]
    a, b = unwrapped(model_a), unwrapped(model_b)
    patterns = [layers] if isinstance(layers, str) else layers
    modules_a, modules_b = (_modules(model, patterns) for model in (a, b))
    common = [name for name in modules_a if name in modules_b]
    fix = f"The names are: {some(modules_a)}, and {some(modules_b)}"
    check(bool(common), OP, "both models must have layers of the same name", "none", fix)
    found = {name: LayerDifference(name) for name in common}
    order: dict[str, None] = {}
    ran_in_b: set[str] = set()
    result = Comparison()
    scores = Scores()
    with torch.no_grad(), without_graphs():
        for args, kwargs in calls:
            # The random state is restored after the first run: dropout is equal in both.
            with torch.random.fork_rng(devices=_devices()):
                outputs, logits = _run_kept(a, {n: modules_a[n] for n in common}, args, kwargs)
            order |= dict.fromkeys(outputs)
            with _hooked({n: modules_b[n] for n in common}, _comparer(outputs, found, ran_in_b)):
                other = _logits(b(*args, **kwargs))
            if logits is not None and other is not None:
                result.output.add(logits, other)
                scores.add(logits, other)
    result.layers = [found[name] for name in order if found[name].calls]
    names = dict.fromkeys([*modules_a, *modules_b])
    one_only = {*modules_a} ^ {*modules_b} | {*order} ^ ran_in_b
    result.missing = tuple(n for n in names if n in one_only)
    result.unused = tuple(n for n in names if n not in one_only | {*order})
    result.top1, result.kl = scores.top1, scores.kl
    return result


def _arguments(batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a call."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    rule = "an input must be a tensor, a tuple of arguments or a mapping of keyword arguments"
    got = type(batch).__name__
    if not isinstance(batch, tuple):
        fail(OP, rule, got, "Pass one of these", ArgumentTypeError)
    return batch, {}


def _modules(model: nn.Module, patterns: Iterable[str] | None) -> dict[str, nn.Module]:
    """Return the modules of a model to compare, by name."""
    # A sequence does not call its operations one by one, and refuses hooks on them.
    inside: set[nn.Module] = set()
    for module in model.modules():
        inside |= run_by(module) if isinstance(module, Sequential) else set()
    named = {
        clean_name(name): module
        for name, module in model.named_modules()
        if name and module not in inside
    }
    if patterns is None:
        layers = {layer.sequence or layer.name for layer in find_layers(model)}
        chosen = {n: m for n, m in named.items() if n in layers or not list(m.children())}
        return chosen or {"": model}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = {name: m for name, m in named.items() if fnmatchcase(name, pattern)}
        if not matching:
            rule = "each pattern of layers must match a module of both models"
            fail(OP, rule, repr(pattern), f"The modules are: {some(named)}")
        found |= matching
    return found


def _devices() -> list[int]:
    ready = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.cuda.current_device()] if ready else []


@contextlib.contextmanager
def _hooked(
    modules: Mapping[str, nn.Module], take: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call ``take(name, output)`` with the first tensor that each module returns."""

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: object) -> None:
            tensor = _first_tensor(output)
            if tensor is not None:
                take(name, tensor)

        return hook

    with contextlib.ExitStack() as undo:
        for name, module in modules.items():
            undo.callback(module.register_forward_hook(hook_of(name)).remove)
        yield


def _run_kept(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[dict[str, list[Tensor]], Tensor | None]:
    """Run a model; return copies of the outputs of its modules by name, and of its logits."""
    outputs: dict[str, list[Tensor]] = {}
    with _hooked(modules, lambda name, t: outputs.setdefault(name, []).append(t)):
        logits = _logits(model(*args, **kwargs))
    return outputs, logits


def _comparer(
    outputs: dict[str, list[Tensor]], found: dict[str, LayerDifference], ran: set[str]
) -> Callable[[str, Tensor], None]:
    """Return a function that compares the output of a module with the next of ``outputs``.

    It adds the name of the module to ``ran``.
    """

    def take(name: str, tensor: Tensor) -> None:
        ran.add(name)
        expected = outputs.get(name)
        if expected:
            found[name].add(expected.pop(0), tensor)

    return take


def _first_tensor(output: object) -> Tensor | None:
    """Return a copy on the CPU of the first floating tensor of an output; None without one."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        output = next((part for part in output if isinstance(part, Tensor)), None)
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return None
    if isinstance(output, QuantizedTensorStorage):
        output = output.dequantize()
    # A copy, because the model may change its output in place.
    return output.detach().to("cpu", copy=True)


def _logits(output: object) -> Tensor | None:
    named = output.get("logits") if isinstance(output, Mapping) else None
    found = getattr(output, "logits", None) if named is None else named
    return _first_tensor(output if found is None else found)
