"""Calls that a careless user makes: each is done as meant, or refused with a clear message."""

import json
import math
import os
from collections import UserDict

import pytest
import torch
from checkpoint_cases import assert_same_bytes, weight
from torch._subclasses import FakeTensorMode

from qtensor import checkpoints
from qtensor.checkpoints import CheckpointError


def fake():
    with FakeTensorMode():
        return torch.ones(3)


WITHOUT_BYTES = {
    "meta": (lambda: torch.empty(3, device="meta"), "meta device"),
    "quantized on meta": (lambda: weight("mxfp8").to("meta"), "meta device"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "fake": (fake, "FakeTensor"),
    "lazy": (torch.nn.UninitializedParameter, "lazy parameter"),
    "number": (lambda: 3, "int for 'x'"),
}


@pytest.mark.parametrize("case", WITHOUT_BYTES)
def test_a_tensor_without_bytes_is_named(case, tmp_path):
    make, got = WITHOUT_BYTES[case]
    with pytest.raises(CheckpointError, match=got) as caught:
        checkpoints.save(UserDict({"good": torch.ones(2), "x": make()}), tmp_path / "model")
    assert "'x'" in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_conjugate_and_negative_views_are_written_as_values(tmp_path):
    view = torch.tensor([1 + 2j, 3 - 4j]).conj()
    checkpoints.save({"conj": view, "neg": view.imag}, tmp_path / "model")
    state = checkpoints.load_state_dict(tmp_path / "model")
    assert state["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert state["neg"].tolist() == [-2.0, 4.0]


@pytest.mark.parametrize("path", [None, 3, b"model", "", "a\0b", "\ud800"], ids=ascii)
def test_a_path_that_is_none(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints.save({"x": torch.ones(2)}, "source")
    with pytest.raises(CheckpointError, match="path is the path of a file or folder"):
        checkpoints.save({"x": torch.ones(2)}, path)
    for places in ((path, "result"), ("source", path)):
        with pytest.raises(CheckpointError, match="is the path of a file or folder"):
            checkpoints.convert(*places)
    assert [found.name for found in tmp_path.iterdir()] == ["source"]


CONFIGS = {
    "object": ({"a": object()}, "Change the config"),
    "bytes": ({"a": b"x"}, "Change the config"),
    "half a character": ({"a": "\ud800"}, "Change the config"),
    "list": ([1], "a mapping"),
    "text": ("x", "a mapping"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_is_not_json(case, tmp_path):
    config, rule = CONFIGS[case]
    with pytest.raises(CheckpointError, match=rule):
        checkpoints.save({"x": torch.ones(2)}, tmp_path / "model", config=config)
    assert not (tmp_path / "model").exists()


def test_a_name_with_half_a_character(tmp_path):
    for layout in ("qtensor", "plain", "modelopt"):
        with pytest.raises(CheckpointError, match="UTF-8"):
            checkpoints.save({"\ud800": torch.ones(2)}, tmp_path / "model", layout=layout)
    torch.save({"\ud800": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="UTF-8"):
        checkpoints.convert(tmp_path / "model.pt", tmp_path / "model")


@pytest.mark.parametrize("dtype", ["bf16", torch.int8, torch.complex64, torch.float8_e4m3fn, 3])
def test_a_dtype_that_loses_the_values(dtype, tmp_path):
    checkpoints.save({"a.weight": weight("mxfp8"), "b": torch.randn(3)}, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"dtype is None or one of torch\.float64"):
        checkpoints.load_state_dict(tmp_path / "model", dtype=dtype)


@pytest.mark.parametrize("device", ["nope", "cuda:99", 1.5])
def test_a_device_that_torch_does_not_have(device, tmp_path):
    checkpoints.save({"x": torch.ones(2)}, tmp_path / "model")
    with pytest.raises(CheckpointError, match="device is one that torch can use"):
        checkpoints.load_state_dict(tmp_path / "model", device=device)


def test_infinite_numbers_of_a_config_stay(tmp_path):
    """Configs of Nemotron and Mamba models have ``"time_step_limit": [0.0, Infinity]``."""
    state = {"a.weight": weight("nvfp4")}
    config = {"time_step_limit": [0.0, math.inf]}
    checkpoints.save(state, tmp_path / "a", layout="modelopt", config=config)
    text = (tmp_path / "a" / "config.json").read_text()
    assert "Infinity" in text
    checkpoints.convert(tmp_path / "a", tmp_path / "b", layout="compressed-tensors")
    with checkpoints.open(tmp_path / "b") as checkpoint:
        assert checkpoint.config["time_step_limit"] == [0.0, math.inf]
        assert_same_bytes(checkpoint["a.weight"], state["a.weight"])
    assert json.loads((tmp_path / "b" / "config.json").read_text())["time_step_limit"][1] > 1e300


def test_a_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    """Root reads every folder, so the system's answer is replaced."""

    def refused(path="."):
        raise PermissionError(13, "Permission denied", path)

    checkpoints.save({"x": torch.ones(2)}, tmp_path / "a")
    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(CheckpointError, match=r"the folder must be readable.*Permission denied"):
        checkpoints.open(tmp_path / "a")
    assert not checkpoints.verify(tmp_path / "a").ok


CALLS = {
    "load": lambda path, new: checkpoints.load_state_dict(path),
    "origin": lambda path, new: checkpoints.load_state_dict(path, rounding="origin"),
    "read": lambda path, new: dict(checkpoints.open(path)),
    "save": lambda path, new: checkpoints.save(checkpoints.open(path), new, "compressed-tensors"),
    "convert": lambda path, new: checkpoints.convert(path, new, "modelopt"),
    "quantize": lambda path, new: checkpoints.convert(path, new, format="mxfp8"),
    "dequantize": lambda path, new: checkpoints.dequantize(path, new),
    "inspect": lambda path, new: checkpoints.inspect_tensor(path, "a.weight"),
    "compare": lambda path, new: checkpoints.compare(path, path),
    "verify": lambda path, new: checkpoints.verify(path).ok,
}


@pytest.fixture
def stored(tmp_path):
    checkpoints.save({"a.weight": weight("nvfp4")}, tmp_path / "a", layout="compressed-tensors")
    return tmp_path / "a"


@pytest.mark.parametrize("call", CALLS)
def test_a_default_device_does_not_matter(call, stored, tmp_path):
    """Files lie in memory: with a default device, their factors met tables on another device."""
    want = CALLS[call](stored, tmp_path / "want")
    with torch.device("meta"):
        found = CALLS[call](stored, tmp_path / "found")
    if isinstance(want, dict):
        assert_same_bytes(found["a.weight"], want["a.weight"])
    elif call in ("inspect", "verify"):
        assert repr(found) == repr(want)
    elif call != "compare":
        assert checkpoints.compare(tmp_path / "found", tmp_path / "want").equal


@pytest.mark.parametrize("call", CALLS)
def test_tensors_without_data_are_refused(call, stored, tmp_path):
    checkpoint = checkpoints.open(stored)
    with (
        FakeTensorMode(),
        pytest.raises(CheckpointError, match=r"with data; got a mode that makes a FakeTensor"),
    ):
        CALLS[call](stored, tmp_path / "found")
    with FakeTensorMode():
        assert "nvfp4" in repr(checkpoints.open(stored).table())
    assert_same_bytes(checkpoint["a.weight"], checkpoints.load_state_dict(stored)["a.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_name_that_safetensors_keeps_for_itself(tmp_path):
    """GGUF and torch files may have it."""
    state = {"__metadata__": torch.ones(4), "b": torch.ones(3)}
    checkpoints.save(state, tmp_path / "m.gguf", layout="gguf")
    assert list(checkpoints.open(tmp_path / "m.gguf")) == list(state)
    for write in (
        lambda: checkpoints.save(state, tmp_path / "a"),
        lambda: checkpoints.convert(tmp_path / "m.gguf", tmp_path / "a"),
    ):
        with pytest.raises(CheckpointError, match=r"header has its texts.*Rename the tensor"):
            write()
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"m.gguf"}  # nor a journal of a conversion that finished nothing


@pytest.mark.parametrize("dtype", ["bf16", torch.int8, torch.float8_e4m3fn, 3])
def test_a_dtype_that_dense_does_not_give(dtype, tmp_path):
    """Plain tensors too: torch would raise a TypeError, or cast to integers."""
    state = {"a.weight": weight("mxfp8"), "b": torch.ones(3)}
    checkpoints.save(state, tmp_path / "a")
    with checkpoints.open(tmp_path / "a") as checkpoint:
        for name in state:
            with pytest.raises(CheckpointError, match=r"dtype is None or one of.*bfloat16"):
                checkpoint.dense(name, dtype)


PAIRS = {
    "int64": ([2**53], [2**53 + 1], torch.int64),
    "uint64": ([2**63], [2**63 + 1], torch.uint64),
    "int32": ([2**24], [2**24 + 1], torch.int32),
    "complex": ([1 + 2j], [1 + 3j], torch.complex64),
    "float64": ([1.0], [1 + 2**-40], torch.float64),
}


@pytest.mark.parametrize("case", PAIRS)
def test_values_that_float32_does_not_hold_are_compared(case, tmp_path):
    *values, dtype = PAIRS[case]
    for name, value in zip("ab", values, strict=True):
        checkpoints.save({"x": torch.tensor(value, dtype=dtype)}, tmp_path / name)
    (found,) = checkpoints.compare(tmp_path / "a", tmp_path / "b").tensors
    assert found.result == "different"
    assert math.copysign(1, found.max_abs_error) == 1
    if case in ("int32", "complex", "float64"):
        assert found.max_abs_error == abs(values[0][0] - values[1][0])
    assert checkpoints.compare(tmp_path / "a", tmp_path / "a").equal


def test_numbers_of_two_dtypes_are_compared_by_value(tmp_path):
    checkpoints.save({"x": torch.tensor([2**64 - 1], dtype=torch.uint64)}, tmp_path / "a")
    checkpoints.save({"x": torch.tensor([-1])}, tmp_path / "b")
    assert not checkpoints.compare(tmp_path / "a", tmp_path / "b").equal
    checkpoints.save({"x": torch.tensor([1 + 0j, 2 + 0j])}, tmp_path / "c")
    checkpoints.save({"x": torch.tensor([1, 2])}, tmp_path / "d")
    assert checkpoints.compare(tmp_path / "c", tmp_path / "d").equal


def test_complex_values_that_are_not_finite(tmp_path):
    values = torch.tensor([complex(math.nan, 1), complex(1, math.inf), 1j])
    checkpoints.save({"x": values}, tmp_path / "a")
    found = checkpoints.verify(tmp_path / "a")
    assert not found.ok
    assert [problem.text for problem in found.problems] == [
        "1 values are NaN",
        "1 values are infinite",
    ]
