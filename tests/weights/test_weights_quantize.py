"""``quantize_``: the weights of a model become quantized parameters, or the model is unchanged."""

import pytest
import torch
from torch import nn

import qtensor


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 32))


@pytest.mark.parametrize("fmt", [f for f in qtensor.formats() if f != "fp8_delayed"])
def test_every_format(fmt):
    model = make_model()
    weight, x = model[0].weight.detach().clone(), torch.randn(3, 64)
    done = qtensor.quantize_(model, fmt)
    assert [report.name for report in done.swapped] == ["0", "2", "3"]
    assert not done.skipped
    expected = qtensor.quantize(weight, fmt)
    pairs = zip(model[0].weight.buffers(), expected.buffers(), strict=True)
    assert all(torch.equal(stored, buffer) for stored, buffer in pairs)
    assert not model[0].weight.requires_grad
    assert type(model[0]) is nn.Linear
    plain = nn.functional.linear(x, expected.dequantize(), model[0].bias)
    torch.testing.assert_close(model[0](x), plain, rtol=1e-5, atol=1e-5)


def test_formats_by_pattern():
    model = make_model()
    done = qtensor.quantize_(
        model, {"0": "nvfp4", "2": None, "*": qtensor.quantizer("mxfp8", columnwise=True)}
    )
    assert model[0].weight._quantizer.canonical == "nvfp4"
    assert type(model[2].weight) is nn.Parameter
    assert model[3].weight._quantizer.canonical == "mxfp8(columnwise=True)"
    assert [(r.name, r.note) for r in done.skipped] == [("2", "stays in high precision")]
    assert done.swapped[0].note == "nvfp4, 4.50 bits a value"


def test_what_stays():
    model = make_model()
    tied = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 32, bias=False))
    tied[1].weight = tied[0].weight
    own = qtensor.LayerNormLinear(64, 64)
    odd = nn.modules.linear.NonDynamicallyQuantizableLinear(64, 64)
    holder = nn.ModuleDict({"model": model, "tied": tied, "own": own, "odd": odd})
    model[3].weight = nn.Parameter(qtensor.quantize(model[3].weight.detach(), "mxfp4"))
    done = qtensor.quantize_(holder, "nvfp4", lambda module, name: name != "model.2")
    assert [r.name for r in done.swapped] == ["model.0"]
    notes = {r.name: r.note for r in done.skipped}
    assert notes["model.2"] == "filtered"
    assert notes["model.3"] == "its weight is quantized already: mxfp4"
    assert notes["tied.1"] == "its weight is tied: tied.0.weight, tied.1.weight"
    assert "convert_ with quantized_params" in notes["own"]
    assert "a subclass of nn.Linear" in notes["odd"]


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("nvfp5", "Choose one of"),
        ("fp8_delayed", "no earlier steps"),
        (7, "format"),
        ({"1": "nvfp4"}, "must match a layer"),
        ({"0": "nvfp4", "nothing*": "mxfp8"}, r"'nothing\*'"),
        ({"0": "nvfp4", "2": "nvfp5"}, "nvfp5"),
    ],
)
def test_bad_formats_change_nothing(format, message):
    model = make_model()
    with pytest.raises(qtensor.QTensorError, match=message):
        qtensor.quantize_(model, format)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_lazy_layer_is_skipped():
    model = nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 32))
    (skipped,) = qtensor.quantize_(model, "nvfp4").skipped
    assert skipped.features == "? -> ?"
    assert "run the model on an input first" in skipped.note
    assert model(torch.randn(2, 16)).shape == (2, 32)


def test_bad_models():
    with pytest.raises(qtensor.ArgumentTypeError, match="model must be"):
        qtensor.quantize_("model", "nvfp4")
    with pytest.raises(qtensor.ArgumentTypeError, match="filter_fn"):
        qtensor.quantize_(make_model(), "nvfp4", "0")
    with pytest.raises(qtensor.QTensorError, match=r"needs a layer"):
        qtensor.quantize_(nn.Sequential(nn.ReLU()), "nvfp4")
    with pytest.raises(qtensor.QTensorError, match="filtered"):
        qtensor.quantize_(make_model(), "nvfp4", lambda module, name: False)
    with pytest.raises(qtensor.QTensorError, match=r"none, and layers of kinds=\['convolution'\]"):
        qtensor.quantize_(nn.Sequential(nn.Conv2d(32, 16, 3)), "nvfp4")
    prepared = make_model()
    qtensor.prepare_qat_(prepared, "nvfp4")
    with pytest.raises(qtensor.QTensorError, match="prepare_qat_ has prepared it"):
        qtensor.quantize_(prepared, "nvfp4")


def test_no_format_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    with pytest.raises(qtensor.QTensorError, match="a format must be named"):
        qtensor.quantize_(model, None)
    assert type(model[0].weight) is torch.nn.Parameter
