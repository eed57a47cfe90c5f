"""Pairs of linear layers of one block: the outputs of the first may be inputs of the second."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from qtensor.modules.input_hook import TRANSFORM
from qtensor.weights.layers import WeightLayer


def layer_pairs(layers: Mapping[str, WeightLayer]) -> Iterator[tuple[str, str]]:
    """Yield the names of two layers whose sizes fit.

    The second has as many inputs as the first has outputs, or several times as many, where heads of
    queries share those of values. Whether it reads them must be tried.
    """
    blocks: dict[str, list[str]] = {}
    for name, layer in layers.items():
        block = re.match(r"(.*\.)?\d+\.", name)
        if layer.is_plain and block is not None:
            blocks.setdefault(block[0], []).append(name)
    for names in blocks.values():
        for first in names:
            width = layers[first].modules[0].out_features
            for second in names:
                reader = layers[second].modules[0]
                fits = reader.in_features % width == 0 and TRANSFORM not in reader._modules
                if fits and second != first:
                    yield first, second


def kind_of(*names: str) -> tuple[str, ...]:
    """Return what names of layers have in common with those of other blocks."""
    return tuple(re.sub(r"\d+", "*", name) for name in names)
