"""Carry the factors of activations and of the KV cache from one layout to another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.checkpoints.activation_factors import (
    factor_problem,
    input_tensors,
    kv_factor,
    own_input,
    wrong_factor,
)
from qtensor.checkpoints.checkpoint import Checkpoint
from qtensor.checkpoints.conversion.request import Request
from qtensor.checkpoints.errors import Place, refuse
from qtensor.checkpoints.input_transforms import PRE_SCALE, ROTATION
from qtensor.checkpoints.layout_base import DIVISOR, Writer, find_layout
from qtensor.modules.input_hook import QUANTIZER
from qtensor.quantizers import Quantizer


class NotCarried(NamedTuple):
    """Say why a tensor of the source is not in the result."""

    reason: str


class Carried(NamedTuple):
    """Say how a plain tensor is written.

    Attributes:
        name: name in the result.
        reciprocal: True if a factor becomes a divisor, or the reverse.
        shape: shape in the result, or None to keep the shape.
        value: what is written in place of the tensor, or None.
    """

    name: str
    reciprocal: bool = False
    shape: tuple[int, ...] | None = None
    value: Tensor | None = None

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the tensor as it is written."""
        if self.value is not None:
            return self.value
        if self.reciprocal:
            tensor = torch.ones((), dtype=torch.float32) / tensor.float()
        return tensor if self.shape is None else tensor.reshape(self.shape)


def carry(
    checkpoint: Checkpoint, request: Request, writer: Writer, name: str
) -> Carried | NotCarried:
    """Return how a plain tensor is carried: most as they are, factors as the target needs them."""
    module, _, last = name.rpartition(".")
    if last in (PRE_SCALE, ROTATION) and module in checkpoint.input_transforms:
        return _transform(checkpoint, request, writer, name)
    if not checkpoint.groups or not _is_factor(checkpoint, name):
        return Carried(name)
    if request.dtype is not None:
        return NotCarried("a factor of activations or of the KV cache, which plain models lack")
    problem = factor_problem(checkpoint, name)
    if problem and not (checkpoint.layout == writer.layout or writer.keeps_names):
        return NotCarried(f"{problem}; calibrate the module again")
    if last in checkpoint.reader.input_factors:
        return _input_factor(checkpoint, request, writer, name)
    if checkpoint.layout == writer.layout or writer.keeps_names:
        return Carried(name)
    if last == QUANTIZER:
        return _own_input_factor(checkpoint, request, writer, name)
    target = find_layout(writer.layout)
    for which, new in enumerate(target.kv_factors):
        old = kv_factor(name, which)
        if old is not None:
            return Carried(name.removesuffix(old) + new, shape=_one(checkpoint, writer, name))
    if last in target.factor_names:
        return Carried(name)
    return NotCarried(f"layout {writer.layout} has no {last}")


def _transform(
    checkpoint: Checkpoint, request: Request, writer: Writer, name: str
) -> Carried | NotCarried:
    """Return how a tensor is carried without which the weight of its layer is wrong."""
    scales = name.endswith(PRE_SCALE)
    if request.dtype is not None:
        return NotCarried("it is multiplied into the columns of the decoded weight")
    if not (writer.takes_scales if scales else writer.takes_rotations):
        what = "scales" if scales else "rotates"
        rule = f"a weight whose layer {what} its inputs needs a layout that stores this"
        fix = "Write layout 'qtensor', or dequantize, which undoes it in the weight"
        refuse(Place(checkpoint.path, name, writer.layout), rule, f"layout {writer.layout}", fix)
    return Carried(name)


def _is_factor(checkpoint: Checkpoint, name: str) -> bool:
    last = name.rpartition(".")[2]
    if checkpoint.is_factor(name) or last in checkpoint.reader.input_factors:
        return True
    return any(kv_factor(name, which) is not None for which in range(2))


def _input_factor(
    checkpoint: Checkpoint, request: Request, writer: Writer, name: str
) -> Carried | NotCarried:
    """Return how a factor of activations is carried: it belongs to the format of its weight."""
    module, _, last = name.rpartition(".")
    group = checkpoint.groups.get(f"{module}.weight")
    if group is None or not isinstance(group.target, Quantizer):
        before = after = ""
    else:
        before = after = group.target.format
        wanted = request.quantizer
        if wanted is not None and request.chosen(group.name, False, True):
            after = wanted.format
    if _activation(before) != _activation(after):
        return NotCarried(f"it was calibrated for {before} and not for {after}; calibrate again")
    if checkpoint.layout == writer.layout or writer.keeps_names:
        return Carried(name)
    factors = writer.input_factors
    new, sense = factors.get(after, factors.get("", ("", "")))
    if not new:
        return NotCarried(f"layout {writer.layout} stores no factor of activations for {after}")
    old_sense = checkpoint.reader.input_factors[last]
    renamed = f"{module}.{new}" if module else new
    shape = _one(checkpoint, writer, name)
    found = Carried(renamed, (old_sense == DIVISOR) != (sense == DIVISOR), shape)
    if wrong_factor(found.apply(checkpoint[name])):
        return NotCarried(f"the reciprocal of {checkpoint[name].item()} is not a finite float32")
    return found


def _own_input_factor(
    checkpoint: Checkpoint, request: Request, writer: Writer, name: str
) -> Carried | NotCarried:
    """Return how a text of our layout about the input of a weight is written in another one."""
    weight = f"{name.removesuffix(QUANTIZER)}weight"
    group, own = checkpoint.groups.get(weight), own_input(checkpoint, name)
    if group is None or not isinstance(group.target, Quantizer):
        return NotCarried("no quantized weight lies beside it")
    wanted = request.quantizer
    chosen = wanted is not None and request.chosen(weight, False, True)
    after = wanted if chosen and wanted is not None else group.target
    if _activation(after.format) != _activation(group.target.format):
        return NotCarried(f"it was calibrated for {group.target.format}; calibrate again")
    stored = input_tensors(writer, weight, group.target, own)
    writer.input_formats[weight.removesuffix(".weight")] = own.format
    if not stored:
        return NotCarried("each input has factors of its own, which the config may say")
    ((new, value),) = stored.items()
    return Carried(new, value=value)


def _activation(fmt: str) -> str:
    """Return what a factor of activations scales: all FP8 formats have the same."""
    return "fp8" if fmt.startswith("fp8") else fmt


def _one(checkpoint: Checkpoint, writer: Writer, name: str) -> tuple[int, ...] | None:
    """Return the target's shape of a factor of one element."""
    return writer.factor_shape if checkpoint[name].numel() == 1 else None
