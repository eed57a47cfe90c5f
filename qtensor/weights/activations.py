"""``calibrate``: measure factors for the inputs of linear layers, and for keys and values.

No activation is kept: an observer holds a few numbers, or one histogram, of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.api import Format
from qtensor.core.errors import UnsupportedError, check, fail, is_number
from qtensor.modules.input_quantizer import (
    InputQuantizer,
    input_format,
    is_static,
    without_input_quantizers,
)
from qtensor.weights.calibrated import CalibratedInput, CalibratedKeysValues, Calibration
from qtensor.weights.calibration import run_all
from qtensor.weights.groups import layer_groups
from qtensor.weights.layers import Filter, WeightLayer, match, weight_layers, why_skipped
from qtensor.weights.libraries import observing_caches
from qtensor.weights.measurement import evaluating
from qtensor.weights.metrics import as_batches, same_random_numbers
from qtensor.weights.progress import Shown, progress_of
from qtensor.weights.visits import See

OP = "calibrate"
OBSERVERS = ("max", "percentile", "mse")
LEAST_AMAX = 2.0**-40
"""A smaller maximum, such as that of zeros, counts as this: every factor is a normal float32."""
CLIPS = tuple(1 - i / 32 for i in range(17))
"""Shares of the maximum from which the observer "mse" chooses."""
_BINS = 1 << 15
"""Magnitudes of bfloat16, by their bits."""


def calibrate(
    model: nn.Module,
    inputs: Iterable[Any],
    format: Format | Mapping[str, Format | None] = "nvfp4",
    *,
    observer: str = "max",
    percentile: float = 99.99,
    headroom: float = 1.0,
    groups: Iterable[Sequence[str]] | None = None,
    kv_cache: str | None = None,
    filter_fn: Filter | None = None,
    progress: Shown = None,
) -> Calibration:
    """Measure the factors with which static quantization encodes the inputs of linear layers.

    "fp8" and "nvfp4" have one factor for the whole input, from the largest magnitude (amax) that is
    to be encoded: FP8 decodes with ``amax / 448``, NVFP4 with ``amax / 2688``. Formats without such
    a factor need no measurement; their layers are part of the result.

    The model runs in eval mode and eager code, without gradients, once over the inputs, and a
    second time for ``observer="mse"``. No activation is kept. Its bytes, training flags, hooks and
    the state of torch's generators are as before, after an error too. Weights may be quantized;
    inputs that are quantized already are measured as they are before that.

    Layers of a group share one amax, the largest of the members: query, key and value; gate and up
    projections; and the same layers of all experts of a block. An expert that no token reached has
    the amax of its group, or without one that of the same layer of the block's other experts. An
    amax below 2^-40 counts as 2^-40.

    Args:
        model: the root.
        inputs: list or other iterable of inputs: tensors, tuples of arguments or dicts of keyword
            arguments. They are kept in a list. Positions whose ``attention_mask`` is 0 do not
            count, except in experts.
        format: format of the inputs, or a dict from names of layers (``*`` and ``?`` allowed) to
            formats; the first key that matches decides, and None leaves a layer out.
        observer: ``"max"``: the largest magnitude; ``"percentile"``: the least amax that encodes
            this share of the magnitudes, rounded up to bfloat16; ``"mse"``: the share of the
            largest magnitude, from 1/2 to 1 in steps of 1/32, with the least squared error.
        percentile: the share for ``observer="percentile"``, above 0 and at most 100.
        headroom: factor of at least 1 by which each amax is multiplied, so that inputs that are
            larger than those of the calibration do not saturate.
        groups: lists of names or patterns of layers that share one amax; other layers have their
            own. None: the groups above.
        kv_cache: ``"fp8"`` also measures keys and values as a model of transformers caches them,
            after rotary embeddings. Their amax is the largest magnitude times ``headroom``.
        filter_fn: ``(module, name) -> bool`` selects layers; None selects all.
        progress: called after each input, with (inputs done, all, ""). By default, a line in a
            terminal shows it; False shows nothing.

    Returns:
        The factors by name of layer. ``calibration.apply(model)`` lets the layers quantize their
        inputs, and ``qtensor.checkpoints.save(..., calibration=calibration)`` writes the factors.

    Raises:
        QTensorError: an argument is illegal; a key or pattern matches no layer; no input reaches a
            layer and its group; an input of a layer is NaN or infinite; the model fails on an
            input, and its error is the cause; ``kv_cache`` for a model that is not one of
            transformers.
    """
    check(kv_cache in (None, "fp8"), OP, 'kv_cache is None or "fp8"', repr(kv_cache), "Use one")
    options = _Options(observer, percentile, headroom)
    batches = as_batches(OP, "inputs", inputs)
    layers, formats = _wanted(model, format, filter_fn)
    members = _Groups(list(layers), groups)
    runs = len(batches) * (2 if observer == "mse" else 1)
    show = progress_of(OP, progress)
    kv = _KeysValues(model) if kv_cache is not None else None
    done = [0]

    def after() -> None:
        done[0] += 1
        show(done[0], runs, "")

    def passing(see: See, kv: _KeysValues | None) -> None:
        with same_random_numbers(model):
            run = model if kv is None else kv.run
            watch = (see, lambda name, x: None, after)
            run_all(OP, run, layers, batches, watch, "inputs")

    # Quantized inputs are no larger than the factors that they have already.
    with evaluating(model), torch.no_grad(), without_input_quantizers(model):
        seen = _Maxima(layers, members, options)
        passing(seen.see, kv)
        amaxes = seen.amaxes()
        if observer == "mse":
            errors = _Errors(formats, amaxes, members)
            passing(errors.see, None)
            amaxes = errors.amaxes()
    found = {}
    for name, quantizer in formats.items():
        amax = options.final(amaxes[name]) if is_static(quantizer) else None
        found[name] = CalibratedInput(
            quantizer.canonical, amax, rows=sum(seen.rows[name]), idle_experts=seen.idle(name)
        )
    keys = {} if kv is None else kv.result(options)
    return Calibration(found, keys, f"{observer}, headroom {headroom:g}")


@dataclass(frozen=True)
class _Options:
    """The options of an observer."""

    observer: str
    percentile: float
    headroom: float

    def __post_init__(self) -> None:
        rule = f"observer is one of {', '.join(OBSERVERS)}"
        check(self.observer in OBSERVERS, OP, rule, repr(self.observer), "Choose one")
        rule = "percentile is a number above 0 and at most 100"
        fits = is_number(self.percentile) and 0 < self.percentile <= 100
        check(fits, OP, rule, repr(self.percentile), "Pass for example 99.99")
        rule, number = "headroom is a number of at least 1", is_number(self.headroom)
        check(number and 1 <= self.headroom < math.inf, OP, rule, repr(self.headroom), "Pass 1.0")

    def final(self, amax: float) -> float:
        """Return an amax with headroom, float32 and at least ``LEAST_AMAX``."""
        return _float32(max(amax, LEAST_AMAX) * self.headroom)


def _float32(value: float) -> float:
    return float(torch.tensor(min(value, torch.finfo(torch.float32).max), dtype=torch.float32))


def _wanted(
    model: nn.Module, format: object, filter_fn: Filter | None
) -> tuple[dict[str, WeightLayer], dict[str, Any]]:
    """Return the layers whose inputs are quantized, and the quantizers."""
    layers, skipped = weight_layers(OP, model, filter_fn, inputs=True)
    rule = "the model needs a linear layer"
    why = why_skipped(skipped) or "none"
    check(bool(layers), OP, rule, why, "Check the model and filter_fn")
    formats: Mapping[str, Any] = format if isinstance(format, Mapping) else {"*": format}
    patterns = match(OP, formats, layers, "format", skipped=skipped)
    parsed = {p: None if f is None else input_format(OP, f) for p, f in formats.items()}
    chosen = {name: parsed[pattern] for name, pattern in patterns.items()}
    wanted = {name: quantizer for name, quantizer in chosen.items() if quantizer is not None}
    check(bool(wanted), OP, "a layer gets a format", repr(format), "Pass one")
    return {name: layers[name] for name in wanted}, wanted


class _Groups:
    """The layers that share an amax, and those that lend theirs to layers without inputs."""

    def __init__(self, names: list[str], groups: Iterable[Sequence[str]] | None) -> None:
        self._shared = layer_groups(OP, names, groups)
        self._related = self._shared if groups is None else layer_groups(OP, names, None)

    def shared(self) -> Iterable[tuple[str, ...]]:
        """Return the names of each group; every layer is in one."""
        return self._shared

    def related(self, name: str) -> tuple[str, ...]:
        """Return the layers that stand in for one that no input reached."""
        return next(group for group in self._related if name in group)


class _Maxima:
    """Observe the largest magnitudes, or a histogram of magnitudes, of each layer's inputs."""

    def __init__(
        self, layers: Mapping[str, WeightLayer], groups: _Groups, options: _Options
    ) -> None:
        self._groups, self._options = groups, options
        self.rows = {name: [0] * layer.experts for name, layer in layers.items()}
        self._largest = {name: [0.0] * layer.experts for name, layer in layers.items()}
        self._counts: dict[str, Tensor] = {}

    def see(self, name: str, expert: int, rows: Tensor) -> None:
        """Observe rows (R, K), float32."""
        if not rows.numel():
            return
        magnitudes = rows.abs()
        largest = magnitudes.amax().item()
        if not math.isfinite(largest):
            rule = "the inputs of a layer must be finite"
            where = f" (expert {expert})" if len(self.rows[name]) > 1 else ""
            fix = "Check the inputs; qtensor.debug.record finds the first NaN"
            fail(OP, rule, f"NaN or inf in the input of {name}{where}", fix)
        self.rows[name][expert] += len(rows)
        self._largest[name][expert] = max(self._largest[name][expert], largest)
        if self._options.observer == "percentile":
            # The bits of bfloat16, rounded up: equal values stay, and the order is that of values.
            bits = (magnitudes.view(torch.int32).flatten() + 0xFFFF) >> 16
            own = torch.bincount(bits, minlength=_BINS)
            self._counts[name] = own + self._counts[name] if name in self._counts else own

    def idle(self, name: str) -> int:
        """Return the number of experts that no row reached."""
        return sum(not rows for rows in self.rows[name]) if len(self.rows[name]) > 1 else 0

    def amaxes(self) -> dict[str, float]:
        """Return the amax of each layer, which all layers of a group share."""
        found: dict[str, float] = {}
        for group in self._groups.shared():
            reached = [name for name in group if any(self.rows[name])]
            if reached:
                amax = self._amax(reached)
                found |= dict.fromkeys(group, amax)
        for name in self.rows:
            if name not in found:
                others = [n for n in self._groups.related(name) if any(self.rows[n])]
                rule = "the calibration inputs must reach each layer, or one that stands in for it"
                fix = f"Add inputs that run {name}, or leave it out with filter_fn"
                check(bool(others), OP, rule, f"no input of {name}", fix)
                found[name] = self._amax(others)
        return found

    def _amax(self, names: Sequence[str]) -> float:
        largest = max(max(self._largest[name]) for name in names)
        if self._options.observer != "percentile":
            return largest
        counts = torch.stack([self._counts[name] for name in names]).sum(0)
        below = torch.cumsum(counts, 0)
        needed = math.ceil(int(below[-1]) * self._options.percentile / 100)
        bits = int(torch.searchsorted(below, needed))
        value = torch.tensor([bits << 16], dtype=torch.int32).view(torch.float32).item()
        return min(value, largest)


