"""Damaged and hostile files are refused with an error that names the file and the tensor."""

import json
import os
import subprocess
import sys

import pytest
import torch
from checkpoint_cases import EXAMPLES, READ, raw_file

import qtensor
from qtensor import checkpoints
from qtensor.checkpoints.containers.safetensors import SafetensorsFile


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS = {
    "not JSON": ("{", b"", "UTF-8 and JSON"),
    "not an object": ("[]", b"", "JSON object"),
    "not UTF-8": (b'{"\xff": 1}', b"", "UTF-8 and JSON"),
    "half a character": ('{"\\ud800": 1}', b"", "UTF-8 and JSON"),
    "nested too deep": ('{"a":' + "[" * 100_000, b"", "UTF-8 and JSON"),
    "a name twice": ('{"a": 1, "a": 2}', b"", "'a' occurs twice"),
    "NaN": ('{"a": NaN}', b"", "NaN"),
    "an entry without a shape": ({"a": {"dtype": "F32"}}, b"", "keys"),
    "an unknown dtype": ({"a": entry("F7")}, bytes(8), "dtype is one of"),
    "a dtype that is a list": ({"a": {**entry(), "dtype": ["F32"]}}, bytes(8), "dtype is one of"),
    "a negative size": ({"a": entry(shape=(-2,))}, bytes(8), "not negative"),
    "a size that is True": ({"a": entry("U8", (True,), (0, 1))}, bytes(1), "integers"),
    "a size that is a float": ({"a": entry(shape=(2.0,))}, bytes(8), "integers"),
    "a huge size": ({"a": entry(shape=(2**70,))}, bytes(8), "2\\^63"),
    "a huge product": ({"a": entry(shape=(2**40, 2**40))}, bytes(8), "2\\^63"),
    "a huge size beside a zero": ({"a": entry(shape=(0, 2**40, 2**40), offsets=(0, 0))}, b"", "63"),
    "a number of 5000 digits": ('{"a":{"dtype":"F32","shape":[' + "9" * 5000 + "]}}", b"", "JSON"),
    "offsets behind the end": ({"a": entry(offsets=(0, 16), shape=(4,))}, bytes(8), "inside the"),
    "negative offsets": ({"a": entry(offsets=(-8, 0))}, bytes(8), "inside the data"),
    "reversed offsets": ({"a": entry(offsets=(8, 0))}, bytes(8), "inside the data"),
    "offsets that are True": ({"a": entry("U8", (1,), (False, True))}, bytes(1), "inside the data"),
    "fewer bytes than the shape": ({"a": entry(shape=(3,))}, bytes(8), "12 whole bytes"),
    "half a byte": ({"a": entry("F4", (3,), (0, 1))}, bytes(1), "whole bytes"),
    "an overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "gap or overlap"),
    "a gap": ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), "gap or overlap"),
    "two tensors in one place": ({"a": entry(), "b": entry()}, bytes(8), "gap or overlap"),
    "data behind the tensors": ({"a": entry()}, bytes(9), "end where the file ends"),
    "metadata that is a number": ({"__metadata__": {"a": 1}}, b"", "texts to texts"),
    "a space first": (" {}", b"", "JSON object"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_headers(case, tmp_path):
    header, data, message = HEADERS[case]
    path = raw_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.open(path)
    assert raised.value.file == str(path)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 1500
    if isinstance(header, dict) and "a" in header and "end" not in case and "data" not in case:
        assert raised.value.tensor in header


@pytest.mark.parametrize("size", [0, 1, 2**40, 2**63, 2**64 - 1, 100_000_001])
def test_sizes_of_headers(size, tmp_path):
    path = raw_file(tmp_path / "x.safetensors", "{}", size=size)
    with pytest.raises(checkpoints.CheckpointError):
        checkpoints.open(path)


@pytest.mark.parametrize("size", range(9))
def test_short_files(size, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\2" + bytes(7) + b"{}")
    assert len(checkpoints.open(path)) == 0
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(checkpoints.CheckpointError, match=r"size of its header|lies inside"):
        checkpoints.open(path)


def test_truncated_examples(tmp_path):
    """A download that stopped: every shorter file is refused when it is opened."""
    data = (EXAMPLES / "ct_mxfp8" / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        with pytest.raises(checkpoints.CheckpointError):
            SafetensorsFile(path)


def sharded(folder, weight_map):
    checkpoints.save({"a": torch.ones(2)}, folder / "model-1.safetensors", layout="plain")
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


NAMES = (
    "../x.safetensors",
    "/etc/passwd",
    "a/b",
    "..",
    ".",
    "",
    "a\0b",
    "..\\x",
    "none.safetensors",
)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_shards(name, tmp_path):
    """The index names plain files inside its folder; nothing else is opened."""
    (tmp_path / "in").mkdir()
    checkpoints.save({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    folder = sharded(tmp_path / "in", {"a": name})
    with pytest.raises(checkpoints.CheckpointError, match=r"plain file name|exists") as raised:
        checkpoints.open(folder)
    assert raised.value.file.endswith("index.json")


def test_links_that_leave_the_folder(tmp_path):
    (tmp_path / "in").mkdir()
    checkpoints.save({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    folder = sharded(tmp_path / "in", {"a": "link.safetensors"})
    (folder / "link.safetensors").symlink_to(tmp_path / "x.safetensors")
    with pytest.raises(checkpoints.CheckpointError, match="does not link"):
        checkpoints.open(folder)
    (folder / "link.safetensors").unlink()
    (folder / "link.safetensors").symlink_to("model-1.safetensors")
    assert list(checkpoints.open(folder)) == ["a"]


def test_links_of_the_hugging_face_cache(tmp_path):
    """A snapshot links to the blobs of its own repository, and to no other place."""
    snapshot, blobs = tmp_path / "models--m" / "snapshots" / "abc", tmp_path / "models--m" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    checkpoints.save({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    os.rename(tmp_path / "x.safetensors", blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert list(checkpoints.open(snapshot)) == ["a"]
    part = snapshot / "transformer" / "fp8"  # a part of a pipeline of diffusers
    part.mkdir(parents=True)
    (part / "model.safetensors").symlink_to("../../../../blobs/0123")
    assert list(checkpoints.open(part)) == ["a"]
    (part / "config.json").symlink_to("../../../../other")
    with pytest.raises(checkpoints.CheckpointError, match="does not link"):
        checkpoints.open(part)
    (snapshot / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(checkpoints.CheckpointError, match="does not link"):
        checkpoints.open(snapshot)


INDEXES = {
    "no weight_map": ({}, "weight_map"),
    "a list": ({"weight_map": []}, "weight_map"),
    "a number": ({"weight_map": {"a": 1}}, "weight_map"),
    "nothing": ({"weight_map": {}}, "names tensors; got none"),
    "half a character": ({"weight_map": {"a": "\ud800"}}, "UTF-8 and JSON"),
    "a missing tensor": ({"weight_map": {"b": "model-1.safetensors"}}, "lies in the shard"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_damaged_indexes(case, tmp_path):
    index, message = INDEXES[case]
    sharded(tmp_path, {})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(checkpoints.CheckpointError, match=message):
        checkpoints.open(tmp_path)


def write_example(folder, name, change):
    """Write an example after ``change(tensors, config)``."""
    source = EXAMPLES / name
    with checkpoints.open(source, layout="plain") as checkpoint:
        tensors = {k: checkpoint[k].clone() for k in checkpoint}
    path = source / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    change(tensors, config)
    checkpoints.save(tensors, folder / "model.safetensors", layout="plain")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def only(tensors, suffix):
    return next(name for name in sorted(tensors) if name.endswith(suffix))


def drop(suffix):
    return lambda tensors, config: tensors.pop(only(tensors, suffix))


def put(suffix, make):
    def change(tensors, config):
        name = only(tensors, suffix)
        tensors[name] = make(tensors[name])

    return change


def scheme(**changes):
    def change(tensors, config):
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)

    return change


def quantization(**changes):
    return lambda tensors, config: config["quantization_config"].update(changes)


def describe(text):
    return put("comfy_quant", lambda t: torch.frombuffer(bytearray(text), dtype=torch.uint8))


def mlx(**changes):
    return lambda tensors, config: config["quantization"].update(changes)


BROKEN = [
    ("ct_fp8_block", drop("weight_scale"), "quantized weight has weight_scale"),
    ("ct_fp8_block", put("weight_scale", lambda t: t[:1]), r"shape \[2, 1\].*got BF16.*\[1, 1\]"),
    ("ct_fp8_block", scheme(block_structure=[64, 128]), r"64x128 needs .*\[4, 1\]"),
    ("ct_fp8_block", scheme(block_structure=[0, 128]), "two positive sizes"),
    ("ct_fp8_block", scheme(block_structure="128"), "two positive sizes"),
    ("ct_fp8_block", scheme(type="int"), "int"),
    ("ct_fp8_channel", put("weight_scale", lambda t: t.flatten()), "channel"),
    ("ct_fp8_channel", drop("down_proj.weight"), "a factor has a weight"),
    ("ct_fp8_tensor", put("weight_scale", lambda t: t.to(torch.int8)), "I8"),
    ("ct_fp8_tensor", quantization(transform_config={"a": 1}), "rotated"),
    ("ct_fp8_tensor", quantization(config_groups={}), "config_groups"),
    ("ct_mxfp4", drop("weight_scale"), "quantized weight has weight_scale"),
    ("ct_mxfp4", put("weight_scale", lambda t: t[:, :1]), "weight_packed"),
    ("ct_nvfp4", drop("weight_scale"), "quantized weight has weight_scale"),
    ("ct_nvfp4", put("weight_scale", lambda t: t.repeat(4, 1)), "nvfp4-pack-quantized needs"),
    ("ct_nvfp4", put("weight_global_scale", lambda t: t.repeat(2)), r"got F32 of shape \[2\]"),
    ("hf_fp8_block", drop("weight_scale_inv"), "has one factor"),
    ("hf_fp8_block", drop("q_proj.weight"), "each factor has a float8 weight"),
    ("hf_fp8_block", put("weight_scale_inv", lambda t: t.t()), r"128x128 needs .*\[2, 1\]"),
    ("hf_fp8_block", quantization(weight_block_size=[128]), "two positive sizes"),
    ("hf_fp8_block", quantization(weight_block_size=[64, 64]), "64x64 needs"),
    ("hf_fp8_experts", drop("down_proj_scale_inv"), "has one factor"),
    ("deepseek_v3_ragged", put("weight_scale_inv", lambda t: t.int()), "I32"),
    ("comfy_fp8", drop("weight_scale"), "no weight_scale"),
    ("comfy_fp8", drop("qkv.weight"), "no weight"),
    ("comfy_fp8", drop("comfy_quant"), "Pass layout="),
    (
        "comfy_fp8",
        put("weight_scale", lambda t: t.repeat(48)),
        r"one factor|got F32 of shape \[48\]",
    ),
    ("comfy_fp8", put("comfy_quant", lambda t: t[:-1]), "UTF-8 and JSON"),
    ("comfy_fp8", put("comfy_quant", lambda t: t.repeat(5000)), "at most 65536 bytes"),
    ("comfy_fp8", put("comfy_quant", lambda t: t.float()), "U8 in one dim"),
    ("comfy_fp8", describe(b'"float8_e4m3fn"'), "JSON object"),
    ("comfy_fp8", describe(b'{"format": "\xff"}'), "UTF-8 and JSON"),
    ("comfy_fp8", describe(b'{"format": 1}'), "got 1"),
    ("comfy_fp8", describe(b"{}"), "got None"),
    ("comfy_fp8", describe(b'{"format": "float8_e5m2"}'), "needs F8_E5M2"),
    ("comfy_fp8", describe(b'{"format": "nvfp4"}'), "weight_scale_2"),
    ("comfy_fp8", describe(b'{"format": "mxfp8"}'), "multiples of 32 rows"),
    ("comfy_fp8", describe(b'{"format": "float8_e4m3fn", "num_experts": 4}'), "num_experts 4"),
    *(
        ("comfy_fp8", describe(f'{{"format": "{name}"}}'.encode()), name)
        for name in ("int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8", "awq_w4a16")
    ),
    ("comfy_nvfp4", drop("weight_scale_2"), "no weight_scale_2"),
    ("comfy_nvfp4", put("weight_scale", lambda t: t[:32]), r"needs F8_E4M3 of shape \[128, 4\]"),
    ("comfy_nvfp4", put("weight_scale", lambda t: t.view(torch.uint8)), "tiled factors"),
    ("comfy_nvfp4", put("weight_scale_2", lambda t: t.repeat(32)), r"got F32 of shape \[32\]"),
    ("comfy_nvfp4", put("mlp.weight", lambda t: t[:30]), "multiples of 16 rows"),
    ("comfy_scaled_fp8_old", drop("proj.weight"), "a factor has a weight"),
    ("comfy_scaled_fp8_old", put("scaled_fp8", lambda t: t.bfloat16()), "no or two elements"),
    ("comfy_scaled_fp8_old", put("scaled_fp8", lambda t: t.to(torch.float8_e5m2)), "F8_E5M2"),
    ("comfy_scaled_fp8_old", put("scale_weight", lambda t: t.repeat(24)), r"shape \[24\]"),
    ("mlx_mxfp4", drop("scales"), "a packed weight has factors"),
    ("mlx_mxfp4", drop("proj.weight"), "factors have a weight"),
    ("mlx_mxfp4", put("scales", lambda t: t.t().contiguous()), r"needs U8 of shape \[64, 3\]"),
    ("mlx_mxfp4", put("proj.weight", lambda t: t.view(torch.int32)), "needs U32"),
    ("mlx_nvfp4", mlx(mode="affine"), "'affine'"),
    ("mlx_nvfp4", mlx(group_size=32), "groups of 32"),
    ("mlx_nvfp4", mlx(bits="4"), "'4' bits"),
    ("mlx_nvfp4", mlx(mode=None), "'None'"),
    ("mlx_nvfp4", mlx(**{"model.layers.0.mlp.down_proj": False}), "false"),
]


@pytest.mark.parametrize(("name", "change", "message"), BROKEN)
def test_examples_that_do_not_fit_their_config(name, change, message, tmp_path):
    folder = write_example(tmp_path, name, change)
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.open(folder)
    wanted = {example.folder: example.layout for example in READ}[name]
    assert raised.value.layout == ("" if message == "Pass layout=" else wanted)
    assert str(tmp_path) in raised.value.file


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0])
def test_a_global_scale_that_was_never_calibrated(value, tmp_path):
    change = put("weight_global_scale", lambda t: torch.full_like(t, value))
    folder = write_example(tmp_path, "ct_nvfp4", change)
    with checkpoints.open(folder) as checkpoint:
        name = "model.layers.0.mlp.down_proj.weight"
        for read in (checkpoint.dense, checkpoint.__getitem__):
            with pytest.raises(checkpoints.CheckpointError, match="positive and finite") as raised:
                read(name)
            assert raised.value.tensor == name.replace("weight", "weight_global_scale")


def test_a_factor_of_255(tmp_path):
    """No writer makes it, and origins read it as NaN, inf or 2^128; ours is NaN."""
    folder = write_example(tmp_path, "ct_mxfp8", put("weight_scale", lambda t: t.fill_(255)))
    with checkpoints.open(folder) as checkpoint:
        (name,) = checkpoint
        assert checkpoint[name].dequantize().isnan().all()
        with pytest.raises(checkpoints.CheckpointError, match="not 255") as raised:
            checkpoint.dense(name)
        assert raised.value.tensor == name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"tensors": []}, "tensors"),
        ({"tensors": {"a": {}}}, "an entry has"),
        ({"quantizer": "mxfp9"}, "quantizer must be known"),
        ({"quantizer": "mxfp8(surprise=1)"}, "quantizer must be known"),
        ({"quantizer": 7}, "canonical text"),
        ({"shape": [2**70, 2]}, "2\\^63"),
        ({"shape": [64, 64]}, "shape"),
        ({"shape": [1, 1]}, "shape"),
        ({"dtype": "int8"}, "nominal dtype"),
        ({"buffers": {"rowwise_data": "a.rowwise_data"}}, "has the buffers"),
        ({"buffers": {"rowwise_data": "b", "rowwise_scale_inv": "a"}}, "each buffer"),
    ],
)
def test_damaged_entries_of_our_layout(change, message, tmp_path):
    path = tmp_path / "x.safetensors"
    checkpoints.save({"a": qtensor.quantize(torch.randn(4, 32), "mxfp8")}, path)
    file = SafetensorsFile(path)
    about = json.loads(file.headers[0]["qtensor"])
    target = about if change.keys() & {"version", "tensors"} else about["tensors"]["a"]
    target.update(change)
    tensors = {name: file.read(name).clone() for name in file.infos}
    header, data, end = {"__metadata__": {"qtensor": json.dumps(about)}}, b"", 0
    for name, tensor in tensors.items():
        data += bytes(tensor.numpy())
        header[name] = entry("U8", tensor.shape, (end, len(data)))
        end = len(data)
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.load_state_dict(raw_file(path, header, data))
    assert raised.value.layout == "qtensor"


OPENING = """
import json, resource, struct, sys, time
import torch
import qtensor.checkpoints as checkpoints
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.process_time()
checkpoint = checkpoints.open(sys.argv[1])
print(json.dumps([
    time.process_time() - start,
    (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    len(checkpoint),
]))
"""


def test_opening_makes_no_tensors(tmp_path, monkeypatch):
    """Opening reads headers alone: a tensor is made when it is asked for."""

    def refuse(*args, **kwargs):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(SafetensorsFile, "read", refuse)
    for example in ("ct_nvfp4", "hf_fp8_experts"):
        with checkpoints.open(EXAMPLES / example) as checkpoint:
            assert len(checkpoint.table().rows) == len(checkpoint)


@pytest.mark.parametrize(
    "count",
    [20_000, pytest.param(100_000, marks=pytest.mark.nightly(reason="a fifth of them is by day"))],
)
def test_opening_many_tensors_needs_3_kb_each_at_most(count, tmp_path):
    header = {}
    for i in range(count):
        name = f"model.layers.{i // 100}.mlp.experts.{i % 100}.up_proj.weight"
        header[name] = entry("BF16", (1, 1), (2 * i, 2 * i + 2))
    path = raw_file(tmp_path / "model.safetensors", header, bytes(2 * count))
    run = subprocess.run(
        [sys.executable, "-c", OPENING, path], capture_output=True, text=True, check=True
    )
    _, megabytes, found = json.loads(run.stdout)
    assert found == count
    assert megabytes < 0.003 * count
