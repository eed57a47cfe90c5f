"""Folders of every layout that transformers' names fit load as quantized tensors, on a CPU."""

import json
import warnings

import pytest
import safetensors.torch
import torch
from transformers_models import config, dense, load, logits, transformers

import qtensor
from qtensor import QuantizedTensor, checkpoints
from qtensor.core.quantizer_registry import parse
from qtensor.integrations.experts import ExpertWeights
from qtensor.integrations.methods import known_methods, take_methods
from qtensor.integrations.transformers import QTensorConfig, QTensorQuantizer, pretrained_config

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

# test_transformers_models.py has compressed-tensors, fine-grained-fp8, modelopt and gpt-oss.
LAYOUTS = [
    ("llama", "qtensor", "mxfp6"),
    ("llama", "quark", "fp8"),
    ("llama", "quark", "mxfp4"),
    ("qwen3-moe", "quark", "mxfp6(packed=True)"),
    ("llama", "fbgemm-fp8", "fp8_rowwise"),
    ("llama", "torchao", "fp8_rowwise"),
    ("qwen3-moe", "torchao", "nvfp4"),
    ("llama", "mlx", "mxfp4"),
    ("qwen3-moe", "mlx", "mxfp8"),
]


def written(name, layout, fmt, folder):
    """Write a model with quantized projections, each expert apart; return {name: weight}."""
    dense(name, folder / "dense")
    with checkpoints.open(folder / "dense") as plain:
        quantizer = parse(fmt)
        state = {
            key: quantizer(plain[key]) if key.endswith("_proj.weight") else plain[key]
            for key in plain
        }
        checkpoints.save(state, folder / "x", layout=layout, config=plain.config)
    return {key: t for key, t in state.items() if isinstance(t, QuantizedTensor)}


@pytest.mark.parametrize(("name", "layout", "fmt"), LAYOUTS)
def test_a_folder_loads_as_quantized_tensors(name, layout, fmt, tmp_path):
    weights = written(name, layout, fmt, tmp_path)
    with checkpoints.open(tmp_path / "x") as checkpoint:
        assert checkpoint.layout == layout
    model = load(tmp_path / "x", config=pretrained_config(tmp_path / "x"))
    assert model.hf_quantizer.dense == {}
    for key, want in weights.items():
        if ".experts." not in key:
            found = model.get_parameter(key)
            assert isinstance(found, QuantizedTensor)
            assert torch.equal(found.dequantize(), want.dequantize()), key
            continue
        prefix, _, rest = key.partition("experts.")
        index, part, _ = rest.split(".")
        stack = "down_proj" if part == "down_proj" else "gate_up_proj"
        experts = model.get_parameter(f"{prefix}experts.{stack}")
        assert isinstance(experts, ExpertWeights)
        values = experts[int(index)].dequantize()
        if stack == "gate_up_proj":
            values = values.chunk(2)[part == "up_proj"]
        assert torch.equal(values, want.dequantize()), key
    assert torch.isfinite(logits(model)).all()


FACTORS = [
    ("qtensor", "nvfp4", "mlp.up_proj.input_scale"),
    ("modelopt", "nvfp4", "mlp.up_proj.input_scale"),
    ("modelopt", "fp8", "self_attn.v_proj.v_scale"),
    ("compressed-tensors", "nvfp4", "mlp.up_proj.input_global_scale"),
    ("compressed-tensors", "fp8", "self_attn.k_scale"),
    ("fine-grained-fp8", "fp8", "mlp.up_proj.activation_scale"),
    ("quark", "fp8", "self_attn.k_proj.output_scale"),
    ("fbgemm-fp8", "fp8_rowwise", "mlp.up_proj.input_scale_ub"),
]


@pytest.mark.parametrize(("layout", "fmt", "factor"), FACTORS)
def test_factors_of_activations_and_of_the_cache_are_left_alone(layout, fmt, factor, tmp_path):
    """transformers joins the names that a class ignores with those of its own, as sets."""
    weights = written("llama", layout, fmt, tmp_path)
    path = tmp_path / "x" / "model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        about = file.metadata()
    stored = safetensors.torch.load_file(path)
    stored[f"model.layers.0.{factor}"] = torch.tensor(0.5)
    safetensors.torch.save_file(stored, path, about)
    kind = transformers.AutoModelForCausalLM
    model, loading = kind.from_pretrained(
        tmp_path / "x", config=pretrained_config(tmp_path / "x"), output_loading_info=True
    )
    assert not loading["unexpected_keys"]
    assert not loading["missing_keys"]
    for key, want in weights.items():
        assert torch.equal(model.get_parameter(key).dequantize(), want.dequantize())


def test_a_class_that_ignores_keys(tmp_path, monkeypatch):
    """Classes write their list of ignored keys as a list or as a set."""
    written("llama", "modelopt", "nvfp4", tmp_path)
    for own in (["extra.weight"], {"extra.weight"}, None):
        kind = transformers.LlamaForCausalLM
        monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", own, raising=False)
        model = load(tmp_path / "x", config=pretrained_config(tmp_path / "x"))
        assert model._keys_to_ignore_on_load_unexpected >= set(own or ())


