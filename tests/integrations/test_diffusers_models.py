"""Models of diffusers are quantized while they load, run, are saved, offloaded and adapted."""

import json

import pytest
import torch
from diffusers_models import DTYPE, KINDS, diffusers, kind, model, run
from torch import nn

import qtensor
from qtensor import QuantizedTensor, checkpoints
from qtensor.core.errors import UnsupportedError
from qtensor.integrations import transformers as ours
from qtensor.integrations.diffusers import QTensorConfig, load_single_file
from qtensor.modules.input_hook import TRANSFORM, set_input_step
from qtensor.modules.input_transform import InputTransform

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def quantized(made):
    parameters = made.named_parameters()
    return {name: p for name, p in parameters if isinstance(p, QuantizedTensor)}


def load(name, folder, *args, **kwargs):
    return kind(name).from_pretrained(folder, *args, torch_dtype=DTYPE, **kwargs)


def load_quantized(name, fmt, folder, **options):
    model(name).save_pretrained(folder)
    return load(name, folder, quantization_config=QTensorConfig(fmt, **options))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8"])
def test_quantized_while_loading_and_saved(name, fmt, tmp_path):
    """Every linear layer has the codes of its weight; the same bytes come back from shards."""
    source = dict(model(name).named_parameters())
    made = load_quantized(name, fmt, tmp_path / "dense")
    found = quantized(made)
    layers = [m for m in made.modules() if isinstance(m, torch.nn.Linear)]
    assert len(found) + len(made.hf_quantizer.dense) == len(layers)
    assert len(found) > 10
    for key, parameter in found.items():
        want = qtensor.quantize(source[key].detach(), fmt)
        assert not parameter.requires_grad
        assert parameter.quantizer.canonical == want.quantizer.canonical
        assert torch.equal(parameter.dequantize(), want.dequantize())
    result = run(made)
    assert result.isfinite().all()
    made.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "qtensor", "version": 1}
    again = load(name, tmp_path / "saved")
    assert quantized(again).keys() == found.keys()
    assert torch.equal(run(again), result)
    with checkpoints.open(tmp_path / "saved") as checkpoint:
        assert set(found) == set(checkpoint.groups)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_quantized_convolutions_are_loaded_and_saved(fmt, tmp_path):
    made = model("unet")
    done = qtensor.quantize_(made, fmt, kinds=["linear", "convolution"])
    assert any(report.features.endswith("3x3") for report in done.swapped)
    result = run(made)
    made.save_pretrained(tmp_path)
    again = load("unet", tmp_path)
    assert quantized(again).keys() == quantized(made).keys()
    assert torch.equal(run(again), result)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(run(load("unet", tmp_path / "again")), result)


@pytest.mark.parametrize("fmt", ["mxfp8", None])
def test_scaled_and_rotated_inputs_are_kept(fmt, tmp_path):
    made = model("sd3")
    block = made.transformer_blocks[0]
    scale = torch.linspace(0.5, 2, 128)
    for layer, transform in ((block.attn.to_q, (scale, 32)), (block.ff.net[2], (None, 64))):
        set_input_step(layer, TRANSFORM, InputTransform(*transform))
    if fmt:
        qtensor.quantize_(made, fmt, lambda module, name: "blocks" in name)
    result = run(made)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    checkpoints.save(made.state_dict(), path)
    model("sd3").save_config(tmp_path)  # has no entry
    again = load("sd3", tmp_path, quantization_config=QTensorConfig())
    assert torch.equal(run(again), result)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(run(load("sd3", tmp_path / "again")), result)
    with pytest.raises(UnsupportedError, match=r"neither scaled nor rotated.*attn\.to_q"):
        load_single_file(kind("sd3"), path, config=str(tmp_path), torch_dtype=DTYPE)


def test_a_rotated_model_is_saved(tmp_path):
    made = model("sd3")
    whole = nn.Module()
    whole.part, whole.forward = made, lambda _: run(made)
    qtensor.rotate_(whole, [torch.ones(1)], lambda module, name: "ff" in name, size=32)
    made.save_pretrained(tmp_path)
    assert torch.equal(run(load("sd3", tmp_path)), run(made))


def test_a_weight_that_does_not_fit_stays_plain(tmp_path):
    """K of the first layer is 16, and a block of mxfp8 has 32 values."""
    made = load_quantized("flux", "mxfp8", tmp_path)
    assert set(made.hf_quantizer.dense) <= {"x_embedder.weight"}
    for key, why in made.hf_quantizer.dense.items():
        assert "multiple of 32" in why
        assert type(made.get_parameter(key)) is torch.nn.Parameter


