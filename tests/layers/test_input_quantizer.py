"""Layers whose inputs are quantized with a factor that does not depend on the input."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import qtensor
from qtensor.modules.input_quantizer import InputQuantizer, set_input_quantizer
from tests.helpers.checkpoint_cases import assert_same_bytes

AMAX = 4.5


def layer(weight: str | None, inputs: str, amax: float | None = AMAX) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(64, 32)
    if weight is not None:
        values = qtensor.quantize(made.weight.detach(), weight)
        made.weight = nn.Parameter(values, requires_grad=False)
    set_input_quantizer(made, InputQuantizer(inputs, amax))
    return made


def rows(scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(9, 64, generator=generator) * scale


def test_fp8_codes_are_those_of_the_factor():
    """The factor is one that no reciprocal gives: codes by fl(1 / f), values by f itself."""
    factor = torch.tensor([0.0101])
    made = InputQuantizer("fp8", AMAX, factor.item())(rows())
    codes = (rows() * factor.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(made.buffers()[0], codes.view(torch.uint8))
    assert torch.equal(made.buffers()[1], factor)
    assert torch.equal(made.dequantize(), codes.float() * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_codes_are_those_of_a_tensor_with_the_amax(dtype):
    """A further row with the amax makes it the maximum of the whole tensor."""
    x = rows(0.5).to(dtype)
    top = torch.zeros(1, 64, dtype=dtype)
    top[0, 0] = AMAX
    whole = qtensor.quantize(torch.cat([x, top]), "nvfp4")
    made = InputQuantizer("nvfp4", AMAX)(x)
    assert torch.equal(made.buffers()[0], whole.buffers()[0][:-1])
    assert torch.equal(made.dequantize(), whole.dequantize()[:-1])
    other = InputQuantizer("nvfp4", AMAX / 3)(x)
    assert not torch.equal(made.dequantize(), other.dequantize())


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_larger_values_saturate(fmt):
    x = torch.tensor([[1e30, -1e30, 1.0, 100.0] * 16])
    values = InputQuantizer(fmt, AMAX)(x).dequantize()
    assert values.abs().amax().item() == pytest.approx(AMAX, rel=1e-6)
    assert values.isfinite().all()


CELLS = [
    ("fp8", "fp8"),
    ("fp8_rowwise", "fp8"),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "fp8"),
    (None, "nvfp4"),
]
DYNAMIC = [("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"), ("fp8", "fp8_rowwise"), ("nvfp4", "nvfp4")]


@pytest.mark.parametrize(
    ("weight", "inputs", "amax"),
    [(*cell, AMAX) for cell in CELLS] + [(*cell, None) for cell in DYNAMIC],
)
def test_a_layer_multiplies_the_codes_of_its_input(weight, inputs, amax):
    made = layer(weight, inputs, amax)
    own = made.input_quantizer(rows())
    plain = F.linear(own, made.weight, made.bias)
    with torch.no_grad():
        assert_same_bytes(made(rows()), plain.detach())
        assert_same_bytes(made(input=rows()), plain.detach())
    values = F.linear(own.dequantize().double(), _values(made.weight), made.bias.double())
    assert torch.allclose(plain.double(), values, rtol=1e-5, atol=1e-5)


def _values(weight: torch.Tensor) -> torch.Tensor:
    plain = weight.dequantize() if hasattr(weight, "quantizer") else weight
    return plain.detach().double()


@pytest.mark.parametrize(("weight", "inputs"), CELLS)
def test_compiled_code_gives_the_bytes_of_eager(weight, inputs):
    made = layer(weight, inputs)
    torch.compiler.reset()  # graphs of other tests count towards the limit of nn.Linear
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(made, fullgraph=True, backend=graphs, dynamic=True)
    for count in (9, 5):
        with torch.no_grad():
            x = rows()[:count].clone()  # a view would bring the size of its base into the graph
            assert_same_bytes(compiled(x), made(x))
    assert graphs.frame_count == 1


def test_compiled_code_sees_steps_that_come_and_go():
    """torch does not check which hooks a module has, and would run the old graph."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(3, 64)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    plain = compiled(x)
    calibration = qtensor.calibrate(model, [x], "mxfp4")
    calibration.apply(model)
    assert not torch.equal(model(x), plain)
    assert torch.equal(compiled(x), model(x))
    qtensor.Calibration.remove(model)
    assert torch.equal(compiled(x), plain)
    qtensor.rotate_(model, [x])
    torch.testing.assert_close(compiled(x), plain)


def test_a_module_of_qtensor():
    recipe = qtensor.recipes.Float8CurrentScaling()
    made = qtensor.Linear(64, 32, recipe=recipe, quantized_params=True)
    own = InputQuantizer("fp8", AMAX)
    wanted = made(own(rows()))
    set_input_quantizer(made, own)
    assert_same_bytes(made(rows()), wanted)
    assert not torch.equal(wanted, made.forward(rows()))


def test_gradients_pass_through():
    x = rows().requires_grad_()
    made = layer("nvfp4", "nvfp4")
    made(x).sum().backward()
    ones = torch.ones(9, 32)
    assert torch.allclose(x.grad, ones @ made.weight.dequantize(), rtol=1e-5, atol=1e-5)


def test_a_factor_keeps_its_dtype_and_follows_its_layer():
    made = layer("fp8", "fp8")
    factor = made.input_quantizer.scale_inv.clone()
    assert torch.equal(made.to(torch.bfloat16).input_quantizer.scale_inv, factor)
    assert copy.deepcopy(made).to("meta").input_quantizer.scale_inv.is_meta
    x = rows().bfloat16()
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other(x), made(x))
        set_input_quantizer(other, None)
        assert "input_quantizer" not in dict(other.named_children())
        assert not other._forward_pre_hooks
        assert not torch.equal(other(x), made(x))


def test_a_result_does_not_share_the_factor_of_the_layer():
    made = InputQuantizer("fp8", AMAX)
    x = made(rows())
    x.mul_(3)
    assert made.scale_inv.item() == pytest.approx(AMAX / 448)


@pytest.mark.parametrize(
    ("format", "amax", "scale_inv", "message"),
    [
        ("mxfp8", 1.0, None, "factor is for"),
        ("fp8_delayed", None, None, "rowwise, to nearest"),
        ("nvfp4(columnwise=True)", None, None, "rowwise, to nearest"),
        ("fp8", 0.0, None, "positive and finite"),
        ("fp8", 1.0, float("inf"), "positive and finite"),
        ("nvfp4", float("nan"), None, "positive and finite"),
        ("nope", None, None, "nope"),
    ],
)
def test_illegal_factors(format, amax, scale_inv, message):
    with pytest.raises(qtensor.QTensorError, match=message):
        InputQuantizer(format, amax, scale_inv)
