"""Models of transformers are quantized while they load, run, are saved and load again."""

import json

import pytest
import torch
from transformers_models import IDS, NAMES, WITH_EXPERTS, config, dense, load, logits, transformers

import qtensor
from qtensor import QuantizedTensor, checkpoints
from qtensor.integrations.experts import ExpertWeights
from qtensor.integrations.transformers import QTensorConfig, pretrained_config, weights

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def quantized(model):
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if isinstance(parameter, (QuantizedTensor, ExpertWeights))
    }


def assert_same_model(model, other):
    state, again = dict(model.named_parameters()), dict(other.named_parameters())
    assert state.keys() == again.keys()
    for name, parameter in state.items():
        assert type(parameter) is type(again[name]), name
        assert torch.equal(values(parameter), values(again[name])), name
    assert torch.equal(logits(model), logits(other))


def values(parameter):
    parameter = parameter.detach()
    plain = type(parameter) in (torch.Tensor, torch.nn.Parameter)
    return parameter if plain else parameter.dequantize()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8"])
def test_quantized_while_loading_and_saved(name, fmt, tmp_path):
    source = dense(name, tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=QTensorConfig(fmt))
    found = quantized(model)
    per_layer = 7 if "llama" in name else 6  # four of attention, and three of the MLP or two stacks
    assert len(found) == 2 * per_layer
    assert not any(parameter.requires_grad for parameter in found.values())
    for key, parameter in found.items():
        original = source.get_parameter(key)
        if isinstance(parameter, ExpertWeights):
            assert parameter.swapped == (name == "gpt-oss")
            for i, matrix in enumerate(original.detach()):
                rows = matrix.T.contiguous() if parameter.swapped else matrix
                wanted = qtensor.quantize(rows, fmt).dequantize()
                assert torch.equal(
                    parameter[i].dequantize(), wanted.T if parameter.swapped else wanted
                )
        else:
            assert torch.equal(values(parameter), qtensor.quantize(original, fmt).dequantize())
    model.save_pretrained(tmp_path / "saved")
    entry = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert entry == {"quant_method": "qtensor", "version": 1}
    assert_same_model(model, load(tmp_path / "saved"))


@pytest.mark.parametrize("name", NAMES)
def test_output_embeddings_and_tied_weights_stay(name, tmp_path):
    dense(name, tmp_path)
    model = load(tmp_path, quantization_config=QTensorConfig("mxfp8"))
    assert type(model.lm_head.weight) is torch.nn.Parameter
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == (name == "llama-tied")
    routers = [p for n, p in model.named_parameters() if "router" in n or "mlp.gate." in n]
    assert all(type(p) is torch.nn.Parameter for p in routers)


def test_modules_to_not_convert(tmp_path):
    dense("llama", tmp_path)
    kept = QTensorConfig("nvfp4", modules_to_not_convert=["model.layers.1", "q_proj"])
    model = load(tmp_path, quantization_config=kept)
    assert len(quantized(model)) == 6
    assert not any("q_proj" in name or "layers.1." in name for name in quantized(model))


LAYOUTS = [
    ("compressed-tensors", "nvfp4"),
    ("compressed-tensors", "fp8"),
    ("compressed-tensors", "mxfp4"),
    ("fine-grained-fp8", "mxfp8"),
    ("fine-grained-fp8", "fp8"),
    ("modelopt", "nvfp4"),
]


CASES = [(name, *case) for name in ("llama", "qwen3-moe", "mixtral") for case in LAYOUTS]


@pytest.mark.parametrize(
    ("name", "layout", "fmt"),
    [
        *CASES,
        ("gpt-oss", "fine-grained-fp8", "mxfp8"),
        ("gpt-oss", "modelopt", "nvfp4"),
        ("gpt-oss", "gpt-oss", "mxfp4"),
        ("llama4", "modelopt", "nvfp4"),
    ],
)
def test_other_layouts(name, layout, fmt, tmp_path):
    """Every expert is stored apart there, gate and up too, and is stacked without rounding."""
    dense(name, tmp_path / "dense")
    # The layout of gpt-oss holds experts alone.
    attention = ["model.layers.*.self_attn"] if layout == "gpt-oss" else None
    kept = QTensorConfig(fmt, layout=layout, modules_to_not_convert=attention)
    model = load(tmp_path / "dense", quantization_config=kept)
    model.save_pretrained(tmp_path / "saved")
    with checkpoints.open(tmp_path / "saved") as stored:
        assert stored.layout == layout
        if name == "qwen3-moe":
            assert "model.layers.0.mlp.experts.3.gate_proj.weight" in stored.groups
    again = load(tmp_path / "saved", config=pretrained_config(tmp_path / "saved"))
    assert len(quantized(again)) == len(quantized(model))
    assert again.hf_quantizer.dense == {}
    assert_same_model(model, again)


