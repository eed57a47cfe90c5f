"""Quantized models of transformers are saved, and opened in a new process, with and without us."""

import copy
import os
import pickle
import sys

import pytest
import safetensors.torch
import torch
import torch_process
from transformers_models import IDS, dense, load, logits, transformers

import qtensor
from qtensor import checkpoints
from qtensor.checkpoints.layouts.qtensor import NOTE
from qtensor.integrations.transformers import QTensorConfig, attach, weights
from qtensor.weights.layers import KINDS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

OTHERS = pytest.mark.nightly(reason="a process for each kind of model")
NAMES = ["llama", *[pytest.param(n, marks=OTHERS) for n in ("llama-tied", "qwen3-moe", "gpt2")]]
DICT = {"*.1.*": "mxfp8", "*.0.*": "nvfp4"}


def model_of(name, folder):
    if name != "gpt2":
        return dense(name, folder)
    about = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=32)
    model = transformers.AutoModelForCausalLM.from_config(about, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model.eval()


def in_new_process(program, folder, *blocked):
    """Run a program in a folder; importing a module that is ``blocked`` fails."""
    block = "".join(f"sys.modules[{name!r}] = None\n" for name in blocked)
    program = f"import sys, warnings\nwarnings.simplefilter('ignore')\n{block}{program}"
    places = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": places, "HF_HUB_OFFLINE": "1"}
    done = torch_process.run(program, folder=folder, environment=environment)
    return done.stdout + done.stderr


SAME = f"""
import torch, qtensor.integrations.transformers
from transformers import AutoModelForCausalLM
for name in {{names}}:
    model = AutoModelForCausalLM.from_pretrained(name)
    with torch.no_grad():
        assert torch.equal(model(torch.tensor({IDS.tolist()})).logits, torch.load(name + ".pt"))
"""


@pytest.mark.parametrize("name", NAMES)
def test_what_a_model_may_be_quantized_by(name, tmp_path):
    """A format or a dict, after or while loading; a new process gives the same logits."""
    plain = model_of(name, tmp_path / "dense")
    models = {"format": copy.deepcopy(plain), "dict": copy.deepcopy(plain)}
    qtensor.quantize_(models["format"], "nvfp4")
    qtensor.quantize_(models["dict"], DICT)
    models["loaded"] = load(tmp_path / "dense", quantization_config=QTensorConfig(DICT))
    # While loading, each expert gets a factor of its own; quantize_ has one for the stack.
    if name != "qwen3-moe":
        assert torch.equal(logits(models["loaded"]), logits(models["dict"]))
    for how, model in models.items():
        model.save_pretrained(tmp_path / how)
        torch.save(logits(model), tmp_path / f"{how}.pt")
    in_new_process(SAME.format(names=list(models)), tmp_path)


def test_a_search_and_its_file(tmp_path):
    plain = dense("llama", tmp_path / "dense")
    result = qtensor.search(plain, [IDS], budget_bits=6, formats=["nvfp4", "mxfp8"])
    applied = copy.deepcopy(plain)
    result.apply(applied)
    result.save(tmp_path / "search.json")
    for source in (result, tmp_path / "search.json", str(tmp_path / "search.json")):
        model = load(tmp_path / "dense", quantization_config=QTensorConfig(source))
        assert torch.equal(logits(model), logits(applied))
    applied.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(applied))


def test_names_in_a_dict_of_formats(tmp_path):
    dense("llama", tmp_path)
    kept = load(tmp_path, quantization_config=QTensorConfig({"*": "nvfp4", "*.q_proj": None}))
    assert type(kept.lm_head.weight) is torch.nn.Parameter
    named = QTensorConfig({"lm_head": "mxfp8", "*.q_proj": None, "*": "nvfp4"})
    model = load(tmp_path, quantization_config=named)
    assert model.lm_head.weight.quantizer.format == "mxfp8"
    assert type(model.model.layers[0].self_attn.q_proj.weight) is torch.nn.Parameter
    assert model.model.layers[0].mlp.up_proj.weight.quantizer.format == "nvfp4"
    with pytest.raises(qtensor.QTensorError, match=r"each pattern of format.*'\*\.gate'"):
        load(tmp_path, quantization_config=QTensorConfig({"*.gate": "nvfp4"}))


