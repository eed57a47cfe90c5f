"""Models of transformers whose layers quantize their inputs with the factors of a checkpoint."""

import os
import subprocess
import sys

import pytest
import torch

import qtensor
from qtensor import checkpoints
from qtensor.modules.input_hook import set_input_step
from qtensor.modules.input_transform import InputTransform
from tests.helpers.transformers_models import IDS, config, load, transformers

integration = pytest.importorskip("qtensor.integrations.transformers", reason="extra transformers")


def keep(module, name):
    return "lm_head" not in name


def calibrated(fmt):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config("llama"), dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    qtensor.quantize_(model, fmt, keep)
    plain = model(IDS).logits
    found = qtensor.calibrate(model, [IDS, IDS + 1], fmt, filter_fn=keep, kv_cache="fp8")
    found.apply(model)
    return model, found, plain


@pytest.mark.parametrize(
    ("fmt", "layout"),
    [
        ("nvfp4", "qtensor"),
        ("fp8", "compressed-tensors"),
        pytest.param(
            "nvfp4",
            "modelopt",
            marks=pytest.mark.nightly(reason="test_checkpoints_calibration.py reads its factors"),
        ),
    ],
)
def test_a_saved_model_runs_with_its_factors(tmp_path, fmt, layout):
    model, found, plain = calibrated(fmt)
    logits = model(IDS).logits
    assert not torch.equal(logits, plain)
    if layout == "modelopt":  # it has a second JSON file
        state = integration.weights(model)
        checkpoints.save(state, tmp_path, layout, config=model.config.to_dict(), calibration=found)
        with checkpoints.open(tmp_path) as c:
            assert "model.layers.0.self_attn.k_proj.k_scale" in c
    else:
        model.hf_quantizer.quantization_config.layout = layout
        model.save_pretrained(tmp_path)
    assert checkpoints.verify(tmp_path).ok
    asked = integration.QTensorConfig(activations=True)
    again = load(tmp_path, config=integration.pretrained_config(tmp_path, asked))
    assert torch.equal(again(IDS).logits, logits)
    if layout == "qtensor":  # four seconds; the layout of the file does not change the graph
        torch.compiler.reset()  # graphs of other tests count towards the limit of nn.Linear
        compiled = torch.compile(again, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(IDS).logits, logits)
    off = load(tmp_path, config=integration.pretrained_config(tmp_path))
    assert torch.equal(off(IDS).logits, plain)
    if layout == "qtensor":  # its own config says that the model was saved so
        assert torch.equal(load(tmp_path)(IDS).logits, logits)


def test_a_checkpoint_without_activations_is_refused(tmp_path):
    model, _, _ = calibrated("nvfp4")
    qtensor.Calibration.remove(model)
    model.save_pretrained(tmp_path)
    asked = integration.QTensorConfig(activations=True)
    with pytest.raises(qtensor.QTensorError, match="says how inputs are quantized"):
        load(tmp_path, config=integration.pretrained_config(tmp_path, asked))