def test_methods_that_transformers_does_not_know(tmp_path):
    dense("qwen3-moe", tmp_path / "dense")
    kept = QTensorConfig("nvfp4", layout="modelopt")
    model = load(tmp_path / "dense", quantization_config=kept)
    model.save_pretrained(tmp_path / "saved")
    assert_same_model(model, load(tmp_path / "saved", quantization_config=QTensorConfig()))


def test_gate_and_up_with_separate_factors(tmp_path):
    """Checkpoints that were quantized expert by expert have a tensor factor for each matrix."""
    source = dense("qwen3-moe", tmp_path / "dense")
    state = {
        name: qtensor.quantize(tensor, "nvfp4") if "experts." in name else tensor
        for name, tensor in checkpoints.load_state_dict(tmp_path / "dense").items()
    }
    assert sum(isinstance(t, QuantizedTensor) for t in state.values()) == 2 * 4 * 3
    checkpoints.save(state, tmp_path / "ct", "compressed-tensors", config=source.config.to_dict())
    model = load(tmp_path / "ct", config=pretrained_config(tmp_path / "ct"))
    experts = model.model.layers[1].mlp.experts
    for i in range(4):
        for half, part in enumerate(("gate", "up")):
            stored = state[f"model.layers.1.mlp.experts.{i}.{part}_proj.weight"].dequantize()
            assert torch.equal(experts.gate_up_proj[i].dequantize().chunk(2)[half], stored)
    for key, tensor in weights(model).items():
        assert torch.equal(values(tensor), values(state[key])), key


def test_blocks_of_128(tmp_path):
    small = config("qwen3-moe")
    small.hidden_size, small.moe_intermediate_size = 128, 128
    torch.manual_seed(0)
    source = transformers.AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16)
    source.save_pretrained(tmp_path / "dense")
    quantizer = qtensor.quantizer("fp8_blockwise", block_scaling_dim=2)
    kept = QTensorConfig(
        quantizer,
        layout="fine-grained-fp8",
        modules_to_not_convert=["k_proj", "v_proj", "q_proj", "o_proj"],
    )
    model = load(tmp_path / "dense", quantization_config=kept)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", config=pretrained_config(tmp_path / "saved"))
    assert_same_model(model, again)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_the_loader_of_transformers_reads_what_save_pretrained_wrote(name, tmp_path):
    """transformers decodes fine-grained FP8 to the same bfloat16 values, without qtensor."""
    dense(name, tmp_path / "dense")
    kept = QTensorConfig("fp8", layout="fine-grained-fp8")
    model = load(tmp_path / "dense", quantization_config=kept)
    model.save_pretrained(tmp_path / "saved")
    theirs = load(
        tmp_path / "saved",
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )
    ours = dict(model.named_parameters())
    for key, parameter in theirs.named_parameters():
        assert torch.equal(parameter, values(ours[key])), key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_generate_with_static_and_dynamic_caches(name, fmt, tmp_path):
    dense(name, tmp_path)
    model = load(tmp_path, quantization_config=QTensorConfig(fmt))
    options = {"max_new_tokens": 12, "do_sample": False}
    tokens = model.generate(IDS, **options)
    assert tokens.shape == (1, IDS.shape[1] + 12)
    assert torch.equal(model.generate(IDS, cache_implementation="static", **options), tokens)
    # The tokens are those of the same weights without quantized tensors, up to near ties.
    known = tokens[:, : IDS.shape[1] + 1]
    plain = model.dequantize()
    difference = (logits(plain)[0, -1] - plain(known).logits[0, -2]).abs().max()
    assert difference < 0.1 * logits(plain).abs().max()
    assert type(plain.model.layers[0].self_attn.q_proj.weight) is torch.nn.Parameter


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_every_implementation_of_experts(name, tmp_path):
    dense(name, tmp_path)
    wanted = None
    for kind in ("grouped_mm", "batched_mm", "eager"):
        model = load(
            tmp_path, quantization_config=QTensorConfig("nvfp4"), experts_implementation=kind
        )
        found = logits(model)
        with torch.inference_mode():
            assert torch.equal(model(IDS).logits, found)
        wanted = found if wanted is None else wanted
        assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


TIED = [
    *((layout, fmt) for layout in ("qtensor", "compressed-tensors") for fmt in ("mxfp4", "mxfp8")),
    *(("torchao", fmt) for fmt in ("fp8_rowwise", "mxfp8", "nvfp4")),
    *((layout, fmt) for layout in ("modelopt", "compressed-tensors") for fmt in ("fp8", "nvfp4")),
]


