"""``prepare_qat_`` and ``convert_qat_``: the outputs of training are those of the packed model."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from formats import FORMATS, assert_same_bytes, assert_same_tensor, rand
from rounding_cases import OPTIONS
from torch import nn

import qtensor
from qtensor.weights.aware import become_aware
from qtensor.weights.calibrated import CalibratedInput

NAMES = [case.name for case in FORMATS if case.name != "fp8_delayed"]
every_format = pytest.mark.parametrize("fmt", [*NAMES, *OPTIONS])
COMPILED = ("fp8", "nvfp4")
OTHERS = pytest.mark.nightly(reason="their eager training, and the graphs of others, are tested")
INDUCTOR = pytest.param("inductor", marks=pytest.mark.nightly(reason="slow; aot_eager is not"))
inputs_too = pytest.mark.parametrize("activations", [False, True], ids=["weights", "inputs"])


class Net(nn.Module):
    """Two linear layers with and without a bias, and one that stays plain."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x + self.down(torch.relu(self.up(x))))


def prepared(fmt="nvfp4", **options):
    torch.manual_seed(0)
    model = Net()
    if isinstance(fmt, str) and "(" in fmt:
        fmt = qtensor.api.parsed(fmt)
    qtensor.prepare_qat_(model, {"head": None, "*": fmt}, **options)
    return model


