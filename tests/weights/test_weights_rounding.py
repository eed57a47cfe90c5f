"""``quantize_`` with calibration: errors that later columns of a weight make up for."""

import copy

import numpy as np
import pytest
import torch
from oracle.elements import ELEMENTS, encode
from rounding_cases import (
    FORMATS,
    OPTIONS,
    Block,
    assert_same_bytes,
    block_of,
    make_inputs,
    named_buffers,
    rounded,
    stored_factors,
)
from torch import nn

import qtensor
from qtensor.weights.calibration import groups, survey
from qtensor.weights.compensation import inverse_factor
from qtensor.weights.layers import WeightLayer
from qtensor.weights.rounding import ROUNDINGS

every_format = pytest.mark.parametrize("fmt", [*FORMATS, *OPTIONS])
with_inputs = [name for name, rounding in ROUNDINGS.items() if rounding.needs_inputs]
chosen = [name for name, rounding in ROUNDINGS.items() if rounding.chooses]


def layer_of(columns, rows=48, dtype=torch.float32):
    return nn.Linear(columns, rows, bias=False, dtype=dtype)


def output_error(weight, layer, inputs):
    """Squared error of a layer's outputs, in float64."""
    difference = (weight.dequantize() - layer.weight).detach().double()
    return sum(float((x.double() @ difference.t()).square().sum()) for x in inputs)


@every_format
def test_compensation_lowers_the_error_of_outputs(fmt):
    model, unseen = Block(), make_inputs(seed=2)
    models = {name: rounded(model, fmt, name) for name in ("nearest", "gptq", "gptq_mse")}
    for name in ("q", "k"):
        layer = model.get_submodule(name)
        errors = {
            rounding: output_error(done.get_submodule(name).weight, layer, unseen)
            for rounding, done in models.items()
        }
        assert errors["gptq"] < 0.7 * errors["nearest"]
        assert errors["gptq_mse"] < 0.7 * errors["nearest"]


@every_format
@pytest.mark.parametrize("rounding", chosen)
def test_values_are_on_the_grid(fmt, rounding):
    """The values divided by the stored factors are values of the element, and have the codes."""
    model = rounded(Block(), fmt, rounding)
    for layer in (model.q, model.k, model.out):
        weight = layer.weight
        assert type(weight.data) is weight._quantizer.tensor_cls
        assert not weight.requires_grad
        element = ELEMENTS[weight._quantizer.element.name]
        values = weight.dequantize().double().numpy()
        elements = values / decode_factors(weight)
        codes = encode(elements.astype(np.float32), element)
        # One float32 rounding of a product, and one of its quotient: far below a step of a code.
        np.testing.assert_allclose(element.values[codes], elements, rtol=2e-6)


def decode_factors(weight):
    """The factor of each value, float64 (M, K), from the stored buffers by the format's rule."""
    height, width = block_of(weight)
    factors = stored_factors(weight)
    if weight._quantizer.spec.scale == "e8m0":
        decoded = 2.0 ** (factors.double() - 127)
    elif weight._quantizer.spec.scale == "e4m3":
        outer = named_buffers(weight)["_amax_rowwise"] / (6 * weight._quantizer.e4m3_max)
        decoded = factors.contiguous().view(torch.float8_e4m3fn).double() * outer[:, None]
    else:
        decoded = factors.double()
    spread = decoded.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return np.where(
        (spread := spread[: weight.shape[0], : weight.shape[1]].numpy()) == 0, 1.0, spread
    )


@pytest.mark.parametrize("fmt", FORMATS)
def test_save_and_load(fmt, tmp_path):
    model = rounded(Block(), fmt, "gptq_mse")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = Block()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), assign=True)
    assert_same_bytes(again.q.weight, model.q.weight)
    qtensor.checkpoints.save({"q": model.q.weight}, str(tmp_path / "own"), layout="qtensor")
    loaded = qtensor.checkpoints.load_state_dict(str(tmp_path / "own"))
    assert_same_bytes(loaded["q"], model.q.weight)


@pytest.mark.parametrize("fmt", [f for f in OPTIONS if "columnwise" in f])
def test_columnwise_data_follow(fmt):
    weight = rounded(Block(), fmt, "gptq").q.weight
    columnwise = weight._quantizer.with_usage(rowwise=False, columnwise=True)
    named = named_buffers(weight)
    only = columnwise.assemble(
        [named[slot.name] for slot in columnwise.slots], weight.shape, weight.dtype
    )
    assert torch.equal(only.dequantize(), weight.dequantize())


