"""gpt-oss and FBGEMM FP8: stacked experts whose dense values are (E, K, N), and 2-D weights."""

import json

import pytest
import torch
from checkpoint_cases import (
    EXAMPLES,
    READ,
    assert_same_bytes,
    assert_same_values,
    expected,
    stored_bytes,
    weight,
)

import qtensor
from qtensor import checkpoints
from tests.checkpoints.test_checkpoints_hostile import drop, put, write_example
from tests.checkpoints.test_checkpoints_variants import (
    E2M1,
    check,
    codes,
    every,
    fp8_values,
    grid,
    low_first,
    powers,
    write,
)

FP8 = torch.float8_e4m3fn
GATE = "model.layers.0.mlp.experts.gate_up_proj"


def experts(name, blocks="_blocks", scales="_scales"):
    """Stored tensors of three experts (24, 96), and their exact values (3, 24, 96)."""
    data, scale = codes(3, 24, 48), codes(3, 24, 3, below=255)
    scale[0, 0] = torch.tensor([0, 254, 127])
    values = E2M1[low_first(data)] * every(powers(scale), 1, 32, (3, 24, 96))
    stored = {name + blocks: data.reshape(3, 24, 3, 16), name + scales: scale}
    return stored, torch.from_numpy(values).float()


NAMES = [
    (GATE, "_blocks", "_scales"),
    ("model.layers.0.mlp.experts.down_proj", "_blocks", "_scales"),
    ("block.0.mlp.mlp1_weight", ".blocks", ".scales"),
    ("block.0.mlp.mlp2_weight", ".blocks", ".scales"),
]


@pytest.mark.parametrize(("name", "blocks", "scales"), NAMES)
def test_experts(name, blocks, scales, tmp_path):
    """The quantized tensor is (E, N, K) around the bytes of the file; dense values are turned."""
    stored, values = experts(name, blocks, scales)
    bias = torch.ones(3, 24, dtype=torch.bfloat16)
    with write(tmp_path, {**stored, f"{name}_bias": bias}, quant_method="mxfp4") as checkpoint:
        assert checkpoint.layout == "gpt-oss"
        assert set(checkpoint) == {name, f"{name}_bias"}
        for dtype in (torch.bfloat16, torch.float32):
            want = values.to(dtype)
            assert_same_values(checkpoint.dense(name, dtype), want.transpose(1, 2))
            assert_same_values(checkpoint[name].dequantize(dtype), want)
        tensor = checkpoint[name]
        assert checkpoint.groups[name].transposed
        assert tensor.buffers()[0].shape == (3, 24, 48)
        assert tensor.buffers()[1].shape == (128, 4)  # 72 rows and 3 factors, padded
        assert tensor.buffers()[0].data_ptr() == checkpoint.stored(name)["codes"].data_ptr()
        checkpoints.save(checkpoint, tmp_path / "x", layout="gpt-oss")
    assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "model.safetensors")


def test_e8m0_factors(tmp_path):
    stored, values = experts(GATE)
    stored[f"{GATE}_scales"] = stored[f"{GATE}_scales"].view(torch.float8_e8m0fnu)
    with write(tmp_path, stored, quant_method="mxfp4") as checkpoint:
        assert_same_values(checkpoint.dense(GATE, torch.float32), values.transpose(1, 2))
        assert_same_values(checkpoint[GATE].dequantize(torch.float32), values)


@pytest.mark.parametrize(("name", "blocks", "scales"), [NAMES[0], NAMES[2]])
def test_names_alone_need_a_layout(name, blocks, scales, tmp_path):
    """The release of a single file has no configuration."""
    stored, values = experts(name, blocks, scales)
    path = tmp_path / "model.safetensors"
    checkpoints.save(stored, path, layout="plain")
    with pytest.raises(checkpoints.CheckpointError, match="Pass layout="):
        checkpoints.open(path)
    with checkpoints.open(path, layout="gpt-oss") as checkpoint:
        assert_same_values(checkpoint.dense(name, torch.float32), values.transpose(1, 2))


