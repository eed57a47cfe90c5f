"""The state of delayed scaling when its module moves or changes its dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from formats import assert_same_bytes
from torch import nn

import qtensor
from qtensor.recipes import DelayedScaling


def trained(layer: qtensor.Linear) -> qtensor.Linear:
    for _ in range(2):
        layer(torch.randn(16, 32)).sum().backward()
    return layer


MOVES = {
    "bfloat16": lambda layer: layer.bfloat16(),
    "double": lambda layer: layer.double(),
    "to_empty": lambda layer: layer.to_empty(device="cpu"),
    "share_memory": lambda layer: layer.share_memory(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_values_stay(move: Callable[[nn.Module], nn.Module]):
    """Not rounded to the parameters' dtype, and not left to chance."""
    layer = trained(qtensor.Linear(32, 16, recipe=DelayedScaling()))
    state = layer._states["weight"].delayed
    before = [t.clone() for t in (state.scale, state.history, state.cell)]
    assert state.history.any()
    move(layer)
    for old, new in zip(before, (state.scale, state.history, state.cell), strict=True):
        assert_same_bytes(new, old)


def test_a_layer_that_was_made_without_data():
    layer = qtensor.Linear(32, 16, recipe=DelayedScaling(), device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    state = layer._states["weight"].delayed
    assert_same_bytes(state.scale, torch.ones(3))
    assert not state.history.any()
    assert not state.cell.any()
    trained(layer)


def test_by_way_of_meta():
    """The state, which meta could not hold, stays where it was."""
    layer = trained(qtensor.Linear(32, 16, recipe=DelayedScaling()))
    state = layer._states["weight"].delayed
    scale = state.scale.clone()
    layer.to("meta").to_empty(device="cpu")
    assert_same_bytes(state.scale, scale)
    layer.reset_parameters()
    trained(layer)