WIDE = pytest.mark.nightly(reason="a new process imports transformers; another cell is like it")
STOPS = f"""
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM
for folder in ("saved", "shards", "written"):
    for kind in (AutoModelForCausalLM, AutoModel, LlamaForCausalLM):
        try:
            kind.from_pretrained(folder, attn_implementation="eager")
        except ValueError as error:
            assert {NOTE!r} in str(error), error
        else:
            raise SystemExit("loaded")
        try:
            kind.from_pretrained(folder, config=AutoConfig.from_pretrained("dense"))
        except RuntimeError as error:
            assert "ignore_mismatched_sizes" in str(error), error
        else:
            raise SystemExit("loaded")
"""


@pytest.mark.parametrize(
    ("fmt", "blocked"),
    [
        pytest.param("fp8", (), id="fp8-not imported", marks=WIDE),
        pytest.param("fp8", ("qtensor",), id="fp8-not installed"),
        pytest.param("nvfp4", (), id="nvfp4-not imported", marks=WIDE),
        pytest.param("nvfp4", ("qtensor",), id="nvfp4-not installed", marks=WIDE),
    ],
)
def test_a_process_without_the_integration_stops(fmt, blocked, tmp_path):
    """The codes of fp8 have the shape of the weight; those of nvfp4 have not."""
    dense("llama", tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=QTensorConfig(fmt))
    model.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    checkpoints.save(weights(model), tmp_path / "written", config=model.config.to_dict())
    shown = in_new_process(STOPS, tmp_path, *blocked)
    assert shown.count(f"{NOTE} ") >= 9  # the report of each load names the tensor
    for folder in ("saved", "shards", "written"):
        again = load(tmp_path / folder)
        assert torch.equal(logits(again), logits(model))
        assert not hasattr(again.config, "fusion_config")
        with checkpoints.open(tmp_path / folder) as checkpoint:
            assert NOTE not in checkpoint
            assert set(checkpoint) == set(weights(model))


def test_other_layouts_and_dense_models_have_no_note(tmp_path):
    dense("llama", tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=QTensorConfig("nvfp4"))
    model.save_pretrained(tmp_path / "ours")
    assert NOTE in (tmp_path / "ours" / "config.json").read_text()
    model.hf_quantizer.quantization_config.layout = "compressed-tensors"
    model.save_pretrained(tmp_path / "theirs")
    checkpoints.convert(tmp_path / "ours", tmp_path / "converted", layout="compressed-tensors")
    model.save_pretrained(tmp_path / "ours")
    model.dequantize().save_pretrained(tmp_path / "plain")
    for folder in ("theirs", "converted", "plain"):
        assert NOTE not in (tmp_path / folder / "config.json").read_text()
    assert torch.equal(logits(load(tmp_path / "plain")), logits(model))


def test_parameters_that_were_replaced_by_hand(tmp_path):
    model = dense("llama", tmp_path / "dense")
    other = transformers.LlamaForCausalLM(model.config)
    layer = model.model.layers[0].mlp.up_proj
    quantized = qtensor.quantize(layer.weight.detach(), "mxfp8")
    layer.weight = torch.nn.Parameter(quantized, requires_grad=False)
    with pytest.raises(qtensor.QTensorError, match=r"attach.* of qtensor\.integrations"):
        model.save_pretrained(tmp_path / "saved")
    attach(model)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))
    assert not hasattr(other.config, "quantization_config")  # the config was shared
    assert model.model.config is model.config
    model.hf_quantizer = another = object()
    with pytest.raises(qtensor.UnsupportedError, match="weights of one library"):
        attach(model)
    qtensor.quantize_(model, {"lm_head": "mxfp8"})  # what the other library left plain
    assert model.hf_quantizer is another


def test_models_without_quantized_weights_stay_plain(tmp_path):
    model = dense("llama", tmp_path / "dense")
    for plain in (model, torch.nn.Linear(4, 4)):
        with pytest.raises(qtensor.QTensorError, match="attach: the model must be one of transf"):
            attach(plain)
    whole = torch.nn.ModuleDict({"text": model, "head": torch.nn.Linear(64, 64)})
    qtensor.quantize_(whole, "nvfp4", lambda module, name: name == "head")
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))


def test_one_name_of_modules_that_stay_plain(tmp_path):
    dense("llama", tmp_path)
    config = QTensorConfig("nvfp4", modules_to_not_convert="q_proj")
    assert "(format='nvfp4', modules_to_not_convert=['q_proj'], layout='qtensor')" in repr(config)
    layer = load(tmp_path, quantization_config=config).model.layers[0]
    assert "weight=nvfp4" not in str(layer.self_attn.q_proj)
    assert "weight=nvfp4" in str(layer.mlp.up_proj)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe"])
