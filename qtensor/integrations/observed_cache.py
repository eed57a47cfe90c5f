"""A cache of transformers that observes keys and values, and keeps none."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicLayer,
    get_layer_types_and_kwargs,
)

from qtensor.integrations.caches import KINDS


class ObservedLayer(DynamicLayer):
    """Observe the keys and values of one layer: an empty cache before and after each call."""

    def __init__(self, index: int, amaxes: dict[int, tuple[float, float]]) -> None:
        """Write the largest magnitudes to ``amaxes[index]``."""
        super().__init__()
        self._index, self._amaxes = index, amaxes

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a prompt (B, heads, T, size) as they are."""
        before = self._amaxes.get(self._index, (0.0, 0.0))
        pair = zip(before, (key_states, value_states), strict=True)
        found = [_larger(old, rows.abs().amax().item()) for old, rows in pair]
        self._amaxes[self._index] = (found[0], found[1])
        return key_states, value_states


def _larger(a: float, b: float) -> float:
    """Return the larger number; NaN stays."""
    return b if not b <= a else a


class ObservedCache(Cache):
    """A cache for one run of a model."""

    def __init__(self, config: Any, amaxes: dict[int, tuple[float, float]]) -> None:
        """Observe the attention layers of a model with this config."""
        text = config.get_text_config(decoder=True)
        layers = [
            ObservedLayer(index, amaxes)
            if kind in KINDS
            else DYNAMIC_LAYER_TYPE_MAPPING[kind](**own)
            for index, (kind, own) in enumerate(zip(*get_layer_types_and_kwargs(text), strict=True))
        ]
        super().__init__(layers=layers)