def test_modules_to_not_convert_and_dequantize(tmp_path):
    made = load_quantized("flux", "fp8", tmp_path, modules_to_not_convert=["proj_out", "attn."])
    found = quantized(made)
    assert found
    assert not any("proj_out" in key or "attn." in key for key in found)
    result = run(made)
    values = {key: parameter.detach().dequantize() for key, parameter in found.items()}
    name = next(iter(found)).removesuffix(".weight")
    inputs = {name: qtensor.weights.CalibratedInput("mxfp8")}
    qtensor.Calibration(inputs).apply(made)
    made.dequantize()
    assert not quantized(made)
    assert not any("input_quantizer" in name for name, _ in made.named_modules())
    for key, want in values.items():
        assert torch.equal(made.get_parameter(key), want)
    torch.testing.assert_close(run(made), result, rtol=0.05, atol=0.05)


def test_a_dict_of_formats(tmp_path):
    """Each layer has the format of the first pattern; the model's repr shows it."""
    formats = {"*.to_q": "mxfp8", "*.to_out.*": None, "*attn*": "nvfp4"}
    made = load_quantized("flux", formats, tmp_path, modules_to_not_convert="to_v")
    found = quantized(made)
    assert {p.quantizer.canonical for p in found.values()} == {"mxfp8", "nvfp4"}
    for name, layer in made.named_modules():
        if isinstance(layer, torch.nn.Linear):
            expected = "attn" in name and "to_v" not in name and "to_out" not in name
            assert (f"{name}.weight" in found) == expected
            format = "mxfp8" if name.endswith(".to_q") else "nvfp4"
            assert (f"weight={format}" in str(layer)) == expected
    with pytest.raises(qtensor.QTensorError, match=r"must match a layer.*got '\*\.to_x'"):
        load("flux", tmp_path, quantization_config=QTensorConfig({"*.to_x": "nvfp4"}))


def test_what_a_config_and_a_folder_say(tmp_path):
    made = load_quantized("sd3", "fp8", tmp_path / "dense")
    made.save_pretrained(tmp_path / "saved")
    with pytest.raises(qtensor.QTensorError, match="loads quantized weights"):
        load("sd3", tmp_path / "dense", quantization_config=QTensorConfig())
    made.hf_quantizer.quantization_config.layout = "comfyui"
    with pytest.raises(UnsupportedError, match="writes layout"):
        made.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_transformers_and_diffusers_take_one_config():
    """With two classes, each library failed with an error of its own about the other's."""
    assert ours.QTensorConfig is QTensorConfig
    config = QTensorConfig("nvfp4")
    assert config.quant_method.value == "qtensor"  # diffusers asks an enum
    assert type(config.to_dict()["quant_method"]) is str  # and transformers writes it


def test_a_model_that_quantize_chose_factors_for(tmp_path):
    """``quantize_`` with a rounding, then a folder that loads without a copy."""
    made = model("sd3")
    qtensor.quantize_(made, "nvfp4", lambda _, name: "blocks" in name, rounding="mse")
    want, codes = run(made), quantized(made)
    made.save_pretrained(tmp_path)
    again = load("sd3", tmp_path)
    assert quantized(again).keys() == codes.keys()
    assert torch.equal(run(again), want)


@pytest.mark.nightly(reason="compiles a whole model")
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_compiled(name, tmp_path):
    """Not the UNet: it compares versions in its forward, which Dynamo does not trace."""
    made = load_quantized(name, "nvfp4", tmp_path)
    want = run(made)
    torch._dynamo.reset()
    made.compile(backend="aot_eager")
    torch.testing.assert_close(run(made), want, rtol=0.02, atol=0.02)


# ---- pipelines


def pipeline():
    """A FLUX pipeline without tokenizers; prompts are passed as embeddings."""
    from transformers import CLIPTextConfig, CLIPTextModel  # noqa: PLC0415

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    encoder = CLIPTextModel(
        CLIPTextConfig(
            **sizes,
            num_attention_heads=2,
            vocab_size=99,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    vae = diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        block_out_channels=(8,),
        latent_channels=4,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        shift_factor=0.0,
        scaling_factor=1.0,
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae.to(DTYPE),
        text_encoder=encoder.to(DTYPE),
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=model("flux"),
    )


def image(pipe):
    return pipe(
        prompt_embeds=torch.ones(1, 4, 64, dtype=DTYPE),
        pooled_prompt_embeds=torch.ones(1, 64, dtype=DTYPE),
        num_inference_steps=2,
        height=8,
        width=8,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        guidance_scale=0.0,
    ).images


def load_pipeline(folder, **options):
    missing = dict.fromkeys(("tokenizer", "tokenizer_2", "text_encoder_2"))
    return diffusers.FluxPipeline.from_pretrained(folder, torch_dtype=DTYPE, **missing, **options)


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("how", ["backend", "mapping"])
def test_a_pipeline(how, tmp_path):
    """One config for models of diffusers and text encoders of transformers; saved and loaded."""
    quiet(pipeline()).save_pretrained(tmp_path / "dense")
    if how == "backend":
        about = {"quant_backend": "qtensor", "quant_kwargs": {"format": "mxfp8"}}
        about["components_to_quantize"] = ["transformer", "text_encoder"]
    else:
        config = QTensorConfig("mxfp8")
        about = {"quant_mapping": {"transformer": config, "text_encoder": config}}
    config = diffusers.PipelineQuantizationConfig(**about)
    pipe = quiet(load_pipeline(tmp_path / "dense", quantization_config=config))
    assert quantized(pipe.transformer)
    assert quantized(pipe.text_encoder)
    assert not quantized(pipe.vae)
    result = image(pipe)
    assert result.isfinite().all()
    pipe.save_pretrained(tmp_path / "saved")
    again = quiet(load_pipeline(tmp_path / "saved"))
    assert quantized(again.text_encoder).keys() == quantized(pipe.text_encoder).keys()
    assert torch.equal(image(again), result)


# ---- offload


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"offload_type": "leaf_level"},
        {"offload_type": "block_level", "num_blocks_per_group": 1},
    ],
    ids=lambda options: options["offload_type"],
)
def test_group_offload(name, options, tmp_path):
    """Codes and factors are moved; the parameters keep their formats and bytes."""
    made = load_quantized(name, "nvfp4", tmp_path)
    want, before = run(made), quantized(made)
    codes = {key: parameter.detach().clone() for key, parameter in before.items()}
    devices = {"onload_device": torch.device("cpu"), "offload_device": torch.device("cpu")}
    made.enable_group_offload(**devices, **options)
    assert torch.equal(run(made), want)
    assert torch.equal(run(made), want)
    for key, parameter in quantized(made).items():
        assert torch.equal(parameter.dequantize(), codes[key].dequantize())
    assert quantized(made).keys() == codes.keys()


