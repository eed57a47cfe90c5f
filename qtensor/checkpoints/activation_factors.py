"""Factors of activations, keys and values: check, write and read them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor, nn

from qtensor.api import quantizer_of
from qtensor.checkpoints.checkpoint import Checkpoint, open_checkpoint
from qtensor.checkpoints.containers.base import Path
from qtensor.checkpoints.errors import Place, refuse
from qtensor.checkpoints.input_transforms import PRE_SCALE, ROTATION
from qtensor.checkpoints.layout_base import (
    DIVISOR,
    Group,
    Writer,
    find_layout,
    layouts,
)
from qtensor.checkpoints.modes import in_memory
from qtensor.checkpoints.nvfp4_factor import activation_amax, activation_divisor
from qtensor.core.errors import QTensorError
from qtensor.core.texts import some
from qtensor.modules.input_hook import TRANSFORM, set_input_step
from qtensor.modules.input_quantizer import NAME, InputQuantizer, input_format, is_static
from qtensor.quantizers import Quantizer
from qtensor.reference.nvfp4 import nearest_amax
from qtensor.storage.tensor import QuantizedTensor
from qtensor.weights.calibrated import CalibratedInput, Calibration

_OWN_FACTOR = re.compile(rf"(^|\.){NAME}\.(\w+\.)?(amax|scale_inv)$")
"""Names of factors in the state dict of a model; those of experts have the name of a weight."""
WHY = "an expert that calibration never reached?"
_FACTORS = ("input_scale", "input_global_scale", "activation_scale", "qscale_act", "scale_input")
"""Last name parts, in any layout, of factors of activations that quantize to codes."""


def is_activation_factor(checkpoint: Checkpoint, name: str) -> bool:
    """Return True for the factor of a layer's inputs, or of the keys or values of attention."""
    last = name.rpartition(".")[2]
    if name in checkpoint.groups or last.endswith("_input_scale"):
        return name not in checkpoint.groups
    known = last in checkpoint.reader.input_factors or last in _FACTORS
    return known or any(kv_factor(name, which) is not None for which in range(2))


def kv_factor(name: str, which: int) -> str | None:
    """Return the end of a name that says "factor of the keys" (0) or "of the values" (1), or None.

    A layout that keeps names may hold names of every layout, so all of them are tried.
    """
    for end in _kv_ends(which):
        if name == end or name.endswith(f".{end}"):
            return end
    return None


@functools.cache
def _kv_ends(which: int) -> tuple[str, ...]:
    """Return the names in all layouts, the longest first: others are the ends of it."""
    ends = {layout.kv_factors[which] for layout in layouts().values()}
    return tuple(sorted(ends, key=len, reverse=True))


def wrong_factor(factor: Tensor) -> str:
    """Return the first value of a factor or divisor that is not positive and finite, or ""."""
    if factor.is_meta or not factor.is_floating_point():
        return ""
    values = factor.detach().float().flatten()
    bad = values[~(torch.isfinite(values) & (values > 0))]
    return str(bad[0].item()) if bad.numel() else ""


def factor_problem(checkpoint: Checkpoint, name: str) -> str:
    """Return what is wrong with a stored factor of activations, or "" for all other tensors."""
    if not is_activation_factor(checkpoint, name):
        return ""
    got = wrong_factor(checkpoint[name])
    return f"a factor of activations is positive and finite; got {got} ({WHY})" if got else ""


# ---- writing


def same_activations(weight: str, inputs: str) -> bool:
    """Return True if servers multiply weights of one format by inputs of the other.

    All FP8 formats have the same factor of activations.
    """
    first, second = (fmt.partition("(")[0] for fmt in (weight, inputs))
    return first == second or (first.startswith("fp8") and second.startswith("fp8"))


