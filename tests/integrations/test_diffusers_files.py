"""Single files of ComfyUI and Black Forest Labs open in models of diffusers."""

import json

import pytest
import safetensors.torch
import torch
from checkpoint_cases import assert_same_values
from diffusers_models import DTYPE, diffusers, kind, model, original, run, small_flux_converter

import qtensor
from qtensor import QuantizedTensor, checkpoints
from qtensor.integrations.diffusers import QTensorConfig, load_single_file

bfl = pytest.importorskip(
    "diffusers.quantizers.bfl.utils", reason="this diffusers does not read files of BFL"
)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
MODELS = ["flux", "sd3"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_flux_converter(monkeypatch)


def is_large(name, tensor):
    """Weights of linear layers that ComfyUI does not pad: it pads to 16 or 32 rows and columns."""
    return name.endswith(".weight") and tensor.ndim == 2 and not any(n % 32 for n in tensor.shape)


def weights(name, folder):
    """The plain weights under the names of the origin; the folder gets the config."""
    made = model(name)
    made.save_config(folder)
    return original(name, {key: tensor.clone() for key, tensor in made.state_dict().items()})


def open_file(name, path, folder, **options):
    options = {"config": str(folder), "torch_dtype": DTYPE, **options}
    return kind(name).from_single_file(str(path), **options)


def loaded(name, path, folder, **options):
    return load_single_file(kind(name), path, config=str(folder), torch_dtype=DTYPE, **options)


def stored_values(path, rounding, layout=None):
    """The plain values of a file, by our arithmetic or by that of the origin."""
    with checkpoints.open(path, layout) as checkpoint:
        found = {}
        for key in checkpoint:
            if checkpoint.is_factor(key):
                continue
            if rounding == "origin":
                found[key] = checkpoint.dense(key, DTYPE)
            else:
                tensor = checkpoint[key]
                quantized = isinstance(tensor, QuantizedTensor)
                found[key] = tensor.dequantize(DTYPE) if quantized else tensor
    return found


def check(name, path, folder, layout=None):
    """Values of every parameter: ours from codes, the origin's from ``rounding="origin"``."""
    made = loaded(name, path, folder, layout=layout)
    quantized = [p for p in made.parameters() if isinstance(p, QuantizedTensor)]
    assert len(quantized) > 15
    plain = kind(name).from_single_file(
        stored_values(path, None, layout), config=str(folder), torch_dtype=DTYPE
    )
    wanted = dict(plain.named_parameters())
    for key, parameter in made.named_parameters():
        stored = isinstance(parameter, QuantizedTensor)
        values = parameter.detach().dequantize() if stored else parameter.detach()
        assert_same_values(values, wanted[key].detach())
    exact = loaded(name, path, folder, layout=layout, rounding="origin")
    origin = kind(name).from_single_file(
        stored_values(path, "origin", layout), config=str(folder), torch_dtype=DTYPE
    )
    assert torch.equal(run(exact), run(origin))
    torch.testing.assert_close(run(made), run(exact), rtol=0.1, atol=0.1)
    return made


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "nvfp4"])
def test_comfyui(name, fmt, tmp_path):
    """Its descriptions lie beside the weights; diffusers parts, joins and swaps rows."""
    swizzled = {"swizzled": True} if fmt != "fp8" else {}
    state = {
        f"model.diffusion_model.{key}": (
            qtensor.quantize(tensor, fmt, **swizzled) if is_large(key, tensor) else tensor
        )
        for key, tensor in weights(name, tmp_path).items()
    }
    path = tmp_path / "x.safetensors"
    checkpoints.save(state, path, layout="comfyui")
    made = check(name, path, tmp_path)
    again = open_file(name, path, tmp_path, quantization_config=QTensorConfig())
    assert torch.equal(run(again), run(made))
    with pytest.raises(qtensor.QTensorError, match="checkpoints without quantized weights"):
        open_file(name, path, tmp_path, quantization_config=QTensorConfig("fp8"))


