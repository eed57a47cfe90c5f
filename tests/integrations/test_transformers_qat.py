"""Quantization-aware training of models of transformers: Trainer, saved folders, experts."""

import copy

import pytest
import torch
import torch._inductor.config
from torch import nn
from transformers_models import config, load, trainer, transformers

import qtensor
from qtensor.integrations.transformers import QTensorConfig, pretrained_config, weights
from qtensor.weights.calibrated import CalibratedInput

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours
IDS = torch.arange(40).view(2, 20) % 60 + 1


def make(name="llama", dtype=torch.float32):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config(name), dtype=dtype)


def is_layer(module, name):
    return "lm_head" not in name


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


@pytest.mark.nightly(reason="compiles a whole model; the op of its experts has a test")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "quantized"])
def test_compiled_experts_in_float32(prepared):
    """Compiled models of transformers multiply experts by an op of their own in float32."""
    model = make("mixtral").eval()
    chosen = qtensor.prepare_qat_ if prepared else qtensor.quantize_
    chosen(model, "nvfp4", lambda module, name: "experts" in name)
    embedding = model.get_input_embeddings().weight

    def step(run):
        loss = run(IDS).logits.square().mean()
        return loss, torch.autograd.grad(loss, embedding)[0]

    got, want = step(torch.compile(model, backend="aot_eager")), step(model)
    torch.testing.assert_close(got, want)


WIDE = pytest.mark.nightly(reason="seconds a cell; inputs of nvfp4 are trained")


@pytest.mark.parametrize(
    "activations", [pytest.param(False, marks=WIDE), True], ids=["weights", "inputs"]
)
@pytest.mark.parametrize("fmt", ["nvfp4", pytest.param("mxfp4", marks=WIDE)])
def test_a_run_of_trainer(fmt, activations, tmp_path):
    """Trained, resumed, converted, saved, loaded, and converted to another layout: equal logits."""

    def prepared():
        model = make()
        qtensor.prepare_qat_(model, fmt, is_layer, activations=activations)
        return model

    run = tmp_path / "run"
    trainer(prepared(), run, 2).train()
    resumed = trainer(prepared(), run, 4)
    resumed.train(resume_from_checkpoint=True)
    model = resumed.model
    # The checkpoints of the run hold plain weights, which every program opens.
    plain = transformers.AutoModelForCausalLM.from_pretrained(run / "checkpoint-4")
    assert torch.equal(plain.model.layers[0].mlp.up_proj.weight, master(model))
    assert not torch.equal(logits(plain), logits(make()))
    wanted = logits(model)
    assert not torch.equal(wanted, logits(plain))
    qtensor.convert_qat_(model)
    assert torch.equal(logits(model), wanted)
    own, other = tmp_path / "own", tmp_path / "other"
    model.save_pretrained(own)
    qtensor.checkpoints.convert(str(own), str(other), layout="compressed-tensors")
    for again in (load(own), load(other, config=pretrained_config(other))):
        if activations:
            names = [n for n, m in again.named_modules() if isinstance(m, nn.Linear)]
            inputs = {name: CalibratedInput(fmt) for name in names if is_layer(None, name)}
            qtensor.Calibration(inputs).apply(again)
        assert torch.equal(logits(again), wanted)


def master(model):
    return model.model.layers[0].mlp.up_proj.weight


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_stacked_experts(name, activations, tmp_path):
    model = make(name, torch.bfloat16)
    own = {name: id(p) for name, p in model.named_parameters()}
    done = qtensor.prepare_qat_(model, "nvfp4", is_layer, activations=activations)
    assert {n: id(p) for n, p in model.named_parameters()} == own
    assert any(report.name.endswith("experts.gate_up_proj") for report in done.swapped)
    experts = model.model.layers[0].mlp.experts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        grads = [getattr(experts, n).grad for n in ("gate_up_proj", "down_proj")]
        assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)
        optimizer.zero_grad()
    copied = copy.deepcopy(model)
    wanted = logits(model)
    assert torch.equal(logits(copied), wanted)
    qtensor.convert_qat_(model)
    assert type(experts.gate_up_proj) is not nn.Parameter
    assert torch.equal(logits(model), wanted)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), wanted)


@pytest.mark.nightly(reason="a compiled model; layers compiled in test_weights_qat.py")
@pytest.mark.parametrize("activations", [False, True])
def test_compiled_experts(activations):
    model = make("qwen3-moe", torch.bfloat16)
    qtensor.prepare_qat_(model, "nvfp4", is_layer, activations=activations)
    wanted = model(IDS).logits
    compiled = torch.compile(model, backend="aot_eager")
    y = compiled(IDS).logits
    y.float().square().mean().backward()
    assert torch.equal(y, wanted)
    assert model.model.layers[0].mlp.experts.down_proj.grad.abs().sum() > 0


