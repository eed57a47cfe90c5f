"""``Calibration``: factors for the inputs of linear layers, and for keys and values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qtensor.core.errors import QTensorError, UnsupportedError, check, fail
from qtensor.core.texts import aligned, some
from qtensor.modules.conversion import Conversion, LayerReport
from qtensor.modules.input_quantizer import (
    NAME,
    InputQuantizer,
    factor_from_amax,
    input_format,
    set_input_quantizer,
)
from qtensor.weights.expert_inputs import expert_quantizers, set_expert_quantizers
from qtensor.weights.layers import FILTERED, Filter, WeightLayer, weight_layers

_VERSION = 1


@dataclass(frozen=True)
class CalibratedInput:
    """How the inputs of a layer are quantized.

    Attributes:
        format: canonical text of the quantizer.
        amax: the largest magnitude that is encoded, a float32; None if each input has factors of
            its own.
        scale_inv: the tensor-wide decode factor; None for ``amax / 448`` (FP8) or ``amax / 2688``
            (NVFP4). Files may hold another one.
        rows: rows that calibration saw; 0 if the factor comes from a file.
        idle_experts: experts of a stack that no row reached.
    """

    format: str
    amax: float | None = None
    scale_inv: float | None = None
    rows: int = 0
    idle_experts: int = 0

    @property
    def factor(self) -> float | None:
        """The tensor-wide decode factor; None if each input has its own."""
        if self.amax is None or self.scale_inv is not None:
            return self.scale_inv
        return factor_from_amax(input_format("CalibratedInput", self.format), self.amax)

    def quantizer(self, device: torch.types.Device = None) -> InputQuantizer:
        """Return the module that quantizes inputs so, with its factors on a device."""
        return InputQuantizer(self.format, self.amax, self.scale_inv, device)


@dataclass(frozen=True)
class CalibratedKeysValues:
    """The largest magnitudes of the keys and values of a layer's attention, float32."""

    keys: float
    values: float


