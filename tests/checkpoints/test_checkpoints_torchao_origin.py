"""Tensors that torchao makes, as pickles and as safetensors, against torchao's own dequantizer."""

import json
import warnings

import pytest
import torch
from checkpoint_cases import assert_same_values, stored_bytes

from qtensor import checkpoints
from qtensor.checkpoints.containers.safetensors import SafetensorsFile

REASON = "torchao is not installed: pip install torch-qtensor[origins]"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    support = pytest.importorskip(
        "torchao.prototype.safetensors.safetensors_support", reason=REASON
    )
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=REASON)
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason=REASON)
    ao = pytest.importorskip("torchao.quantization", reason=REASON)

ELEMENTS = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float4_e2m1fn_x2,
    "fp6_e2m3",
    "fp6_e3m2",
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def values():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(200, 384, generator=generator).bfloat16()
    matrix[:4] = 0
    return {"matrix": matrix, "experts": torch.randn(3, 128, 256, generator=generator).bfloat16()}


def state():
    """A tensor of each type and option, of a matrix and of stacked experts."""
    found = {"plain.weight": torch.ones(2, 3)}
    for name, x in values().items():
        scale = nvfp4.per_tensor_amax_to_scale(x.abs().max()).float()
        for swizzled in (False, True):
            layer = f"{name}.swizzled" if swizzled else f"{name}.plain"
            for i, element in enumerate(ELEMENTS):
                found[f"{layer}.mx{i}"] = mx.MXTensor.to_mx(
                    x, element, 32, is_swizzled_scales=swizzled
                )
            make = nvfp4.NVFP4Tensor.to_nvfp4
            found[f"{layer}.nv"] = make(x, is_swizzled_scales=swizzled)
            found[f"{layer}.scaled"] = make(
                x,
                per_tensor_scale=scale,
                act_per_tensor_scale=torch.tensor(0.5),
                is_swizzled_scales=swizzled,
            )
            if x.ndim == 3:
                amax = x.abs().amax((1, 2), keepdim=True)
                each = nvfp4.per_tensor_amax_to_scale(amax).float()
                found[f"{layer}.each"] = make(x, per_tensor_scale=each, is_swizzled_scales=swizzled)
        for granularity in (ao.PerRow(), ao.PerTensor()):
            key = type(granularity).__name__
            found[f"{name}.{key}"] = ao.Float8Tensor.from_hp(x, granularity=granularity)
    return found


def compare(path, tensors):
    with checkpoints.open(path) as checkpoint:
        assert checkpoint.layout == "torchao"
        for name, tensor in tensors.items():
            if type(tensor) is torch.Tensor:
                assert torch.equal(checkpoint[name], tensor)
                continue
            for dtype in DTYPES:
                assert_same_values(checkpoint.dense(name, dtype), tensor.dequantize(dtype))
            assert checkpoint.why_dense(name) is None or name.endswith("transposed")
        return len(checkpoint)


def test_pickles(tmp_path):
    """Every type and option; activation factors are plain tensors beside their weight."""
    tensors = state()
    torch.save(tensors, tmp_path / "x.pt")
    assert compare(tmp_path / "x.pt", tensors) == len(tensors) + 4
    # Written as safetensors, and read by torchao again.
    with checkpoints.open(tmp_path / "x.pt") as checkpoint:
        checkpoints.save(checkpoint, tmp_path / "x", layout="torchao")
    compare(tmp_path / "x", tensors)
    file = SafetensorsFile(tmp_path / "x" / "model.safetensors")
    stored = {name: file.read(name) for name in file.infos}
    loaded, left = support.unflatten_tensor_state_dict(stored, file.headers[0])
    assert not left
    for name, tensor in tensors.items():
        if type(tensor) is not torch.Tensor:
            assert_same_values(loaded[name].dequantize(), tensor.dequantize())
    assert loaded["matrix.plain.scaled"].act_per_tensor_scale == 0.5


def test_pickles_of_transposes(tmp_path):
    """A transpose keeps the bytes and swaps the strides; it is dense only."""
    tensors = {
        f"{name}.transposed": tensor.t()
        for name, tensor in state().items()
        if tensor.ndim == 2 and isinstance(tensor, (mx.MXTensor, nvfp4.NVFP4Tensor))
    }
    torch.save(tensors, tmp_path / "x.pt")
    compare(tmp_path / "x.pt", tensors)


def test_safetensors(tmp_path):
    """What torchao writes comes back byte for byte, with the same texts."""
    safetensors = pytest.importorskip("safetensors.torch", reason="an extra of the demo")
    tensors = state()
    stored, texts = support.flatten_tensor_state_dict(tensors)
    path = tmp_path / "x.safetensors"
    safetensors.save_file(stored, path, metadata=texts)
    compare(path, tensors)
    with checkpoints.open(path) as checkpoint:
        checkpoints.save(checkpoint, tmp_path / "y", layout="torchao")
    assert stored_bytes(tmp_path / "y") == stored_bytes(path)
    written = SafetensorsFile(tmp_path / "y" / "model.safetensors").headers[0]
    assert set(json.loads(written["tensor_names"])) == set(tensors)
    for name in tensors:
        want, got = json.loads(texts[name]), json.loads(written[name])
        if want["_type"] != "Tensor":
            for text in (want, got):
                text["_tensor_data_names"].sort()
        assert got == want