def test_comfyui_described_in_the_header(tmp_path):
    """diffusers does not hand over the header, which ``load_single_file`` reads."""
    state = {
        key: qtensor.quantize(tensor, "fp8") if is_large(key, tensor) else tensor
        for key, tensor in weights("sd3", tmp_path).items()
    }
    path = tmp_path / "x.safetensors"
    checkpoints.save(state, path, layout="comfyui")
    stored = safetensors.torch.load_file(path)
    layers = {}
    for key in list(stored):
        if key.endswith(".comfy_quant"):
            about = json.loads(bytes(stored.pop(key).numpy()))
            layers[key.removesuffix(".comfy_quant")] = about
    text = json.dumps({"format_version": "1.0", "layers": layers})
    header = tmp_path / "header.safetensors"
    safetensors.torch.save_file(stored, header, {"_quantization_metadata": text})
    want = run(check("sd3", path, tmp_path))
    assert torch.equal(run(loaded("sd3", header, tmp_path)), want)
    with pytest.raises(checkpoints.CheckpointError, match="layout"):
        open_file("sd3", header, tmp_path, quantization_config=QTensorConfig())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fmt", ["fp8r", "nvfp4"])
def test_black_forest_labs(name, fmt, tmp_path):
    """Files as diffusers' own functions quantize; its own quantizer decodes to our values."""
    stored = {}
    for key, tensor in weights(name, tmp_path).items():
        if not is_large(key, tensor):
            stored[key] = tensor
            continue
        module = key.removesuffix(".weight")
        if fmt == "fp8r":
            stored[key], stored[f"{module}.weight_scale"] = bfl.quantize_fp8r(tensor)
        else:
            codes, scale, factor = bfl.quantize_nvfp4(tensor)
            stored |= {key: codes, f"{module}.weight_scale": scale}
            stored |= {f"{module}.weight_scale_2": factor, f"{module}.input_scale": torch.ones(())}
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(stored, path)
    made = check(name, path, tmp_path, layout="bfl")
    again = open_file(name, path, tmp_path, quantization_config=QTensorConfig())
    assert torch.equal(run(again), run(made))
    exact = dict(loaded(name, path, tmp_path, layout="bfl", rounding="origin").named_parameters())
    theirs = open_file(
        name, path, tmp_path, quantization_config=diffusers.BFLQuantizationConfig(DTYPE)
    )
    theirs.dequantize()
    for key, parameter in theirs.named_parameters():
        assert_same_values(exact[key].detach(), parameter.detach())


def test_a_plain_file_needs_a_format(tmp_path):
    """A file without quantized weights is quantized while it loads, if the config has a format."""
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(weights("sd3", tmp_path), path)
    with pytest.raises(qtensor.QTensorError, match="loads quantized weights"):
        open_file("sd3", path, tmp_path, quantization_config=QTensorConfig())
    made = open_file("sd3", path, tmp_path, quantization_config=QTensorConfig("nvfp4"))
    want = qtensor.quantize(model("sd3").transformer_blocks[0].attn.to_q.weight.detach(), "nvfp4")
    got = made.transformer_blocks[0].attn.to_q.weight
    assert torch.equal(got.dequantize(), want.dequantize())


def test_a_name_without_a_description_is_not_guessed(tmp_path):
    """``checkpoints.open`` asks for ``layout="bfl"``, because names alone settle nothing."""
    codes, scale = bfl.quantize_fp8r(torch.randn(32, 64))
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a.weight": codes, "a.weight_scale": scale}, path)
    with pytest.raises(checkpoints.CheckpointError):
        checkpoints.open(path)
    with checkpoints.open(path, "bfl") as checkpoint:
        want = bfl.dequantize_fp8r(codes, scale)
        assert torch.equal(checkpoint.dense("a.weight", torch.float32), want)
        assert torch.equal(checkpoint["a.weight"].dequantize(torch.float32), want)
    for wrong in ({"a.weight_scale": scale}, {"a.weight": codes, "a.weight_scale": scale[:3]}):
        safetensors.torch.save_file({**wrong, "b": torch.ones(1)}, path)
        with pytest.raises(checkpoints.CheckpointError):
            checkpoints.open(path, "bfl")


def test_an_unknown_rounding_is_refused(tmp_path):
    with pytest.raises(qtensor.QTensorError, match="rounding is None or 'origin'; got 'exact'"):
        loaded("flux", tmp_path / "x.safetensors", tmp_path, rounding="exact")