@pytest.mark.nightly(reason="inductor compiles the experts")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("converted", [False, True], ids=["prepared", "converted"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8", "fp8_rowwise"])
def test_experts_in_one_graph(fmt, converted, backend):
    """Outputs and gradients have the bits of eager mode, whose roundings inductor keeps here."""
    model = make("mixtral" if fmt.startswith("fp8") else "qwen3-moe", torch.bfloat16)
    qtensor.prepare_qat_(model, fmt, is_layer, activations=True)
    if converted:
        qtensor.convert_qat_(model)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(6, model.config.hidden_size).bfloat16()
    chosen = torch.stack([torch.randperm(experts.num_experts)[:2] for _ in range(6)])
    factors = torch.rand(6, 2).bfloat16()

    def run(function):
        own = x.clone().requires_grad_()
        y = function(own, chosen, factors)
        y.float().square().sum().backward()
        grads = [p.grad for p in experts.parameters() if p.grad is not None]
        experts.zero_grad()
        return [y, own.grad, *grads]

    want = run(experts)
    with torch._inductor.config.patch(emulate_precision_casts=True):
        got = run(torch.compile(experts, backend=backend, fullgraph=True))
    assert len(want) == (2 if converted else 4)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


COMPILED = pytest.param("aot_eager", marks=pytest.mark.nightly(reason="compiles a whole model"))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", [None, COMPILED])
def test_experts_learn_a_factor_for_each_stack(backend):
    model = make("qwen3-moe", torch.bfloat16)
    formats = {"*experts*": "nvfp4", "*": None}
    found = qtensor.calibrate(model, [IDS], filter_fn=lambda module, name: "experts" in name)
    qtensor.prepare_qat_(model, formats, activations=found, learned_factors=True)
    name = "model.layers.0.mlp.experts"
    names = [
        f"{name}.{own}"
        for own in (
            *("gate_up_proj_factor", "down_proj_factor"),
            *("input_quantizer.gate_up_proj.factor", "input_quantizer.down_proj.factor"),
        )
    ]
    before = [model.get_submodule(name).log2_amax.item() for name in names]
    call = model if backend is None else torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    for _ in range(2):
        call(IDS).logits.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = [model.get_submodule(name).log2_amax.item() for name in names]
    assert all(a != b for a, b in zip(after, before, strict=True))
    wanted = logits(model)
    qtensor.convert_qat_(model)
    assert not any("factor" in name for name in model.state_dict())
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("learned", [False, True])
def test_a_layer_that_stores_its_weight_transposed(learned):
    torch.manual_seed(0)
    sizes = transformers.GPT2Config(
        vocab_size=64, n_embd=64, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=1
    )
    model = transformers.AutoModelForCausalLM.from_config(sizes)
    fmt = "fp8" if learned else "mxfp8"
    done = qtensor.prepare_qat_(model, fmt, learned_factors=learned)
    assert len(done.swapped) == 4
    model.eval()
    y = model(IDS).logits
    y.sum().backward()
    layer = model.transformer.h[0].mlp.c_fc
    assert layer.weight.grad.abs().sum() > 0
    if learned:
        assert layer.weight_factor.log2_amax.grad != 0
    qtensor.convert_qat_(model)
    assert torch.equal(logits(model), y)
    assert not layer.weight.quantizer.rowwise  # the transpose of rowwise data


def test_a_quantized_model_cannot_be_prepared(tmp_path):
    make().save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=QTensorConfig("nvfp4"))
    rule = r"prepare_qat_: .*its weight is quantized already: nvfp4"
    with pytest.raises(qtensor.QTensorError, match=rule):
        qtensor.prepare_qat_(model, "nvfp4", is_layer)


def test_weights_of_a_prepared_model_are_plain():
    model = make()
    qtensor.prepare_qat_(model, "nvfp4", is_layer)
    assert all(type(t) is torch.Tensor for t in weights(model).values())


@pytest.mark.parametrize("change", [qtensor.prepare_qat_, qtensor.quantize_])
def test_errors_name_skipped_experts(change):
    """Not the layers that the caller left out: those hid the reason."""
    model = make("gpt-oss")
    why = r"mlp\.experts\.gate_up_proj: its experts are stored as \(E, K, N\)"
    with pytest.raises(qtensor.QTensorError, match=rf"got model\.layers\.0\.{why}"):
        change(model, "mxfp8", lambda module, name: "experts" in name)
    with pytest.raises(qtensor.QTensorError, match=rf"matches only skipped layers: .*{why}"):
        change(model, {"*.experts.*": "mxfp8"})
    with pytest.raises(qtensor.QTensorError, match=r"q_proj: filtered; .*k_proj: filtered"):
        change(model, "mxfp8", lambda module, name: False)
