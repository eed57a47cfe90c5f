"""``qtensor.debug.compare``: the first layer that differs, errors by layer, and logits."""

from __future__ import annotations

import math

import pytest
import torch
from debug_cases import inputs, plain_model
from torch import nn

import qtensor


def test_equal_models():
    result = qtensor.debug.compare(plain_model(), plain_model(), inputs())
    assert result.first is None
    assert [layer.layer for layer in result.layers] == ["0", "1", "2"]
    assert (result.top1, result.kl, result.output.sqnr_db) == (1.0, 0.0, math.inf)
    assert "equal: all outputs have equal values" in str(result)


def test_the_first_layer_that_differs():
    """Layer 1 has another weight; the errors by their definitions."""
    a, b = plain_model(), plain_model()
    weight = qtensor.quantize(b[1].weight.detach(), "nvfp4")
    b[1].weight = nn.Parameter(weight)
    x = inputs()
    result = qtensor.debug.compare(a, b, x)
    assert result.first.layer == "1"
    assert [layer.equal for layer in result.layers] == [True, False, False]
    with torch.no_grad():
        ours, theirs = a[1](a[0](x)), b[1](b[0](x))
        logits, others = a(x).double(), b(x).double()
    error = (ours - theirs).double().square().sum()
    want = 10 * math.log10(ours.double().square().sum() / error)
    assert result.first.sqnr_db == pytest.approx(want, rel=1e-6)
    assert result.first.max_abs_error == pytest.approx((ours - theirs).abs().max().item(), rel=1e-6)
    p, q = logits.softmax(-1), others.softmax(-1)
    assert result.kl == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-6)
    assert result.top1 == (logits.argmax(-1) == others.argmax(-1)).double().mean().item()
    assert "first layer that differs: 1" in str(result)
    assert result.to_dict()["equal"] == [True, False, False]


def test_a_sequence_of_operations_is_one_layer():
    """It refuses hooks on its operations, which are not called one by one."""
    models = []
    for recipe in (None, qtensor.recipes.MXFP8BlockScaling()):
        torch.manual_seed(0)
        block = qtensor.ops.Sequential(qtensor.ops.Linear(64, 64, recipe=recipe), nn.Linear(64, 8))
        models.append(nn.Sequential(block, nn.ReLU()))
    result = qtensor.debug.compare(*models, inputs())
    assert [layer.layer for layer in result.layers] == ["0.1", "0", "1"]
    assert result.first.layer == "0.1"


class Tied(nn.Module):
    """Calls a layer twice, changes its output in place, and returns logits by name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.drop = nn.Linear(64, 64), nn.Dropout(0.5)
        self.unused = nn.Linear(2, 2)

    def forward(self, x, scale=1.0):
        hidden = self.layer(x).relu_() * scale
        return {"other": x, "logits": self.layer(self.drop(hidden))}


def test_calls_batches_and_dropout():
    """A layer that runs twice; batches of each kind; both models drop the same values."""
    batches = [inputs(8), (inputs(4), 2.0), {"x": inputs(2), "scale": 3.0}]
    model = Tied()
    result = qtensor.debug.compare(model, Tied(), batches)
    assert result.first is None
    assert {layer.layer: layer.calls for layer in result.layers} == {"layer": 6, "drop": 3}
    assert (result.missing, result.unused) == ((), ("unused",))
    assert result.equal
    assert "equal: all outputs have equal values\n1 layers did not run: unused" in str(result)
    assert result.top1 == 1.0
    assert not model.layer._forward_hooks


def test_layers_of_one_model_only():
    """One that only one model runs, and one that only one model has."""
    model, other = Tied(), Tied()
    other.layer = nn.Sequential(other.layer)
    result = qtensor.debug.compare(model, other, [inputs(8)])
    assert result.missing == ("layer", "layer.0")
    assert result.unused == ("unused",)
    assert not result.equal
    assert "equal:" not in str(result)
    skipping = Tied()
    skipping.forward = lambda x: skipping.layer(x)
    result = qtensor.debug.compare(model, skipping, [inputs(8)])
    assert result.missing == ("drop",)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_models():
    a, b = plain_model(), plain_model()
    with torch.no_grad():
        b[2].bias += 1
    call = torch.compile(b, backend="aot_eager")
    call(inputs())
    result = qtensor.debug.compare(a, call, inputs())
    assert result.first.layer == "2"
    assert result.first.max_abs_error == pytest.approx(1, rel=1e-5)


def test_hooks_are_removed_after_an_exception():
    a, b = plain_model(), plain_model()
    b[2] = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        qtensor.debug.compare(a, b, inputs())
    assert not any(module._forward_hooks for module in [*a.modules(), *b.modules()])


def test_outputs_of_other_shapes_and_values():
    a, b = plain_model(1), nn.Sequential(nn.Linear(64, 8))
    result = qtensor.debug.compare(a, b, inputs())
    assert result.first.note == "shapes differ: (32, 64) and (32, 8)"
    assert math.isnan(result.top1)
    b = plain_model(1)
    with torch.no_grad():
        b[0].bias[0] = math.nan
    assert qtensor.debug.compare(a, b, inputs()).first.not_finite == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "there must be an input; got an empty list"),
        ((["text"],), "an input must be a tensor, a tuple .* got str"),
        ((inputs(), "x.*"), r"must match a module of both models; got 'x\.\*'\. .* are: 0, 1, 2\."),
    ],
)
def test_wrong_calls(arguments, message):
    with pytest.raises(qtensor.QTensorError, match=message):
        qtensor.debug.compare(plain_model(), plain_model(), *arguments)


def test_models_without_a_common_layer():
    named = nn.ModuleDict({"first": nn.Linear(64, 64)})
    with pytest.raises(qtensor.QTensorError, match="layers of the same name; got none"):
        qtensor.debug.compare(plain_model(), named, inputs())
    with pytest.raises(qtensor.QTensorError, match=r"must be torch\.nn\.Module; got function"):
        qtensor.debug.compare(plain_model(), lambda x: x, inputs())