@every_format
def test_uncorrelated_inputs_give_nearest(fmt):
    """If the products of different channels are zero, no column can make up for another one."""
    torch.manual_seed(0)
    layer = layer_of(200, rows=40)
    with torch.no_grad():
        layer.weight[3, 17] = 9.0
    nearest, gptq = copy.deepcopy(layer), copy.deepcopy(layer)
    qtensor.quantize_(nearest, fmt)
    qtensor.quantize_(gptq, fmt, rounding="gptq", calibration=[torch.eye(200)])
    assert_same_bytes(nearest.weight, gptq.weight)
    ordered = copy.deepcopy(layer)
    rounding = qtensor.Rounding(compensate=True, activation_order=True)
    inputs = [torch.diag(1.0 + torch.rand(200))]
    qtensor.quantize_(ordered, fmt, rounding=rounding, calibration=inputs)
    assert_same_bytes(nearest.weight, ordered.weight)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rounding", with_inputs)
def test_the_same_bytes_in_every_run(fmt, rounding):
    model = Block()
    first, second = rounded(model, fmt, rounding), rounded(model, fmt, rounding)
    for name in ("q", "k", "out"):
        assert_same_bytes(first.get_submodule(name).weight, second.get_submodule(name).weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    layer = layer_of(64, dtype=dtype)
    weight = layer.weight.detach().clone()
    inputs = [torch.randn(99, 64, dtype=dtype)]
    qtensor.quantize_(layer, "nvfp4", rounding="gptq_mse", calibration=inputs)
    assert layer.weight.dtype == dtype
    assert float((layer.weight.dequantize() - weight).norm() / weight.norm()) < 0.25


# ---- calibration
# -------------------------------------------------------------------------------------------------


def test_layers_that_share_inputs():
    """One Hessian serves q and k; the survey counts rows and squares without padding."""
    model, batches = Block().eval(), make_inputs()
    layers = {name: WeightLayer((model.get_submodule(name),)) for name in ("out", "k", "q")}
    found = survey(model, layers, batches)
    assert groups(found) == [("q", "k"), ("out",)]
    assert found["q"].rows == [2 * 4 * 64]
    expected = torch.cat(batches).flatten(0, 1).double().square().sum(0)
    torch.testing.assert_close(found["q"].squares, [expected])


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = layer_of(72)

    def forward(self, x, attention_mask=None):
        return self.layer(x)


def test_kinds_of_inputs():
    """Tensors, tuples and dicts mean the same; padding does not count."""
    model, inputs = Masked(), make_inputs()
    expected = rounded(model, "mxfp4", "gptq").layer.weight
    for kind in ([(x,) for x in inputs], ({"x": x} for x in inputs)):
        assert_same_bytes(rounded(model, "mxfp4", "gptq", calibration=kind).layer.weight, expected)
    padded = []
    for x in inputs:
        mask = torch.ones(4, 70, dtype=torch.int64)
        mask[:, 64:] = 0
        longer = torch.cat((x, 100 * torch.randn(4, 6, 72)), 1)
        padded.append({"x": longer, "attention_mask": mask})
    assert_same_bytes(rounded(model, "mxfp4", "gptq", calibration=padded).layer.weight, expected)


def test_inputs_are_those_with_earlier_layers_quantized():
    """The second layer is compensated for what the quantized first layer gives it."""
    model = nn.Sequential(nn.Linear(72, 64, bias=False), nn.Linear(64, 48, bias=False))
    done = rounded(model, "mxfp4", "gptq")
    with torch.no_grad():
        inner = [done[0](x) for x in make_inputs()]
    alone = copy.deepcopy(model[1])
    qtensor.quantize_(alone, "mxfp4", rounding="gptq", calibration=inner)
    assert_same_bytes(done[1].weight, alone.weight)


def test_a_compiled_model_is_calibrated_in_eager_code():
    model = Block()
    expected = rounded(model, "mxfp4", "gptq").q.weight
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    with torch.no_grad():
        compiled(make_inputs()[0])
    qtensor.quantize_(compiled, "mxfp4", rounding="gptq", calibration=make_inputs())
    assert_same_bytes(compiled.q.weight, expected)


def test_a_run_that_was_interrupted_goes_on():
    """Finished layers are quantized, the others are unchanged, and a second call does the rest."""
    model, whole = Block(), Block()
    whole.load_state_dict(model.state_dict())
    qtensor.quantize_(whole, "nvfp4", rounding="gptq", calibration=make_inputs())
    own = model.k.weight

    def stop(done, total, name):
        assert (done, total, name) == (1, 3, "q")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qtensor.quantize_(model, "nvfp4", rounding="gptq", calibration=make_inputs(), progress=stop)
    assert_same_bytes(model.q.weight, whole.q.weight)
    assert model.k.weight is own
    steps = []
    qtensor.quantize_(
        model,
        "nvfp4",
        rounding="gptq",
        calibration=make_inputs(),
        progress=lambda *step: steps.append(step),
    )
    assert steps == [(1, 2, "k"), (2, 2, "out")]
    for name in ("q", "k", "out"):
        assert_same_bytes(model.get_submodule(name).weight, whole.get_submodule(name).weight)
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert model.training


def test_the_report():
    done = qtensor.quantize_(
        Block(), {"q": "nvfp4", "*": None}, rounding="weighted_mse", calibration=make_inputs()
    )
    assert "with weighted_mse" in done.title
    assert [r.name for r in done.swapped] == ["q"]
    assert done.swapped[0].note.startswith("nvfp4, ")


# ---- the Hessian
# -------------------------------------------------------------------------------------------------


def test_the_factor_of_the_inverse():
    x = torch.randn(200, 40, dtype=torch.float64) @ torch.randn(40, 40, dtype=torch.float64)
    hessian = x.t() @ x / 200
    upper, damping = inverse_factor(hessian.clone(), 0.01)
    assert damping == 0.01
    mean = hessian.diagonal().mean()
    damped = hessian / mean + 0.01 * torch.eye(40, dtype=torch.float64)
    assert torch.equal(upper, upper.triu())
    product = upper.double().t() @ upper.double() @ damped
    torch.testing.assert_close(product, torch.eye(40, dtype=torch.float64), rtol=0, atol=1e-4)


def test_singular_hessians():
    """Fewer inputs than channels and no damping: damping is raised until the factor exists."""
    layer, inputs = layer_of(64), [torch.randn(5, 64)]
    plain = copy.deepcopy(layer)
    rounding = qtensor.Rounding(compensate=True, damping=0.0)
    done = qtensor.quantize_(layer, "mxfp4", rounding=rounding, calibration=inputs)
    assert "damping 1e-" in done.swapped[0].note
    nearest = qtensor.quantize(plain.weight.detach(), "mxfp4")
    # Five inputs leave 59 directions free, so that almost all of the error can be made up for.
    error = output_error(layer.weight, plain, inputs)
    assert error < 0.1 * output_error(nearest, plain, inputs)


def test_dead_columns_are_rounded_to_nearest():
    layer = layer_of(64)
    nearest = qtensor.quantize(layer.weight.detach(), "mxfp8")
    x = torch.randn(99, 64) @ torch.randn(64, 64)
    x[:, 32:] = 0
    qtensor.quantize_(layer, "mxfp8", rounding="gptq", calibration=[x])
    assert torch.equal(layer.weight.dequantize()[:, 32:], nearest.dequantize()[:, 32:])
    silent = layer_of(64)
    nearest = qtensor.quantize(silent.weight.detach(), "mxfp8")
    qtensor.quantize_(silent, "mxfp8", rounding="gptq_mse", calibration=[torch.zeros(3, 64)])
    assert_same_bytes(silent.weight, nearest)


# ---- bad input
# -------------------------------------------------------------------------------------------------


class Unused(Block):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(8, 8)


def nan_inputs():
    batches = make_inputs()
    batches[1][0, 3, 7] = float("nan")
    return batches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounding": "best"}, "nearest, mse, weighted_mse, gptq, gptq_mse"),
        ({"calibration": None}, "needs calibration"),
        ({"calibration": []}, "at least one input"),
        ({"calibration": torch.randn(4, 72)}, "a Tensor"),
        ({"calibration": {"x": 1}}, "a dict"),
        ({"rounding": "mse"}, "Leave it out"),
        ({"rounding": "nearest"}, "Leave it out"),
        ({"calibration": nan_inputs()}, "input of q, channel 7"),
        ({"calibration": [torch.full((1, 72), 1e30)]}, "input of q, channel 0"),
        ({"format": "nvfp4(stochastic_rounding=True)"}, "Drop stochastic_rounding"),
        ({"format": "mxfp4(columnwise=True)"}, "choose square blocks"),
        ({"format": "mxfp4(rowwise=False,columnwise=True)"}, "Drop rowwise=False"),
        ({"format": "nvfp4(with_rht=True,rht_side=rowwise)"}, "Drop with_rht"),
        ({"model": Unused()}, "no input of spare"),
    ],
)
def test_bad_arguments_change_nothing(change, message):
    options = {"format": "nvfp4", "rounding": "gptq", "calibration": make_inputs(), **change}
    model = options.pop("model", None) or Block()
    own = dict(model.named_parameters())
    with pytest.raises(qtensor.QTensorError, match=message):
        qtensor.quantize_(model, options.pop("format"), **options)
    assert all(own[name] is parameter for name, parameter in model.named_parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert model.training


def test_bad_weights_and_options():
    model = Block()
    with torch.no_grad():
        model.out.weight[1, 2] = float("nan")
    with pytest.raises(qtensor.QTensorError, match=r"NaN or inf in out\.weight"):
        qtensor.quantize_(model, "nvfp4", rounding="mse")
    assert type(model.q.weight) is nn.Parameter
    with pytest.raises(qtensor.QTensorError, match="damping"):
        qtensor.Rounding(damping=float("inf"))
    with pytest.raises(qtensor.QTensorError, match="weighted_mse"):
        qtensor.Rounding(scales="best")


def test_a_model_without_values_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32)).to("meta")
    with pytest.raises(qtensor.QTensorError, match=r"0\.weight on the meta device"):
        qtensor.quantize_(model, "mxfp4", rounding="mse")
    assert type(model[0].weight) is torch.nn.Parameter
