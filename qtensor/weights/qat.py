"""Quantization-aware training: ``prepare_qat_`` and ``convert_qat_``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from qtensor.api import Format
from qtensor.core.errors import check, fail
from qtensor.modules.conversion import Conversion
from qtensor.modules.in_place import is_held
from qtensor.quantizers import Quantizer
from qtensor.weights.aware import QuantizationAware, become_aware, become_unaware
from qtensor.weights.calibrated import CalibratedInput, Calibration
from qtensor.weights.layers import Filter, named_layers
from qtensor.weights.learned import (
    check_inputs,
    freeze,
    learn_inputs,
    learned_parts,
    packed_weights,
    set_weight_factors,
    weight_starts,
)
from qtensor.weights.plain_reads import unwatch, watch
from qtensor.weights.quantize import as_quantizer, chosen_layers, quantize_, report_of
from qtensor.weights.rounding import Layer

PREPARE, CONVERT = "prepare_qat_", "convert_qat_"


def prepare_qat_(
    model: nn.Module,
    format: Format | Mapping[str, Format | None],
    filter_fn: Filter | None = None,
    *,
    activations: bool | Format | Calibration = False,
    learned_factors: bool | str = False,
) -> Conversion:
    """Let the linear layers of a model compute with quantized weights while they are trained.

    The parameters stay plain, are the same objects, and keep their names: optimizers, checkpoints
    and ``save_pretrained`` see the model as before. In each forward pass, a layer quantizes its
    weight and multiplies by the codes, with the kernels of a quantized model. The gradient of the
    quantized weight is that of the plain one (straight through). ``convert_qat_`` then replaces the
    weights by quantized ones, and the outputs stay equal in every bit.

    With ``activations``, layers also quantize their inputs, as after ``Calibration.apply``. The
    factors come from each input, or from a calibration, and then training does not change them.

    With ``learned_factors``, an optimizer trains the tensor-wide factors of "fp8" and "nvfp4", with
    the gradient of Esser et al., "Learned Step Size Quantization" (2020). Each is a new parameter
    of one element, ``weight_factor.log2_amax`` or ``input_quantizer.factor.log2_amax`` of its
    layer, which starts from the largest magnitude of the weight or from the calibration. Prepare
    the model before the optimizer is made, and leave these parameters out of weight decay.

    Other code that multiplies by the weight of such a layer sees the plain parameter. The first
    forward pass of the model with gradients, in eager code, warns of it.

    Args:
        model: the root. It is changed in place. Prepare it before ``fully_shard``.
        format: as for ``quantize_``: a format, or a dict from names of layers to formats.
        filter_fn: ``(module, name) -> bool`` selects layers; None selects all.
        activations: quantize the inputs of the layers too: True in the format of the weight, a
            format for all inputs, or the result of ``calibrate``.
        learned_factors: "weights": learn a factor of each weight; "inputs": of each input, which
            need a calibration; True: of the weights, and of the inputs that have a calibrated
            factor; False: of none.

    Returns:
        The layers that were prepared, and those that were skipped with the reason. Its repr is a
        table.

    Raises:
        QTensorError: a format is unknown, takes its scale from earlier steps, or rounds at random;
            a key matches no layer; there is no layer to prepare; the model is sharded; a factor is
            to be learned that the format computes from blocks, rows or each input, or of a weight
            that is not finite.
        UnsupportedError: the inputs of a layer with several weights are to be quantized.
    """
    if isinstance(model, nn.Module) and is_held(model):
        rule = "the model is prepared before it is sharded"
        fix = "Call prepare_qat_ first, then fully_shard or parallelize_module"
        fail(PREPARE, rule, "a sharded model", fix)
    with _set_aside(model) as before:
        wanted, skipped = chosen_layers(PREPARE, model, format, filter_fn, plain=True)
        for each in wanted:
            rule = "training and the packed model have equal bytes only if rounding is to nearest"
            safe = each.quantizer.is_requantization_safe()
            check(safe, PREPARE, rule, each.quantizer.canonical, "Drop stochastic_rounding")
        of_weights, of_inputs = learned_parts(PREPARE, learned_factors)
        starts = {w.name: weight_starts(PREPARE, w) for w in wanted} if of_weights else {}
        if of_inputs:
            check_inputs(PREPARE, model, wanted, activations, every=not of_weights)
        notes = {} if activations is False else _quantize_inputs(model, wanted, activations)
        for each in wanted:
            for module in each.target.modules:
                # Stacks of experts have several weights, each a layer of its own.
                known = before.get(module, _Weights({}, each.target.transposed))
                new = dict.fromkeys(each.target.parameters, each.quantizer)
                before[module] = known._replace(quantizers={**known.quantizers, **new})
            set_weight_factors(each.target, each.quantizer, starts.get(each.name))
            if of_inputs:
                learn_inputs(each.target)
    watch(model)
    swapped = []
    for each in wanted:
        learned = ", learned factor" if each.name in starts else ""
        note = each.quantizer.canonical + learned + notes.get(each.name, "") + each.target.note
        swapped.append(report_of(each.name, each.target, note))
    return Conversion(PREPARE, tuple(swapped), tuple(skipped))


class _Weights(NamedTuple):
    """Arguments of ``become_aware`` for a layer."""

    quantizers: dict[str, Quantizer]
    transposed: bool


@contextmanager
def _set_aside(model: nn.Module) -> Iterator[dict[nn.Module, _Weights]]:
    """Give prepared layers their own classes inside the block, and prepare them again after it.

    Yields:
        The prepared layers; the caller may add to them, or remove some.
    """
    prepared: dict[nn.Module, _Weights] = {}
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, QuantizationAware):
            prepared[module] = _Weights(module.weight_quantizers, module.weights_are_transposed)
    for module in prepared:
        become_unaware(module)
    try:
        yield prepared
    finally:
        for module, weights in prepared.items():
            become_aware(module, *weights)


def _quantize_inputs(
    model: nn.Module, wanted: list[Layer], activations: bool | Format | Calibration
) -> dict[str, str]:
    """Let layers quantize their inputs, and return the formats of the inputs by layer."""
    if isinstance(activations, Calibration):
        chosen = activations
    else:
        one = None if activations is True else as_quantizer(PREPARE, activations)  # type: ignore[arg-type]
        rowwise = {"rowwise": True, "columnwise": False}
        formats = {w.name: (one or w.quantizer.with_usage(**rowwise)).canonical for w in wanted}
        chosen = Calibration({name: CalibratedInput(text) for name, text in formats.items()})
    names = {each.name for each in wanted}
    chosen.apply(model, lambda module, name: name in names)
    return {name: f", inputs {chosen.inputs[name].format}" for name in names & set(chosen.inputs)}


def convert_qat_(model: nn.Module) -> Conversion:
    """Replace the weights that ``prepare_qat_`` prepared by quantized ones, in place.

    This is ``quantize_`` in the formats of the training. The layers get their own classes back, and
    go on quantizing their inputs. The new parameters are frozen. Learned factors become those of
    the quantized weights and of the inputs, exactly.

    Args:
        model: a model that ``prepare_qat_`` has prepared.

    Returns:
        The result of ``quantize_``.

    Raises:
        QTensorError: no layer is prepared; the model is sharded; a learned factor is not finite.
    """
    if not isinstance(model, nn.Module):
        rule = "model must be a torch.nn.Module"
        fail(CONVERT, rule, type(model).__name__, "Pass one")
    with _set_aside(model) as prepared:
        formats: dict[str, Format | None] = {}
        names, seen = set(), set()
        for name, layer in named_layers(model).items():
            module, own = layer.modules[0], layer.parameters[0]
            trained = prepared[module].quantizers.get(own) if module in prepared else None
            if trained is None:
                continue
            names.add(name)
            # Layers with one weight are one layer, with the name of the first.
            if id(layer.stored[0]) not in seen:
                formats[name] = trained
                seen.add(id(layer.stored[0]))
        rule = "the model has layers that prepare_qat_ prepared"
        check(bool(formats), CONVERT, rule, "none", "Call prepare_qat_ before the training")
        if is_held(model):
            rule = "weights are quantized where they are whole"
            fix = (
                "Save a full state dict, load it into a model that is not sharded, prepare that "
                "one in the same way, and convert it"
            )
            fail(CONVERT, rule, "a sharded model", fix)
        packed = packed_weights(CONVERT, model, prepared)
        done = quantize_(model, formats, lambda module, name: name in names)
        for layer, weights in packed:
            layer.put(weights)
        freeze({module: weights.quantizers for module, weights in prepared.items()})
        unwatch(model)
        prepared.clear()
    return done