def without_quantizers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict without the factors that ``Calibration.apply`` gave the layers."""
    return {name: t for name, t in state.items() if not _OWN_FACTOR.search(name)}


def refuse_quantizers(state: Mapping[str, Tensor]) -> None:
    """Refuse a state dict with factors of ``Calibration.apply``: their format is in the model."""
    found = [name for name in state if _OWN_FACTOR.search(name)]
    if found:
        rule = "factors of inputs are saved together with their formats, which only the model knows"
        fix = "Pass the model, or leave them out and pass calibration=Calibration.of(model)"
        refuse(Place("", found[0]), rule, "a state dict", fix)


def with_calibration(
    state: Mapping[str, Tensor], writer: Writer, calibration: Calibration
) -> dict[str, Tensor]:
    """Return a state dict with the factors of a calibration, as a writer stores them.

    Raises:
        CheckpointError: a factor belongs to no quantized weight of ``state``, or the layout has no
            factor for its format.
    """
    state, used = dict(state), set()
    for name, weight in list(state.items()):
        module = name.removesuffix(".weight")
        key = _calibrated_name(module, calibration)
        if key is None or not isinstance(weight, QuantizedTensor):
            continue
        used.add(key)
        state.update(input_tensors(writer, name, quantizer_of(weight), calibration.inputs[key]))
        writer.input_formats[module] = calibration.inputs[key].format
    left = [name for name in calibration.inputs if name not in used]
    if left:
        rule = "each calibrated input belongs to a quantized weight of the state dict"
        fix = "Quantize the weight, or calibrate without the layer"
        refuse(Place("", left[0], writer.layout), rule, f"no such weight: {some(left)}", fix)
    ends = find_layout(writer.layout).kv_factors
    for attention, pair in calibration.keys_values.items():
        for end, amax in zip(ends, (pair.keys, pair.values), strict=True):
            factor = torch.tensor(amax, dtype=torch.float32) / torch.tensor(448.0)
            state[_joined(attention, end)] = factor.reshape(writer.factor_shape)
    return state


def _joined(module: str, last: str) -> str:
    return f"{module}.{last}" if module else last


def _calibrated_name(module: str, calibration: Calibration) -> str | None:
    """Return the name under which the input of a weight was calibrated, or None.

    Experts that a model stacks are stored one by one in many checkpoints.
    """
    if module in calibration.inputs:
        return module
    found = re.fullmatch(r"(.*\bexperts)\.\d+\.(\w+)", module)
    if found is None:
        return None
    down = found[2] in ("down_proj", "w2")
    stacks = (found[2], "down_proj" if down else "gate_up_proj")
    return next((s for s in (f"{found[1]}.{s}" for s in stacks) if s in calibration.inputs), None)


def input_tensors(
    writer: Writer, name: str, weight: Quantizer, own: CalibratedInput
) -> dict[str, Tensor]:
    """Return the stored factor of the input of a weight, by name."""
    module = name.removesuffix(".weight")
    if writer.keeps_names:
        text = json.dumps({k: asdict(own)[k] for k in ("format", "amax", "scale_inv")})
        stored = torch.tensor(list(text.encode()), dtype=torch.uint8)
        return {_joined(module, NAME): stored}
    factors = writer.input_factors
    last, sense = factors.get(weight.format, factors.get("", ("", "")))
    inputs = input_format("save", own.format)
    if not last or not same_activations(weight.format, inputs.format):
        rule = f"layout {writer.layout} has factors of inputs in the format of the weight"
        got = f"inputs in {own.format}, weight in {weight.canonical}"
        refuse(Place("", name, writer.layout), rule, got, "Write layout 'qtensor'")
    if own.amax is None or own.factor is None:
        return {}
    factor = torch.tensor([own.factor], dtype=torch.float32)
    if sense == DIVISOR:
        amax = torch.tensor([own.amax], dtype=torch.float32)
        factor = activation_divisor(amax, None if own.scale_inv is None else factor)
    mark = "." if name.endswith(".weight") else "_"
    return {f"{module}{mark}{last}": factor.reshape(writer.factor_shape)}


def with_transforms(state: Mapping[str, Tensor], writer: Writer) -> dict[str, Tensor]:
    """Return a state dict in which the transforms of inputs are as a writer stores them.

    Raises:
        CheckpointError: the layout stores no such transforms, without which the weights are wrong.
    """
    done: dict[str, Tensor] = {}
    for name, tensor in state.items():
        module, mark, last = name.rpartition(f"{TRANSFORM}.")
        module = module.removesuffix(".")
        if not mark:
            done[name] = tensor
        elif not (writer.takes_scales if last == "scale" else writer.takes_rotations):
            what = "scales" if last == "scale" else "rotates"
            rule = f"a weight whose layer {what} its inputs needs a layout that stores this"
            fix = "Write layout 'qtensor', or quantize the model without the transform"
            refuse(Place("", name, writer.layout), rule, f"layout {writer.layout}", fix)
        elif last == "scale":
            done[_joined(module, PRE_SCALE)] = tensor
        else:
            done[_joined(module, ROTATION)] = tensor
    return done


# ---- reading


@in_memory
def apply_transforms(path: Path | Checkpoint, model: nn.Module) -> list[str]:
    """Let the layers of a model scale and rotate their inputs as a checkpoint asks for.

    These are AWQ's ``pre_quant_scale`` and online rotations of a ``transform_config``. The stored
    weights of the layers are right only together with them. ``from_pretrained`` of
    ``qtensor.integrations.transformers`` calls this itself.

    Args:
        path: a file, a folder, an index, an open file or an open checkpoint.
        model: the model with the names of the checkpoint; its ``Linear`` layers get a submodule
            ``input_transform``.

    Returns:
        The names of the layers that were changed.

    Raises:
        CheckpointError: a transform cannot be applied, or the model lacks the layer.
    """
    if not isinstance(path, Checkpoint):
        with open_checkpoint(path, accept_rotated=True) as checkpoint:
            return apply_transforms(checkpoint, model)
    modules = dict(model.named_modules())
    found = path.input_transforms
    for name in found:
        if not isinstance(modules.get(name), nn.Linear):
            rule = "inputs are scaled and rotated for linear layers of the model"
            fix = "Pass the model with the names of the checkpoint; experts cannot have transforms"
            got = type(modules[name]).__name__ if name in modules else "no such layer"
            refuse(Place(path.path, name, path.layout), rule, got, fix)
    for name, transform in found.items():
        device = next(modules[name].parameters()).device
        set_input_step(modules[name], TRANSFORM, transform.to(device))
    return list(found)


@in_memory
def calibration(path: Path | Checkpoint, layout: str | None = None) -> Calibration:
    """Return how a checkpoint says that the inputs of its layers are quantized.

    Args:
        path: a file, a folder, an index, an open file or an open checkpoint.
        layout: name of the layout; by default it is recognised.

    Returns:
        By module the format, and the factor where the file has one: ``calibration.apply(model)``
        lets a model with these names quantize its inputs. Layers whose inputs the checkpoint
        leaves in high precision are not in it.

    Raises:
        CheckpointError: a factor is missing, 0, infinite, NaN or negative; or the inputs have a
            format that is not one of ours.
    """
    if isinstance(path, Checkpoint):
        return _calibration(path)
    with open_checkpoint(path, layout, accept_rotated=True) as checkpoint:
        return _calibration(checkpoint)


def _calibration(checkpoint: Checkpoint) -> Calibration:
    found = {}
    for name, group in checkpoint.groups.items():
        own = _stored_input(checkpoint, name, group)
        if own is not None:
            found[name.removesuffix(".weight")] = own
    return Calibration(found, note=f"of {checkpoint.path}")


def _stored_input(checkpoint: Checkpoint, name: str, group: Group) -> CalibratedInput | None:
    """Return how the input of a weight is quantized; None for high precision."""
    module = name.removesuffix(".weight")
    own = _joined(module, NAME)
    if own in checkpoint:
        return own_input(checkpoint, own)
    fmt = checkpoint.reader.input_format(group)
    marks = (".", "_") if name == f"{module}.weight" else ("_",)
    senses = checkpoint.reader.input_factors
    names = {f"{module}{mark}{last}": s for mark in marks for last, s in senses.items()}
    stored = next((key for key in names if key in checkpoint), None)
    if not fmt:
        return None
    if not is_static(input_format("calibration", fmt)):
        return CalibratedInput(fmt)
    place = Place(checkpoint.path, name, checkpoint.layout)
    if stored is None:
        if checkpoint.reader.inputs_are_dynamic(group):
            return CalibratedInput(fmt)
        rule = f"inputs in {fmt} have a factor in the file"
        refuse(place, rule, "none", "Calibrate the model: qtensor.calibrate")
    value = checkpoint[stored].float().flatten()
    wrong = wrong_factor(value)
    if wrong or value.numel() != 1:
        rule = f"{stored} is one positive and finite number"
        refuse(place, rule, wrong or tuple(value.shape), "Calibrate the model: qtensor.calibrate")
    if names[stored] == DIVISOR:
        amax, factor = activation_amax(value), torch.ones(1) / value
    elif fmt == "nvfp4":
        amax, factor = nearest_amax(value, 448.0), value
    else:
        amax, factor = value * 448, value
    return CalibratedInput(fmt, amax.item(), factor.item())


def own_input(checkpoint: Checkpoint, name: str) -> CalibratedInput:
    """Return the quantization of an input that a tensor of our own layout describes."""
    try:
        text = bytes(checkpoint[name].flatten().tolist()).decode()
        own = CalibratedInput(**json.loads(text))
        InputQuantizer(own.format, own.amax, own.scale_inv)
    except (ValueError, TypeError, QTensorError) as error:
        rule = "the text of an input_quantizer has format, amax and scale_inv"
        place = Place(checkpoint.path, name, checkpoint.layout)
        refuse(place, rule, str(error), "Write the file again", error)
    return own
