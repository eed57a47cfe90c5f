"""Names of stored tensors that scale or rotate the inputs of layers."""

from __future__ import annotations

from qtensor.checkpoints.source import Source
from qtensor.modules.input_transform import InputTransform

ROTATED = "accept_rotated"
"""Option of ``open``: read weights that are right only for rotated inputs."""
ROTATION = "input_rotation"
"""Last name part of the size of the blocks of a layer's input that are rotated, in our layout."""
PRE_SCALE = "pre_quant_scale"
"""Last name part of the factors of the channels of a layer's input, (K,)."""


def stored_transforms(source: Source) -> dict[str, InputTransform]:
    """Return the transforms of inputs that tensors of a checkpoint describe, by module."""
    found: dict[str, InputTransform] = {}
    if source.read is None:
        return found
    scales, rotations = (_by_module(source, last) for last in (PRE_SCALE, ROTATION))
    for module in dict.fromkeys((*scales, *rotations)):
        scale = source.read(scales[module]).clone() if module in scales else None
        size = int(source.read(rotations[module])) if module in rotations else 0
        found[module] = InputTransform(scale, size)
    return found


def _by_module(source: Source, last: str) -> dict[str, str]:
    names = (name for name in source.tensors if name.endswith(f".{last}"))
    return {name.removesuffix(f".{last}"): name for name in names}
