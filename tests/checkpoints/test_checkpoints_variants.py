"""Variants of layouts that no example shows: files built here, values from float64 formulas."""

import json

import numpy as np
import pytest
import torch
from checkpoint_cases import assert_same_values, stored_bytes

from qtensor import checkpoints
from qtensor.checkpoints.nvfp4_factor import divisor_of, factor_of, from_divisor, from_factor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = np.array(E2M1 + [-x for x in E2M1])
E2M3 = [m / 8 for m in range(8)] + [2.0**e * (1 + m / 8) for e in range(3) for m in range(8)]
E2M3 = np.array(E2M3 + [-x for x in E2M3])
# E4M3: 2^-9 per subnormal step, then 2^(e - 7) * (1 + m / 8); code 127 is NaN.
E4M3 = [m * 2.0**-9 for m in range(8)]
E4M3 += [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8)]
E4M3 = np.array([*E4M3[:127], np.nan, *(-x for x in E4M3[:127]), np.nan])


def codes(*shape, below=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, below, shape, generator=generator, dtype=torch.uint8)


def low_first(packed):
    packed = packed.numpy()
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def six_bits(packed):
    """Codes of packed FP6, by a bit string: code i is in bits 6i to 6i + 5 of 24."""
    found = []
    for a, b, c in packed.numpy().reshape(-1, 3).tolist():
        word = a + 256 * b + 65536 * c
        found += [word // 64**i % 64 for i in range(4)]
    return np.array(found).reshape(*packed.shape[:-1], -1)


def powers(scale):
    return 2.0 ** (scale.numpy().astype(np.float64) - 127)


def every(factors, rows, cols, shape):
    """The factor of each element, by its index."""
    row, col = (np.arange(n) // size for n, size in zip(shape[-2:], (rows, cols), strict=True))
    return factors[..., row[:, None], col[None, :]]


def write(folder, tensors, **quantization):
    checkpoints.save(tensors, folder / "model.safetensors", layout="plain")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return checkpoints.open(folder)


def check(checkpoint, name, want, fmt, dtypes=(torch.bfloat16, torch.float32)):
    """Dense values are ``want`` (float64, exact products), rounded; ours are the same."""
    for dtype in dtypes:
        rounded = torch.from_numpy(want).float().to(dtype)
        assert_same_values(checkpoint.dense(name, dtype), rounded)
        if fmt is None:
            assert checkpoint.why_dense(name)
        else:
            assert checkpoint[name].quantizer.format == fmt
            assert_same_values(checkpoint[name].dequantize(dtype), rounded)


def grid(*shape):
    """Float32 factors with 12 random bits, so that a product with a code is exact."""
    return codes(*shape, seed=1).float() * 2**-9 + 0.125


def fp8_values(data, factors):
    return E4M3[data.numpy()] * factors


FINE = [
    # weight, factors, block, format
    ((48, 160), grid(1, 2), [128, 128], "fp8_blockwise"),
    ((130, 300), grid(130, 3), [1, 128], "fp8_blockwise"),
    ((2, 256, 160), grid(2, 2, 2), [128, 128], "fp8_blockwise"),
    ((2, 100, 160), grid(2, 1, 2), [128, 128], None),
    ((48, 160), grid(2, 3), [32, 64], None),
    ((48, 160), codes(48, 5, below=200), [1, 32], "mxfp8"),
    ((48, 160), grid(48, 5), [1, 32], None),
]


@pytest.mark.parametrize(("shape", "scale", "block", "fmt"), FINE)
def test_fine_grained_blocks(shape, scale, block, fmt, tmp_path):
    data = codes(*shape)
    name = "experts.up_proj" if len(shape) == 3 else "a.weight"
    with write(
        tmp_path,
        {name: data.view(torch.float8_e4m3fn), f"{name}_scale_inv": scale},
        quant_method="fp8",
        weight_block_size=block,
    ) as checkpoint:
        factors = powers(scale) if scale.dtype == torch.uint8 else scale.double().numpy()
        want = fp8_values(data, every(factors, *block, shape))
        # A product below the smallest float32 of 24 bits would be rounded twice; none is here.
        check(checkpoint, name, want, fmt)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_factors_that_are_powers_of_two(dtype, tmp_path):
    """A grid of E8M0 is widened; 0 is 2^-127."""
    data, scale = codes(200, 160), codes(2, 2, below=140)
    scale[0, 0] = 0
    with write(
        tmp_path,
        {"a.weight": data.view(torch.float8_e4m3fn), "a.weight_scale_inv": scale.view(dtype)},
        quant_method="fp8",
        scale_fmt="ue8m0",
        weight_block_size=[128, 128],
    ) as checkpoint:
        assert "force_pow_2_scales" not in checkpoint["a.weight"].quantizer.canonical
        want = fp8_values(data, every(powers(scale), 128, 128, (200, 160)))
        check(checkpoint, "a.weight", want, "fp8_blockwise", (torch.float32,))


@pytest.mark.parametrize("factor", ["weight_scale_inv", "qscale_weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fine_grained_per_tensor(factor, dtype, tmp_path):
    data, scale = codes(48, 160), torch.tensor(0.75, dtype=dtype)
    tensors = {
        "a.weight": data.view(torch.float8_e4m3fn),
        f"a.{factor}": scale,
        "a.qscale_act": torch.tensor(0.5),
        "b.scale": torch.ones(3),
    }
    with write(tmp_path, tensors, quant_method="fp8", weight_block_size=None) as checkpoint:
        assert checkpoint["a.weight"].dtype == dtype
        check(checkpoint, "a.weight", fp8_values(data, 0.75), "fp8")
        assert set(checkpoint) == {"a.weight", "a.qscale_act", "b.scale"}


def test_deepseek_v4(tmp_path):
    """FP8 layers and FP4 experts have ``.scale``; the other ``.scale`` tensors are plain."""
    fp8, fp4 = codes(200, 160), codes(64, 80)
    scale8, scale4 = codes(2, 2, below=140), codes(64, 5, below=140)
    tensors = {
        "attn.weight": fp8.view(torch.float8_e4m3fn),
        "attn.scale": scale8.view(torch.float8_e8m0fnu),
        "experts.0.weight": fp4.view(torch.int8),
        "experts.0.scale": scale4.view(torch.float8_e8m0fnu),
        "norm.weight": torch.ones(4),
        "norm.scale": torch.ones(4),
    }
    with write(
        tmp_path, tensors, quant_method="fp8", expert_dtype="fp4", weight_block_size=[128, 128]
    ) as checkpoint:
        want = fp8_values(fp8, every(powers(scale8), 128, 128, (200, 160)))
        check(checkpoint, "attn.weight", want, "fp8_blockwise", (torch.float32,))
        want = E2M1[low_first(fp4)] * every(powers(scale4), 1, 32, (64, 160))
        check(checkpoint, "experts.0.weight", want, "mxfp4", (torch.float32,))
        assert torch.equal(checkpoint["norm.scale"], torch.ones(4))


def ct(folder, fmt, tensors, **weights):
    bits = {"nvfp4": 4, "mxfp4": 4, "mxfp6": 6}.get(fmt[:5], 8)
    group = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": bits, **weights}}
    quantization = {"format": fmt, "config_groups": {"group_0": group}}
    return write(folder, tensors, quant_method="compressed-tensors", **quantization)


CT_FP8 = [
    ((130, 300), grid(130, 3), {"strategy": "group", "group_size": 128}, "fp8_blockwise"),
    ((130, 300), grid(3, 5), {"strategy": "block", "block_structure": [64, 64]}, None),
    ((130, 300), grid(130, 1), {"strategy": "channel"}, "fp8_rowwise"),
    ((130, 300), torch.tensor(0.75), {"strategy": "tensor"}, "fp8"),
]


@pytest.mark.parametrize(("shape", "scale", "weights", "fmt"), CT_FP8)
def test_compressed_tensors_fp8(shape, scale, weights, fmt, tmp_path):
    data = codes(*shape)
    tensors = {"a.weight": data.view(torch.float8_e4m3fn), "a.weight_scale": scale}
    with ct(tmp_path, "float-quantized", tensors, **weights) as checkpoint:
        block = weights.get("block_structure", [1, weights.get("group_size", shape[1])])
        factors = scale.double().numpy()
        if scale.ndim:
            factors = every(factors, *block, shape)
        check(checkpoint, "a.weight", fp8_values(data, factors), fmt, (torch.float32,))


def test_compressed_tensors_mxfp6(tmp_path):
    data, scale = codes(48, 120), codes(48, 5, below=140)
    tensors = {"a.weight_packed": data, "a.weight_scale": scale}
    with ct(tmp_path, "mxfp6-pack-quantized", tensors, strategy="group") as checkpoint:
        want = E2M3[six_bits(data)] * every(powers(scale), 1, 32, (48, 160))
        check(checkpoint, "a.weight", want, "mxfp6", (torch.bfloat16,))


def test_mixed_precision(tmp_path):
    """Each module has the scheme that its tensors show, whatever the class names say."""
    data, scale = codes(48, 80), codes(48, 5, below=140)
    tensors = {
        "a.weight_packed": data,
        "a.weight_scale": scale,
        "b.weight": codes(48, 160).view(torch.float8_e4m3fn),
        "b.weight_scale": grid(48, 1),
        "c.weight": torch.ones(4, 4),
    }
    groups = {
        "group_0": {
            "targets": ["re:a"],
            "format": "mxfp4-pack-quantized",
            "weights": {"type": "float", "num_bits": 4, "strategy": "group"},
        },
        "group_1": {
            "targets": ["b"],
            "format": "float-quantized",
            "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
        },
    }
    method = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    with write(tmp_path, tensors, config_groups=groups, **method) as checkpoint:
        kinds = {row.name: row.kind for row in checkpoint.table().rows}
        assert kinds == {"a.weight": "mxfp4", "b.weight": "fp8_rowwise", "c.weight": "plain"}


def test_global_scales_that_no_amax_gives(tmp_path):
    """The tensor stores a decode factor; writing gives the file's own number again."""
    generator = torch.Generator().manual_seed(0)
    divisors = torch.rand(400, generator=generator) * 1000 + 1
    none = [d.reshape(1) for d in divisors if from_divisor(d).factor is not None]
    assert 20 < len(none) < 80  # about 9 % of uniform numbers have no amax
    data, scale = codes(32, 32), codes(32, 4, below=120).view(torch.float8_e4m3fn)
    tensors = {}
    for i, divisor in enumerate(none):
        tensors[f"l{i}.weight_packed"] = data
        tensors[f"l{i}.weight_scale"] = scale
        tensors[f"l{i}.weight_global_scale"] = divisor
    with ct(tmp_path, "nvfp4-pack-quantized", tensors, strategy="tensor_group") as checkpoint:
        for i, divisor in enumerate(none):
            tensor = checkpoint[f"l{i}.weight"]
            assert tensor.quantizer.with_global_scale_inv
            factors = (scale.float().numpy() / divisor.numpy()).astype(np.float32)
            want = E2M1[low_first(data)].astype(np.float32) * every(factors, 1, 16, (32, 64))
            want = torch.from_numpy(want)
            assert_same_values(checkpoint.dense(f"l{i}.weight"), want.bfloat16())
            # Three more float32 roundings than the origin, of half a unit each.
            torch.testing.assert_close(tensor.dequantize(torch.float32), want, rtol=2**-22, atol=0)
        checkpoints.save(checkpoint, tmp_path / "x", layout="compressed-tensors")
    again = stored_bytes(tmp_path / "x")
    original = stored_bytes(tmp_path / "model.safetensors")
    assert again == original


def test_every_divisor_comes_back():
    """Also those that share their reciprocal with a neighbour."""
    generator = torch.Generator().manual_seed(1)
    for divisor in (torch.rand(2000, generator=generator) * 4000 + 0.5).split(1):
        found = from_divisor(divisor)
        assert torch.equal(divisor_of(*found), divisor)


def test_every_factor_comes_back():
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for factor in (torch.rand(500, generator=generator) * 0.01 + 1e-6).split(1):
        found = from_factor(factor)
        seen.add(found.quantizer.canonical)
        assert torch.equal(factor_of(*found), factor)
    assert len(seen) == 3  # an amax with 448, with 256, or a stored factor


def test_a_bfloat16_amax_is_found():
    generator = torch.Generator().manual_seed(0)
    for amax in (torch.rand(300, generator=generator) * 50 + 1e-3).bfloat16().float().split(1):
        divisor = torch.tensor([2688.0]) / amax
        assert torch.equal(from_divisor(divisor).amax, amax)


def test_options_of_open(tmp_path):
    data, scale = codes(48, 80), codes(48, 5, below=140)
    group = {"targets": ["Linear"], "weights": {"type": "float", "strategy": "group"}}
    quantization = {"format": "mxfp4-pack-quantized", "config_groups": {"group_0": group}}
    tensors = {"a.weight_packed": data, "a.weight_scale": scale}
    method = {"quant_method": "compressed-tensors", "transform_config": {"r": {}}}
    with pytest.raises(checkpoints.CheckpointError, match="accept_rotated=True"):
        write(tmp_path, tensors, **quantization, **method)
    assert len(checkpoints.open(tmp_path, accept_rotated=True)) == 1
    with pytest.raises(checkpoints.CheckpointError, match=r"takes accept_rotated; got surprise"):
        checkpoints.open(tmp_path, surprise=1)


def test_a_layout_name_that_is_unknown(tmp_path):
    checkpoints.save({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(checkpoints.CheckpointError, match="Choose one of qtensor"):
        checkpoints.open(tmp_path / "x.safetensors", layout="gptq")