def train(model, steps=3, dtype=torch.float32):
    """Train, and return the outputs that the trained model gives."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(rand(4, 8, 64, seed=step, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(rand(4, 8, 64, dtype=dtype)).detach()


# ---- equal bits


@inputs_too
@every_format
def test_the_packed_model_has_the_outputs_of_training(fmt, activations):
    model = prepared(fmt, activations=activations)
    wanted = train(model)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    done = qtensor.convert_qat_(model)
    assert [report.name for report in done.swapped] == ["up", "down"]
    for layer, name in ((model.up, "up.weight"), (model.down, "down.weight")):
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        assert not weight.requires_grad
        assert_same_tensor(weight.detach(), weight.quantizer(masters[name]))
        assert type(layer) is nn.Linear
    assert type(model.head.weight) is nn.Parameter
    x = rand(4, 8, 64)
    assert torch.equal(model(x), wanted)
    with torch.no_grad():
        assert torch.equal(model(x), wanted)
    with torch.inference_mode():
        assert torch.equal(model.eval()(x), wanted)


@inputs_too
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp8"])
def test_other_dtypes(fmt, dtype, activations):
    model = Net().to(dtype)
    qtensor.prepare_qat_(model, fmt, lambda m, name: name != "head", activations=activations)
    wanted = train(model, dtype=dtype)
    qtensor.convert_qat_(model)
    assert torch.equal(model(rand(4, 8, 64, dtype=dtype)), wanted)


@inputs_too
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize(
    "fmt", [pytest.param(n, marks=() if n in COMPILED else OTHERS) for n in NAMES]
)
def test_compiled_training_is_eager_training(fmt, backend, activations):
    eager, compiled = (prepared(fmt, activations=activations) for _ in range(2))
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    program = torch.compile(compiled, backend=counted, fullgraph=True, dynamic=True)
    for batch in (4, 6, 9):
        x = rand(batch, 8, 64, seed=batch)
        outputs = [model(x) for model in (eager, program)]
        for y in outputs:
            y.square().sum().backward()
        assert_same_bytes(outputs[1].detach(), outputs[0].detach())
    assert len(graphs) == 1
    for name in ("up", "down"):
        # The order of the sums of a plain layer's bias gradient is the compiler's.
        own, wanted = (m.get_submodule(name).weight.grad for m in (compiled, eager))
        assert_same_bytes(own, wanted)
    qtensor.convert_qat_(compiled)
    assert torch.equal(compiled(x), outputs[0])


@inputs_too
def test_the_gradient_passes_the_rounding(activations):
    """Gradients are those of a layer with the quantized values, and reach the plain weight."""
    model = prepared("nvfp4", activations=activations)
    x = rand(16, 64).requires_grad_()
    y = model.up(x)
    grad = rand(16, 96, seed=1)
    y.backward(grad)
    weight = model.up.weight
    read = qtensor.quantize(weight.detach(), "nvfp4").dequantize()
    rows = qtensor.quantize(x.detach(), "nvfp4").dequantize() if activations else x.detach()
    torch.testing.assert_close(y, rows @ read.t() + model.up.bias)
    torch.testing.assert_close(weight.grad, grad.t() @ rows)
    torch.testing.assert_close(x.grad, grad @ read)
    torch.testing.assert_close(model.up.bias.grad, grad.sum(0))


# ---- the model stays as it was


@inputs_too
def test_parameters_and_names_stay(activations):
    torch.manual_seed(0)
    model, plain = Net(), Net()
    own = dict(model.named_parameters())
    qtensor.prepare_qat_(model, "mxfp8", lambda m, name: name != "head", activations=activations)
    assert {name: id(p) for name, p in model.named_parameters()} == {
        n: id(p) for n, p in own.items()
    }
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(type(t) is torch.Tensor for t in model.state_dict().values())
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    assert isinstance(model.up, nn.Linear)
    with pytest.raises(TypeError, match="cannot assign"):
        model.up.weight = torch.ones(96, 64)
    model.up.weight = nn.Parameter(torch.ones(96, 64))
    assert model.up.weight.eq(1).all()


class Peeking(nn.Linear):
    """Keeps the weight that its forward reads."""

    def forward(self, x):
        self.seen = [self.weight]
        if x.shape[-1] != 64:
            raise ValueError(x.shape)
        return super().forward(x)


def test_the_forward_alone_reads_the_quantized_weight():
    model = prepared("nvfp4")
    assert type(model.up.weight) is nn.Parameter
    assert model.up.weight is dict(model.named_parameters())["up.weight"]
    assert "weight=trained as nvfp4" in repr(model.up)
    assert "QuantizationAwareLinear(in_features=64" in repr(model.up)
    layer = Peeking(64, 32)
    become_aware(layer, {"weight": qtensor.quantizer("nvfp4")}, False)
    for columns in (64, 65):
        try:
            layer(rand(2, columns))
        except ValueError:
            assert columns == 65
        assert_same_tensor(layer.seen[0].detach(), qtensor.quantize(layer.weight.detach(), "nvfp4"))
        assert type(layer.weight) is nn.Parameter


@inputs_too
def test_copies_and_pickles(activations):
    model = prepared("mxfp4", activations=activations)
    wanted = model(rand(4, 64))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(rand(4, 64)), wanted)
        qtensor.convert_qat_(other)
        assert torch.equal(other(rand(4, 64)), wanted)
    assert torch.equal(model(rand(4, 64)), wanted)


@inputs_too
def test_a_resumed_run_goes_on(activations):
    """The state dict of a prepared model is that of the plain one."""
    whole, first = (prepared("nvfp4", activations=activations) for _ in range(2))
    wanted = train(whole, 4)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            data = io.BytesIO()
            torch.save((first.state_dict(), optimizer.state_dict()), data)
            data.seek(0)
            model_state, optimizer_state = torch.load(data)
            first = prepared("nvfp4", activations=activations)
            first.load_state_dict(model_state)
            optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
            optimizer.load_state_dict(optimizer_state)
        first(rand(4, 8, 64, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(first(rand(4, 8, 64)), wanted)


@inputs_too
def test_the_packed_model_is_saved_and_loaded(activations, tmp_path):
    model = prepared("nvfp4", activations=activations)
    wanted = train(model)
    qtensor.convert_qat_(model)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    own, other = str(tmp_path / "own"), str(tmp_path / "other")
    qtensor.checkpoints.save(model.state_dict(), own, layout="qtensor")
    qtensor.checkpoints.convert(own, other, layout="compressed-tensors")
    states = [torch.load(tmp_path / "state.pt", weights_only=True)]
    states += [qtensor.checkpoints.load_state_dict(path) for path in (own, other)]
    for state in states:
        again = Net()
        again.load_state_dict(state, assign=True)
        if activations:
            inputs = dict.fromkeys(("up", "down"), CalibratedInput("nvfp4"))
            qtensor.Calibration(inputs).apply(again)
        assert torch.equal(again(rand(4, 8, 64)), wanted)


# ---- what goes together


def test_formats_of_a_search():
    model = Net()
    result = qtensor.search(model, [rand(8, 64)], budget_bits=6.0, formats=["nvfp4", "mxfp8"])
    qtensor.prepare_qat_(model, result.formats)
    wanted = train(model)
    qtensor.convert_qat_(model)
    assert torch.equal(model(rand(4, 8, 64)), wanted)
    assert model.up.weight.quantizer.canonical == result.formats["up"]


def test_inputs_in_another_format():
    model = prepared("nvfp4", activations="mxfp8")
    wanted = train(model)
    assert model.up.input_quantizer.format == "mxfp8"
    qtensor.convert_qat_(model)
    assert torch.equal(model(rand(4, 8, 64)), wanted)


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_calibrated_factors_stay_in_training(fmt, tmp_path):
    """Files hold weights and factors, and give the bits of training."""
    model = Net()
    factors = qtensor.calibrate(model, [rand(8, 64)], {"head": None, "*": fmt})
    qtensor.prepare_qat_(model, {"head": None, "*": fmt}, activations=factors)
    wanted = train(model)
    assert model.up.input_quantizer.amax.item() == factors.inputs["up"].amax
    qtensor.convert_qat_(model)
    assert torch.equal(model(rand(4, 8, 64)), wanted)
    path = str(tmp_path / "served")
    qtensor.checkpoints.save(model, path, layout="compressed-tensors")
    again = Net()
    stored = qtensor.checkpoints.load_state_dict(path)
    state = {name: tensor for name, tensor in stored.items() if ".input_" not in name}
    again.load_state_dict(state, assign=True)
    qtensor.checkpoints.calibration(path).apply(again)
    assert torch.equal(again(rand(4, 8, 64)), wanted)


class MultipliesItself(Net):
    """A model that multiplies by the weight of a layer, without calling the layer."""

    def forward(self, x):
        y = torch.relu(self.up(x)).to(self.down.weight.dtype)
        if x.isnan().any():
            raise ValueError("NaN")
        return self.head(x + torch.nn.functional.linear(y, weight=self.down.weight))


def test_code_that_computes_with_the_plain_weight():
    """The first forward pass with gradients warns, once, and leaves no hook or mode."""
    model, x = MultipliesItself(), rand(4, 64)
    qtensor.prepare_qat_(model, "nvfp4", lambda m, name: name != "head")
    with torch.no_grad():
        model(x)
    with pytest.raises(ValueError, match="NaN"):
        model(x * torch.nan)
    copied = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"computes with the plain down\.weight\. After") as found:
        model(x)
    assert len(found) == 1
    model(x).sum().backward()
    assert "forward" not in vars(model)
    with pytest.warns(UserWarning, match="the plain down"):
        copied(x)
    for call in (lambda net: net(x), qtensor.convert_qat_):
        other = prepared()
        assert "forward" in vars(other)
        call(other)
        assert "forward" not in vars(other)


class Interrupted(MultipliesItself):
    """A model whose forward pass is interrupted, once."""

    interrupts = True

    def forward(self, x):
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        return super().forward(x)


def test_an_interrupted_first_pass():
    """It leaves no mode, compiled code is compiled again, and the next pass warns."""
    model, x, graphs = Interrupted(), rand(4, 64), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(torch.relu, backend=backend)
    qtensor.prepare_qat_(model, "nvfp4", lambda m, name: name != "head")
    with pytest.raises(KeyboardInterrupt):
        model(x)
    assert torch.overrides._len_torch_function_stack() == 0
    compiled(x)
    assert len(graphs) == 1
    with pytest.warns(UserWarning, match="the plain down"):
        model(x)


def test_first_pass_of_copies_and_wrapped_models():
    """What other libraries do with ``forward`` goes on working."""
    x = rand(4, 64)
    model = MultipliesItself()
    own = model.forward
    model.forward = lambda y: own(2 * y)
    qtensor.prepare_qat_(model, "nvfp4", lambda m, name: name != "head")
    assert list(inspect.signature(model.forward).parameters) == ["y"]
    with pytest.warns(UserWarning, match="the plain down"):
        twice = model(x)
    assert torch.equal(model.forward(x), twice)
    assert torch.equal(own(2 * x), twice)
    # accelerate replaces the forward that it finds.
    model = MultipliesItself()
    qtensor.prepare_qat_(model, "nvfp4", lambda m, name: name != "head")
    model = pickle.loads(pickle.dumps(model))
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    wrapped = model.forward
    model.forward = lambda y: wrapped(2 * y)
    with pytest.warns(UserWarning, match="the plain down"):
        twice = model(x)
    assert torch.equal(model(x), twice)  # without a second warning
    assert torch.equal(wrapped(2 * x), twice)


def test_layers_with_one_weight():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    qtensor.prepare_qat_(model, "nvfp4")
    train(model)
    wanted = model(rand(4, 64))
    qtensor.convert_qat_(model)
    assert model[2].weight is model[0].weight
    assert torch.equal(model(rand(4, 64)), wanted)


def test_a_second_call_changes_the_format():
    model = prepared("nvfp4")
    qtensor.prepare_qat_(model, {"up": "mxfp8", "*": None})
    qtensor.convert_qat_(model)
    assert [model.up.weight.quantizer.format, model.down.weight.quantizer.format] == [
        "mxfp8",
        "nvfp4",
    ]


# ---- errors


def test_errors():
    at_random = qtensor.quantizer("nvfp4", stochastic_rounding=True)
    for fmt, rule in (
        (at_random, "prepare_qat_: .*only if rounding is to nearest"),
        ("fp8_delayed", "prepare_qat_: .*no earlier steps"),
        ("fp9", "fp9"),
        ({"middle": "nvfp4"}, "prepare_qat_: each pattern of format.*middle"),
        (None, "prepare_qat_: a format must be named"),
    ):
        model = Net()
        with pytest.raises(qtensor.QTensorError, match=rule):
            qtensor.prepare_qat_(model, fmt)
        assert type(model.up) is nn.Linear
    with pytest.raises(qtensor.QTensorError, match="convert_qat_: the model has layers that"):
        qtensor.convert_qat_(Net())
    with pytest.raises(qtensor.QTensorError, match=r"prepare_qat_: .*needs a linear layer"):
        qtensor.prepare_qat_(nn.Sequential(nn.ReLU()), "nvfp4")
    rule = "got none, and layers that prepare_qat_ leaves alone: convolution"
    with pytest.raises(qtensor.QTensorError, match=rule):
        qtensor.prepare_qat_(nn.Sequential(nn.Conv2d(32, 16, 3)), "nvfp4")
    columnwise = qtensor.quantizer("mxfp8", columnwise=True)
    with pytest.raises(qtensor.QTensorError, match="inputs are quantized rowwise, to nearest"):
        qtensor.prepare_qat_(Net(), "mxfp8", activations=columnwise)


def test_a_conversion_that_fails_leaves_the_model_prepared(monkeypatch):
    model = prepared("nvfp4")
    wanted = model(rand(4, 64))

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("qtensor.weights.qat.quantize_", fail)
    with pytest.raises(KeyboardInterrupt):
        qtensor.convert_qat_(model)
    monkeypatch.undo()
    assert torch.equal(model(rand(4, 64)), wanted)
    qtensor.convert_qat_(model)
    assert torch.equal(model(rand(4, 64)), wanted)