@dataclass(frozen=True, repr=False)
class Calibration:
    """Factors with which inputs, keys and values are quantized. ``str()`` gives a table.

    ``qtensor.calibrate`` measures one, ``qtensor.checkpoints.calibration`` reads one from files.

    Attributes:
        inputs: by name of the layer.
        keys_values: by name of the attention module.
        note: how the factors were found.
    """

    inputs: Mapping[str, CalibratedInput]
    keys_values: Mapping[str, CalibratedKeysValues] = field(default_factory=dict)
    note: str = ""

    def apply(self, model: nn.Module, filter_fn: Filter | None = None) -> Conversion:
        """Let the layers of a model quantize their inputs, in eager and compiled code.

        Each layer gets a submodule ``input_quantizer`` (``InputQuantizer``) and a hook. A product
        whose weight is quantized too reads the codes of both. Factors of keys and values are not
        applied here: pass them to a cache.

        Args:
            model: the root of ``nn.Linear``, ``Conv1D`` and ``qtensor.Linear`` layers, and of
                stacked experts of transformers, whose rows are quantized together.
            filter_fn: ``(module, name) -> bool`` selects layers; None selects all.

        Returns:
            The layers, and those that keep their inputs in high precision.

        Raises:
            QTensorError: the model lacks a layer of the calibration.
            UnsupportedError: a layer multiplies several weights, such as ``GroupedLinear``, or its
                experts are split over ranks; no layer was changed.
        """
        layers, out = weight_layers("Calibration.apply", model, filter_fn, inputs=True)
        known = {*layers, *(report.name for report in out if report.note == FILTERED)}
        missing = [name for name in self.inputs if name not in known]
        rule = "the model must have every layer of the calibration"
        fix = "Pass the model that was calibrated, or one with its names"
        check(not missing, "Calibration.apply", rule, f"no {some(missing)}", fix)
        chosen = [name for name in self.inputs if name in layers]
        several = [name for name in chosen if not _is_single(layers[name])]
        if several:
            rule = "the inputs of single layers and of whole stacks of experts are quantized"
            fix = "Leave the layers out with filter_fn"
            fail("Calibration.apply", rule, some(several), fix, UnsupportedError)
        # An illegal format or factor raises an error before a layer is changed.
        made = {
            (name, module): self.inputs[name].quantizer(next(module.parameters()).device)
            for name in chosen
            for module in layers[name].modules
        }
        swapped, skipped = [], []
        stacks: dict[nn.Module, dict[str, InputQuantizer]] = {}
        for name, layer in layers.items():
            found = self.inputs.get(name)
            if found is None:
                note = "its inputs stay in high precision"
                skipped.append(LayerReport(name or "(root)", layer.features, note))
                continue
            for module in layer.modules:
                own = made[name, module]
                if layer.stacked:
                    steps = stacks.setdefault(module, expert_quantizers(module))
                    steps[layer.parameters[0]] = own
                else:
                    set_input_quantizer(module, own)
            note = found.format if found.amax is None else f"{found.format}, amax {found.amax:.4g}"
            swapped.append(LayerReport(name or "(root)", layer.features, note))
        for module, quantizers in stacks.items():
            set_expert_quantizers(module, quantizers)
        return Conversion("inputs quantized", tuple(swapped), tuple(skipped))

    @staticmethod
    def remove(model: nn.Module) -> None:
        """Let all layers of a model take their inputs in high precision again."""
        for module in list(model.modules()):
            if isinstance(module._modules.get(NAME), InputQuantizer):
                set_input_quantizer(module, None)
            if expert_quantizers(module):
                set_expert_quantizers(module, {})

    @classmethod
    def of(cls, model: nn.Module) -> Calibration:
        """Return the factors that ``apply`` gave the layers of a model."""
        found = {}
        for place, module in model.named_modules():
            single = module._modules.get(NAME)
            steps: dict[str, Any] = {place: single, **_named(place, expert_quantizers(module))}
            for name, own in steps.items():
                if not isinstance(own, InputQuantizer):
                    continue
                amax, scale_inv = own.values()
                plain = CalibratedInput(own.format, amax)
                same = plain.factor == scale_inv
                found[name] = plain if same else CalibratedInput(own.format, amax, scale_inv)
        return cls(found, note="of a model")

    def save(self, path: str | Path) -> None:
        """Write the calibration as a JSON file."""
        value = {
            "qtensor_calibration": _VERSION,
            "inputs": {name: asdict(own) for name, own in self.inputs.items()},
            "keys_values": {name: asdict(own) for name, own in self.keys_values.items()},
            "note": self.note,
        }
        Path(path).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Return the calibration of a file that ``save`` wrote.

        Raises:
            QTensorError: the file does not hold a calibration.
        """
        try:
            value: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            if value["qtensor_calibration"] != _VERSION:
                raise ValueError(f"version {value['qtensor_calibration']}")
            inputs = {name: CalibratedInput(**own) for name, own in value["inputs"].items()}
            for own in inputs.values():
                own.quantizer()
            keys = {n: CalibratedKeysValues(**own) for n, own in value["keys_values"].items()}
            return cls(inputs, keys, value["note"])
        except (ValueError, KeyError, TypeError, AttributeError, QTensorError) as error:
            rule = "the file holds a calibration that Calibration.save wrote"
            fix = "Calibrate again"
            fail("Calibration.load", rule, f"{path}: {error}", fix)

    def __str__(self) -> str:
        rows = [("layer", "format", "amax", "rows", "experts without rows")]
        for name, own in self.inputs.items():
            amax = "of each input" if own.amax is None else f"{own.amax:.6g}"
            rows.append((name, own.format, amax, str(own.rows), str(own.idle_experts or "")))
        for name, pair in self.keys_values.items():
            rows.append((name, "fp8", f"k {pair.keys:.6g}, v {pair.values:.6g}", "", ""))
        return "\n".join([f"calibration: {self.note}", *aligned(rows)])

    __repr__ = __str__


def _is_single(layer: WeightLayer) -> bool:
    """Return True if each module multiplies its input by one weight, or is a stack of experts."""
    if layer.stacked:
        return not layer.modules[0]._is_expert_parallel
    return layer.experts == 1


def _named(module: str, steps: Mapping[str, InputQuantizer]) -> dict[str, InputQuantizer]:
    """Return the quantizers of experts by the names of their layers."""
    return {f"{module}.{own}" if module else own: step for own, step in steps.items()}