class _Errors:
    """Observe the squared errors of inputs that are quantized with parts of their amax."""

    def __init__(
        self, formats: Mapping[str, Any], amaxes: Mapping[str, float], groups: _Groups
    ) -> None:
        self._formats, self._amaxes, self._groups = formats, amaxes, groups
        self._errors = {name: [0.0] * len(CLIPS) for name in amaxes}

    def see(self, name: str, expert: int, rows: Tensor) -> None:
        """Observe rows (R, K), float32."""
        if not is_static(self._formats[name]) or not rows.numel():
            return
        for index, clip in enumerate(CLIPS):
            quantize = self._quantizer(name, clip, rows.device)
            difference = quantize(rows).dequantize() - rows
            self._errors[name][index] += float(difference.double().square().sum())

    def _quantizer(self, name: str, clip: float, device: torch.device) -> InputQuantizer:
        amax = _float32(max(self._amaxes[name] * clip, LEAST_AMAX))
        return InputQuantizer(self._formats[name], amax, device=device)

    def amaxes(self) -> dict[str, float]:
        """Return the amax of each layer; the largest wins a tie."""
        found: dict[str, float] = {}
        for group in self._groups.shared():
            totals = [math.fsum(self._errors[n][i] for n in group) for i in range(len(CLIPS))]
            clip = CLIPS[totals.index(min(totals))]
            found |= {name: self._amaxes[name] * clip for name in group}
        return found