@pytest.mark.nightly(reason="starts another Python, which imports compressed-tensors")
@pytest.mark.parametrize(("fmt", "last"), [("nvfp4", "input_global_scale"), ("fp8", "input_scale")])
def test_the_library_compressed_tensors_opens_the_factors(tmp_path, fmt, last):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors (extra origins)")
    model, _, _ = calibrated(fmt)
    model.hf_quantizer.quantization_config.layout = "compressed-tensors"
    model.save_pretrained(tmp_path)
    name = "model.layers.1.mlp.down_proj"
    script = f"""
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, dtype=torch.float32)
layer = model.get_submodule({name!r})
print(layer.quantization_scheme.input_activations.dynamic, layer.{last}.item().hex())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ
    )
    dynamic, number = done.stdout.split()
    with checkpoints.open(tmp_path) as c:
        assert float.fromhex(number) == c[f"{name}.{last}"].item()
    assert dynamic == ("local" if fmt == "nvfp4" else "False")


def rotated(name, folder):
    """Write a model that rotate_ changed, in the layout of compressed-tensors."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(name), dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    qtensor.rotate_(model, [IDS], size=32)
    qtensor.quantize_(model, "nvfp4", keep)
    model.hf_quantizer.quantization_config.layout = "compressed-tensors"
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_rotated_model_is_saved_with_its_rotations(tmp_path, name):
    """The residual of the first is rotated too; a tied head keeps that of the second.

    Rotations that are folded into weights need no entry in the config.
    """
    model = rotated(name, tmp_path)
    assert checkpoints.verify(tmp_path).ok
    again = load(tmp_path, config=integration.pretrained_config(tmp_path))
    online = [n for n, m in again.named_modules() if isinstance(m, InputTransform)]
    assert online == [n for n, m in model.named_modules() if isinstance(m, InputTransform)]
    assert online
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_a_dense_model_prepares_no_inputs(tmp_path):
    """``model.dequantize()`` gives the weights of ``checkpoints.dequantize``."""
    model = rotated("llama", tmp_path / "ct")
    plain = model(IDS).logits
    qtensor.calibrate(model, [IDS], "nvfp4", filter_fn=keep).apply(model)
    checkpoints.dequantize(tmp_path / "ct", tmp_path / "converted", dtype=torch.bfloat16)
    model.dequantize().save_pretrained(tmp_path / "plain")
    folders = (tmp_path / "plain", tmp_path / "converted")
    first, second = (load(folder).state_dict() for folder in folders)
    assert first.keys() == second.keys() == model.state_dict().keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.testing.assert_close(model(IDS).logits, plain, rtol=0, atol=0.02)


@pytest.mark.nightly(reason="starts another Python, which imports compressed-tensors")
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_the_library_compressed_tensors_runs_a_rotated_model(tmp_path, name):
    """Its own transforms of inputs, and its decoded weights, give the logits of our decoding."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors (extra origins)")
    rotated(name, tmp_path)
    script = f"""
import json, torch, transformers
from compressed_tensors.transform import TransformConfig, apply_transform_config
folder = {str(tmp_path)!r}
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
found = json.load(open(folder + "/config.json"))["quantization_config"]["transform_config"]
for group in found["config_groups"].values():  # the weights of the file are rotated already
    group["apply"] = [place for place in group["apply"] if place["location"] == "input"]
apply_transform_config(model, TransformConfig(**found))
torch.save(model(torch.tensor({IDS.tolist()})).logits.detach(), folder + "/logits.pt")
"""
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, env=os.environ)
    plain = transformers.AutoModelForCausalLM.from_config(config(name), dtype=torch.bfloat16)
    state = checkpoints.load_state_dict(tmp_path, rounding="origin", accept_rotated=True)
    plain.load_state_dict(state, strict=name == "llama")
    checkpoints.apply_transforms(tmp_path, plain)
    assert torch.equal(plain.eval()(IDS).logits, torch.load(tmp_path / "logits.pt"))


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors", "qtensor"])
def test_scaled_and_rotated_inputs_are_applied_while_loading(tmp_path, layout):
    """Files of AWQ and with online rotations: the logits of the model that wrote them."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config("llama"), dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    before = model(IDS).logits
    for block in model.model.layers:
        layer = block.mlp.down_proj
        if layout == "compressed-tensors":
            own = InputTransform(hadamard=32)
            layer.weight.copy_(own(layer.weight))
        else:
            own = InputTransform(torch.rand(96).bfloat16() + 0.5)
            layer.weight.copy_(layer.weight / own.scale)
        set_input_step(layer, "input_transform", own)
    assert torch.allclose(model(IDS).logits, before, atol=0.02)
    qtensor.quantize_(model, "nvfp4", keep)
    logits = model(IDS).logits
    if layout == "modelopt":
        state = integration.weights(model)
        checkpoints.save(state, tmp_path, layout, config=model.config.to_dict())
    else:
        model.hf_quantizer.quantization_config.layout = layout
        model.save_pretrained(tmp_path)
    again = load(tmp_path, config=integration.pretrained_config(tmp_path))
    assert torch.equal(again(IDS).logits, logits)
    found = qtensor.calibrate(again, [IDS], "nvfp4", filter_fn=keep)
    found.apply(again)
    assert not torch.equal(again(IDS).logits, logits)