@pytest.mark.parametrize(("layout", "fmt"), TIED)
def test_a_tied_weight_that_is_quantized_is_stored_once(layout, fmt, tmp_path):
    dense("llama-tied", tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=QTensorConfig(fmt, layout=layout))
    quantized_weight = qtensor.quantize(model.lm_head.weight.detach(), fmt)
    tied = torch.nn.Parameter(quantized_weight, requires_grad=False)
    model.lm_head.weight = model.model.embed_tokens.weight = tied
    model.save_pretrained(tmp_path / "saved")
    with checkpoints.open(tmp_path / "saved") as checkpoint:
        stored = [name for name in checkpoint if "embed" in name or "lm_head" in name]
    assert stored == ["model.embed_tokens.weight"]
    again = load(tmp_path / "saved", config=pretrained_config(tmp_path / "saved"))
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight.dequantize(), quantized_weight.dequantize())
    assert torch.equal(logits(again), logits(model))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt-oss"])
def test_compiled(name, tmp_path):
    dense(name, tmp_path)
    model = load(tmp_path, quantization_config=QTensorConfig("nvfp4"))
    wanted = logits(model)
    found = logits(torch.compile(model, backend="aot_eager"))
    assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_shards(tmp_path):
    dense("qwen3-moe", tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=QTensorConfig("nvfp4"))
    plain = model.config.to_dict()
    checkpoints.save(weights(model), tmp_path / "saved", config=plain, shard_size="20KB")
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    assert_same_model(model, load(tmp_path / "saved"))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert_same_model(model, load(tmp_path / "theirs"))


def test_weights_that_no_format_holds_are_plain(tmp_path):
    """Blocks of 64x64 are dense only."""
    source = dense("llama", tmp_path / "dense")
    stored = {}
    for name, tensor in checkpoints.load_state_dict(tmp_path / "dense").items():
        stored[name] = tensor
        if "mlp.up_proj" in name:
            stored[name] = tensor.to(torch.float8_e4m3fn)
            blocks = [-(-n // 64) for n in tensor.shape]
            stored[f"{name}_scale_inv"] = torch.full(blocks, 0.5)
    about = source.config.to_dict()
    about["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [64, 64],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["self_attn", "down_proj", "gate_proj", "lm_head"],
    }
    (tmp_path / "fp8").mkdir()
    transformers.modeling_utils.safe_save_file(
        {k: t.clone() for k, t in stored.items()},
        tmp_path / "fp8" / "model.safetensors",
        {"format": "pt"},
    )
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(about))
    model = load(tmp_path / "fp8", config=pretrained_config(tmp_path / "fp8"))
    key = "model.layers.1.mlp.up_proj.weight"
    assert "64" in model.hf_quantizer.dense[key]
    assert torch.equal(model.get_parameter(key), (stored[key].float() * 0.5).bfloat16())


def test_mistakes_are_named(tmp_path):
    dense("llama", tmp_path / "dense")
    with pytest.raises(qtensor.QTensorError, match="Pass a format"):
        load(tmp_path / "dense", quantization_config=QTensorConfig())
    model = load(tmp_path / "dense", quantization_config=QTensorConfig("nvfp4"))
    model.save_pretrained(tmp_path / "saved")
    own = pretrained_config(tmp_path / "saved", QTensorConfig("mxfp8"))
    with pytest.raises(qtensor.QTensorError, match="without quantized weights"):
        load(tmp_path / "saved", config=own)
    with pytest.raises(qtensor.QTensorError, match=r"to one device.*call disk_offload of"):
        load(
            tmp_path / "dense",
            quantization_config=QTensorConfig("nvfp4"),
            device_map={"model": "cpu", "lm_head": "disk"},
            offload_folder=tmp_path / "offload",
        )
    for bad, message in [
        ({"format": "fp5"}, "registered"),
        ({"format": "fp8_delayed"}, "factors of their own values"),
        ({"format": "mxfp8(columnwise=True)"}, "rowwise, with"),
        ({"layout": "zip"}, "name of a layout"),
        ({"bits": 4}, "arguments must be known"),
        ({"version": 9}, "version 1"),
        ({"quant_method": "awq"}, "quant_method is"),
    ]:
        with pytest.raises(qtensor.QTensorError, match=message):
            QTensorConfig(**bad)


def test_a_layout_that_cannot_hold_stacked_experts_says_so(tmp_path):
    dense("gpt-oss", tmp_path / "dense")
    kept = QTensorConfig("nvfp4", layout="compressed-tensors")
    model = load(tmp_path / "dense", quantization_config=kept)
    with pytest.raises(checkpoints.CheckpointError, match=r"experts.*compressed-tensors"):
        model.save_pretrained(tmp_path / "saved")


def test_a_shape_that_does_not_fit_the_model(tmp_path):
    dense("llama", tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=QTensorConfig("mxfp8"))
    model.save_pretrained(tmp_path / "saved")
    other = pretrained_config(tmp_path / "saved")
    other.intermediate_size = 192
    with pytest.raises(qtensor.QTensorError, match="has the shape of the parameter"):
        load(tmp_path / "saved", config=other)
