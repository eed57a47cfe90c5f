"""``merge_lora_``: add changes of low rank to quantized weights, and say how much of them is left.

A change that is smaller than the steps of a format is lost where it is rounded to nearest: a
quantized weight lies on the grid, and its nearest value on the grid is itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from qtensor.api import quantizer_of
from qtensor.core.errors import ArgumentTypeError, DtypeError, check, fail, is_number
from qtensor.core.texts import some
from qtensor.modules.conversion import LayerReport
from qtensor.modules.input_transform import for_inputs_of
from qtensor.storage.ops.lost_changes import left_of
from qtensor.storage.tensor import QuantizedTensor
from qtensor.weights import calibration as inputs_of
from qtensor.weights.layers import WeightLayer, holders_of, named_layers, why_skipped
from qtensor.weights.libraries import library_changes
from qtensor.weights.measurement import evaluating
from qtensor.weights.merge_report import LayerMerge, MergeReport, warn_of_losses
from qtensor.weights.merged_rounding import rounded_sum
from qtensor.weights.metrics import as_batches
from qtensor.weights.progress import Shown, progress_of
from qtensor.weights.rounding import check_grid, grid_of

OP = "merge_lora_"
METHODS = ("nearest", "stochastic", "gptq")
Pair = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, float]
"""Factors A (r, K) and B (N, r) of a change ``scaling * B @ A``, and the scaling, 1 by default."""


@dataclass(frozen=True, eq=False)
class Change:
    """A change of the weight of a layer, which is not merged yet.

    Attributes:
        name: of the layer, as in ``quantize_``.
        layer: the layer.
        compute: returns the change, float32 (N, K), or (E, N, K) for stacked experts.
        mark_merged: tells the library that holds the adapter whether the layer's weight contains
            the change, so that the library does not add it again.
    """

    name: str
    layer: WeightLayer
    compute: Callable[[], Tensor]
    mark_merged: Callable[[bool], None]

    @property
    def weight(self) -> Tensor:
        """The weight as it is quantized, (N, K) or (E, N, K); it shares the parameter's bytes."""
        parameter = self.layer.stored[0].detach()
        # The experts of a model of transformers that was loaded quantized have a class of their
        # own around the quantized tensor.
        stored = getattr(parameter, "stored", parameter)
        return stored.t() if self.layer.transposed else stored


