"""``quantize_``: replace the weights of a model's layers by quantized tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from qtensor.api import Format, quantizer
from qtensor.core.errors import QTensorError, fail
from qtensor.core.quantizer_registry import parse
from qtensor.core.texts import some
from qtensor.functional.linear.layer_plan import weight_canonical
from qtensor.modules.conversion import Conversion, LayerReport
from qtensor.modules.quantized_module import QuantizedModule
from qtensor.quantizers import Quantizer
from qtensor.weights.layers import (
    KINDS,
    PRODUCTS,
    Filter,
    WeightLayer,
    dense_modules,
    match,
    named_layers,
    weight_layers,
    why_skipped,
)
from qtensor.weights.libraries import tell_libraries
from qtensor.weights.measurement import evaluating
from qtensor.weights.progress import Shown, progress_of
from qtensor.weights.rounding import Layer, Rounding, as_rounding, round_weights
from qtensor.weights.shown import show_formats


def quantize_(
    model: nn.Module,
    format: Format | Mapping[str, Format | None],
    filter_fn: Filter | None = None,
    *,
    kinds: Collection[str] = PRODUCTS,
    rounding: str | Rounding = "nearest",
    calibration: Iterable[Any] | None = None,
    progress: Shown = None,
) -> Conversion:
    """Quantize the weights of a model's linear layers, and of others on request, in place.

    The layers keep their classes and compute with the codes of their weights; the inputs of an
    ``nn.Linear`` stay in high precision. The new parameters are frozen. ``convert_`` is for
    training: it swaps the layers, and a recipe quantizes inputs and gradients too.

    Linear layers are ``nn.Linear``, ``Conv1D`` and stacked experts (E, N, K) of transformers, and
    ``Linear`` and ``GroupedLinear`` of qtensor; ``"attention"`` are the projections of
    ``nn.MultiheadAttention``. ``kinds`` must name the others: ``"convolution"``, whose weights are
    quantized as matrices (N, C / groups * kernel); ``"embedding"``; ``"recurrent"`` (LSTM, GRU and
    RNN). Layers with one weight count as one, with the first name.

    Arguments, weights and calibration inputs are checked before the first layer changes. If a later
    step fails or is interrupted, each finished layer is quantized and each other one is unchanged;
    the same call then quantizes the rest.

    With calibration inputs, the model runs in eval mode and eager code, without gradients. It runs
    once over all inputs, and for GPTQ once more for each group of layers that share an input, up to
    that group, with all layers before it quantized. Activations are not kept: the memory beside the
    model is a few float64 matrices (K, K) of one layer, or up to 1 GiB of them for experts.
    Positions whose ``attention_mask`` is 0 do not count, except in experts. The bytes of a run can
    be repeated with the same number of threads. The state of torch's generators is restored.

    Args:
        model: the root. It is changed in place, a layer at a time.
        format: a format id such as ``"nvfp4"``, a quantizer, or the canonical text of one. Or a
            dict from names of layers (``*`` and ``?`` allowed) to formats; the first key that
            matches a name decides, and None leaves the layer in high precision.
        filter_fn: ``(module, name) -> bool`` selects layers; None selects all. Stacked experts,
            ``in_proj_weight`` of attention and weights of recurrent layers have the name of their
            parameter.
        kinds: the kinds of layers: ``"linear"``, ``"attention"``, ``"convolution"``,
            ``"embedding"`` and ``"recurrent"``.
        rounding: ``"nearest"``; ``"mse"``: the factors with the least squared error of each block;
            ``"weighted_mse"``: the same, weighted by the mean squares of the inputs; ``"gptq"``:
            later columns of a weight make up for the errors of earlier ones (Frantar et al., 2022);
            ``"gptq_mse"``: both; or a ``Rounding``.
        calibration: inputs of the model, for the roundings that need them: tensors, tuples of
            arguments or dicts of keyword arguments. They are kept in a list.
        progress: called after each layer, with (layers done, all layers, its name). By default, a
            line in a terminal shows it if a calibration runs; False shows nothing.

    Returns:
        The layers that were quantized, those that were skipped with the reason, and every module
        whose values stay plain, with its share of all values. Its repr is a table.

    Raises:
        QTensorError: a format or kind is unknown, or takes its scale from earlier steps; a key
            matches no layer; the model has no layer to quantize; ``calibration`` is empty, missing
            or not needed, does not run a layer, or leads to NaN; a format or weight allows only
            ``"nearest"``; a rounding needs the inputs of embeddings or recurrent layers, which
            calibration cannot see; a recipe of a layer of qtensor does not read the format; the
            model fails on an input, and its error is the cause.
    """
    wanted, skipped = chosen_layers("quantize_", model, format, filter_fn, kinds)
    chosen_rounding, batches = as_rounding(rounding, calibration)
    for each in wanted:
        check_recipe(each.name, each.target, each.quantizer)
    notes = {}
    # Rounding to nearest is quick.
    quiet = progress is None and not batches
    show = progress_of("quantize_", False if quiet else progress)
    with evaluating(model), torch.no_grad():
        for done, note in round_weights(model, wanted, chosen_rounding, batches):
            target, text = done.target, done.quantizer.canonical
            bits = 8 * target.nbytes / target.values
            notes[done.name] = f"{text}, {bits:.2f} bits a value{note}{target.note}"
            for module in target.modules:
                show_formats(module)
            show(len(notes), len(wanted), done.name)
    tell_libraries(model)
    swapped = tuple(report_of(each.name, each.target, notes[each.name]) for each in wanted)
    title = f"quantize_ to {format if isinstance(format, str) else 'the formats given'}"
    if chosen_rounding.chooses:
        title += f" with {rounding if isinstance(rounding, str) else chosen_rounding}"
    return Conversion(title, swapped, tuple(skipped), dense_modules(model))


def chosen_layers(
    op: str,
    model: nn.Module,
    format: Format | Mapping[str, Format | None],
    filter_fn: Filter | None,
    kinds: Collection[str] = ("linear",),
    plain: bool = False,
) -> tuple[list[Layer], list[LayerReport]]:
    """Return the layers to quantize with their formats, and a report of each other one.

    ``format``, ``filter_fn`` and ``kinds`` are those of ``quantize_``; ``plain`` leaves layers of
    qtensor out.

    Raises:
        QTensorError: there is no layer, a format or kind is unknown, or a key matches no layer.
    """
    layers, skipped = weight_layers(op, model, filter_fn, kinds, plain)
    if not layers:
        others = {layer.kind for layer in named_layers(model, KINDS).values()}.difference(kinds)
        why = why_skipped(skipped) or "none"
        if op != "quantize_":
            rule = "the model needs a linear layer whose weight can be quantized"
            why += f", and layers that {op} leaves alone: {some(sorted(others))}" if others else ""
            fail(op, rule, why, "Check the model and filter_fn")
        why += f", and layers of kinds={sorted(others)}" if others else ""
        rule = f"the model needs a layer whose weight can be quantized, of kinds={tuple(kinds)}"
        fail(op, rule, why, "Check filter_fn and kinds")
    if format is None:
        rule = "a format must be named; None leaves single layers in high precision"
        fail(op, rule, "None", 'Pass for example "nvfp4", or {"head": None, "*": "nvfp4"}')
    formats = format if isinstance(format, Mapping) else {"*": format}
    patterns = match(op, formats, layers, "format", skipped=skipped)
    parsed = {pattern: as_quantizer(op, formats[pattern]) for pattern in formats}
    wanted = []
    for name, layer in layers.items():
        chosen = parsed[patterns[name]] if name in patterns else None
        if chosen is None:
            reason = "stays in high precision" if name in patterns else "no key of format matches"
            skipped.append(report_of(name, layer, reason))
        elif reason := short_rows(layer, chosen):
            skipped.append(report_of(name, layer, reason))
        else:
            wanted.append(Layer(name, layer, chosen))
    return wanted, skipped


def as_quantizer(op: str, format: Format | None) -> Quantizer | None:
    """Return the quantizer of a format id, a canonical text, a quantizer or None."""
    if format is None:
        return None
    found = parse(format) if isinstance(format, str) and "(" in format else quantizer(format)
    if not isinstance(found, Quantizer):
        fail(op, "a format is an id, a text or a quantizer", repr(format), 'Pass one, like "nvfp4"')
    if found.format == "fp8_delayed":
        rule = "a weight has no earlier steps from which its scale could be taken"
        fail(op, rule, found.canonical, 'Use "fp8", which takes the scale from the weight')
    return found


def short_rows(layer: WeightLayer, quantizer: Quantizer) -> str:
    """Return why the rows of a convolution are too short for a format, or "".

    Its blocks would mostly be padding, as in depthwise convolutions.
    """
    if layer.kind != "convolution":
        return ""
    dims = [dim for slot in quantizer.slots if slot.holds == "factors" for dim in slot.dims]
    block = max([dim.per for dim in dims if dim.axis == "k"], default=1)
    count = layer.weights[0].shape[1]
    return f"a row has {count} values, less than a block of {block}" if count < block else ""


def check_recipe(name: str, layer: WeightLayer, quantizer: Quantizer) -> None:
    """Refuse a format that the recipe of a layer of qtensor does not read."""
    module = layer.modules[0]
    if isinstance(module, QuantizedModule):
        try:
            kind, key = module._layer_options("weight").module, module._recipe_key()
            weight_canonical(quantizer.canonical, key, kind, module.name, False)
        except QTensorError as error:
            rule = "a layer of qtensor needs the format that its recipe reads"
            got = f"{quantizer.canonical} for {name or '(root)'} ({error})"
            fail("quantize_", rule, got, "Choose that format, or leave the layer out")


def report_of(name: str, layer: WeightLayer, note: str) -> LayerReport:
    """Return a layer's row in a report; the note begins with the number of experts."""
    count = f"{layer.experts} experts, " if layer.experts > 1 else ""
    return LayerReport(name or "(root)", layer.features, count + note)
