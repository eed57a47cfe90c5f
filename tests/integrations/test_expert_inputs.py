"""Stacked experts of transformers whose inputs are quantized: bytes, files, compiled code."""

import copy
import pickle

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch.nn import functional as F

import qtensor
from qtensor import checkpoints
from qtensor.modules.input_quantizer import NAME
from qtensor.weights import expert_inputs
from qtensor.weights.calibrated import CalibratedInput
from tests.helpers.transformers_models import IDS, config, dense, load, transformers

integration = pytest.importorskip("qtensor.integrations.transformers", reason="extra transformers")
OTHERS = pytest.mark.nightly(reason="other models")
MODELS = ["qwen3-moe", *[pytest.param(name, marks=OTHERS) for name in ("mixtral", "gpt-oss")]]


def is_experts(module, name):
    return "experts" in name


def with_biases(model):
    """The model, whose biases of experts are no longer zero."""
    for name, parameter in model.named_parameters():
        if "experts" in name and name.endswith("_bias"):
            nn.init.normal_(parameter)
    return model


def quantized(name, folder):
    """A model whose experts are quantized; gpt-oss stores them as (E, K, N), with biases."""
    dense(name, folder)
    asked = integration.QTensorConfig({"*experts*": "nvfp4"})
    return with_biases(load(folder, quantization_config=asked, dtype=torch.bfloat16))


def expected(experts, x, index, weights):
    """The outputs, expert by expert, with plain products of rows that were quantized before."""
    steps = experts._modules[NAME]
    numbers = index.flatten()
    places = [(numbers == e).nonzero().flatten() for e in range(experts.num_experts)]

    def product(own, rows, e):
        matrix = getattr(experts, own)[e]
        out = rows @ matrix if experts.is_transposed else F.linear(rows, matrix)
        out = out.to(x.dtype)
        return out + getattr(experts, f"{own}_bias")[e] if experts.has_bias else out

    rows = steps["gate_up_proj"](x).dequantize(torch.float32)
    chosen = index.shape[1]
    parts = [product("gate_up_proj", rows[p // chosen], e) for e, p in enumerate(places) if len(p)]
    hidden = steps["down_proj"](experts._apply_gate(torch.cat(parts))).dequantize(torch.float32)
    out = x.new_zeros(len(numbers), x.shape[1])
    split = hidden.split([len(p) for p in places])
    for e, (own, part) in enumerate(zip(places, split, strict=True)):
        if len(own):
            out[own] = product("down_proj", part, e) * weights.flatten()[own, None]
    return out.view(*index.shape, -1).sum(1)


@pytest.mark.parametrize("name", MODELS)
def test_bytes(name, tmp_path):
    """With factors of a calibration, and of each input; some experts have no rows."""
    model = quantized(name, tmp_path)
    layers = qtensor.calibrate(model, [IDS], "nvfp4", filter_fn=is_experts)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(7, 64).bfloat16()
    index = torch.tensor([[0, 3], [3, 0], [0, 1], [1, 3], [3, 1], [0, 3], [1, 0]])
    weights = torch.rand(7, 2).bfloat16()
    before = experts(x, index, weights)
    seen = []
    for fmt in ("nvfp4", "fp8", "mxfp8", "nvfp4 of each input"):
        own = fmt.split()[0]
        found = {n: CalibratedInput(own, a.amax) for n, a in layers.inputs.items()}
        if fmt not in ("nvfp4", "fp8"):
            found = {n: CalibratedInput(own) for n in found}
        done = qtensor.Calibration(found).apply(model)
        assert {report.name for report in done.swapped} == {*found}
        y = experts(x, index, weights)
        assert torch.equal(y, expected(experts, x, index, weights)), fmt
        assert all(not torch.equal(y, other) for other in (before, *seen))
        seen.append(y)
    qtensor.Calibration.remove(model)
    assert torch.equal(experts(x, index, weights), before)
    assert NAME not in experts._modules


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "quantized"])
@pytest.mark.parametrize("name", MODELS)
def test_the_forward_pass_is_that_of_transformers(name, plain, tmp_path):
    """Without quantizers the bits are those of their grouped_mm, which may change in a release."""
    model = with_biases(dense(name, tmp_path)) if plain else quantized(name, tmp_path)
    experts = model.model.layers[0].mlp.experts
    x, weights = torch.randn(7, 64).bfloat16(), torch.rand(7, 2).bfloat16()
    index = torch.tensor([[0, 3], [3, 0], [0, 1], [1, 3], [3, 1], [0, 3], [1, 0]])
    theirs = transformers.integrations.moe.grouped_mm_experts_forward
    wanted = theirs(experts, x, index, weights)
    experts._modules[NAME] = nn.ModuleDict()
    assert torch.equal(expert_inputs._forward(experts, x, index, weights), wanted)


def test_experts_prepared_with_inputs_are_pickled(tmp_path):
    model = dense("qwen3-moe", tmp_path)
    qtensor.prepare_qat_(model, "mxfp4", activations="mxfp8")
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded.model.layers[0].mlp.experts) is type(model.model.layers[0].mlp.experts)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", MODELS)
def test_copies_and_a_second_calibration(name, tmp_path):
    model = quantized(name, tmp_path)
    found = qtensor.calibrate(model, [IDS], "nvfp4", filter_fn=is_experts)
    found.apply(model)
    y = model(IDS).logits
    again = qtensor.Calibration.of(model).inputs
    assert {n: own.amax for n, own in again.items()} == {
        n: own.amax for n, own in found.inputs.items()
    }
    experts = model.model.layers[0].mlp.experts
    assert type(pickle.loads(pickle.dumps(experts))) is type(experts)
    assert torch.equal(copy.deepcopy(model)(IDS).logits, y)
    # The observers see inputs before they are quantized.
    second = qtensor.calibrate(model, [IDS], "nvfp4", filter_fn=is_experts).inputs
    first = "model.layers.0.mlp.experts.gate_up_proj"
    assert second[first].amax == found.inputs[first].amax