def test_a_factor_of_255(tmp_path):
    """The origin reads it as inf, and we as NaN; no writer makes it."""
    stored, _ = experts(GATE)
    stored[f"{GATE}_scales"][1, 2, 0] = 255
    with write(tmp_path, stored, quant_method="mxfp4") as checkpoint:
        with pytest.raises(checkpoints.CheckpointError, match="not 255") as raised:
            checkpoint.dense(GATE)
        assert raised.value.tensor == GATE
        assert int(checkpoint[GATE].dequantize().isnan().sum()) == 32


BROKEN = [
    ("gptoss_mxfp4", drop("down_proj_scales"), "blocks have scales beside them"),
    ("gptoss_mxfp4", drop("down_proj_blocks"), "scales have blocks beside them"),
    ("gptoss_mxfp4", put("down_proj_blocks", lambda t: t.reshape(2, 64, 2, 8)), "blocks, 16"),
    ("gptoss_mxfp4", put("down_proj_blocks", lambda t: t.flatten(2)), r"got U8 of shape \[2, 64"),
    ("gptoss_mxfp4", put("down_proj_blocks", lambda t: t.view(torch.int8)), "got I8"),
    ("gptoss_mxfp4", put("down_proj_scales", lambda t: t[:, :32]), r"needs .*\[2, 64, 1\]"),
    ("gptoss_mxfp4", put("down_proj_scales", lambda t: t.float()), "got F32"),
    # ModelOpt's gpt-oss files have other shapes.
    ("gptoss_mxfp4", put("down_proj_scales", lambda t: t.transpose(1, 2)), r"\[2, 1, 64\]"),
    ("fbgemm_fp8", drop("q_proj.weight_scale"), r"has the factors .*; got none"),
    ("fbgemm_fp8", drop("q_proj.weight"), "factors have a float8 weight"),
    ("fbgemm_fp8", put("q_proj.weight", lambda t: t.bfloat16()), "factors have a float8 weight"),
    ("fbgemm_fp8", put("q_proj.weight", lambda t: t.view(torch.float8_e5m2)), "F8_E5M2"),
    ("fbgemm_fp8", put("q_proj.weight", lambda t: t[None]), "a weight is 2-D"),
    ("fbgemm_fp8", put("weight_scale", lambda t: t.flatten()), r"shape \[64, 1\]; got F32"),
    ("fbgemm_fp8", put("weight_scale", lambda t: t.t()), r"got F32 of shape \[1, 64\]"),
    ("fbgemm_fp8", put("weight_scale", lambda t: t[:1]), r"got F32 of shape \[1, 1\]"),
    ("fbgemm_fp8", put("weight_scale", lambda t: t.half()), "needs F32 or BF16"),
]