def merge_lora_(
    model: nn.Module,
    adapters: Mapping[str, Pair] | None = None,
    *,
    method: str = "nearest",
    calibration: Iterable[Any] | None = None,
    warn_below: float = 0.5,
    generator: torch.Generator | None = None,
    progress: Shown = None,
) -> MergeReport:
    """Add LoRA adapters to the weights of a model, in place, and report what is left of them.

    The bytes of the weights change, and nothing else: parameters stay the same objects, and formats
    stay. Adapters of PEFT that are active are merged as by ``merge_adapter()``; call
    ``model.unload()`` then to get the model without them.

    Without calibration inputs, the model does not run. With them, it runs once over all inputs, and
    once more for each group of layers that share an input, up to that group, with all earlier
    layers merged; see ``quantize_``. Stacked experts come last. While a stack of experts is
    calibrated, its weights are in memory in high precision.

    If a step fails or is interrupted, each finished layer is merged and each other one is
    unchanged; the same call then does the rest.

    Args:
        model: a model with quantized weights, whose adapters PEFT has added; or any model, with
            ``adapters``.
        adapters: for each layer by name, (A, B) or (A, B, scaling), with A (r, K) and B (N, r), or
            (E, r, K) and (E, N, r) for stacked experts: the change is ``scaling * B @ A``. None
            takes the adapters that PEFT has added.
        method: how the sum is rounded. ``"nearest"``: quantize it. ``"stochastic"``: at random
            between the two neighbors on the grid of the weight, so that the mean is the sum.
            ``"gptq"``: column by column, so that the outputs change as wanted; later columns make
            up for the errors of earlier ones (Frantar et al., 2022), and then each value moves
            where this brings the outputs closer.
        calibration: inputs of the model, needed for ``"gptq"``; with other methods they measure
            what is left. Tensors, tuples of arguments or dicts of keyword arguments.
        warn_below: warn of each layer that keeps a smaller share of its change. The share is
            ``LayerMerge.survived``: the cosine of the outputs, or without calibration the lesser of
            projection and cosine of the weight. 0 never warns.
        generator: for ``"stochastic"``, of the device of the weights; None draws from torch's own.
        progress: called after each layer, with (layers done, all layers, its name). By default, a
            line in a terminal shows it if a calibration runs; False shows nothing.

    Returns:
        What is left of the change of each layer. Its repr is a table.

    Raises:
        QTensorError: an argument is wrong; there is no adapter; an adapter does not fit its layer;
            a format cannot be rounded by the method; the model fails on an input, or an input leads
            to NaN.
    """
    if method not in METHODS:
        fail(OP, f"method is one of {', '.join(METHODS)}", repr(method), "Use one")
    rule = 'method="gptq" needs calibration, a list of inputs of the model'
    check(method != "gptq" or calibration is not None, OP, rule, "none", "Pass calibration=[...]")
    if generator is not None and method != "stochastic":
        fail(OP, 'generator is for method="stochastic"', f"method={method!r}", "Leave it out")
    rule, number = "warn_below is a number from 0 on", is_number(warn_below)
    check(number and warn_below >= 0, OP, rule, repr(warn_below), "Pass 0.5, or 0 for no warning")
    batches = [] if calibration is None else as_batches(OP, "calibration", calibration)
    changes, skipped = _changes(model, adapters)
    for change in changes.values():
        _check(change, method)
    show = progress_of(OP, False if progress is None and not batches else progress)
    merged: list[LayerMerge] = []
    with evaluating(model), torch.no_grad():
        for change, matrices, note in _with_inputs(model, changes, batches, method):
            merged.append(_merge(change, method, matrices, generator, note))
            show(len(merged), len(changes), change.name)
    warn_of_losses(OP, merged, warn_below, method)
    return MergeReport(method, tuple(merged), tuple(skipped))


# ---- adapters


def _changes(
    model: nn.Module, adapters: Mapping[str, Pair] | None
) -> tuple[dict[str, Change], list[LayerReport]]:
    """Return the changes to merge by the names of their layers, and the layers to skip."""
    if not isinstance(model, nn.Module):
        rule = "model must be a torch.nn.Module"
        fail(OP, rule, type(model).__name__, "Pass one", ArgumentTypeError)
    skipped: list[LayerReport] = []
    if adapters is None:
        changes, skipped = library_changes(model)
    else:
        if not isinstance(adapters, Mapping):
            rule, fix = "adapters is a dict from names of layers to (A, B)", "Pass one"
            fail(OP, rule, type(adapters).__name__, fix, ArgumentTypeError)
        layers, holders = named_layers(model), holders_of(model)
        changes = {name: _plain_change(name, layers, pair) for name, pair in adapters.items()}
        for name, change in changes.items():
            places = holders.get(id(change.layer.stored[0]), {})
            rule = "a merge changes the weight of one layer"
            got = f"the weight of {name} is tied: {', '.join(places)}"
            check(len(places) < 2, OP, rule, got, "Untie it, or leave the layer out of adapters")
    if not changes:
        why = why_skipped(skipped) or "none"
        rule = "the model needs an active adapter that can be merged"
        fail(OP, rule, why, "Add adapters with PEFT, or pass adapters={name: (A, B)}")
    return changes, skipped


