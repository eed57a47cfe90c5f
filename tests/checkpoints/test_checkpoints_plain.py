"""Files without factors: float8 codes are the values; and methods that are refused by name."""

import json

import pytest
import torch
from checkpoint_cases import EXAMPLES, assert_same_bytes, assert_same_values, stored_bytes

from qtensor import checkpoints
from tests.checkpoints.test_checkpoints_variants import codes


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_without_factors(dtype, tmp_path):
    """A cast checkpoint opens as FP8 tensors with a factor of 1, and is written as it was."""
    data = codes(16, 32).view(dtype)
    tensors = {"a.weight": data, "a.bias": torch.ones(4), "one": data[0, 0].clone()}
    checkpoints.save(tensors, tmp_path / "x.safetensors", layout="plain")
    with checkpoints.open(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.layout == "plain"
        q = checkpoint["a.weight"]
        assert q.quantizer.format == "fp8"
        assert q.buffers()[1].item() == 1
        for kind in (torch.float32, torch.bfloat16, torch.float16):
            assert_same_values(checkpoint.dense("a.weight", kind), data.float().to(kind))
            assert_same_values(q.dequantize(kind), data.float().to(kind))
        assert_same_bytes(checkpoint["one"], tensors["one"])
        checkpoints.save(checkpoint, tmp_path / "copy.safetensors", layout="plain")
    assert stored_bytes(tmp_path / "copy.safetensors") == stored_bytes(tmp_path / "x.safetensors")


def test_float8_stays_plain_where_the_caller_overrides_the_layout():
    """``layout="plain"`` on a file with factors gives the stored tensors."""
    with checkpoints.open(EXAMPLES / "comfy_fp8", layout="plain") as checkpoint:
        assert not checkpoint.groups
        name = "model.diffusion_model.blocks.0.qkv.weight"
        assert checkpoint[name].dtype == torch.float8_e4m3fn


METHODS = ["fp_quant", "fouroversix", "nvfp4", "gptq", "awq", "bitsandbytes", "something"]


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_are_refused(method, tmp_path):
    tensors = {"a.weight": codes(4, 32).view(torch.float8_e4m3fn)}
    checkpoints.save(tensors, tmp_path / "model.safetensors", layout="plain")
    config = {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(checkpoints.CheckpointError, match=f"'{method}'.*Pass layout="):
        checkpoints.open(tmp_path)


def test_packed_words_without_a_config_need_a_layout(tmp_path):
    """U32 words with ``.scales`` beside them are codes of MLX, whose config is missing."""
    with checkpoints.open(EXAMPLES / "mlx_mxfp4", layout="plain") as checkpoint:
        tensors = {name: checkpoint[name].clone() for name in checkpoint}
    checkpoints.save(tensors, tmp_path / "model.safetensors", layout="plain")
    with pytest.raises(checkpoints.CheckpointError, match="Pass layout="):
        checkpoints.open(tmp_path)


CODES = [
    ("a._weight_qdata", "a._weight_scale"),
    ("a.weight_packed", "a.weight_scale"),
    ("a.experts_blocks", "a.experts_scales"),
    ("a.weight", "a.scale_weight"),
]


@pytest.mark.parametrize(("codes", "factor"), CODES)
def test_codes_with_a_factor_are_not_plain(codes, factor, tmp_path):
    """A file that lost its header texts is not read with a factor of 1."""
    tensors = {codes: torch.ones(4, 4).to(torch.float8_e4m3fn), factor: torch.ones(4, 1)}
    checkpoints.save(tensors, tmp_path / "x.safetensors", layout="plain")
    with pytest.raises(checkpoints.CheckpointError, match="Pass layout="):
        checkpoints.open(tmp_path / "x.safetensors")


@pytest.mark.parametrize("layout", ["gpt-oss", "comfyui", "transformer-engine", "fine-grained-fp8"])
def test_a_layout_that_the_file_does_not_have(layout, tmp_path):
    """Its codes do not pass as plain tensors because the caller named another layout."""
    codes = {"a.weight": torch.zeros(4, 4, dtype=torch.uint8), "a.b": torch.ones(2)}
    checkpoints.save(codes, tmp_path / "x.safetensors", layout="plain")
    with pytest.raises(checkpoints.CheckpointError, match="leave out layout=") as raised:
        checkpoints.open(tmp_path / "x.safetensors", layout=layout)
    assert raised.value.layout == layout
