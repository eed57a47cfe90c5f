"""ComfyUI checkpoints, current and old: files built here, values from the rules in float64."""

import json

import numpy as np
import pytest
import torch
from checkpoint_cases import (
    EXAMPLES,
    assert_same_bytes,
    assert_same_values,
    raw_file,
    stored_bytes,
    weight,
)

import qtensor
from qtensor import checkpoints
from tests.checkpoints.test_checkpoints_variants import E2M1, E4M3, codes, every, fp8_values, powers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def text(**about):
    return torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)


def write(folder, tensors, **options):
    checkpoints.save(tensors, folder / "x.safetensors", layout="plain")
    return checkpoints.open(folder / "x.safetensors", **options)


def tiled(factors):
    """Factors (..., R, C) at the offsets of 128x4 tiles, index by index, with zeros as padding."""
    *lead, rows, cols = factors.shape
    up, right = -(-rows // 128) * 128, -(-cols // 4) * 4
    out = np.zeros((int(np.prod(lead, dtype=int)), up * right), dtype=np.uint8)
    for plane, source in zip(out, factors.numpy().reshape(-1, rows, cols), strict=True):
        for r in range(rows):
            for c in range(cols):
                tile = (r // 128) * (right // 4) + c // 4
                plane[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = source[r, c]
    return torch.from_numpy(out.reshape(*lead, up, right))


def high_first(packed):
    packed = packed.numpy()
    return np.stack([packed >> 4, packed & 15], -1).reshape(*packed.shape[:-1], -1)


def rounded(values, dtype):
    """Float64 values, which are exact products, rounded once."""
    return torch.from_numpy(np.asarray(values)).float().to(dtype)


def product(elements, factors, dtype):
    """Class D: both rounded to the dtype, then the product."""
    pair = [rounded(np.asarray(x), dtype).double().numpy() for x in (elements, factors)]
    return rounded(pair[0] * pair[1], dtype)


def nvfp4(*shape, factor):
    """Stored tensors and a function that gives the values in a dtype."""
    *lead, rows, cols = shape
    data, scale = codes(*lead, rows, cols // 2), codes(*lead, rows, cols // 16, seed=1, below=127)
    stored = {"weight": data, "weight_scale": tiled(scale).view(torch.float8_e4m3fn)}
    stored |= {"weight_scale_2": factor, "comfy_quant": text(format="nvfp4")}

    def values(dtype):
        own = factor.double().numpy()
        own = own.reshape(-1, 1, 1) if own.size > 1 else own
        block = product(E4M3[scale.numpy()], own, dtype).double().numpy()
        return product(E2M1[high_first(data)], every(block, 1, 16, shape), dtype)

    return {f"p.{k}": v for k, v in stored.items()}, values


@pytest.mark.parametrize("shape", [(32, 64), (144, 96), (3, 48, 160), (2, 128, 64)], ids=str)
@pytest.mark.parametrize("factor", [2.0**-9, 0.0071234])
def test_nvfp4(shape, factor, tmp_path):
    """High nibble first, tiles of factors for each expert, and rounding at every step."""
    tensors, values = nvfp4(*shape, factor=torch.tensor(factor))
    with write(tmp_path, tensors) as checkpoint:
        assert list(checkpoint) == ["p.weight"]
        for dtype in DTYPES:
            assert_same_values(checkpoint.dense("p.weight", dtype), values(dtype))
        q = checkpoint["p.weight"]
        assert q.quantizer.swizzled
        # Element, block factor and tensor factor are rounded three times in float32 by both.
        want = values(torch.float32)
        torch.testing.assert_close(q.dequantize(torch.float32), want, rtol=2**-22, atol=0)
        checkpoints.save(checkpoint, tmp_path / "copy.safetensors", layout="comfyui")
    assert stored_bytes(tmp_path / "copy.safetensors") == stored_bytes(tmp_path / "x.safetensors")


@pytest.mark.parametrize("exact", [True, False])
def test_experts_with_a_factor_each(exact, tmp_path):
    """One amax for each row where all factors have one, else a stored factor for each row."""
    factors = torch.tensor([0.5, 0.25, 0.001]) if exact else torch.rand(3) + 0.3
    if not exact:
        found = qtensor.checkpoints.nvfp4_factor.from_experts(factors, 1)
        assert found.quantizer.with_global_scale_inv == (found.factor is not None)
    tensors, values = nvfp4(3, 48, 64, factor=factors)
    with write(tmp_path, tensors) as checkpoint:
        for dtype in DTYPES:
            assert_same_values(checkpoint.dense("p.weight", dtype), values(dtype))
        q = checkpoint["p.weight"]
        assert q.quantizer.row_scaled
        want = values(torch.float32)
        torch.testing.assert_close(q.dequantize(torch.float32), want, rtol=2**-22, atol=0)
        checkpoints.save(checkpoint, tmp_path / "copy.safetensors", layout="comfyui")
    assert stored_bytes(tmp_path / "copy.safetensors") == stored_bytes(tmp_path / "x.safetensors")


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("shape", [(20, 40), (33, 96), (130, 300), (3, 40, 72)], ids=str)
def test_padding(fmt, shape, tmp_path):
    """Weights of any shape are padded with zeros; ``shape=`` removes the padding."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(*shape, generator=generator).bfloat16()
    q = qtensor.quantize(values, fmt)
    checkpoints.save({"p.weight": q}, tmp_path / "x.safetensors", layout="comfyui")
    size = {"nvfp4": 16, "mxfp8": 32}[fmt]
    padded = (*shape[:-2], *(-(-n // size) * size for n in shape[-2:]))
    cut = tuple(slice(n) for n in shape)
    with checkpoints.open(tmp_path / "x.safetensors") as checkpoint:
        assert "with padding" in repr(checkpoint.table())
        ours, dense = checkpoint["p.weight"], checkpoint.dense("p.weight")
        assert ours.shape == dense.shape == padded
        assert_same_values(ours.dequantize()[cut], q.dequantize())
        assert dense.count_nonzero() == dense[cut].count_nonzero()
    options = {"shape": {"p.weight": shape}}
    with checkpoints.open(tmp_path / "x.safetensors", **options) as checkpoint:
        assert_same_values(checkpoint["p.weight"].dequantize(), q.dequantize())
        assert_same_values(checkpoint.dense("p.weight"), dense[cut])
        checkpoints.save(checkpoint, tmp_path / "copy.safetensors", layout="comfyui")
    assert stored_bytes(tmp_path / "copy.safetensors") == stored_bytes(tmp_path / "x.safetensors")
    state = checkpoints.load_state_dict(tmp_path / "x.safetensors", **options)
    assert state["p.weight"].shape == shape


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"p.weight": (16, 40)}, "differs from it by the padding"),
        ({"p.weight": (20, 50)}, "differs from it by the padding"),
        ({"p.weight": (40,)}, "differs from it by the padding"),
        ({"q.weight": (20, 40)}, "names quantized weights"),
        ({"p.weight": "x"}, "maps names"),
        ({"p.weight": (20, -1)}, "maps names"),
        ((20, 40), "maps names"),
    ],
)
def test_wrong_shapes(shape, message, tmp_path):
    q = weight("nvfp4", 20, 40)
    checkpoints.save({"p.weight": q}, tmp_path / "x.safetensors", layout="comfyui")
    with pytest.raises(checkpoints.CheckpointError, match=message):
        checkpoints.open(tmp_path / "x.safetensors", shape=shape)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8(dtype, tmp_path):
    """A product in float32 and one rounding; the factor code 0 is 0."""
    data, scale = codes(160, 96), codes(160, 3, seed=1, below=130)
    scale.clamp_(min=1)[:4] = 0
    tensors = {
        "p.weight": data.view(torch.float8_e4m3fn),
        "p.weight_scale": tiled(scale).view(dtype),
        "p.comfy_quant": text(format="mxfp8"),
    }
    with write(tmp_path, tensors) as checkpoint:
        factors = np.where(scale.numpy() == 0, 0.0, powers(scale))
        want = fp8_values(data, every(factors, 1, 32, (160, 96)))
        for kind in DTYPES:
            assert_same_values(checkpoint.dense("p.weight", kind), rounded(want, kind))
        ours = checkpoint["p.weight"].dequantize(torch.float32)[4:]
        assert_same_values(ours, rounded(want, torch.float32)[4:])
        shared = checkpoint["p.weight"].buffers()[0].data_ptr()
        assert checkpoint["p.weight"].buffers()[0].data_ptr() == shared


def test_mxfp8_factors_of_255(tmp_path):
    tensors = {
        "p.weight": codes(32, 32).view(torch.float8_e4m3fn),
        "p.weight_scale": torch.full((128, 4), 255, dtype=torch.uint8),
        "p.comfy_quant": text(format="mxfp8"),
    }
    with (
        write(tmp_path, tensors) as checkpoint,
        pytest.raises(checkpoints.CheckpointError, match="not 255"),
    ):
        checkpoint.dense("p.weight")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("factor", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_fp8(dtype, factor, shape, tmp_path):
    """Element and factor are rounded to the dtype; files are written back as they were."""
    data = codes(48, 40).view(dtype)
    scale = torch.tensor(0.0123).to(factor).reshape(shape)
    name = str(dtype).removeprefix("torch.")
    tensors = {
        "a.p.weight": data,
        "a.p.weight_scale": scale,
        "a.p.input_scale": torch.tensor(2.0),
        "a.p.comfy_quant": text(format=name, full_precision_matrix_mult=True),
        "a.norm.weight": torch.ones(4),
        "a.cast.weight": data.clone(),
    }
    with write(tmp_path, tensors) as checkpoint:
        assert set(checkpoint) == set(tensors) - {"a.p.weight_scale", "a.p.comfy_quant"}
        assert "full precision" in repr(checkpoint.table())
        elements = data.double().numpy()
        for kind in DTYPES:
            want = product(elements, scale.double().numpy().reshape(()), kind)
            assert_same_values(checkpoint.dense("a.p.weight", kind), want)
        want = rounded(elements * scale.double().numpy(), torch.float32)
        assert_same_values(checkpoint["a.p.weight"].dequantize(torch.float32), want)
        assert checkpoint.is_factor("a.p.input_scale")
        checkpoints.save(checkpoint, tmp_path / "copy.safetensors", layout="comfyui")
    assert stored_bytes(tmp_path / "copy.safetensors") == stored_bytes(tmp_path / "x.safetensors")


def test_fp8_experts_with_a_factor_each_are_dense_only(tmp_path):
    data, factors = codes(2, 4, 8).view(torch.float8_e4m3fn), torch.tensor([0.3, 2.0])
    about = text(format="float8_e4m3fn", num_experts=2)
    tensors = {"p.weight": data, "p.weight_scale": factors, "p.comfy_quant": about}
    with write(tmp_path, tensors) as checkpoint:
        want = product(data.double().numpy(), factors.double().numpy()[:, None, None], DTYPES[1])
        assert_same_values(checkpoint["p.weight"], want)
        assert "each expert" in checkpoint.why_dense("p.weight")


def with_metadata(folder, about):
    """Write comfy_fp8 without its ``comfy_quant``, and a text in the header."""
    with checkpoints.open(EXAMPLES / "comfy_fp8", layout="plain") as checkpoint:
        tensors = {k: checkpoint[k].clone() for k in checkpoint if not k.endswith("comfy_quant")}
    value = about if isinstance(about, str) else json.dumps(about)
    header, data = {"__metadata__": {"_quantization_metadata": value}}, b""
    names = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape)}
        header[name]["data_offsets"] = [len(data), len(data) + len(raw)]
        data += raw
    return raw_file(folder / "x.safetensors", header, data)


LAYER = "model.diffusion_model.blocks.0.qkv"


def test_the_header_describes_layers(tmp_path):
    layers = {LAYER: {"format": "float8_e4m3fn"}}
    path = with_metadata(tmp_path, {"format_version": "1.0", "layers": layers})
    with (
        checkpoints.open(path) as checkpoint,
        checkpoints.open(EXAMPLES / "comfy_fp8") as original,
    ):
        assert checkpoint.layout == "comfyui"
        assert list(checkpoint.groups) == [f"{LAYER}.weight"]
        assert_same_bytes(checkpoint[f"{LAYER}.weight"], original[f"{LAYER}.weight"])


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ("{", "UTF-8 and JSON"),
        ("[]", "JSON object"),
        ({"format_version": "2.0", "layers": {}}, "version '2.0'"),
        ({"format_version": "1.0"}, "layers NoneType"),
        ({"layers": {LAYER: []}}, "a layer is a JSON object"),
        ({"layers": {LAYER: {"format": "svdquant"}}}, "svdquant"),
        ({"layers": {}}, "factors belong to a layer"),
        ({"layers": {LAYER: {"format": "float8_e4m3fn"}, "x": {"format": "nvfp4"}}}, "no weight"),
    ],
)
def test_damaged_texts_of_the_header(about, message, tmp_path):
    path = with_metadata(tmp_path, about)
    with pytest.raises(checkpoints.CheckpointError, match=message):
        checkpoints.open(path)


def test_files_without_descriptions_need_the_layout(tmp_path):
    """FLUX files of other tools have the bytes alone."""
    tensors, values = nvfp4(32, 64, factor=torch.tensor(0.01))
    del tensors["p.comfy_quant"]
    fp8 = codes(32, 32).view(torch.float8_e4m3fn)
    tensors |= {"q.weight": fp8, "q.weight_scale": torch.tensor(0.5)}
    tensors |= {"r.weight": fp8.clone(), "r.weight_scale": tiled(codes(32, 1, below=140))}
    with pytest.raises(checkpoints.CheckpointError, match="Pass layout="):
        write(tmp_path, tensors)
    with checkpoints.open(tmp_path / "x.safetensors", layout="comfyui") as checkpoint:
        assert_same_values(checkpoint.dense("p.weight"), values(torch.bfloat16))
        formats = [checkpoint[f"{m}.weight"].quantizer.format for m in "pqr"]
        assert formats == ["nvfp4", "fp8", "mxfp8"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_tensor_factors_that_are_no_factors(value, tmp_path):
    tensors, _ = nvfp4(32, 64, factor=torch.tensor(value))
    with write(tmp_path, tensors) as checkpoint:
        for read in (checkpoint.dense, checkpoint.__getitem__):
            with pytest.raises(checkpoints.CheckpointError, match="finite") as raised:
                read("p.weight")
            assert raised.value.tensor == "p.weight_scale_2"


def test_a_tensor_of_zeros(tmp_path):
    """Its tensor factor is 0, as amax / 2688."""
    tensors, _ = nvfp4(32, 64, factor=torch.tensor(0.0))
    with write(tmp_path, tensors) as checkpoint:
        assert not checkpoint["p.weight"].dequantize().any()
        assert not checkpoint.dense("p.weight").any()


# ---- old files


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize(
    ("marker", "dtype"),
    [
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float8_e5m2, torch.float8_e5m2),
    ],
)
def test_scaled_fp8(marker, dtype, as_bytes, tmp_path):
    """The dtype of the marker is that of the weights, which may be stored as bytes."""
    data, scale = codes(24, 40), torch.tensor([0.0123])
    tensors = {
        "m.scaled_fp8": torch.empty(2, dtype=marker).fill_(0),
        "m.p.weight": data if as_bytes else data.view(dtype),
        "m.p.scale_weight": scale,
        "m.p.scale_input": torch.tensor(1.0),
        "m.q.scale_input": torch.tensor(3.0),
        "m.cast.weight": data.view(torch.float8_e4m3fn).clone(),
    }
    with write(tmp_path, tensors) as checkpoint:
        assert checkpoint.layout == "comfyui-scaled-fp8"
        plain = {"m.p.scale_input", "m.q.scale_input", "m.cast.weight"}
        assert set(checkpoint) == {"m.p.weight", *plain}
        elements = data.view(dtype).double().numpy()
        for kind in DTYPES:
            want = product(elements, scale.double().numpy(), kind)
            assert_same_values(checkpoint.dense("m.p.weight", kind), want)
        assert checkpoint["m.p.weight"].quantizer.format == "fp8"
        cast = data.view(torch.float8_e4m3fn).bfloat16()
        assert_same_values(checkpoint.dense("m.cast.weight", torch.bfloat16), cast)
        if marker == dtype:
            checkpoints.save(checkpoint, tmp_path / "new.safetensors", layout="comfyui")
            with checkpoints.open(tmp_path / "new.safetensors") as new:
                assert_same_bytes(new["m.p.weight"], checkpoint["m.p.weight"])
                # A scale_input of 1 stands for none; in new files it would clip activations.
                assert set(new) == {"m.p.weight", "m.q.input_scale", "m.cast.weight"}


def test_the_longest_prefix_of_a_marker_decides(tmp_path):
    e4m3, e5m2 = (codes(4, 8).view(d) for d in (torch.float8_e4m3fn, torch.float8_e5m2))
    tensors = {
        "scaled_fp8": e4m3[:0, 0].clone(),
        "a.scaled_fp8": e5m2[:0, 0].clone(),
        "p.weight": e4m3,
        "p.scale_weight": torch.tensor(1.0),
        "a.p.weight": e5m2,
        "a.p.scale_weight": torch.tensor(1.0),
    }
    with write(tmp_path, tensors) as checkpoint:
        assert checkpoint["a.p.weight"].quantizer.element.name == "e5m2"
        assert checkpoint["p.weight"].quantizer.element.name == "e4m3"


def test_a_scaled_layer_outside_every_prefix(tmp_path):
    tensors = {
        "a.scaled_fp8": torch.empty(0),
        "p.weight": codes(4, 8).view(torch.float8_e4m3fn),
        "p.scale_weight": torch.tensor(1.0),
    }
    with pytest.raises(checkpoints.CheckpointError, match="under the prefix"):
        write(tmp_path, tensors)


@pytest.mark.parametrize("marker", ["scaled_fp8", "q.comfy_quant"])
def test_old_and_current_names_in_one_file(marker, tmp_path):
    """One of the two factors would be ignored."""
    fp8 = codes(4, 8).view(torch.float8_e4m3fn)
    tensors = {
        "p.weight": fp8,
        "p.scale_weight": torch.tensor(2.0),
        "q.weight": fp8.clone(),
        "q.weight_scale": torch.tensor(2.0),
        marker: fp8[:0, 0].clone() if marker == "scaled_fp8" else text(format="float8_e4m3fn"),
    }
    with pytest.raises(checkpoints.CheckpointError, match="are named"):
        write(tmp_path, tensors)


def test_one_element_for_an_old_file(tmp_path):
    state = {"a.weight": weight("fp8"), "b.weight": weight("fp8", dtype="e5m2")}
    with pytest.raises(checkpoints.CheckpointError, match="one for the file"):
        checkpoints.save(state, tmp_path / "x.safetensors", layout="comfyui-scaled-fp8")


@pytest.mark.parametrize("marker", ["scaled_fp8", "comfy_quant"])
def test_layers_without_a_factor_are_casts(marker, tmp_path):
    """Dense reading in a dtype converts them; as stored, they stay float8."""
    cast = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(torch.float8_e5m2)
    tensors = {"p.weight": torch.ones(4, 8).to(torch.float8_e4m3fn), "q.weight": cast}
    if marker == "scaled_fp8":
        tensors |= {"scaled_fp8": torch.empty(0), "p.scale_weight": torch.ones(())}
    else:
        tensors |= {"p.weight_scale": torch.ones(()), "p.comfy_quant": text(format="float8_e4m3fn")}
    checkpoints.save(tensors, tmp_path / "x.safetensors", layout="plain")
    for dtype in DTYPES:
        state = checkpoints.load_state_dict(
            tmp_path / "x.safetensors", dtype=dtype, rounding="origin"
        )
        assert_same_values(state["q.weight"], cast.to(dtype))
    state = checkpoints.load_state_dict(tmp_path / "x.safetensors", dtype=torch.float32)
    assert_same_bytes(state["q.weight"], cast)
