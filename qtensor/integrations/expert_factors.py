"""Factors of the inputs of stacked experts, which many checkpoints store for each expert."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel

from qtensor.core.errors import UnsupportedError, check, fail
from qtensor.core.texts import some
from qtensor.integrations.experts import ExpertWeights
from qtensor.storage.tensor import QuantizedTensor
from qtensor.weights.calibrated import CalibratedInput, Calibration
from qtensor.weights.layers import named_layers

OP = "from_pretrained"


def stored_experts(model: PreTrainedModel) -> dict[str, str]:
    """Return the names that checkpoints give to experts, and for each the name of its stack."""
    found: dict[str, str] = {}
    for name, layer in named_layers(model).items():
        if layer.stacked:
            weight: Any = layer.stored[0].detach()
            weight = ExpertWeights(weight) if isinstance(weight, QuantizedTensor) else weight
            stored = revert_weight_conversion(model, {name: weight})
            found |= {each.removesuffix(".weight"): name for each in stored}
    return found


def for_checkpoint(model: PreTrainedModel, calibration: Calibration) -> Calibration:
    """Return a calibration of a model with the names that checkpoints give to the layers."""
    inputs = dict(calibration.inputs)
    for stored, stack in stored_experts(model).items():
        if stack in calibration.inputs:
            inputs.pop(stack, None)
            inputs[stored] = calibration.inputs[stack]
    return dataclasses.replace(calibration, inputs=inputs)


def quantize_inputs(model: PreTrainedModel, calibration: Calibration) -> None:
    """Let the layers of a model quantize their inputs as its checkpoint says.

    Raises:
        QTensorError: the checkpoint does not say how; or experts of a stack have several factors.
        UnsupportedError: the model lacks a layer.
    """
    rule = "a checkpoint loaded with activations=True says how inputs are quantized"
    fix = "Load it without activations=True"
    check(bool(calibration.inputs), OP, rule, calibration.note, fix)
    stacks = stored_experts(model)
    each: dict[str, dict[CalibratedInput, None]] = {}
    for stored, own in calibration.inputs.items():
        each.setdefault(stacks.get(stored, stored), {})[own] = None
    known = {*stacks.values(), *(name for name, _ in model.named_modules())}
    missing = [name for name in each if name not in known]
    if missing:
        rule = "activations=True is for layers that the model has"
        fail(OP, rule, some(missing), fix, UnsupportedError)
    for name, factors in each.items():
        rule = f"all experts of {name} have one factor of their inputs"
        more = f"{fix}, and calibrate it: qtensor.calibrate"
        check(len(factors) == 1, OP, rule, f"{len(factors)} factors", more)
    inputs = {name: next(iter(factors)) for name, factors in each.items()}
    dataclasses.replace(calibration, inputs=inputs).apply(model)