def test_experts_of_fbgemm(tmp_path):
    """Llama 4 multiplies by (E, K, N); the file has a factor for each column of an expert."""
    dense("llama4", tmp_path / "dense")
    state = checkpoints.load_state_dict(tmp_path / "dense")
    names = [key for key in state if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    for key in names:
        state[key] = qtensor.quantize(state[key].mT.contiguous(), "fp8_rowwise")
    about = config("llama4").to_dict()
    checkpoints.save(state, tmp_path / "x", layout="fbgemm-fp8", config=about)
    model = load(tmp_path / "x", config=pretrained_config(tmp_path / "x"))
    for key in names:
        found = model.get_parameter(key)
        assert isinstance(found, ExpertWeights)
        assert torch.equal(found.dequantize(), state[key].dequantize().mT)
    assert len(names) == 4


def test_one_parameter_is_dense_at_a_time(tmp_path, monkeypatch):
    """The parameters before it are quantized, and those after it are on the meta device."""
    dense("qwen3-moe", tmp_path)
    seen = []
    original = QTensorQuantizer.param_needs_quantization

    def note(self, model, param_name, **kwargs):
        needed = original(self, model, param_name, **kwargs)
        seen.append([
            name
            for name, parameter in model.named_parameters()
            if type(parameter) is torch.nn.Parameter
            and not parameter.is_meta
            and original(self, model, name)
        ])
        return needed

    monkeypatch.setattr(QTensorQuantizer, "param_needs_quantization", note)
    model = load(tmp_path, quantization_config=QTensorConfig("mxfp8"))
    assert len(seen) > 12
    assert max(len(names) for names in seen) <= 1
    quantized = [p for p in model.parameters() if isinstance(p, (QuantizedTensor, ExpertWeights))]
    assert len(quantized) == 12


METHODS = {
    "compressed-tensors": {"config_groups": {}, "format": "float-quantized"},
    "fp8": {"weight_block_size": [128, 128]},
    "mxfp8": {},
    "mxfp4": {},
    "fbgemm_fp8": {},
    "quark": {},
    "torchao": {
        "quant_type": {"default": {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": {}}}
    },
}


TAKEN = [
    ("compressed-tensors", "nvfp4", "compressed-tensors"),
    ("compressed-tensors", "fp8", "compressed-tensors"),
    ("fine-grained-fp8", "fp8_blockwise(block_scaling_dim=2)", "fp8"),
    ("fine-grained-fp8", "mxfp8", "fp8"),
    ("modelopt", "nvfp4", "modelopt"),
    ("quark", "mxfp4", "quark"),
    ("fbgemm-fp8", "fp8_rowwise", "fbgemm_fp8"),
    ("torchao", "fp8_rowwise", "torchao"),
]


@pytest.mark.parametrize(("layout", "fmt", "method"), TAKEN)
def test_methods_that_are_taken_need_no_argument(layout, fmt, method, tmp_path):
    weights = written("llama", layout, fmt, tmp_path)
    about = json.loads((tmp_path / "x" / "config.json").read_text())
    assert about["quantization_config"]["quant_method"] == method
    with take_methods():
        for options in ({}, {"quantization_config": QTensorConfig()}):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "You passed `quantization_config`")
                model = load(tmp_path / "x", **options)
            for key, want in weights.items():
                found = model.get_parameter(key)
                assert isinstance(found, QuantizedTensor)
                assert torch.equal(found.dequantize(), want.dequantize()), key
    assert isinstance(model.config.quantization_config, QTensorConfig)


def test_gpt_oss_needs_no_argument(tmp_path):
    dense("gpt-oss", tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=QTensorConfig("mxfp4", layout="gpt-oss"))
    for module in model.modules():
        for key, parameter in dict(module._parameters).items():
            if isinstance(parameter, QuantizedTensor):  # the layout holds experts alone
                module._parameters[key] = torch.nn.Parameter(parameter.dequantize())
    model.save_pretrained(tmp_path / "x")
    with take_methods("mxfp4"):
        again = load(tmp_path / "x")
    assert torch.equal(logits(again), logits(model))


def test_methods_are_given_back():
    mapping = transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    before = dict(mapping)
    taken = take_methods()
    assert all(mapping[method] is not before.get(method) for method in known_methods())
    assert {"compressed-tensors", "fp8", "mxfp4", "modelopt", "quark"} <= set(known_methods())
    taken.give_back()
    assert mapping == before
    with pytest.raises(qtensor.QTensorError, match="'awq'"):
        take_methods(["awq"])


@pytest.mark.parametrize("method", METHODS)
def test_transformers_refuses_our_config_for_its_own_methods(method, tmp_path):
    """It compares the class names of the configs, and lets nobody register a method again.

    Where this fails, the detour by ``pretrained_config`` in docs/transformers.md may go.
    """
    package = {"torchao": "torchao", "compressed-tensors": "compressed_tensors"}.get(method)
    if package:
        pytest.importorskip(
            package, reason=f"{method} is not installed: pip install torch-qtensor[origins]"
        )
    dense("llama", tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    about["quantization_config"] = {"quant_method": method, **METHODS[method]}
    (tmp_path / "config.json").write_text(json.dumps(about))
    refusal = "you are passing a QTensorConfig|the latest version of Quark"
    with pytest.raises((ValueError, ImportError), match=refusal):
        load(tmp_path, quantization_config=QTensorConfig())
    own = pretrained_config(tmp_path).quantization_config
    assert isinstance(own, QTensorConfig)
    with pytest.raises(ValueError, match="already registered"):
        transformers.quantizers.auto.register_quantization_config(method)(QTensorConfig)


def test_the_config_of_a_file_says_what_to_pass(tmp_path):
    """transformers says that its name is not a valid JSON file, or asks the hub for it."""
    path = tmp_path / "m.gguf"
    checkpoints.save({"blk.0.ffn_up.weight": torch.zeros(2, 2)}, path, layout="gguf")
    with pytest.raises(qtensor.QTensorError, match=r"a config.json.*m\.gguf.*Pass the"):
        pretrained_config(path)