class _KeysValues:
    """Run a model of transformers with a cache that observes keys and values and keeps none."""

    def __init__(self, model: nn.Module) -> None:
        self._caches = observing_caches(model)
        if self._caches is None:
            rule = "kv_cache is for models of transformers, which fill a cache"
            got, fix = type(model).__name__, "Leave kv_cache out"
            fail(OP, rule, got, fix, UnsupportedError)
        self._model = model
        self._amaxes: dict[int, tuple[float, float]] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on one input."""
        cache = self._caches.ObservedCache(self._model.config, self._amaxes)
        return self._model(*args, **{**kwargs, "past_key_values": cache, "use_cache": True})

    def result(self, options: _Options) -> dict[str, CalibratedKeysValues]:
        """Return the factors by name of the attention module."""
        names: dict[int, str] = {}
        for name, module in self._model.named_modules():
            index = getattr(module, "layer_idx", None)
            if isinstance(index, int) and "Attention" in type(module).__name__:
                names.setdefault(index, name)
        for index, pair in self._amaxes.items():
            if not all(map(math.isfinite, pair)):
                got = f"NaN or inf in those of {names.get(index, index)}"
                fix = "Check the inputs; qtensor.debug.record finds the first NaN"
                fail(OP, "keys and values must be finite", got, fix)
        rule = "the model must fill its cache"
        fix = "Leave kv_cache out"
        check(bool(self._amaxes), OP, rule, "no keys", fix)
        return {
            names.get(index, str(index)): CalibratedKeysValues(
                options.final(pair[0]), options.final(pair[1])
            )
            for index, pair in sorted(self._amaxes.items())
        }
