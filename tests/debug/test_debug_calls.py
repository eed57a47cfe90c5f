"""``qtensor.debug.record``: layers that run several times in a step."""

from __future__ import annotations

import json
import math

import pytest
import torch
from debug_cases import inputs, plain_model
from torch import nn

import qtensor
from qtensor.debug.log import ROLES


def test_columns_are_counted_over_all_calls_of_a_step():
    """A column is dead or an outlier by its maximum over the calls, not by that of one call."""
    first, second = inputs(seed=1), inputs(seed=2).bfloat16().float()
    first[:, :10], second[:, 5:20] = 0, 0
    first[:, 30], second[:, 31] = 1000, 1000
    second[0, 5] = math.nan
    model = plain_model(1)
    with qtensor.debug.record(model, roles=["input"], count="manual") as log:
        for x in (first, second):
            model(x)
        log.step()
        model(first)
    found = [(r.calls, r.dead_columns, r.outlier_channels, r.nan) for r in log.records]
    # Columns 6 to 9 are dead in both calls of step 0; column 5 has a NaN in one of them.
    assert found == [(2, 4, 2, 1), (1, 10, 1, 0)]


def test_columns_of_calls_with_different_widths():
    """A module with quantized parameters takes any input: here of 32 and of 64 columns."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(qtensor.quantize(torch.ones(32, 32), "mxfp8"))

        def forward(self, x):
            return x * 2

    model, wide, narrow = Scaled(), torch.ones(4, 64), torch.ones(4, 32, dtype=torch.bfloat16)
    wide[:, 10], narrow[:, 10:12], wide[:, 50:] = 0, 0, 0
    with qtensor.debug.record(model, roles=["input"], count="manual") as log:
        for x in (narrow, wide, narrow):
            model(x)
    record = log.records[0]
    assert (record.columns, record.dead_columns, record.shape) == (64, 15, (4, 32))


def test_a_weight_that_is_not_a_parameter():
    """FSDP1 keeps parameters in a flat one, and sets views of it as plain attributes."""
    model = plain_model(2)
    for layer in model:
        weight = layer.weight.detach().clone()
        del layer.weight
        layer.weight = weight
    with qtensor.debug.record(model) as log:
        model(inputs().requires_grad_()).sum().backward()
    found = {(r.layer, r.role) for r in log.records}
    assert found == {(name, role) for name in "01" for role in ROLES[:5]}


class Loop(nn.Module):
    """Runs two layers three times; a NaN enters between them in the second round."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        for i in range(3):
            x = self.a(x)
            if i == 1:
                x = torch.cat([x[:-1], x[-1:] * math.nan])
            x = self.b(x)
        return x


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_first_nan_of_layers_that_run_several_times(compiler, tmp_path):
    """The order of the calls counts, not the order in which the layers ran first."""
    model, path = Loop(), tmp_path / "log.jsonl"
    call = model if compiler is None else torch.compile(model, backend=compiler, fullgraph=True)
    with qtensor.debug.record(call, jsonl=path) as log:
        call(inputs())
        assert (log.first_not_finite.layer, log.first_not_finite.role) == ("b", "input")
        call(inputs())
    first = log.first_not_finite
    # Each round has input and output of a and b; the weights are recorded in the first round.
    assert (first.step, first.layer, first.role, first.not_finite_at) == (0, "b", "input", 8)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    places = {(r["layer"], r["role"]): r["not_finite_at"] for r in rows if r["step"] == 1}
    assert places == {
        ("a", "input"): 10,
        ("a", "weight"): -1,
        ("a", "output"): 11,
        ("b", "input"): 8,
        ("b", "weight"): -1,
        ("b", "output"): 9,
    }


def test_a_gradient_before_the_input_of_the_next_microbatch():
    """A gradient of the first microbatch is infinite, and then an input of the second."""
    model = plain_model(3)
    with qtensor.debug.record(model, count="manual") as log:
        hidden = model[1](model[0](inputs()))
        hidden.register_hook(lambda grad: grad * math.inf)
        model[2](hidden).sum().backward()
        model(inputs() * math.inf).sum().backward()
    first = log.first_not_finite
    assert (first.layer, first.role, first.calls) == ("1", "grad_output", 2)
