"""``quantize_``: replace the weights of a model's linear layers by quantized tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from qtensor.api import Format, quantize, quantizer
from qtensor.errors import fail
from qtensor.modules.conversion import Conversion, LayerReport
from qtensor.quantizers import Quantizer
from qtensor.registry import parse
from qtensor.weights.layers import Filter, linear_layers, match, set_weight


def quantize_(
    model: nn.Module,
    format: Format | Mapping[str, Format | None],
    filter_fn: Filter | None = None,
) -> Conversion:
    """Quantize the weights of a model's ``nn.Linear`` layers, in place.

    The layers stay ``nn.Linear`` and compute with the codes of their weights; inputs stay in high
    precision. The new parameters are frozen. ``convert_`` is for training: it swaps the layers, and
    a recipe quantizes inputs and gradients too. If an argument is wrong, the model is unchanged.

    Args:
        model: the root. It is changed in place, a layer at a time.
        format: a format id such as ``"nvfp4"``, a quantizer, or the canonical text of one. Or a
            dict from names of layers (``*`` and ``?`` allowed) to formats; the first key that
            matches a name decides, and None leaves the layer in high precision.
        filter_fn: ``(module, name) -> bool`` selects layers; None selects all.

    Returns:
        The layers that were quantized, and those that were skipped with the reason. Its repr is a
        table.

    Raises:
        QTensorError: a format is unknown, or takes its scale from earlier steps; a key matches no
            layer; the model has no layer to quantize.
    """
    layers, reasons = linear_layers("quantize_", model, filter_fn)
    if not layers:
        why = "; ".join(f"{n or '(root)'}: {r}" for n, r in list(reasons.items())[:3]) or "none"
        rule = "the model needs an nn.Linear whose weight can be quantized"
        fail("quantize_", rule, why, "Check filter_fn, or quantize single tensors with quantize")
    formats = format if isinstance(format, Mapping) else {"*": format}
    patterns = match("quantize_", formats, layers, "format")
    parsed = {pattern: as_quantizer("quantize_", formats[pattern]) for pattern in formats}
    swapped, skipped = [], [_report(name, model, reason) for name, reason in reasons.items()]
    for name, layer in layers.items():
        chosen = parsed[patterns[name]] if name in patterns else None
        if chosen is None:
            reason = "stays in high precision" if name in patterns else "no key of format matches"
            skipped.append(_report(name, model, reason))
            continue
        weight: Any = quantize(layer.weight.detach(), chosen)
        set_weight(layer, weight)
        bits = 8 * weight.nbytes / weight.numel()
        swapped.append(_report(name, model, f"{chosen.canonical}, {bits:.2f} bits a value"))
    title = f"quantize_ to {format if isinstance(format, str) else 'the formats given'}"
    return Conversion(title, tuple(swapped), tuple(skipped))


def as_quantizer(op: str, format: Any) -> Quantizer | None:
    """Return the quantizer of a format id, a canonical text, a quantizer or None.

    Raises:
        QTensorError: the format is unknown, or takes its scale from earlier steps.
    """
    if format is None:
        return None
    found = parse(format) if isinstance(format, str) and "(" in format else quantizer(format)
    if not isinstance(found, Quantizer):
        fail(op, "a format is an id, a text or a quantizer", repr(format), 'Pass one, like "nvfp4"')
    if found.format == "fp8_delayed":
        rule = "a weight that is quantized once has no earlier steps to take a scale from"
        fail(op, rule, found.canonical, 'Use "fp8", which takes the scale from the weight')
    return found


def _report(name: str, model: nn.Module, note: str) -> LayerReport:
    layer: Any = model.get_submodule(name)
    sizes = (getattr(layer, "in_features", "?"), getattr(layer, "out_features", "?"))
    return LayerReport(name or "(root)", f"{sizes[0]} -> {sizes[1]}", note)