def test_footprint_and_print(name, tmp_path):
    plain = dense(name, tmp_path)
    loaded = load(tmp_path, quantization_config=QTensorConfig("nvfp4"))
    for model in (loaded, qtensor.quantize_(plain, "nvfp4") and plain):
        for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            wanted = sum(parameter.nbytes for parameter in same.parameters())
            assert same.get_memory_footprint(return_buffers=False) == wanted
            buffers = sum(buffer.nbytes for buffer in same.buffers())
            assert same.get_memory_footprint() == wanted + buffers
            assert "bias=False, weight=nvfp4)" in str(same.model.layers[0].self_attn)
    plain.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(torch.zeros(64, 64))
    assert str(plain.model.layers[0].self_attn.q_proj).endswith("bias=False)")
    if name == "qwen3-moe":
        assert "gate_up_proj=nvfp4(row_scaled=True)" in str(loaded.model.layers[0].mlp.experts)


def test_shards_of_a_variant(tmp_path):
    """A folder may hold an index for each variant: the weights are those of the one asked for."""
    want = {}
    for seed, variant in enumerate([None, "other"]):
        torch.manual_seed(seed)
        dense("llama", tmp_path / str(seed))
        model = load(tmp_path / str(seed), quantization_config=QTensorConfig("mxfp8"))
        codes = model.model.layers[0].mlp.up_proj.weight._rowwise_data
        codes[:] = seed + 40
        model.save_pretrained(tmp_path / "both", variant=variant, max_shard_size="60KB")
        want[variant] = codes
    assert (tmp_path / "both" / "model.safetensors.index.other.json").exists()
    for variant, codes in want.items():
        found = load(tmp_path / "both", variant=variant).model.layers[0].mlp.up_proj.weight
        assert torch.equal(found._rowwise_data, codes)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_convolutions_are_saved(tied, tmp_path):
    """``quantize_`` with all kinds of layers, then ``save_pretrained`` and ``from_pretrained``."""
    about = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=128,
        num_attention_heads=4, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(about).eval()
    done = qtensor.quantize_(model, "nvfp4", kinds=KINDS)
    assert done.swapped[0].name == "model.embed_tokens"
    model.save_pretrained(tmp_path / "llama")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
    assert torch.equal(logits(loaded), logits(model))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    about = transformers.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        image_size=32, patch_size=8,
    )  # fmt: skip
    model, x = transformers.ViTModel(about).eval(), torch.randn(2, 3, 32, 32)
    qtensor.quantize_(model, "nvfp4", kinds=KINDS)
    model.save_pretrained(tmp_path / "vit")
    for dtype in (torch.float32, torch.bfloat16):
        loaded = transformers.ViTModel.from_pretrained(tmp_path / "vit", dtype=dtype).eval()
        weight = loaded.embeddings.patch_embeddings.projection.weight
        assert (weight.shape, weight.dtype) == ((64, 3, 8, 8), dtype)
        assert isinstance(weight, qtensor.QuantizedTensor)
        with torch.no_grad():
            y = loaded(x.to(dtype)).last_hidden_state
            if dtype == torch.float32:
                assert torch.equal(y, model(x).last_hidden_state)


def test_a_rotated_model_with_plain_weights_is_saved(tmp_path):
    """Its weights are wrong without the rotations: they are kept, or loading stops."""
    model = dense("llama", tmp_path / "dense").float()
    want = logits(model)
    report = qtensor.rotate_(model, [IDS], size=16)
    assert "its inputs are rotated" in report.swapped[-1].note
    copy.deepcopy(model).half()  # as a model with plain weights
    rotated = logits(model)
    model.save_pretrained(tmp_path / "saved")
    checkpoints.save(model, tmp_path / "written", shard_size="20KB")
    for folder in ("saved", "written"):
        again = load(tmp_path / folder)
        assert torch.equal(logits(again), rotated)
        about = transformers.AutoConfig.from_pretrained(tmp_path / "dense")
        assert NOTE in (tmp_path / folder / "config.json").read_text()
        with pytest.raises(qtensor.QTensorError, match="without quantized weights or rotated"):
            load(tmp_path / folder, config=about, quantization_config=QTensorConfig("nvfp4"))
    # As Trainer loads its best checkpoint.
    again.load_state_dict(safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors"))
    assert torch.equal(logits(again), rotated)
    again.dequantize().save_pretrained(tmp_path / "plain")
    plain = load(tmp_path / "plain")
    assert not any("input_transform" in name for name in plain.state_dict())
    assert torch.allclose(logits(plain), want, rtol=0.01, atol=0.05)
    qtensor.quantize_(model, {"lm_head": "nvfp4"})
    with pytest.raises(ValueError, match="not supported for quantized"):
        model.half()