def test_sequential_offload(tmp_path):
    """What ``enable_sequential_cpu_offload`` does to each model of a pipeline.

    The pipeline's method needs another device: accelerate does not go from ``cpu`` to ``cpu:0``.
    """
    accelerate = pytest.importorskip("accelerate", reason="diffusers offloads with accelerate")
    made = load_quantized("flux", "nvfp4", tmp_path)
    want = run(made)
    accelerate.cpu_offload(made, torch.device("cpu"), offload_buffers=True)
    assert all(parameter.is_meta for parameter in made.parameters())
    assert torch.equal(run(made), want)
    assert all(parameter.is_meta for parameter in made.parameters())
    assert torch.equal(run(made), want)


def test_model_offload(tmp_path):
    pytest.importorskip("accelerate", reason="diffusers offloads with accelerate")
    quiet(pipeline()).save_pretrained(tmp_path)
    mapping = {"transformer": QTensorConfig("nvfp4")}
    config = diffusers.PipelineQuantizationConfig(quant_mapping=mapping)
    pipe = quiet(load_pipeline(tmp_path, quantization_config=config))
    want = image(pipe)
    pipe.enable_model_cpu_offload(device="cpu")
    assert torch.equal(image(pipe), want)
    assert torch.equal(image(pipe), want)


# ---- LoRA


def adapter():
    """Random LoRA weights for the attention of the transformer."""
    generator = torch.Generator().manual_seed(1)
    block = "transformer.transformer_blocks.0.attn"
    state = {}
    for part in ("to_q", "to_k", "to_v", "to_out.0"):
        state[f"{block}.{part}.lora_A.weight"] = torch.randn(4, 128, generator=generator) * 0.1
        state[f"{block}.{part}.lora_B.weight"] = torch.randn(128, 4, generator=generator) * 0.1
    return state


def test_lora(tmp_path):
    """Adapters on frozen codes: the result of the same adapters on the decoded weights."""
    pytest.importorskip("peft", reason="diffusers loads adapters with peft")
    quiet(pipeline()).save_pretrained(tmp_path)
    mapping = {"transformer": QTensorConfig("nvfp4")}
    config = diffusers.PipelineQuantizationConfig(quant_mapping=mapping)
    pipe = quiet(load_pipeline(tmp_path, quantization_config=config))
    plain = image(pipe)
    codes = {key: p.detach().dequantize() for key, p in quantized(pipe.transformer).items()}
    pipe.load_lora_weights(adapter())
    adapted = image(pipe)
    assert not torch.equal(adapted, plain)
    attention = pipe.transformer.transformer_blocks[0].attn
    base = attention.to_q.base_layer.weight
    assert isinstance(base, QuantizedTensor)
    x = torch.ones(1, 128, dtype=DTYPE)
    delta = attention.to_q(x) - attention.to_q.base_layer(x)
    state = adapter()
    key = "transformer.transformer_blocks.0.attn.to_q.lora_{}.weight"
    want = x.float() @ state[key.format("A")].T @ state[key.format("B")].T
    torch.testing.assert_close(delta.float(), want, rtol=0.05, atol=0.1)
    pipe.disable_lora()
    assert torch.equal(image(pipe), plain)
    pipe.enable_lora()
    assert torch.equal(image(pipe), adapted)
    pipe.unload_lora_weights()
    assert torch.equal(image(pipe), plain)
    for key, parameter in quantized(pipe.transformer).items():
        assert torch.equal(parameter.dequantize(), codes[key])
