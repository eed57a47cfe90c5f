"""``search``: choose the format of each layer under a budget of bits."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import nn

from qtensor.api import Format
from qtensor.core.errors import ArgumentTypeError, check, fail, is_number
from qtensor.core.journal import Journal
from qtensor.quantizers import Quantizer
from qtensor.weights.groups import layer_groups
from qtensor.weights.knapsack import Option, front
from qtensor.weights.layers import PRODUCTS, Filter, WeightLayer, match, weight_layers, why_skipped
from qtensor.weights.measurement import Measurement, evaluating, stored_bytes
from qtensor.weights.metrics import Metric, as_batches, fingerprint, named_metric
from qtensor.weights.progress import Progress, Shown, progress_of
from qtensor.weights.quantize import as_quantizer, short_rows
from qtensor.weights.search_result import CurvePoint, GroupChoice, SearchResult

"""Called with (measurements done, all measurements, what was measured)."""

FORMATS = ("mxfp4", "nvfp4", "mxfp6(packed=True)", "mxfp8")


@dataclass(frozen=True)
class _Group:
    """Layers that get one format, and the formats to choose from."""

    names: tuple[str, ...]
    layers: tuple[WeightLayer, ...]
    formats: tuple[Quantizer | None, ...]

    @property
    def values(self) -> int:
        return sum(layer.values for layer in self.layers)

    def bytes(self, option: int) -> int:
        chosen = self.formats[option]
        weights = [weight for layer in self.layers for weight in layer.weights]
        return sum(stored_bytes(weight, chosen) for weight in weights)

    def choice(self, option: int) -> dict[WeightLayer, Quantizer | None]:
        return dict.fromkeys(self.layers, self.formats[option])

    def text(self, option: int) -> str | None:
        return _text(self.formats[option])


def search(
    model: nn.Module,
    inputs: Iterable[Any],
    *,
    budget_bits: float = 5.0,
    formats: Sequence[Format | None] = FORMATS,
    metric: str | Metric = "kl",
    activations: bool = False,
    groups: Iterable[Sequence[str]] | None = None,
    pinned: Mapping[str, Format | None] | None = None,
    filter_fn: Filter | None = None,
    kinds: Collection[str] = PRODUCTS,
    progress: Shown = None,
    resume: str | PathLike[str] | None = None,
) -> SearchResult:
    """Choose a format for the weight of each layer, so that the model's error is least.

    Each group of layers is quantized alone, to each format, and the metric compares the model's
    outputs with those in high precision. The search assumes that the errors of the groups add up,
    finds the best choice exactly under this assumption, and measures it. The model is unchanged.

    The layers are those of ``quantize_``, except layers of qtensor; with ``activations``, they are
    ``nn.Linear`` layers with weights of their own, outside of attention.

    Args:
        model: the root; it runs in eval mode, without gradients.
        inputs: list of calibration inputs: tensors, tuples of arguments or dicts of keyword
            arguments. The model's outputs for all of them are kept in memory.
        budget_bits: most bits for each value of the weights, with factors and padding, as a mean
            over all layers.
        formats: format ids, quantizers or canonical texts to choose from; None is high precision.
        metric: ``"kl"``: divergence of the logits' softmax; ``"sqnr"``: noise of the outputs; or a
            function ``(reference, output) -> float``, where less is better. The mean over the
            inputs counts.
        activations: quantize the inputs of a layer to the format of its weight, too.
        groups: lists of names or patterns of layers that must have one format. None: query, key and
            value; gate and up projections; and the experts of a block.
        pinned: formats (None: high precision) of layers by name or pattern, which are not searched.
            A format of one layer holds for all layers of its group.
        filter_fn: ``(module, name) -> bool`` selects layers; the others do not count.
        kinds: kinds of layers, as for ``quantize_``. A convolution has the formats whose blocks are
            not longer than its rows, and stays in high precision if there is none.
        progress: called after each measurement, with (measurements done, all, group and format). By
            default, a line in a terminal shows it; False shows nothing.
        resume: path of a file that keeps the measurements. A search that was interrupted goes on
            where it stopped. The metric is recognized by its name and by its values for three
            changed copies of the first output.

    Returns:
        The choice, its error, and the trade-off curve. ``result.apply(model)`` quantizes.

    Raises:
        QTensorError: no inputs or layers; a name or pattern matches nothing; the budget is below
            the smallest choice; layers of one group are pinned to different formats; ``resume``
            belongs to another search; the model fails on an input, and its error is the cause; the
            metric does not return a number.
    """
    metric_name, function = named_metric(metric)
    batches = as_batches("search", "inputs", inputs)
    layers = _layers(model, filter_fn, kinds, activations)
    parts = _groups(layers, formats, groups, pinned or {})
    values = sum(part.values for part in parts)
    sizes = [[part.bytes(i) for i in range(len(part.formats))] for part in parts]
    limit = _limit(budget_bits, values, sum(map(min, sizes)))
    with evaluating(model), torch.no_grad():
        measure = Measurement(model, batches, function, activations)
        identity = {} if resume is None else _identity(parts, metric_name, measure)
        journal = _journal(resume, identity)
        errors = _errors(parts, measure, journal, progress_of("search", progress))
        options = [list(map(Option, *pair)) for pair in zip(sizes, errors, strict=True)]
        best = front(options, sum(map(max, sizes)))
        within = int(np.searchsorted(best.bytes, limit, side="right")) - 1
        picks = best.choice(within)
        chosen = [part.choice(pick) for part, pick in zip(parts, picks, strict=True)]
        measured = measure({layer: q for each in chosen for layer, q in each.items()})
    rows = zip(parts, picks, sizes, errors, strict=True)
    return SearchResult(
        groups=tuple(
            GroupChoice(part.names, part.text(i), 8 * size[i] / part.values, error[i])
            for part, i, size, error in rows
        ),
        metric=metric_name,
        activations=activations,
        bits=8 * int(best.bytes[within]) / values,
        predicted=float(best.errors[within]),
        measured=measured,
        curve=tuple(
            CurvePoint(8 * int(b) / values, float(e))
            for b, e in zip(best.bytes, best.errors, strict=True)
        ),
    )


def _layers(
    model: nn.Module, filter_fn: Filter | None, kinds: Collection[str], activations: bool
) -> dict[str, WeightLayer]:
    """Return the layers that are searched, by name."""
    layers, skipped = weight_layers("search", model, filter_fn, kinds, plain=True)
    if activations:
        layers = {name: layer for name, layer in layers.items() if layer.is_plain}
    rule = f"the model needs layers of kinds={tuple(kinds)} with weights in high precision"
    why = why_skipped(skipped) or "none"
    check(bool(layers), "search", rule, why, "Check the model, kinds and filter_fn")
    return layers


def _groups(
    layers: Mapping[str, WeightLayer],
    formats: Sequence[Format | None],
    groups: Iterable[Sequence[str]] | None,
    pinned: Mapping[str, Format | None],
) -> list[_Group]:
    """Return the groups of the layers, each with its formats."""
    if isinstance(formats, str) or not isinstance(formats, Iterable):
        rule, fix = "formats is a list of formats", 'Pass for example ["nvfp4", "mxfp8"]'
        fail("search", rule, repr(formats), fix, ArgumentTypeError)
    choices = tuple(dict.fromkeys(as_quantizer("search", f) for f in formats))
    check(bool(choices), "search", "formats must hold at least one format", "none", "Pass some")
    if not isinstance(pinned, Mapping):
        rule, fix = "pinned is a dict from names to formats", 'Pass for example {"head": None}'
        fail("search", rule, repr(pinned), fix, ArgumentTypeError)
    patterns = match("search", pinned, layers, "pinned")
    fixed = {name: as_quantizer("search", pinned[p]) for name, p in patterns.items()}
    parts = []
    for names in layer_groups("search", list(layers), groups):
        pins = {name: fixed[name] for name in names if name in fixed}
        rule = "the layers of a group have one format, so pinned must not give them several"
        got = ", ".join(f"{name}: {_text(q) or 'high precision'}" for name, q in pins.items())
        fix = "Pin them to one format, or pass groups= in which they are apart"
        check(len(set(pins.values())) <= 1, "search", rule, got, fix)
        found = tuple(dict.fromkeys(pins.values())) or choices
        members = tuple(layers[name] for name in names)
        long = tuple(q for q in found if q is None or not any(short_rows(m, q) for m in members))
        rule = "a convolution is pinned to a format whose blocks are not longer than its rows"
        fix = "Pin it to None, or to another format"
        check(bool(long or not pins), "search", rule, ", ".join(names), fix)
        parts.append(_Group(names, members, long or (None,)))
    return parts


def _text(chosen: Quantizer | None) -> str | None:
    return None if chosen is None else chosen.canonical


def _limit(budget_bits: float, values: int, least: int) -> int:
    """Return the bytes of the budget, which must be at least ``least``."""
    if not is_number(budget_bits):
        rule, fix = "budget_bits is a number of bits", "Pass for example 5.0"
        fail("search", rule, repr(budget_bits), fix, ArgumentTypeError)
    limit = budget_bits * values / 8
    rule = "budget_bits must be at least what the smallest formats need"
    fix = f"Pass {math.ceil(800 * least / values) / 100} or more, or smaller formats"
    check(least <= limit, "search", rule, f"{budget_bits} bits a value", fix)
    return math.floor(min(limit, 1 << 62))


def _identity(parts: Sequence[_Group], metric: str, measure: Measurement) -> dict[str, Any]:
    """Return what the measurements depend on, as JSON values."""
    shapes = {
        name: [*layer.weights[0].shape]
        for part in parts
        for name, layer in zip(part.names, part.layers, strict=True)
    }
    references = measure.references
    return {
        "layers": shapes,
        "metric": metric,
        "activations": measure.activations,
        "outputs in high precision": [float(r.sum(dtype=torch.float64)).hex() for r in references],
        "metric's values": fingerprint(measure.name, measure.metric, references[0]),
    }


def _journal(path: str | PathLike[str] | None, identity: dict[str, Any]) -> Journal:
    """Return the measurements of a file, or of none."""
    if not (path is None or isinstance(path, str | PathLike)):
        rule, fix = "resume is the path of a file", 'Pass for example "search.jsonl"'
        fail("search", rule, repr(path), fix, ArgumentTypeError)
    journal = Journal(path, identity)
    try:
        different = journal.read()
        if any(type(error) not in (int, float) for error in journal.entries.values()):
            raise ValueError("an error is a number")
        if not different:
            journal.begin()
    except ValueError:
        rule = "resume is a file that an earlier search wrote"
        fail("search", rule, str(path), "Pass the path of a new file")
    except OSError as error:
        rule = "resume is the path of a file that can be read and written"
        fix = "Create its folder, or pass another path"
        fail("search", rule, f"{path!r} ({error.strerror})", fix)
    for name in different:
        rule = f"resume belongs to a search with the same {name}"
        fix = "Delete it, or pass the path of a new file"
        fail("search", rule, f"{path}, which differs", fix)
    return journal


def _errors(
    parts: Sequence[_Group], measure: Measurement, journal: Journal, progress: Progress
) -> list[list[float]]:
    """Return the error of each group alone in each of its formats; inf for one that is NaN."""
    total, done = sum(len(part.formats) for part in parts), 0
    errors = []
    for part in parts:
        row = []
        for option, chosen in enumerate(part.formats):
            key = f"{' '.join(part.names)} in {part.text(option)}"
            error = 0.0 if chosen is None else journal.entries.get(key)
            if error is None:
                error = measure(part.choice(option))
                journal.add(key, error)
            row.append(math.inf if math.isnan(error) else error)
            done += 1
            progress(done, total, key)
        rule = "a format must leave the model's outputs finite"
        fix = "Pin these layers to another format, or add formats"
        check(min(row) < math.inf, "search", rule, ", ".join(part.names), fix)
        errors.append(row)
    return errors