@pytest.mark.nightly(reason="seven seconds; test_expert_weights.py compiles products of experts")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code(name, tmp_path):
    model = quantized(name, tmp_path)
    qtensor.calibrate(model, [IDS], "nvfp4", filter_fn=is_experts).apply(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(IDS).logits, model(IDS).logits)


@pytest.mark.nightly(reason="inductor compiles the experts")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_inductor(name, tmp_path):
    """Outputs and gradients have the bits of eager mode, whose roundings inductor keeps here."""
    model = quantized(name, tmp_path)
    qtensor.calibrate(model, [IDS], "nvfp4", filter_fn=is_experts).apply(model)
    experts = model.model.layers[0].mlp.experts
    x, weights = (torch.randn(7, n).bfloat16().requires_grad_() for n in (64, 2))
    index = torch.tensor([[0, 3], [3, 0], [0, 1], [1, 3], [3, 1], [0, 3], [1, 0]])

    def run(function):
        y = function(x, index, weights)
        return y, *torch.autograd.grad(y.float().square().sum(), (x, weights))

    wanted = run(experts)
    with torch._inductor.config.patch(emulate_precision_casts=True):
        got = run(torch.compile(experts, fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("layout", ["qtensor", "compressed-tensors"])
@pytest.mark.parametrize("name", MODELS[:2])
def test_a_saved_model_runs_with_its_factors(tmp_path, name, layout):
    """The files store each expert apart, under the names of the model's checkpoints."""
    model = quantized(name, tmp_path / "dense")
    qtensor.calibrate(model, [IDS], "nvfp4", filter_fn=is_experts).apply(model)
    wanted = model(IDS).logits
    model.hf_quantizer.quantization_config.layout = layout
    model.save_pretrained(tmp_path / "saved")
    assert len(checkpoints.calibration(tmp_path / "saved").inputs) == 2 * 4 * 3
    asked = integration.QTensorConfig(activations=True)
    about = integration.pretrained_config(tmp_path / "saved", asked)
    assert torch.equal(load(tmp_path / "saved", config=about)(IDS).logits, wanted)


def test_experts_with_several_factors_are_refused(tmp_path):
    model = quantized("qwen3-moe", tmp_path / "dense")
    found = qtensor.calibrate(model, [IDS], "nvfp4", filter_fn=is_experts)
    state, names = integration.weights(model), "model.layers.{}.mlp.experts.{}.{}_proj"
    each = {
        names.format(i, e, part): CalibratedInput("nvfp4", 1.0 + e)
        for i in range(2)
        for e in range(4)
        for part in ("gate", "up", "down")
    }
    assert len(found.inputs) == 4
    checkpoints.save(
        state,
        tmp_path / "saved",
        config=model.config.to_dict(),
        calibration=qtensor.Calibration(each),
    )
    asked = integration.QTensorConfig(activations=True)
    about = integration.pretrained_config(tmp_path / "saved", asked)
    with pytest.raises(qtensor.QTensorError, match="one factor of their inputs; got 4 factors"):
        load(tmp_path / "saved", config=about)


def test_experts_that_are_split_over_ranks_are_refused():
    model = transformers.AutoModelForCausalLM.from_config(config("qwen3-moe"))
    found = qtensor.calibrate(model, [IDS], "fp8", filter_fn=is_experts)
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(qtensor.UnsupportedError, match="whole stacks of experts"):
        found.apply(model)