def _plain_change(name: str, layers: Mapping[str, WeightLayer], pair: Any) -> Change:
    """Return the change that ``adapters[name]`` describes."""
    if name not in layers:
        rule = "each key of adapters is the name of a linear layer"
        fail(OP, rule, repr(name), f"Choose among the layers: {some(layers) or '(none)'}")
    layer = layers[name]
    parts = tuple(pair) if isinstance(pair, tuple | list) else ()
    if len(parts) not in (2, 3) or not all(isinstance(each, Tensor) for each in parts[:2]):
        rule = "an adapter is (A, B) or (A, B, scaling)"
        fail(OP, rule, f"{type(pair).__name__} for {name}", "Pass two tensors", ArgumentTypeError)
    if len(layer.parameters) != 1:
        rule = "a layer with an adapter has one weight"
        fail(OP, rule, f"{len(layer.parameters)} weights in {name}", "Leave it out of adapters")
    a, b = parts[:2]
    rule = f"the adapter of {name} is A (r, K) and B (N, r), or (E, r, K) and (E, N, r)"
    fits = a.ndim == b.ndim and a.ndim in (2, 3) and a.shape[:-2] == b.shape[:-2]
    got, fix = f"A {tuple(a.shape)}, B {tuple(b.shape)}", "Pass A first, as PEFT stores both"
    check(fits and a.shape[-2] == b.shape[-1], OP, rule, got, fix)
    rule, got = f"the adapter of {name} holds floating numbers", f"A {a.dtype}, B {b.dtype}"
    floating = a.is_floating_point() and b.is_floating_point()
    check(floating, OP, rule, got, "Convert it to float32", DtypeError)
    given = parts[2] if len(parts) == 3 else 1.0
    if not isinstance(given, SupportsFloat):
        rule = "the scaling of an adapter is a number"
        fail(OP, rule, f"{given!r} for {name}", "Pass lora_alpha / r", ArgumentTypeError)
    scaling = float(given)
    return Change(
        name,
        layer,
        lambda: for_inputs_of(layer.modules[0], b.detach().float() @ a.detach().float() * scaling),
        lambda merged: None,
    )


def _check(change: Change, method: str) -> None:
    """Refuse a change that cannot be merged into its layer."""
    weight, name = change.weight, change.name
    if not isinstance(weight, QuantizedTensor) and type(weight) is not Tensor:
        rule = "a weight is quantized or plain, and whole"
        fix = "Gather a sharded model into one that is not sharded, and merge there"
        fail(OP, rule, f"a {type(weight).__name__} in {name}", fix)
    delta = change.compute()
    if tuple(delta.shape) != tuple(weight.shape):
        rule = f"the change of {name} has the shape of its weight, {tuple(weight.shape)}"
        fail(OP, rule, tuple(delta.shape), "Pass A (r, K) and B (N, r) of this layer")
    if delta.is_meta or weight.is_meta:
        rule, fix = "weights and adapters hold data", "Load them first"
        fail(OP, rule, f"a tensor on the device meta, of {name}", fix)
    if not delta.isfinite().all():
        rule = "a change must be finite"
        fail(OP, rule, f"NaN or inf in the adapter of {name}", "Repair it, or leave it out")
    if not isinstance(weight, QuantizedTensor):
        return
    if method != "nearest":
        check_grid(OP, quantizer_of(weight))
        if change.layer.stacked:
            rows = grid_of(quantizer_of(weight), delta).block[0]
            rule = "each expert must have factors of its own, because it is rounded alone"
            got = f"blocks of {rows} rows for the {weight.shape[1]} rows of an expert of {name}"
            check(weight.shape[1] % rows == 0, OP, rule, got, 'Use method="nearest"')


def _is_transposed(change: Change) -> bool:
    """Return whether the experts of a block are stored as (E, K, N)."""
    return bool(getattr(change.layer.modules[0], "is_transposed", False))


# ---- inputs


