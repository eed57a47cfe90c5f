"""MLX checkpoints: modes of modules, words of other sizes, stacked experts, and what is refused."""

import json

import pytest
import torch
from checkpoint_cases import EXAMPLES, assert_same_bytes, assert_same_values, weight

from qtensor import checkpoints
from tests.checkpoints.test_checkpoints_variants import E2M1, E4M3, codes, every, low_first, powers

MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
MXFP8 = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4"}


def write(folder, tensors, **quantization):
    checkpoints.save(tensors, folder / "model.safetensors", layout="plain")
    config = {"quantization": quantization, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return checkpoints.open(folder)


def module(mode, *shape):
    """Stored tensors and exact values (float64) of a weight of random bytes."""
    *lead, cols = shape
    data = codes(*lead, cols * mode["bits"] // 8)
    scale = codes(*lead, cols // mode["group_size"], seed=1, below=120)
    elements = E4M3[data.numpy()] if mode["bits"] == 8 else E2M1[low_first(data)]
    factors = E4M3[scale.numpy()] if mode["mode"] == "nvfp4" else powers(scale)
    want = elements * every(factors, 1, mode["group_size"], shape)
    return data.view(torch.uint32), scale, torch.from_numpy(want)


@pytest.mark.parametrize("mode", [MXFP4, MXFP8, NVFP4], ids=lambda m: m["mode"])
@pytest.mark.parametrize("shape", [(5, 96), (3, 40, 64)], ids=str)
def test_modes(mode, shape, tmp_path):
    """Both ways give the exact product, rounded once; float16 rounds the factor first."""
    words, scale, want = module(mode, *shape)
    with write(tmp_path, {"a.weight": words, "a.scales": scale}, **mode) as checkpoint:
        assert list(checkpoint) == ["a.weight"]
        for dtype in (torch.float32, torch.bfloat16):
            rounded = want.float().to(dtype)
            assert_same_values(checkpoint.dense("a.weight", dtype), rounded)
            assert_same_values(checkpoint["a.weight"].dequantize(dtype), rounded)
        assert checkpoint["a.weight"].quantizer.format == mode["mode"]


def test_modules_have_their_own_modes(tmp_path):
    tensors, wants = {"c.weight": torch.ones(4, 4)}, {}
    for name, mode in (("a", MXFP4), ("b", MXFP8), ("d", NVFP4)):
        words, tensors[f"{name}.scales"], wants[name] = module(mode, 4, 64)
        tensors[f"{name}.weight"] = words
    with write(tmp_path, tensors, **MXFP4, a=True, b=MXFP8, c=False, d=NVFP4) as checkpoint:
        for name, want in wants.items():
            assert_same_values(checkpoint.dense(f"{name}.weight", torch.float32), want.float())
        assert torch.equal(checkpoint["c.weight"], tensors["c.weight"])
        checkpoints.save(checkpoint, tmp_path / "copy", layout="mlx")
        with checkpoints.open(tmp_path / "copy") as copy:
            assert copy.config["quantization"] == copy.config["quantization_config"]
            for name in checkpoint:
                assert_same_bytes(copy[name], checkpoint[name])


def test_nvfp4_with_a_factor_of_one_is_written(tmp_path):
    """An amax of 2688 gives the factor 1, which MLX needs; so does a stored factor of 1."""
    q = weight("nvfp4", 16, 64)
    for options in ({}, {"with_global_scale_inv": True}):
        q = weight("nvfp4", 16, 64, **options)
        one = [torch.tensor([2688.0]), torch.ones(1)][: 1 + len(options)]
        q = q.quantizer.assemble([*q.buffers()[:2], *one], q.shape, q.dtype)
        checkpoints.save({"a.weight": q}, tmp_path / f"x{len(options)}", layout="mlx")
        with checkpoints.open(tmp_path / f"x{len(options)}") as checkpoint:
            assert_same_values(checkpoint["a.weight"].dequantize(), q.dequantize())


@pytest.mark.parametrize("mode", [MXFP4, MXFP8, NVFP4], ids=lambda m: m["mode"])
def test_a_mode_has_its_usual_numbers(mode, tmp_path):
    """mlx takes those of the mode where bits and group_size are null or absent."""
    words, scale, want = module(mode, 5, 96)
    tensors = {"a.weight": words, "a.scales": scale}
    with write(tmp_path, tensors, mode=mode["mode"], bits=None) as checkpoint:
        assert_same_values(checkpoint.dense("a.weight", torch.float32), want.float())


def test_partial_groups_are_not_written(tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match="multiple of 32"):
        checkpoints.save({"a.weight": weight("mxfp8", 4, 48)}, tmp_path / "x", layout="mlx")


def test_affine_checkpoints_are_refused_by_name(tmp_path):
    tensors = {
        "a.weight": torch.zeros(4, 8, dtype=torch.int32).view(torch.uint32),
        "a.scales": torch.ones(4, 1),
        "a.biases": torch.ones(4, 1),
    }
    with pytest.raises(checkpoints.CheckpointError, match="affine"):
        write(tmp_path, tensors, group_size=64, bits=4)


def test_the_entry_of_mlx_does_not_stay_in_other_configs(tmp_path):
    """MLX writes its entry twice; a folder of another layout has neither."""
    with checkpoints.open(EXAMPLES / "mlx_mxfp4") as checkpoint:
        checkpoints.save(checkpoint, tmp_path / "x", layout="compressed-tensors")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert "quantization" not in config
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
