"""Learned factors of ``prepare_qat_``: which are legal, where they start, how they are packed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from qtensor.core.errors import check, fail
from qtensor.core.graphs import forget_graphs
from qtensor.core.quantizer_registry import parse
from qtensor.core.texts import some
from qtensor.modules.input_quantizer import NAME, InputQuantizer
from qtensor.modules.learned_factor import LearnedFactor
from qtensor.quantizers import Quantizer
from qtensor.weights.activations import LEAST_AMAX
from qtensor.weights.aware import factor_name
from qtensor.weights.calibrated import Calibration
from qtensor.weights.expert_inputs import expert_quantizers
from qtensor.weights.layers import WeightLayer, named_layers
from qtensor.weights.rounding import Layer

_PARTS = {False: (), True: ("weights", "inputs"), "weights": ("weights",), "inputs": ("inputs",)}
_LEGAL = (
    'a factor of the whole tensor is learned, in "fp8" and "nvfp4"; other formats and options '
    "compute all factors from blocks, rows or each tensor"
)


def learned_parts(op: str, learned_factors: object) -> tuple[bool, bool]:
    """Return whether factors of weights, and of inputs, are learned."""
    known = isinstance(learned_factors, bool | str) and learned_factors in _PARTS
    rule = f"learned_factors is one of {', '.join(map(repr, _PARTS))}"
    check(known, op, rule, repr(learned_factors), "Pass one")
    parts = _PARTS[learned_factors]
    return "weights" in parts, "inputs" in parts


def weight_starts(op: str, layer: Layer) -> list[float]:
    """Return the amax with which the factor of each weight of a layer begins.

    Raises:
        QTensorError: the format has no factor to learn; a weight is not finite, or has no values.
    """
    canonical, name = layer.quantizer.canonical, layer.name or "(root)"
    fix = 'Choose "fp8" or "nvfp4" for it, or prepare it by a second call without learned_factors'
    check(layer.quantizer.learns_factor, op, _LEGAL, f"{canonical} for {name}", fix)
    starts = []
    for weight in layer.target.weights:
        if weight.is_meta:
            rule = "a weight must have values before its factor is learned"
            fail(op, rule, f"{name} on the meta device", "Load the weights first")
        amax = weight.abs().amax().float().item()
        rule = "a weight must be finite before its factor is learned"
        fix = "Repair it, or leave it out with filter_fn"
        check(math.isfinite(amax), op, rule, f"NaN or inf in {name}", fix)
        starts.append(max(amax, LEAST_AMAX))
    return starts


def check_inputs(
    op: str, model: nn.Module, wanted: Sequence[Layer], activations: object, every: bool
) -> None:
    """Refuse to learn factors of inputs that no calibration has given, or that are not learned.

    Args:
        op: for the message.
        model: the root, whose layers may quantize their inputs already.
        wanted: the layers.
        activations: the argument of ``prepare_qat_``.
        every: whether each layer must have a calibrated factor of its inputs.
    """
    known = dict(Calibration.of(model).inputs)
    if isinstance(activations, Calibration):
        known |= activations.inputs
    elif activations is not False:
        known = {}
    static = {name for name, own in known.items() if own.amax is not None}
    missing = [layer.name or "(root)" for layer in wanted if layer.name not in static]
    if every and missing:
        rule = "the factor of an input is learned from a calibrated one"
        fix = 'Pass activations=qtensor.calibrate(...) in "fp8" or "nvfp4", or leave them out'
        fail(op, rule, f"none for {some(missing)}", fix)
    for layer in wanted:
        if layer.name in static:
            canonical = known[layer.name].format
            legal = parse(canonical).learns_factor
            got, fix = f"{canonical} for the input of {layer.name}", 'Use learned_factors="weights"'
            check(legal, op, _LEGAL, got, fix)


def set_weight_factors(
    layer: WeightLayer, quantizer: Quantizer, starts: Sequence[float] | None
) -> None:
    """Give the weights of a layer learned factors that start from these amaxes, or none.

    Modules that share a weight share its factor.
    """
    changed = starts is not None
    for index, own in enumerate(layer.parameters):
        factor = None
        if starts is not None:
            factor = LearnedFactor(quantizer, starts[index], layer.stored[index].device)
        for module in layer.modules:
            changed |= module._modules.pop(factor_name(own), None) is not None
            if factor is not None:
                module.add_module(factor_name(own), factor)
    if changed:
        forget_graphs()


def learn_inputs(layer: WeightLayer) -> None:
    """Let training change the calibrated factors of a layer's inputs."""
    for module in layer.modules:
        of_experts = expert_quantizers(module)
        chosen = [of_experts[own] for own in layer.parameters if own in of_experts]
        for quantizer in chosen or _input_quantizers(module):
            if quantizer.amax is not None:
                quantizer.learn()
                forget_graphs()


def packed_weights(
    op: str, model: nn.Module, prepared: Iterable[nn.Module]
) -> list[tuple[WeightLayer, list[Tensor]]]:
    """Return the layers with learned factors of weights, and their quantized weights.

    Raises:
        QTensorError: a learned factor is not finite.
    """
    modules = list(prepared)
    for name, module in model.named_modules():
        if isinstance(module, LearnedFactor):
            rule, value = "learned factors must be finite", module.log2_amax.item()
            got, fix = f"log2_amax = {value} of {name}", "Resume from an earlier checkpoint"
            check(math.isfinite(value), op, rule, got, fix)
    done, seen = [], set()
    for layer in named_layers(model).values():
        stored = layer.stored[0]
        factors = [layer.modules[0]._modules.get(factor_name(own)) for own in layer.parameters]
        if layer.modules[0] not in modules or factors[0] is None or id(stored) in seen:
            continue
        seen.add(id(stored))
        own = layer.parameters[0]
        tied = tuple([m for m in modules if m._parameters.get(own) is stored])
        with torch.no_grad():
            weights = [
                factor(weight, weight.numel())
                for factor, weight in zip(factors, layer.weights, strict=True)
            ]
        done.append((replace(layer, modules=tied), weights))
    return done


def freeze(prepared: Mapping[nn.Module, Iterable[str]]) -> None:
    """Keep the learned factors of inputs, and remove those of weights, which are packed.

    ``prepared`` maps modules to the names of their weights.
    """
    changed = False
    for module, names in prepared.items():
        for own in names:
            changed |= module._modules.pop(factor_name(own), None) is not None
        for quantizer in _input_quantizers(module):
            changed |= quantizer.factor is not None
            quantizer.freeze()
    if changed:
        forget_graphs()


def _input_quantizers(module: nn.Module) -> list[InputQuantizer]:
    """Return the modules that quantize the inputs of a layer, or of the stacks of experts."""
    single = module._modules.get(NAME)
    if isinstance(single, InputQuantizer):
        return [single]
    return list(expert_quantizers(module).values())