def _with_inputs(
    model: nn.Module, changes: Mapping[str, Change], batches: Sequence[Any], method: str
) -> Iterator[tuple[Change, list[Tensor | None], str]]:
    """Yield each change, and for each matrix of its layer the mean of ``x x^T``, float64 (K, K).

    The caller merges a change before it asks for the next one. The matrix is None without inputs.
    """
    if not batches:
        for change in changes.values():
            yield change, [None] * change.layer.experts, ""
        return
    single = {name: c.layer for name, c in changes.items() if not c.layer.stacked}
    found = inputs_of.survey(model, single, batches, OP) if single else {}
    for group in inputs_of.groups(found):
        total = None
        for name in group:
            if total is None:
                layer, seen = single[name], found[name]
                (total,) = inputs_of.hessians(model, name, layer, seen, batches, range(1))
            yield changes[name], [total], ""
    for change in changes.values():
        if change.layer.stacked:
            yield change, *_inputs_of_experts(model, change, batches)


def _inputs_of_experts(
    model: nn.Module, change: Change, batches: Sequence[Any]
) -> tuple[list[Tensor | None], str]:
    """Return the matrices of stacked experts, None for those without rows, and a note."""
    matrices: list[Tensor | None] = []
    layer, name = change.layer, change.name
    with _in_high_precision(change):
        seen = inputs_of.survey(model, {name: layer}, batches, OP)[name]
        for experts in inputs_of.expert_ranges(seen):
            matrices += inputs_of.hessians(model, name, layer, seen, batches, experts)
    idle = [expert for expert, rows in enumerate(seen.rows) if not rows]
    for expert in idle:
        matrices[expert] = None
    return matrices, f"{len(idle)} of {len(seen.rows)} experts had no inputs" if idle else ""


@contextmanager
def _in_high_precision(change: Change) -> Iterator[None]:
    """Give a layer the sum of weight and change as a plain weight inside the block."""
    own = change.layer.stored
    target = (_values(change.weight) + change.compute()).to(change.weight.dtype)
    if _is_transposed(change):
        target = target.mT.contiguous()
    change.layer.restore([nn.Parameter(target, requires_grad=False)])
    change.mark_merged(True)
    try:
        yield
    finally:
        change.layer.restore(own)
        change.mark_merged(False)


# ---- one layer


def _values(weight: Tensor) -> Tensor:
    """Return the values of a quantized or plain weight as a new float32 tensor."""
    if isinstance(weight, QuantizedTensor):
        return weight.dequantize(torch.float32)
    return weight.to(torch.float32, copy=True)


def _merge(
    change: Change,
    method: str,
    matrices: Sequence[Tensor | None],
    generator: torch.Generator | None,
    note: str,
) -> LayerMerge:
    """Merge a change into its layer, and return what is left of it."""
    weight, wanted = change.weight, change.compute()
    before = _values(weight)
    target = before + wanted
    text = "plain"
    if isinstance(weight, QuantizedTensor):
        text = quantizer_of(weight).canonical
        target = rounded_sum(weight, target, method, matrices, generator)
    weight.copy_(target)
    change.mark_merged(True)
    real = _values(weight) - before
    norm = float(before.double().square().sum())
    kept, cosine, size = left_of(wanted, real)
    share = (size / norm) ** 0.5 if norm else float(size > 0)
    outputs = _output_cosine(real, wanted, matrices)
    features = change.layer.features
    return LayerMerge(change.name, features, text, share, kept, cosine, outputs, note)


def _output_cosine(real: Tensor, wanted: Tensor, matrices: Sequence[Tensor | None]) -> float | None:
    """Return the cosine of two changes of the outputs, from the products of the inputs.

    The product of the outputs, summed over all inputs x, is ``sum (real x)^T (wanted x)``, that is
    ``<real H, wanted>``.
    """
    pairs = zip(real, wanted, strict=True) if real.ndim == 3 else [(real, wanted)]
    products = [0.0, 0.0, 0.0]
    for (a, b), matrix in zip(pairs, matrices, strict=True):
        if matrix is None:
            continue
        left, right = a.double() @ matrix, b.double() @ matrix
        products[0] += float((left * b).sum())
        products[1] += float((left * a).sum())
        products[2] += float((right * b).sum())
    if products[2] <= 0:
        return None
    return products[0] / (products[1] * products[2]) ** 0.5 if products[1] > 0 else 0.0
