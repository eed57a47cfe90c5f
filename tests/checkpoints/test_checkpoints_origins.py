"""Each file that we write is read by the library that its layout comes from.

The library's own loader and dequantizer give the values of ``rounding="origin"``, bit for bit, and
where it runs on a CPU, its model gives the logits of these values. What a library cannot read of
its own layout is tested too. test_checkpoints_torchao.py has torchao's functions for safetensors.
"""

import json
import warnings

import pytest
import torch
from checkpoint_cases import assert_same_values, weight
from transformers_models import config, load, logits, transformers

import qtensor
from qtensor import checkpoints
from qtensor.checkpoints.containers.safetensors import SafetensorsFile
from qtensor.core.quantizer_registry import parse

INSTALL = "is not installed: pip install torch-qtensor[origins]"
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:You passed `quantization_config`:UserWarning",  # transformers keeps the file's own
)

BLOCKS = "fp8_blockwise(block_scaling_dim=2,force_pow_2_scales=False)"
ROW_BLOCKS = "fp8_blockwise(force_pow_2_scales=False)"
POWERS = "fp8_blockwise(block_scaling_dim=2)"
COMPRESSED = [
    "fp8",
    "fp8_rowwise",
    BLOCKS,
    ROW_BLOCKS,
    "nvfp4",
    "mxfp4",
    "mxfp6(packed=True)",
    "mxfp8",
]
FINE_GRAINED = ["fp8", BLOCKS, POWERS, "mxfp8", "mxfp4"]
TORCHAO = ["fp8", "fp8_rowwise", BLOCKS, ROW_BLOCKS, "nvfp4", "mxfp4", "mxfp6", "mxfp8"]


def need(name):
    """Import an optional library without its warnings, or skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name.partition('.')[0]} {INSTALL}")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a function from a kind to the folder of a bfloat16 model, whole in blocks of 128."""
    made = {}

    def folder(kind):
        if kind not in made:
            about = config(kind)
            about.hidden_size, about.head_dim, about.num_key_value_heads = 128, 32, 4
            about.num_hidden_layers, about.intermediate_size = 1, 256
            about.moe_intermediate_size = 128
            torch.manual_seed(0)
            made[kind] = tmp_path_factory.mktemp(kind)
            kinds = transformers.AutoModelForCausalLM
            kinds.from_config(about, dtype=torch.bfloat16).save_pretrained(made[kind])
        return made[kind]

    return folder


def write(source, path, layout, fmt, how="convert"):
    """Quantize the projections of a model, and write them in a layout."""
    if how == "convert":
        checkpoints.convert(source, path, layout=layout, format=fmt)
        return path
    with checkpoints.open(source) as plain:
        quantizer = parse(fmt)
        state = {
            name: quantizer(plain[name]) if name.endswith("_proj.weight") else plain[name]
            for name in plain
        }
        checkpoints.save(state, path, layout=layout, config=plain.config)
    return path


