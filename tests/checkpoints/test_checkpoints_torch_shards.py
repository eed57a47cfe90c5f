"""Sharded files of torch.save: ``pytorch_model.bin.index.json``, and folders of several files."""

import json
import pickle
import sys
import types

import pytest
import torch
from checkpoint_cases import assert_same_bytes, weight

from qtensor import checkpoints

INDEX = "pytorch_model.bin.index.json"


class Subclass:
    """Pickles as a tensor subclass of torchao: a class, no arguments, and attributes."""

    def __init__(self, cls, **state):
        self.cls, self.state = cls, state

    def __reduce__(self):
        args = (torch._utils._rebuild_wrapper_subclass, self.cls, (), self.state)
        return torch._tensor._rebuild_from_type_v2, args


@pytest.fixture
def torchao(monkeypatch):
    """A stand-in module with the names of torchao's classes."""
    module = types.ModuleType("torchao.quantization")
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", module)
    for name in ("Float8Tensor", "AffineQuantizedTensor", "LinearActivationQuantizedTensor"):
        setattr(module, name, type(name, (), {"__module__": module.__name__}))
    return module


def float8(torchao, tensor):
    """A Float8Tensor with the codes and factors of a tensor of ours."""
    codes, scale = tensor.buffers()[:2]
    block = [1, tensor.shape[1]]
    state = {"qdata": codes.view(torch.float8_e4m3fn), "scale": scale.reshape(-1, 1)}
    return Subclass(torchao.Float8Tensor, **state, block_size=block, dtype=tensor.dtype)


def shards(folder, *states, **index):
    weight_map = {}
    for i, state in enumerate(states, 1):
        name = f"pytorch_model-{i:05d}-of-{len(states):05d}.bin"
        torch.save(state, folder / name)
        weight_map |= dict.fromkeys(state, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map | index}))
    return folder


def test_plain_shards(tmp_path):
    state = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.ones(2, dtype=torch.bfloat16)}
    shards(tmp_path, {"a": state["a"]}, {"b": state["b"]})
    for path in (tmp_path, tmp_path / INDEX):
        with checkpoints.open(path) as checkpoint:
            assert checkpoint.layout == "plain"
            assert list(checkpoint) == ["a", "b"]
            for name, want in state.items():
                assert torch.equal(checkpoint[name], want)
                checkpoint.release(name)
    assert checkpoints.verify(tmp_path).ok


def test_subclasses_in_shards(torchao, tmp_path):
    """The index names a subclass; its tensors are those of the record."""
    wants = [weight("fp8_rowwise", seed=i) for i in range(2)]
    first = {"a.weight": float8(torchao, wants[0]), "a.bias": torch.ones(3)}
    shards(tmp_path, first, {"b.weight": float8(torchao, wants[1])})
    with checkpoints.open(tmp_path) as checkpoint:
        assert checkpoint.layout == "torchao"
        assert list(checkpoint) == ["a.weight", "a.bias", "b.weight"]
        for name, want in zip(("a.weight", "b.weight"), wants, strict=True):
            assert_same_bytes(checkpoint[name], want)


def test_a_config_beside_shards(tmp_path):
    """Weight and factor may lie in different shards, whatever the container."""
    tensor = weight("fp8_blockwise", 128, 256, block_scaling_dim=2)
    codes, scale = tensor.buffers()[:2]
    codes = {"a.weight": codes.view(torch.float8_e4m3fn)}
    shards(tmp_path, codes, {"a.weight_scale_inv": scale[:, :2].contiguous()})
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with checkpoints.open(tmp_path) as checkpoint:
        assert checkpoint.layout == "fine-grained-fp8"
        got = checkpoint["a.weight"]
        assert torch.equal(got.dequantize(), tensor.dequantize())


def test_damaged_shards(tmp_path):
    shards(tmp_path, {"a": torch.ones(2)}, b="pytorch_model-00001-of-00001.bin")
    with pytest.raises(checkpoints.CheckpointError, match="lies in the shard") as raised:
        checkpoints.open(tmp_path)
    assert raised.value.tensor == "b"
    checkpoints.save({"b": torch.ones(2)}, tmp_path / "x.safetensors", layout="plain")
    shards(tmp_path, {"a": torch.ones(2)}, b="x.safetensors")
    with pytest.raises(checkpoints.CheckpointError, match="all safetensors, or all zips"):
        checkpoints.open(tmp_path)


def test_unlisted_tensors_of_shards(tmp_path):
    torch.save({"a": torch.ones(2), "c": torch.zeros(2)}, tmp_path / "x.bin")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.bin"}}))
    with checkpoints.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["a"]
        assert checkpoint.unlisted == ("c",)


def test_the_model_is_chosen_among_other_files(tmp_path):
    """An optimizer beside pytorch_model.bin is not the model."""
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    torch.save({"state": torch.zeros(2)}, tmp_path / "optimizer.pt")
    assert list(checkpoints.load_state_dict(tmp_path)) == ["a"]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickles_without_a_zip_are_named(protocol, tmp_path):
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"a": list(range(100))}, protocol))
    with pytest.raises(checkpoints.CheckpointError, match="a pickle without a zip"):
        checkpoints.open(tmp_path / "x.pt")


def test_a_header_that_begins_as_a_pickle_does(tmp_path):
    """The size of a safetensors header may have the bytes of a protocol."""
    for size in (0x0280, 0x0480):
        header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
        text = json.dumps(header).encode().ljust(size)
        (tmp_path / "x.safetensors").write_bytes(size.to_bytes(8, "little") + text + b"\7")
        assert checkpoints.load_state_dict(tmp_path / "x.safetensors")["a"].tolist() == [7]


def test_nested_subclasses_are_refused_by_name(torchao, tmp_path):
    """A subclass around a subclass is no configuration: its weight must not vanish."""
    inner = Subclass(torchao.AffineQuantizedTensor, int_data=torch.ones(4, 4).byte())
    outer = Subclass(torchao.LinearActivationQuantizedTensor, original_weight_tensor=inner)
    state = {"a.weight": float8(torchao, weight("fp8_rowwise")), "b.weight": outer}
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(checkpoints.CheckpointError, match="LinearActivation") as raised:
        checkpoints.open(tmp_path / "x.pt")
    assert raised.value.tensor == "b.weight"
