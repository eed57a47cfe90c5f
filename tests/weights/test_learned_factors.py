"""``prepare_qat_(learned_factors=)``: LSQ's gradient, and the bits of the packed model."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from formats import assert_same_bytes, assert_same_tensor, rand
from torch import nn

import qtensor
from qtensor.library import learned
from qtensor.library.learned import LEARNED_FACTOR, LEARNED_FACTOR_BACKWARD
from qtensor.modules.learned_factor import LearnedFactor
from tests.weights.test_weights_qat import Net

FORMATS = ["fp8", "nvfp4"]
every_format = pytest.mark.parametrize("fmt", FORMATS)
INDUCTOR = pytest.param("inductor", marks=pytest.mark.nightly(reason="slow; aot_eager is not"))
OPTIONS = pytest.mark.nightly(reason="options and dtypes; the plain form is in the default tier")
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def prepared(fmt, learned_factors=True, dtype=torch.float32):
    torch.manual_seed(0)
    model = Net().to(dtype)
    formats = {"head": None, "*": fmt}
    factors = qtensor.calibrate(model, [rand(8, 64, dtype=dtype)], formats)
    qtensor.prepare_qat_(model, formats, activations=factors, learned_factors=learned_factors)
    return model


def factors_of(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, LearnedFactor)}


def train(model, steps=3, dtype=torch.float32, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    for step in range(steps):
        model(rand(4, 8, 64, seed=step, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(rand(4, 8, 64, dtype=dtype)).detach()


# ---- the gradient


def nearest(values, grid):
    """Round magnitudes to the grid, ties to the even code, and clip them."""
    bounds = (grid[1:] + grid[:-1]) / 2
    index = np.searchsorted(bounds, np.abs(values))
    tie = (index < len(bounds)) & (np.abs(values) == bounds[np.minimum(index, len(bounds) - 1)])
    return np.copysign(grid[index + (tie & (index % 2 == 1))], values)


def lsq(value, step, grid):
    """Return equation 3 of the paper: the derivative of the quantized value by the step."""
    scaled = value / step
    top = grid[-1]
    return np.where(np.abs(scaled) < top, nearest(scaled, grid) - scaled, np.sign(value) * top)


def expected(fmt, x, grad, amax, count):
    """Return the gradients of the paper, of x and of log2(amax), in float64."""
    x, grad = x.double().numpy(), grad.double().numpy()
    largest = 448.0 if fmt == "fp8" else 6 * 448.0
    step = float(np.float32(amax) / np.float32(largest))
    if fmt == "fp8":
        slopes = lsq(x, step, E4M3)
    else:
        blocks = x.reshape(x.shape[0], -1, 16)
        top = np.abs(blocks).max(-1, keepdims=True) / 6
        own = step * nearest(top / step, E4M3)
        slopes = (lsq(blocks, own, E2M1) * lsq(top, step, E4M3)).reshape(x.shape)
    total = math.fsum((grad * slopes).ravel())
    scaled = total / math.sqrt(count * largest)
    return np.where(np.abs(x) < amax, grad, 0), scaled * step * math.log(2)


@pytest.mark.parametrize("share", [1.0, 0.4, 3.0])
@every_format
def test_the_gradient_is_that_of_the_paper(fmt, share):
    x, grad = rand(48, 64), rand(48, 64, seed=1)
    log2 = torch.tensor([math.log2(x.abs().max().item() * share)])
    to_x, to_factor = LEARNED_FACTOR_BACKWARD(grad, x, log2, fmt, x.numel())
    amax = LEARNED_FACTOR(log2, fmt)[0].item()
    wanted_x, wanted = expected(fmt, x, grad, amax, x.numel())
    assert np.array_equal(to_x.double().numpy(), wanted_x)
    assert (wanted_x == 0).any() == (share < 1 or amax <= x.abs().max())
    # The implementation decides with float32 products on which side of a tie a value lies.
    torch.testing.assert_close(to_factor.item(), wanted, rtol=1e-5, atol=1e-6)


@every_format
def test_a_layer_passes_both_gradients(fmt):
    """Through a product: those of the ops, with N of the weight and K of the input."""
    model = prepared(fmt)
    layer, x, grad = model.up, rand(16, 64).mul(2).requires_grad_(), rand(16, 96, seed=1)
    layer(x).backward(grad)
    of_weight, of_input = layer.weight_factor.log2_amax, layer.input_quantizer.factor.log2_amax
    plain, rows = layer.weight.detach(), x.detach()
    with torch.no_grad():
        read = layer.weight_factor(plain, 1).dequantize()
        values = layer.input_quantizer(rows).dequantize()
    for given, value, factor, found, count in (
        (grad.t() @ values, plain, of_weight, layer.weight.grad, plain.numel()),
        (grad @ read, rows, of_input, x.grad, 64),
    ):
        wanted = LEARNED_FACTOR_BACKWARD(given, value, factor.detach(), fmt, count)
        torch.testing.assert_close(found, wanted[0])
        torch.testing.assert_close(factor.grad, wanted[1], rtol=1e-3, atol=1e-5)
    assert x.grad.eq(0).any()


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4", "nvfp4(with_2d_quantization=True)"])
def test_the_sum_has_one_order(fmt, monkeypatch):
    """Other numbers of threads, other strides and other parts give the same bits."""
    x, grad, log2 = rand(300, 520), rand(300, 520, seed=1), torch.tensor([1.0])
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for strided in (x, x.t().contiguous().t()):
                found += [LEARNED_FACTOR_BACKWARD(grad, strided, log2, fmt, 64)]
    finally:
        torch.set_num_threads(threads)
    for elements in (1, 1 << 24):
        monkeypatch.setattr(learned, "_CPU_PART", elements)
        found += [LEARNED_FACTOR_BACKWARD(grad, x, log2, fmt, 64)]
    for other in found[1:]:
        for part, wanted in zip(other, found[0], strict=True):
            assert_same_bytes(part, wanted)


# ---- equal bits


@pytest.mark.parametrize("learned", [True, "weights", "inputs"])
@every_format
def test_the_packed_model_has_the_outputs_of_training(fmt, learned, tmp_path):
    model = prepared(fmt, learned)
    before = {name: factor.values()[0] for name, factor in factors_of(model).items()}
    assert len(before) == (4 if learned is True else 2)
    wanted = train(model)
    after = {name: factor.values() for name, factor in factors_of(model).items()}
    assert all(after[name][0] != amax for name, amax in before.items())
    packed = {
        name: copy.deepcopy(factor)(model.get_submodule(name[:-14]).weight.detach(), 1)
        for name, factor in factors_of(model).items()
        if name.endswith(".weight_factor")
    }
    qtensor.convert_qat_(model)
    assert not factors_of(model)
    for name, weight in packed.items():
        assert_same_tensor(model.get_submodule(name[:-14]).weight.detach(), weight.detach())
    for name in ("up", "down"):
        values = after.get(f"{name}.input_quantizer.factor")
        if values is not None:
            assert model.get_submodule(name).input_quantizer.values() == values
    assert torch.equal(model(rand(4, 8, 64)), wanted)
    path = str(tmp_path / "served")
    qtensor.checkpoints.save(model, path, layout="compressed-tensors")
    stored, again = qtensor.checkpoints.load_state_dict(path), Net()
    state = {name: tensor for name, tensor in stored.items() if ".input_" not in name}
    again.load_state_dict(state, assign=True)
    qtensor.checkpoints.calibration(path).apply(again)
    assert torch.equal(again(rand(4, 8, 64)), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=OPTIONS)])
@every_format
def test_other_dtypes(fmt, dtype):
    model = prepared(fmt, dtype=dtype)
    # The epsilon of Adam is 0 in float16.
    wanted = train(model, dtype=dtype, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    model.to(dtype)
    assert all(f.log2_amax.dtype == torch.float32 for f in factors_of(model).values())
    qtensor.convert_qat_(model)
    assert torch.equal(model(rand(4, 8, 64, dtype=dtype)), wanted)


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@every_format
def test_compiled_training_is_eager_training(fmt, backend):
    eager, compiled = prepared(fmt), prepared(fmt)
    torch._dynamo.reset()
    program = torch.compile(compiled, backend=backend, fullgraph=True, dynamic=True)
    for batch in (4, 6):
        x = rand(batch, 8, 64, seed=batch)
        outputs = [model(x) for model in (eager, program)]
        for y in outputs:
            y.square().sum().backward()
        assert_same_bytes(outputs[1].detach(), outputs[0].detach())
    grads = [
        {n: p.grad for n, p in m.named_parameters() if "head" not in n and "bias" not in n}
        for m in (eager, compiled)
    ]
    assert sum("log2_amax" in name for name in grads[0]) == 4
    for name, grad in grads[0].items():
        assert grad.ne(0).any(), name
        assert_same_bytes(grads[1][name], grad)
    with torch.no_grad():
        for model in (eager, compiled):
            model.up.weight_factor.log2_amax.sub_(0.5)
        assert_same_bytes(program(x), eager(x))
        wanted = program(x)
    qtensor.convert_qat_(compiled)
    assert torch.equal(compiled(x), wanted)


@OPTIONS
@pytest.mark.parametrize(
    "fmt",
    [
        qtensor.quantizer("fp8", dtype="e5m2"),
        qtensor.quantizer("nvfp4", with_2d_quantization=True),
        qtensor.quantizer("nvfp4", swizzled=True),
    ],
    ids=str,
)
def test_options_of_weights(fmt):
    torch.manual_seed(0)
    model = Net()
    qtensor.prepare_qat_(model, {"head": None, "*": fmt}, learned_factors="weights")
    wanted = train(model)
    qtensor.convert_qat_(model)
    assert torch.equal(model(rand(4, 8, 64)), wanted)


# ---- training goes on


@every_format
def test_training_moves_a_wrong_factor(fmt):
    """From eight times the largest input, the factor falls and the error with it."""
    torch.manual_seed(0)
    x = rand(256, 64).mul(0.01)
    factor = LearnedFactor(qtensor.quantizer(fmt), 0.001, None)
    optimizer = torch.optim.Adam(factor.parameters(), lr=0.1)
    errors = []
    for _ in range(60):
        loss = (factor(x, 64).dequantize() - x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        errors.append(loss.item())
    assert errors[-1] < errors[0] / 20
    assert factor.values()[0] > 0.01


def test_a_resumed_run_goes_on():
    whole, first = prepared("nvfp4"), prepared("nvfp4")
    wanted = train(whole, 4)
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2, weight_decay=0)
    for step in range(4):
        if step == 2:
            data = io.BytesIO()
            torch.save((first.state_dict(), optimizer.state_dict()), data)
            data.seek(0)
            states = torch.load(data)
            assert "up.weight_factor.log2_amax" in states[0]
            assert "up.input_quantizer.factor.log2_amax" in states[0]
            first = prepared("nvfp4")
            first.load_state_dict(states[0])
            optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2, weight_decay=0)
            optimizer.load_state_dict(states[1])
        first(rand(4, 8, 64, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(first(rand(4, 8, 64)), wanted)


def test_copies_and_pickles():
    model = prepared("nvfp4")
    wanted = train(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(factors_of(other)) == 4
        assert torch.equal(other(rand(4, 8, 64)), wanted)
        qtensor.convert_qat_(other)
        assert torch.equal(other(rand(4, 8, 64)), wanted)
    assert torch.equal(model(rand(4, 8, 64)), wanted)


def test_layers_with_one_weight_share_its_factor():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    qtensor.prepare_qat_(model, "nvfp4", learned_factors=True)
    assert model[2].weight_factor is model[0].weight_factor
    wanted = train(model)
    qtensor.convert_qat_(model)
    assert model[2].weight is model[0].weight
    assert torch.equal(model(rand(4, 8, 64)), wanted)


def test_a_second_call_drops_the_factor():
    model = prepared("nvfp4")
    qtensor.prepare_qat_(model, {"up": "mxfp8", "*": None})
    assert sorted(factors_of(model)) == [
        "down.input_quantizer.factor",
        "down.weight_factor",
        "up.input_quantizer.factor",
    ]
    assert qtensor.Calibration.of(model).inputs["up"].amax > 0
    wanted = train(model)
    qtensor.convert_qat_(model)
    assert torch.equal(model(rand(4, 8, 64)), wanted)


# ---- errors


def test_errors():
    amax = qtensor.calibrate(Net(), [rand(8, 64)], "nvfp4")
    other = qtensor.calibrate(Net(), [rand(8, 64)], qtensor.quantizer("nvfp4", use_4over6=True))
    for fmt, options, rule in (
        ("mxfp4", {"learned_factors": True}, 'in "fp8" and "nvfp4".*got mxfp4 for up.*second call'),
        ("fp8_rowwise", {"learned_factors": "weights"}, "got fp8_rowwise for up"),
        (qtensor.quantizer("nvfp4", use_4over6=True), {"learned_factors": True}, "use_4over6"),
        ("nvfp4", {"learned_factors": "biases"}, "learned_factors is one of False, True, 'weigh"),
        ("nvfp4", {"learned_factors": 1.5}, "got 1.5"),
        ("nvfp4", {"learned_factors": "inputs"}, "from a calibrated one; got none for up, down"),
        ("nvfp4", {"learned_factors": "inputs", "activations": True}, "got none for up"),
        ("nvfp4", {"learned_factors": True, "activations": other}, "for the input of up"),
    ):
        model = Net()
        with pytest.raises(qtensor.QTensorError, match=f"(?s)prepare_qat_: .*{rule}"):
            qtensor.prepare_qat_(model, fmt, **options)
        assert type(model.up) is nn.Linear
        assert list(model.state_dict()) == list(Net().state_dict())
    model = Net()
    with torch.no_grad():
        model.down.weight[3, 3] = math.nan
    with pytest.raises(qtensor.QTensorError, match=r"must be finite.*NaN or inf in down"):
        qtensor.prepare_qat_(model, "nvfp4", learned_factors=True)
    with pytest.raises(qtensor.QTensorError, match=r"must have values.*up on the meta device"):
        qtensor.prepare_qat_(Net().to("meta"), "nvfp4", learned_factors=True)
    qtensor.prepare_qat_(Net(), "nvfp4", activations=amax, learned_factors=True)


def test_a_factor_that_is_not_finite():
    model = prepared("nvfp4")
    with torch.no_grad():
        model.up.weight_factor.log2_amax.fill_(math.nan)
    with pytest.raises(qtensor.QTensorError, match=r"must be finite.*log2_amax = nan"):
        model(rand(4, 64))
    with pytest.raises(qtensor.QTensorError, match=r"convert_qat_.*nan of up\.weight_factor"):
        qtensor.convert_qat_(model)
    for extreme in (-1e30, 1e30):
        with torch.no_grad():
            model.up.weight_factor.log2_amax.fill_(extreme)
        amax, scale_inv = model.up.weight_factor.values()
        assert min(amax, scale_inv) >= torch.finfo(torch.float32).tiny
        assert math.isfinite(amax)
    with pytest.raises(
        qtensor.QTensorError, match=r"log2_amax must hold 1 value of torch\.float32"
    ):
        LEARNED_FACTOR(torch.ones(1).bfloat16(), "nvfp4")
    # Mixed precision of fully_shard casts all parameters below it.
    factor = model.up.weight_factor
    factor.log2_amax.data = factor.log2_amax.data.bfloat16()
    with pytest.raises(
        qtensor.QTensorError, match=r"stay float32; got torch\.bfloat16.*param_dtype"
    ):
        model(rand(4, 64))
