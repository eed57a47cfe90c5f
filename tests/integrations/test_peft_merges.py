"""Adapters of PEFT over quantized weights: merges, and training for the merged weights."""

import copy

import pytest
import torch
from formats import FORMATS, assert_same_tensor, rand
from torch import nn

import qtensor

peft = pytest.importorskip("peft", reason="peft (extra dev) is not installed")

from qtensor.integrations.peft import MergeAwareLinear, merge_aware_  # noqa: E402
from qtensor.modules.input_hook import TRANSFORM, set_input_step  # noqa: E402
from qtensor.modules.input_transform import InputTransform  # noqa: E402

ROUNDED = [case for case in FORMATS if case.name != "fp8_delayed"]
"""A weight that is quantized once has no earlier steps."""
rounded = pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.name)


def adapted(case, size=0.2, **options):
    """A model whose first layer is quantized and has a random adapter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    qtensor.quantize_(model, case.quantizer())
    config = peft.LoraConfig(r=4, target_modules=["0", "2"], **options)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = size * rand(*parameter.shape, seed=len(name))
    return model


def steps(model, count=3):
    """Train the adapters, and return the outputs for the first input afterwards."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(count):
        model(rand(16, 64, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(rand(16, 64)).detach()


# ---- merges


def test_a_tied_weight_is_skipped():
    """The change reached the embedding too; the adapter stays beside the weight."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32, bias=False))
    inner[2].weight = inner[0].weight
    model = peft.get_peft_model(inner, peft.LoraConfig(r=4, target_modules=["1", "2"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * rand(*parameter.shape, seed=len(name))
    ids = torch.arange(8)
    want = model(ids)
    report = qtensor.merge_lora_(model)
    assert [each.name for each in report.layers] == ["1"]
    assert "its weight is tied: " in report.skipped[0].note
    torch.testing.assert_close(model(ids), want)


@pytest.mark.parametrize(
    ("given", "aware"), [("pair", False), ("peft", False), ("peft", True)], ids=str
)
def test_a_merge_into_a_layer_that_transforms_its_inputs(given, aware):
    """The adapter reads the inputs themselves; its change was added as if they were transformed."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 96)
    set_input_step(layer, TRANSFORM, InputTransform(torch.linspace(0.5, 2, 64), 32))
    if aware:
        qtensor.quantize_(layer, "mxfp8")
    a, b, x = rand(4, 64, seed=1), rand(96, 4, seed=2), rand(16, 64, seed=3)
    want = layer(x) + x @ a.T @ b.T
    if given == "pair":
        model, pairs = layer, {"": (a, b)}
    else:
        config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["0"])
        model, pairs = peft.get_peft_model(nn.Sequential(layer), config), None
        adapter = model.base_model.model[0]
        adapter.lora_A["default"].weight.data = a
        adapter.lora_B["default"].weight.data = b
        torch.testing.assert_close(model(x), want)
    if aware:
        merge_aware_(model)
    trained = model(x)
    qtensor.merge_lora_(model, pairs)
    if aware:
        assert torch.equal(model(x), trained)
    tolerance = 0.05 if aware else 1e-5
    assert (model(x) - want).norm() < tolerance * want.norm()


@pytest.mark.parametrize("method", ["nearest", "stochastic", "gptq"])
def test_merge_lora_of_active_adapters(method):
    model = adapted(ROUNDED[-1])
    inputs = [rand(64, 64, seed=9)]
    calibration = inputs if method == "gptq" else None
    layer = model.base_model.model[0]
    wanted = (layer.base_layer.weight.dequantize() + layer.get_delta_weight("default")).detach()
    report = qtensor.merge_lora_(model, method=method, calibration=calibration, warn_below=0)
    assert [each.name for each in report.layers] == ["0", "2"]
    assert layer.merged_adapters == ["default"]
    assert report.layers[0].kept > 0.5
    weight = layer.base_layer.weight
    if method == "nearest":
        assert_same_tensor(weight.detach(), weight.quantizer(wanted))
    y = model(inputs[0])
    with pytest.raises(qtensor.QTensorError, match="0: its adapters are merged already: default"):
        qtensor.merge_lora_(model)
    assert torch.equal(model(inputs[0]), y)
    plain = model.unload()
    assert type(plain[0]) is nn.Linear
    assert plain[0].weight is weight
    assert torch.equal(plain(inputs[0]), y)
    with pytest.raises(qtensor.QTensorError, match=r"needs an active adapter.*got none"):
        qtensor.merge_lora_(plain)


def test_adapters_that_are_more_than_a_product_stay():
    model = adapted(ROUNDED[0], use_dora=True)
    with pytest.raises(qtensor.QTensorError, match=r"0: adapter default.*DoraLinearVariant"):
        qtensor.merge_lora_(model)
    with pytest.raises(qtensor.QTensorError, match=r"0: its adapter has a bias"):
        qtensor.merge_lora_(adapted(ROUNDED[0], lora_bias=True))
    model.disable_adapter_layers()
    with pytest.raises(qtensor.QTensorError, match="0: its adapters are disabled: default"):
        qtensor.merge_lora_(model)


@pytest.mark.parametrize("safe", [False, True])
def test_the_merge_of_peft_warns(safe):
    small = adapted(ROUNDED[-1], size=0.01)
    with pytest.warns(UserWarning, match=r"\+= \[nvfp4\]: rounding leaves \d+% .*merge_lora_"):
        small.merge_and_unload(safe_merge=safe)
    adapted(ROUNDED[-1], size=1.0).merge_and_unload(safe_merge=safe)  # warnings are errors


# ---- training for the merged weights


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@rounded
def test_merged_outputs_are_those_of_training(case, backend):
    """By PEFT's merge, by ``merge_lora_``, and after saving and loading the adapters."""
    model = adapted(case)
    done = merge_aware_(model)
    assert [each.name for each in done.swapped] == ["0", "2"]
    eager = copy.deepcopy(model)
    wanted = steps(eager)
    if backend is not None:
        compiled = copy.deepcopy(model)
        compiled.compile(backend=backend, fullgraph=True)
        assert torch.equal(steps(compiled), wanted)
        model = compiled
    else:
        model = eager
    x = rand(16, 64)
    before = [layer.weight.detach().clone() for layer in base_layers(model)]
    ours = copy.deepcopy(eager)
    qtensor.merge_lora_(ours, warn_below=0)
    with torch.no_grad():
        assert torch.equal(ours.unload()(x), wanted)
        merged = eager.merge_and_unload()
        assert torch.equal(merged(x), wanted)
    for weight, old in zip((merged[0].weight, merged[2].weight), before, strict=True):
        assert type(weight.data) is type(old)
        assert weight.quantizer == old.quantizer
        assert not torch.equal(weight.dequantize(), old.dequantize())


def base_layers(model):
    return [m.base_layer for m in model.modules() if isinstance(m, MergeAwareLinear)]


def test_the_gradient_is_that_of_the_sum():
    """Straight through: as if the weight were ``Q(W + B A)`` and rounding had a slope of 1."""
    model = adapted(ROUNDED[-1])
    merge_aware_(model)
    layer = model.base_model.model[0]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = rand(16, 64, seed=5).requires_grad_()
    y = layer(x)
    grad = rand(16, 96, seed=6)
    y.backward(grad)
    weight = layer.merged_weight(["default"]).dequantize().detach()
    slope = grad.t() @ x.detach()  # of the weight
    scaling = layer.scaling["default"]
    torch.testing.assert_close(a.grad, scaling * b.detach().t() @ slope)
    torch.testing.assert_close(b.grad, scaling * slope @ a.detach().t())
    torch.testing.assert_close(x.grad, grad @ weight)


def test_several_adapters_are_added_before_they_are_rounded():
    model = adapted(ROUNDED[-1])
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    merge_aware_(model)
    with torch.no_grad():
        wanted = model(rand(16, 64))
        ours = copy.deepcopy(model)
        qtensor.merge_lora_(ours, warn_below=0)
        assert torch.equal(ours(rand(16, 64)), wanted)
        assert torch.equal(model.merge_and_unload()(rand(16, 64)), wanted)


def test_mixed_precision_trains_the_merged_weights():
    """Autocast does not round the factors, which a merge multiplies in float32."""
    model = adapted(ROUNDED[-1])
    merge_aware_(model)
    weight = model.base_model.model[0].merged_weight(["default"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = model.base_model.model[0].merged_weight(["default"])
        y = model(rand(16, 64))
        merged = model.merge_and_unload()
        assert torch.equal(merged(rand(16, 64)), y)
    assert_same_tensor(inside.detach(), weight.detach())


def test_adapters_are_saved_and_loaded(tmp_path):
    model = adapted(ROUNDED[-1])
    base = copy.deepcopy(model).unload()
    merge_aware_(model)
    wanted = steps(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    merge_aware_(again)
    assert torch.equal(again(rand(16, 64)), wanted)
    again.disable_adapter_layers()
    assert not torch.equal(again(rand(16, 64)), wanted)


def test_what_has_no_merged_weight_is_refused():
    with pytest.raises(qtensor.QTensorError, match=r"merge_aware_: .*no dropout; got.*in 0"):
        merge_aware_(adapted(ROUNDED[0], lora_dropout=0.1))
    plain = peft.get_peft_model(
        nn.Sequential(nn.Linear(8, 8)), peft.LoraConfig(r=2, target_modules=["0"])
    )
    with pytest.raises(qtensor.QTensorError, match=r"over a quantized weight; got 0: .*not quant"):
        merge_aware_(plain)
    at_random = nn.Sequential(nn.Linear(64, 64))
    qtensor.quantize_(at_random, qtensor.quantizer("nvfp4", stochastic_rounding=True))
    model = peft.get_peft_model(at_random, peft.LoraConfig(r=2, target_modules=["0"]))
    with pytest.raises(qtensor.QTensorError, match="rounding is to nearest"):
        merge_aware_(model)
    model = adapted(ROUNDED[0]).eval()
    merge_aware_(model)
    with pytest.raises(qtensor.QTensorError, match="same for all rows of a batch"):
        model(rand(2, 64), adapter_names=["default", "__base__"])


# ---- models of transformers

theirs = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:Dynamo detected:UserWarning"
)


@theirs
def test_a_layer_that_stores_its_weight_transposed():
    transformers = pytest.importorskip("transformers", reason="extra transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=64, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=1
    )
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    qtensor.quantize_(model, "nvfp4")
    targets = ["c_attn", "c_fc"]
    check_model(model, peft.LoraConfig(r=4, target_modules=targets, fan_in_fan_out=True), "gptq")


LIKE_OTHERS = pytest.mark.nightly(reason="the other cells have this model, origin and method")
# quantize_ leaves experts alone that are stored as (E, K, N).
EXPERTS = [
    ("qwen3-moe", "quantize_", "gptq"),
    pytest.param("qwen3-moe", "loaded", "gptq", marks=LIKE_OTHERS),
    pytest.param("gpt-oss", "loaded", "nearest", marks=LIKE_OTHERS),
    ("gpt-oss", "loaded", "gptq"),
]
compiled = pytest.param("aot_eager", marks=pytest.mark.nightly(reason="20 s a model"))


@theirs
@pytest.mark.parametrize("backend", [None, compiled])
@pytest.mark.parametrize(("name", "how", "method"), EXPERTS)
def test_stacked_experts(name, how, method, backend, tmp_path):
    """One factor for all experts, or one for each; stored as (E, N, K) or as (E, K, N)."""
    models = pytest.importorskip("transformers_models", reason="extra transformers")
    from qtensor.integrations.transformers import QTensorConfig  # noqa: PLC0415

    model = models.dense(name, tmp_path)
    if how == "quantize_":
        qtensor.quantize_(model, "nvfp4", lambda module, name: "lm_head" not in name)
    else:
        model = models.load(
            tmp_path, quantization_config=QTensorConfig("nvfp4"), dtype=torch.bfloat16
        )
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets)
    check_model(model, config, method, backend)


def check_model(model, config, method, backend=None):
    """Merge, and train for the merge; the ids reach every layer."""
    ids = torch.arange(48).view(2, 24) % 60
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.05 * rand(*parameter.shape, seed=len(name)).to(parameter.dtype)
    targets = [n for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    merged = copy.deepcopy(model)
    report = qtensor.merge_lora_(merged, method=method, calibration=[ids], warn_below=0.5)
    assert len(report.layers) == len(targets)
    assert not report.skipped
    if method == "gptq":
        other = qtensor.merge_lora_(copy.deepcopy(model), calibration=[ids], warn_below=0)
        pairs = [
            (a.output_cosine, b.output_cosine)
            for a, b in zip(report.layers, other.layers, strict=True)
        ]
        assert all(own > nearest for own, nearest in pairs), pairs
    merge_aware_(model)
    model.train()
    y = model(ids).logits
    y.float().square().mean().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
    if backend is not None:
        compiled = torch.compile(model, backend=backend)(ids).logits
        assert torch.equal(compiled, y)
    plain = model.merge_and_unload()
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, y)