def ours(path, dtype):
    """Return our values for the parameters of the model: experts stacked, gate and up joined."""
    state = checkpoints.load_state_dict(path, dtype=dtype, rounding="origin")
    values = {name: t.to(dtype) for name, t in state.items()}
    experts = [name.rpartition("experts.")[0] for name in values if ".experts.0.up" in name]
    for prefix in experts:
        count = len([n for n in values if n.startswith(prefix) and n.endswith("up_proj.weight")])
        part = {
            key: [values.pop(f"{prefix}experts.{i}.{key}_proj.weight") for i in range(count)]
            for key in ("gate", "up", "down")
        }
        pairs = zip(part["gate"], part["up"], strict=True)
        values[f"{prefix}experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        values[f"{prefix}experts.down_proj"] = torch.stack(part["down"])
    return values


def plain_values(parameter):
    """Return the values of a parameter as its library decodes it."""
    parameter = parameter.detach()
    plain = type(parameter) in (torch.Tensor, torch.nn.Parameter)
    return parameter if plain else parameter.dequantize()


def assert_reads(model, path, dtype):
    """The parameters of the model that the library loaded have our values, each of them."""
    wanted = ours(path, dtype)
    found = dict(model.named_parameters())
    found = {name: t for name, t in found.items() if not name.endswith("_scale")}
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        got = plain_values(found[name]).to(dtype)  # some stay in the dtype of the file
        try:
            assert_same_values(got, want)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def assert_runs(model, path, dtype):
    """The logits of the library's model are those of a plain model with our values."""
    plain = transformers.AutoModelForCausalLM.from_config(config_of(path), dtype=dtype).eval()
    plain.load_state_dict(ours(path, dtype))
    assert torch.equal(logits(model), logits(plain))


def config_of(path):
    about = transformers.AutoConfig.from_pretrained(path)
    del about.quantization_config
    return about


def entry(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


# ---- transformers decodes while it loads

WRONG_EXPERTS = ["nvfp4", "mxfp8"]
"""Formats of compressed-tensors: test_experts_that_transformers_does_not_decode."""
DEQUANTIZED = [
    (kind, layout, fmt)
    for kind in ("llama", "qwen3-moe")
    for layout, formats in (("compressed-tensors", COMPRESSED), ("fine-grained-fp8", FINE_GRAINED))
    for fmt in formats
    if (kind, layout) != ("qwen3-moe", "compressed-tensors") or fmt not in WRONG_EXPERTS
]


def dequantizing(layout):
    if layout == "compressed-tensors":
        need("compressed_tensors")
        return transformers.CompressedTensorsConfig(dequantize=True)
    return transformers.FineGrainedFP8Config(dequantize=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", ["save", "convert"])
@pytest.mark.parametrize(("kind", "layout", "fmt"), DEQUANTIZED)
def test_transformers_decodes(kind, layout, fmt, how, dtype, sources, tmp_path):
    path = write(sources(kind), tmp_path / "x", layout, fmt, how)
    model = load(path, quantization_config=dequantizing(layout), dtype=dtype)
    assert_reads(model, path, dtype)


# ---- compressed-tensors


@pytest.mark.parametrize("fmt", COMPRESSED)
def test_compressed_tensors_decodes_at_the_first_forward(fmt, sources, tmp_path):
    """The model's dtype holds the factors: bfloat16 would round those of FP8."""
    need("compressed_tensors")
    path = write(sources("llama"), tmp_path / "x", "compressed-tensors", fmt)
    dtype = torch.float32 if "fp8_" in fmt or fmt == "fp8" else torch.bfloat16
    model = load(path, dtype=dtype).eval()
    logits(model)
    assert_reads(model, path, dtype)
    (group,) = entry(path)["config_groups"].values()
    if group["input_activations"] is None:
        assert_runs(model, path, dtype)
    else:  # it rounds activations too
        assert fmt.startswith("fp8") or fmt == "mxfp8"


@pytest.mark.parametrize("shape", [(48, 160), (130, 384), (1, 128)], ids=str)
@pytest.mark.parametrize("fmt", COMPRESSED)
@pytest.mark.parametrize("nominal", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_compressed_tensors_decodes_each_weight(nominal, fmt, shape, tmp_path):
    """Its compressors alone, with the scheme of our config.json, for shapes with partial blocks."""
    if fmt == ROW_BLOCKS and shape[1] % 128:
        shape = (shape[0], 256)  # whole groups: our writer refuses others
    compressors = need("compressed_tensors.compressors")
    quantization = need("compressed_tensors.quantization")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(nominal)
    q = parse(fmt)(values)
    about = {"torch_dtype": str(nominal)[6:]}
    checkpoints.save({"a.weight": q}, tmp_path / "x", "compressed-tensors", config=about)
    settings = quantization.QuantizationConfig.model_validate(entry(tmp_path / "x"))
    (scheme,) = settings.config_groups.values()
    kind = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    file = SafetensorsFile(tmp_path / "x" / "model.safetensors")
    parts = {name.removeprefix("a."): file.read(name) for name in file.infos}
    values = kind.decompress(parts, scheme)["weight"]
    ours = checkpoints.load_state_dict(tmp_path / "x", dtype=values.dtype, rounding="origin")
    assert_same_values(values, ours["a.weight"])


@pytest.mark.parametrize("fmt", WRONG_EXPERTS)
def test_experts_that_transformers_does_not_decode(fmt, sources, tmp_path):
    """transformers 5.23 loses the tensor factor of NVFP4 experts, and refuses MXFP8 experts."""
    base = need("compressed_tensors.compressors").BaseCompressor
    path = write(sources("qwen3-moe"), tmp_path / "x", "compressed-tensors", fmt)
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    if fmt == "mxfp8":
        with pytest.raises(RuntimeError, match="conversion"):
            load(path, quantization_config=settings)
        return
    model = load(path, quantization_config=settings, dtype=torch.bfloat16)
    about = need("compressed_tensors.quantization").QuantizationConfig.model_validate(entry(path))
    (scheme,) = about.config_groups.values()
    file = SafetensorsFile(path / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.down_proj."
    parts = {n.removeprefix(name): file.read(n) for n in file.infos if n.startswith(name)}
    kind = base.get_value_from_registry(scheme.format)
    whole = kind.decompress(dict(parts), scheme)["weight"]
    del parts["weight_global_scale"]
    found = model.get_parameter("model.layers.0.mlp.experts.down_proj")[1]
    assert_same_values(found.detach(), kind.decompress(parts, scheme)["weight"])
    assert_same_values(whole, ours(path, torch.bfloat16)["model.layers.0.mlp.experts.down_proj"][1])


# ---- torchao in transformers


@pytest.mark.parametrize("how", ["save", "convert"])
@pytest.mark.parametrize("fmt", TORCHAO)
def test_torchao(fmt, how, sources, tmp_path):
    """The parameters are torchao's own tensors, and the model has the logits of our values.

    torchao multiplies by MX weights only where it quantizes the activations too.
    """
    subclass = need("torchao.utils").TorchAOBaseTensor
    path = write(sources("llama"), tmp_path / "x", "torchao", fmt, how)
    model = load(path, dtype=torch.bfloat16).eval()
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, subclass)
    assert_reads(model, path, torch.bfloat16)
    if not fmt.startswith("mx"):
        assert_runs(model, path, torch.bfloat16)


# ---- FBGEMM


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fbgemm(dtype, sources, tmp_path):
    """transformers runs it on GPUs; its modules take our file, and their product decodes as we do.

    The modules call FBGEMM, or torch's scaled product on an XPU: that one runs on a CPU.
    """
    need("accelerate")
    fbgemm = need("transformers.integrations.fbgemm_fp8")
    path = write(sources("llama"), tmp_path / "x", "fbgemm-fp8", "fp8_rowwise")
    with pytest.raises(ImportError, match="requires a GPU"):
        load(path)
    assert transformers.FbgemmFp8Config.from_dict(entry(path)).modules_to_not_convert
    file = SafetensorsFile(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj."
    module = fbgemm.FbgemmFp8Linear(128, 256, bias=False)
    stored = {key: file.read(name + key) for key in ("weight", "weight_scale")}
    for key, parameter in module.state_dict().items():
        assert (parameter.shape, parameter.dtype) == (stored[key].shape, stored[key].dtype)
    one = torch.eye(128).to(torch.float8_e4m3fn)
    columns = torch._scaled_mm(
        one,
        stored["weight"].t(),
        scale_a=torch.ones(128, 1),
        scale_b=stored["weight_scale"].t(),
        out_dtype=dtype,
    )
    assert_same_values(columns.t(), ours(path, dtype)[name + "weight"])


def test_fbgemm_experts(tmp_path):
    """The parameters of the experts of Llama 4: (E, K, N), with a factor for each column."""
    need("accelerate")
    fbgemm = need("transformers.integrations.fbgemm_fp8")
    about = config("llama4")
    rows = {"gate_up_proj": (4, 128, 64), "down_proj": (4, 64, 64)}
    state = {
        f"experts.{name}": qtensor.quantize(torch.randn(shape).bfloat16(), "fp8_rowwise")
        for name, shape in rows.items()
    }
    checkpoints.save(state, tmp_path / "x", layout="fbgemm-fp8")
    file = SafetensorsFile(tmp_path / "x" / "model.safetensors")
    module = fbgemm.FbgemmFp8Llama4TextExperts(about)
    module.load_state_dict({name.removeprefix("experts."): file.read(name) for name in file.infos})
    for name, q in state.items():
        key = name.removeprefix("experts.")
        codes, scale = getattr(module, key).detach(), getattr(module, f"{key}_scale").detach()
        values = codes.float().transpose(1, 2) * scale.reshape(4, -1, 1)
        assert_same_values(values.to(torch.bfloat16), q.dequantize())


# ---- gpt-oss


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gpt_oss(dtype, tmp_path):
    """transformers decodes MXFP4 experts while it loads, on a CPU without kernels."""
    need("accelerate")
    about = config("gpt-oss")
    about.architectures = ["GptOssForCausalLM"]
    torch.manual_seed(0)
    state = dict(transformers.GptOssForCausalLM(about).bfloat16().state_dict())
    for name in [n for n in state if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        state[name] = qtensor.quantize(state[name].mT.contiguous() * 8, "mxfp4")
    checkpoints.save(state, tmp_path / "x", layout="gpt-oss", config=about.to_dict())
    decode = transformers.Mxfp4Config(dequantize=True)
    model = load(tmp_path / "x", quantization_config=decode, dtype=dtype)
    assert_reads(model, tmp_path / "x", dtype)


# ---- GGUF

PLAIN = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
PLAIN += [torch.int8, torch.int16, torch.int32, torch.int64]


def test_gguf(tmp_path):
    """Every type that we write: matrices, stacked experts, tensor factors and plain tensors."""
    gguf = need("gguf")
    whole = torch.float32
    each = qtensor.quantize(torch.randn(3, 4, 128), "nvfp4", row_scaled=True)
    each = each.quantizer.assemble(
        [*each.buffers()[:2], torch.tensor([3.0, 5.0, 0.7]).repeat_interleave(4)], each.shape, whole
    )
    state = {f"plain.{str(d)[6:]}": torch.arange(6).view(2, 3).to(d) for d in PLAIN}
    state |= {
        "blk.0.up.weight": weight("nvfp4", 8, 128, nominal=whole),
        "blk.0.up_exps.weight": each,
        "blk.0.down.weight": weight("mxfp4", 8, 96, nominal=whole),
        "blk.0.down_exps.weight": qtensor.quantize(torch.randn(3, 4, 64), "mxfp4"),
    }
    about = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "tokenizer.ggml.tokens": ["a", "ü"],
    }
    checkpoints.save(state, tmp_path / "x.gguf", layout="gguf", config=about)
    reader = gguf.GGUFReader(str(tmp_path / "x.gguf"))
    assert {key: reader.fields[key].contents() for key in about} == about
    read = {t.name: t for t in reader.tensors}
    exact = {"F64", "I8", "I16", "I32", "I64"}  # dequantize() has no case for them
    values = {
        name: torch.from_numpy(
            (
                t.data if t.tensor_type.name in exact else gguf.dequantize(t.data, t.tensor_type)
            ).copy()
        )
        for name, t in read.items()
    }
    for name, want in state.items():
        scale = values.get(name.replace(".weight", ".scale"))
        got = values[name]
        if isinstance(want, qtensor.QuantizedTensor):
            want = want.dequantize(whole)
            got = got if scale is None else got * scale.view(-1, *[1] * (got.ndim - 1))
        assert got.dtype in {want.dtype, whole}
        assert_same_values(got, want.to(got.dtype))
    assert values["blk.0.up_exps.scale"].shape == (3,)