@pytest.mark.parametrize(("name", "change", "message"), BROKEN)
def test_files_that_are_refused(name, change, message, tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.open(write_example(tmp_path, name, change))
    assert raised.value.layout == ("gpt-oss" if "oss" in name else "fbgemm-fp8")
    assert raised.value.tensor


def test_gpt_oss_holds_stacked_experts_alone(tmp_path):
    stack = qtensor.quantize(torch.randn(2, 8, 40), "mxfp4")
    columns = qtensor.quantize(torch.randn(2, 32, 32), "mxfp4", rowwise=False, columnwise=True)
    for name, tensor, message in [
        ("a.weight", weight("mxfp4"), "stacked experts"),
        (GATE, stack, "K a multiple of 32"),
        (GATE, weight("mxfp8"), "holds MXFP4"),
        (GATE, columns, "rowwise"),
    ]:
        with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
            checkpoints.save({name: tensor}, tmp_path / "x", layout="gpt-oss")
        assert raised.value.tensor == name


# ---- FBGEMM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows(dtype, tmp_path):
    """A bfloat16 factor is widened, and written in its dtype again."""
    data, scale = codes(48, 160), grid(48, 1).bfloat16().to(dtype)
    tensors = {
        "a.weight": data.view(FP8),
        "a.weight_scale": scale,
        "lm_head.weight": torch.ones(4, 4),
    }
    entry = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    with write(tmp_path, tensors, **entry) as checkpoint:
        assert checkpoint["a.weight"].quantizer.canonical == "fp8_rowwise"
        check(checkpoint, "a.weight", fp8_values(data, scale.double().numpy()), "fp8_rowwise")
        checkpoints.save(checkpoint, tmp_path / "x", layout="fbgemm-fp8")
    if dtype == torch.bfloat16:
        assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    assert config == {**entry, "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize("scale", [torch.rand(48, 1) + 0.5, torch.full((48, 1), 0.25)])
def test_float32_factors_stay_float32(scale, tmp_path):
    """Also those that bfloat16 holds, if all of them are powers of two."""
    tensors = {"a.weight": codes(48, 160).view(FP8), "a.weight_scale": scale}
    with write(tmp_path, tensors, quant_method="fbgemm_fp8") as checkpoint:
        checkpoints.save(checkpoint, tmp_path / "x", layout="fbgemm-fp8")
    assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "model.safetensors")


STACKED = [
    ("experts.gate_up_proj", (3, 1, 24)),
    ("experts.down_proj", (3, 24, 1)),
]


@pytest.mark.parametrize(("name", "scale_shape"), STACKED)
@pytest.mark.parametrize("cols", [40, 24])
def test_llama_4_experts(name, scale_shape, cols, tmp_path):
    """Factors belong to the last dim of (E, K, N), also where they are stored as (E, N, 1)."""
    data, scale = codes(3, cols, 24), grid(*scale_shape)
    tensors = {name: data.view(FP8), f"{name}_scale": scale}
    with write(tmp_path, tensors, quant_method="fbgemm_fp8") as checkpoint:
        values = torch.from_numpy(
            fp8_values(data, scale.reshape(3, 1, 24).double().numpy())
        ).float()
        for dtype in (torch.bfloat16, torch.float32):
            assert_same_values(checkpoint.dense(name, dtype), values.to(dtype))
            ours = checkpoint[name].dequantize(dtype)
            assert_same_values(ours.transpose(1, 2), values.to(dtype))
        assert checkpoint[name].shape == (3, 24, cols)
        assert checkpoint.groups[name].transposed
        checkpoints.save(checkpoint, tmp_path / "x", layout="fbgemm-fp8")
    assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "model.safetensors")


def test_factors_of_experts_that_belong_to_the_inputs(tmp_path):
    tensors = {"experts.down_proj": codes(3, 40, 24).view(FP8)}
    tensors["experts.down_proj_scale"] = grid(3, 40, 1)
    with pytest.raises(checkpoints.CheckpointError, match=r"\[3, 1, 24\] or \[3, 24, 1\]; got"):
        write(tmp_path, tensors, quant_method="fbgemm_fp8")


def test_experts_without_their_factors(tmp_path):
    data = {"experts.down_proj": codes(3, 40, 24).view(FP8)}
    with pytest.raises(checkpoints.CheckpointError, match=r"down_proj_scale; got none"):
        write(tmp_path, data, quant_method="fbgemm_fp8")


@pytest.mark.parametrize("folder", ["gptoss_mxfp4", "fbgemm_fp8"])
def test_our_layout_keeps_what_was_read(folder, tmp_path):
    """The quantized tensors survive our own layout, with their orientation."""
    (example,) = [e for e in READ if e.folder == folder]
    with checkpoints.open(EXAMPLES / folder) as checkpoint:
        checkpoints.save(checkpoint, tmp_path / "x")
        with checkpoints.open(tmp_path / "x") as copy:
            for name, dtype, want in expected(example):
                assert_same_bytes(copy[name], checkpoint[name])
                values = copy[name].dequantize(dtype)
                turned = checkpoint.groups[name].transposed
                assert_same_values(values.transpose(-1, -2) if turned else values, want)
