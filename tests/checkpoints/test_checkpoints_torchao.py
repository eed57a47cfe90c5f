"""torchao: every type and option, its own loader, and pickles."""

import json

import pytest
import torch
from checkpoint_cases import assert_same_bytes, assert_same_values, stored_bytes, weight

import qtensor
from qtensor import checkpoints
from qtensor.checkpoints.containers.safetensors import (
    SafetensorsFile,
    SafetensorsWriter,
    TensorSpec,
)
from qtensor.reference.nvfp4 import find_amax

FORMATS = [
    ("fp8", {}),
    ("fp8", {"dtype": "e5m2"}),
    ("fp8_rowwise", {}),
    ("fp8_rowwise", {"axis": 0}),
    ("fp8_blockwise", {"force_pow_2_scales": False}),
    ("fp8_blockwise", {"block_scaling_dim": 2, "force_pow_2_scales": False}),
    ("mxfp8", {}),
    ("mxfp8", {"dtype": "e5m2"}),
    ("mxfp8", {"swizzled": True}),
    ("mxfp6", {}),
    ("mxfp6", {"dtype": "e3m2"}),
    ("mxfp4", {}),
    ("mxfp4", {"swizzled": True}),
    ("nvfp4", {}),
    ("nvfp4", {"swizzled": True}),
]
formats = pytest.mark.parametrize(
    ("fmt", "options"), FORMATS, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v))
)


def test_a_factor_that_no_amax_gives(tmp_path):
    """G = fl(A / 6L) has no solution A here, so the tensor stores G itself."""
    q = weight("nvfp4", 16, 64, with_global_scale_inv=True)
    tried = torch.rand(200, generator=torch.Generator().manual_seed(0)) * 2**-10
    factor = next(f for f in tried.split(1) if find_amax(f) is None)
    q = q.quantizer.assemble([*q.buffers()[:3], factor], q.shape, q.dtype)
    checkpoints.save({"a.weight": q}, tmp_path / "x", layout="torchao")
    with checkpoints.open(tmp_path / "x") as checkpoint:
        assert torch.equal(checkpoint.stored("a.weight")["per_tensor_scale"], factor[0])
        back = checkpoint["a.weight"]
        assert torch.equal(back.buffers()[3], factor)
        assert_same_values(back.dequantize(), q.dequantize())


def experts(fmt, rows=128, cols=256, **options):
    values = torch.randn(3, rows, cols, generator=torch.Generator().manual_seed(4)).bfloat16()
    return qtensor.quantize(values, fmt, **options)


def header(path):
    return SafetensorsFile(path / "model.safetensors").headers[0]


@formats
def test_round_trip(fmt, options, tmp_path):
    """Bytes, options and nominal dtype come back, of matrices and of stacked experts."""
    state = {"a.weight": weight(fmt, 256, 384, **options), "a.bias": torch.ones(3)}
    state["b.half"] = weight(fmt, 128, 256, nominal=torch.float16, **options)
    if options.get("axis") != 0:
        state["c.experts"] = experts(fmt, **options)
    checkpoints.save(state, tmp_path / "x", layout="torchao")
    with checkpoints.open(tmp_path / "x") as checkpoint:
        assert checkpoint.layout == "torchao"
        for name, want in state.items():
            assert_same_bytes(checkpoint[name], want)
    checkpoints.save(checkpoints.load_state_dict(tmp_path / "x"), tmp_path / "y", layout="torchao")
    assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "y")


def theirs(path):
    """The state dict that torchao's own loader makes of the files of a folder."""
    reason = "torchao is not installed: pip install torch-qtensor[origins]"
    support = pytest.importorskip(
        "torchao.prototype.safetensors.safetensors_support", reason=reason
    )
    tensors, metadata = {}, {}
    for file in map(SafetensorsFile, sorted(path.glob("*.safetensors"))):
        tensors.update((name, file.read(name)) for name in file.infos)
        names = json.loads(metadata.get("tensor_names", "[]"))
        metadata.update(file.headers[0])
        metadata["tensor_names"] = json.dumps(names + json.loads(metadata["tensor_names"]))
    state, left = support.unflatten_tensor_state_dict(tensors, metadata)
    assert not left
    return state


@formats
def test_torchao_reads_what_we_write(fmt, options, tmp_path):
    """Its dequantizer gives our dense values, and its tensors have our shapes and dtypes."""
    state = {"a.weight": weight(fmt, 256, 384, **options), "a.bias": torch.ones(3)}
    state["b.weight"] = weight(fmt, 128, 256, nominal=torch.float32, seed=3, **options)
    if options.get("axis") != 0:
        state["c.experts"] = experts(fmt, **options)
    checkpoints.save(state, tmp_path / "x", layout="torchao")
    loaded = theirs(tmp_path / "x")
    assert loaded.keys() == state.keys()
    with checkpoints.open(tmp_path / "x") as checkpoint:
        for name in checkpoint.groups:
            tensor = loaded[name]
            assert (tensor.shape, tensor.dtype) == (state[name].shape, state[name].dtype)
            for dtype in (torch.bfloat16, torch.float32):
                assert_same_values(checkpoint.dense(name, dtype), tensor.dequantize(dtype))
    assert torch.equal(loaded["a.bias"], state["a.bias"])


def test_torchao_reads_our_shards_and_experts_with_their_own_factors(tmp_path):
    """Each expert of NVFP4 may have its own factor, (E, 1, 1)."""
    q = experts("nvfp4", 16, 64, row_scaled=True)
    amax = torch.tensor([3.0, 5.0, 0.7]).repeat_interleave(16)
    q = q.quantizer.assemble([*q.buffers()[:2], amax], q.shape, q.dtype)
    state = {"a.experts": q, "b.weight": weight("mxfp8"), "c.weight": torch.ones(2, 3)}
    checkpoints.save(state, tmp_path / "x", layout="torchao", shard_size=1)
    with checkpoints.open(tmp_path / "x") as checkpoint:
        assert checkpoint.stored("a.experts")["per_tensor_scale"].shape == (3, 1, 1)
        for name in checkpoint.groups:
            assert_same_values(checkpoint[name].dequantize(), state[name].dequantize())
        checkpoints.save(checkpoint, tmp_path / "y", layout="torchao")
        assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "y")
        loaded = theirs(tmp_path / "x")
        for name in checkpoint.groups:
            want = loaded[name].dequantize(torch.float32)
            assert_same_values(checkpoint.dense(name, torch.float32), want)


# ---- what only files of torchao have


def write(folder, name, kind, tensors, more=None, **data):
    """Write a file as torchao does; ``tensors`` maps attributes to tensors."""
    module, _, last = name.rpartition(".")
    stored = {f"{module}._{last}_{key}": value for key, value in tensors.items()}
    text = {"_type": kind, "_data": data, "_tensor_data_names": list(tensors)}
    texts = {"tensor_names": json.dumps([name]), name: json.dumps(text), **(more or {})}
    specs = [TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in stored.items()]
    path = folder / "model.safetensors"
    with SafetensorsWriter(path, specs, texts) as writer:
        for stored_name, tensor in stored.items():
            writer.write(stored_name, tensor)
    return path


def dtype(name):
    return {"_type": "torch.dtype", "_data": name}


def codes(*shape, below=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, below, shape, generator=generator, dtype=torch.uint8)


BLOCKS = [
    # weight, block_size, factors, format
    ((6, 64), [], (), "fp8"),
    ((6, 64), [6, 64], (1, 1), "fp8"),
    ((6, 64), [1, 64], (6, 1), "fp8_rowwise"),
    ((6, 64), [6, 1], (1, 64), "fp8_rowwise"),
    ((200, 160), [128, 128], (2, 2), "fp8_blockwise"),
    ((6, 256), [1, 128], (6, 2), "fp8_blockwise"),
    ((6, 64), [2, 32], (3, 2), None),
    ((3, 4, 64), [1, 4, 64], (3, 1, 1), None),
    ((3, 4, 64), [1, 1, 64], (3, 4, 1), "fp8_rowwise"),
    ((3, 128, 256), [1, 128, 128], (3, 1, 2), "fp8_blockwise"),
    ((3, 100, 256), [1, 128, 128], (3, 1, 2), None),
]


@pytest.mark.parametrize(("shape", "block", "grid", "fmt"), BLOCKS)
@pytest.mark.parametrize("element", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_blocks(shape, block, grid, fmt, element, tmp_path):
    """code * factor, one rounding; the factor of an element by its index."""
    data = codes(*shape, below=120).view(getattr(torch, element))
    scale = codes(*grid, seed=1).float() * 2**-9 + 0.125
    tensors = {"qdata": data, "scale": scale}
    kept = {"dtype": dtype("float16"), "block_size": block, "kernel_preference": None}
    path = write(tmp_path, "a.weight", "Float8Tensor", tensors, **kept)
    each = scale.double()
    for dim, size in enumerate(block if each.ndim else ()):
        index = torch.arange(shape[dim]) // size
        each = each.index_select(dim, index)
    want = data.double() * each
    with checkpoints.open(path) as checkpoint:
        for kind in (torch.float32, torch.bfloat16):
            assert_same_values(checkpoint.dense("a.weight", kind), want.float().to(kind))
        assert checkpoint["a.weight"].dtype == torch.float16
        e5m2_blocks = element == "float8_e5m2" and fmt == "fp8_blockwise"
        if fmt is None or checkpoint.why_dense("a.weight"):
            assert fmt is None or e5m2_blocks
        else:
            tensor = checkpoint["a.weight"]
            assert tensor.quantizer.format == fmt
            assert_same_values(tensor.dequantize(torch.float32), want.float())


def test_factors_at_the_ends_of_the_range(tmp_path):
    """E8M0 code 255 is NaN, and element and factor are each rounded to the dtype (class D)."""
    scale = torch.tensor([[0, 1, 127, 254, 255]], dtype=torch.uint8)
    data = codes(1, 160, below=126).view(torch.float8_e4m3fn)
    tensors = {"qdata": data, "scale": scale.view(torch.float8_e8m0fnu)}
    path = write(
        tmp_path,
        "a.weight",
        "MXTensor",
        tensors,
        elem_dtype=dtype("float8_e4m3fn"),
        block_size=32,
        orig_dtype=dtype("bfloat16"),
        is_swizzled_scales=False,
    )
    with checkpoints.open(path) as checkpoint:
        for kind in (torch.bfloat16, torch.float16, torch.float32):
            got = checkpoint.dense("a.weight", kind)
            powers = torch.tensor([2.0**-127, 2.0**-126, 1.0, 2.0**127, float("nan")])
            factors = powers.to(kind).repeat_interleave(32)
            assert_same_values(got, data.to(kind) * factors)
        assert checkpoint.dense("a.weight")[0, 128:].isnan().all()
        assert checkpoint["a.weight"].dequantize()[0, 128:].isnan().all()


@pytest.mark.parametrize(
    ("kind", "size", "factors"),
    [("MXTensor", 64, "float8_e8m0fnu"), ("NVFP4Tensor", 32, "float8_e4m3fn")],
)
def test_other_block_sizes_are_dense_only(kind, size, factors, tmp_path):
    data, scale = codes(4, 64), codes(4, 128 // size, below=120)
    tensors = {"qdata": data, "scale": scale.view(getattr(torch, factors))}
    path = write(
        tmp_path,
        "a.weight",
        kind,
        tensors,
        elem_dtype=dtype("float4_e2m1fn_x2"),
        block_size=size,
        orig_dtype=dtype("bfloat16"),
    )
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    elements = table[torch.stack([data & 15, data >> 4], -1).flatten(1).int()]
    want = elements * scale.view(getattr(torch, factors)).float().repeat_interleave(size, 1)
    with checkpoints.open(path) as checkpoint:
        assert "ours" in checkpoint.why_dense("a.weight")
        assert_same_values(checkpoint.dense("a.weight", torch.float32), want)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0])
def test_factors_that_no_tensor_of_ours_holds(value, tmp_path):
    """They are decoded as torchao does: fl(element * fl(G * s))."""
    tensors = {
        "qdata": codes(4, 32),
        "scale": codes(4, 4, below=120).view(torch.float8_e4m3fn),
        "per_tensor_scale": torch.tensor(value),
    }
    kept = {"block_size": 16, "orig_dtype": dtype("bfloat16"), "is_swizzled_scales": False}
    path = write(tmp_path, "a.weight", "NVFP4Tensor", tensors, **kept)
    with checkpoints.open(path) as checkpoint:
        assert "positive and finite" in checkpoint.why_dense("a.weight")
        got = checkpoint["a.weight"]
        assert not got.any() if value == 0 else got.isnan().any() or (got < 0).any()


def test_activation_factors_and_attributes_are_written_again(tmp_path):
    """act_per_tensor_scale stays a plain tensor and is listed with its weight again."""
    tensors = {
        "per_tensor_scale": torch.tensor(1.0),
        "act_per_tensor_scale": torch.tensor(0.25),
        "qdata": codes(4, 32),
        "scale": codes(4, 4, below=120).view(torch.float8_e4m3fn),
    }
    kwargs = {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": {"block_size": 16}}
    kept = {"block_size": 16, "orig_dtype": dtype("bfloat16"), "is_swizzled_scales": False}
    kept.update(act_quant_kwargs=kwargs, use_triton_kernel=True)
    path = write(tmp_path, "a.weight", "NVFP4Tensor", tensors, **kept)
    with checkpoints.open(path) as checkpoint:
        assert (
            list(checkpoint) == ["a.weight", "a._weight_act_per_tensor_scale"]
            or len(checkpoint) == 2
        )
        state = checkpoints.load_state_dict(path, dtype=torch.bfloat16)
        assert state["a._weight_act_per_tensor_scale"].dtype == torch.float32
        checkpoints.save(checkpoint, tmp_path / "x", layout="torchao")
    assert stored_bytes(tmp_path / "x") == stored_bytes(path)
    text = json.loads(header(tmp_path / "x")["a.weight"])
    assert set(text["_tensor_data_names"]) == set(tensors)
    assert text["_data"]["act_quant_kwargs"] == kwargs
    assert text["_data"]["use_triton_kernel"] is True
    assert json.loads(header(tmp_path / "x")["tensor_names"]) == ["a.weight"]


GOOD = {"block_size": [6, 64], "dtype": dtype("bfloat16")}
FP8 = {"qdata": codes(6, 64).view(torch.float8_e4m3fn), "scale": torch.ones(1, 1)}
MX = {"qdata": codes(6, 32), "scale": codes(6, 2).view(torch.float8_e8m0fnu)}
MX_DATA = {
    "elem_dtype": dtype("float4_e2m1fn_x2"),
    "block_size": 32,
    "orig_dtype": dtype("bfloat16"),
    "is_swizzled_scales": False,
}
NV = {"qdata": codes(6, 32), "scale": codes(6, 4, below=120).view(torch.float8_e4m3fn)}
NV_DATA = {"block_size": 16, "orig_dtype": dtype("bfloat16"), "is_swizzled_scales": False}
REFUSED = [
    ("Int4Tensor", FP8, GOOD, "Int4Tensor"),
    ("Int8Tensor", FP8, GOOD, "Int8Tensor"),
    ("IntxUnpackedToInt8Tensor", FP8, GOOD, "Intx"),
    ("AffineQuantizedTensor", FP8, GOOD, "AffineQuantizedTensor"),
    ("Float8Tensor", {"qdata": FP8["qdata"]}, GOOD, "has the tensors qdata, scale"),
    ("Float8Tensor", {**FP8, "zero": torch.ones(1)}, GOOD, "has the tensors"),
    ("Float8Tensor", FP8, {**GOOD, "block_size": [1, 64]}, r"shape \[6, 1\]; got F32"),
    ("Float8Tensor", FP8, {**GOOD, "block_size": [0, 64]}, "positive sizes"),
    ("Float8Tensor", FP8, {**GOOD, "block_size": [-1, 64]}, "positive size"),
    ("Float8Tensor", FP8, {**GOOD, "block_size": [8, 64]}, "inside the weight"),
    ("Float8Tensor", FP8, {**GOOD, "block_size": [64]}, "for each dim"),
    ("Float8Tensor", FP8, {**GOOD, "block_size": "64"}, "for each dim"),
    ("Float8Tensor", FP8, {**GOOD, "dtype": dtype("int8")}, "floating-point dtype"),
    ("Float8Tensor", FP8, {"block_size": [6, 64]}, "floating-point dtype"),
    ("Float8Tensor", {**FP8, "qdata": codes(6, 64)}, GOOD, "F8_E4M3 or F8_E5M2"),
    ("Float8Tensor", {**FP8, "scale": torch.ones(1, 1).int()}, GOOD, "I32"),
    ("MXTensor", MX, {**MX_DATA, "elem_dtype": dtype("int4")}, "elem_dtype is one of"),
    ("MXTensor", MX, {**MX_DATA, "elem_dtype": {"_data": []}}, "elem_dtype is one of"),
    ("MXTensor", MX, {**MX_DATA, "elem_dtype": dtype("float8_e4m3fn")}, "needs F8_E4M3"),
    ("MXTensor", MX, {**MX_DATA, "block_size": 0}, "block_size is positive"),
    ("MXTensor", MX, {**MX_DATA, "block_size": 48}, "whole blocks of 48"),
    ("MXTensor", MX, {**MX_DATA, "block_size": 16}, r"\[6, 4\]"),
    ("MXTensor", MX, {**MX_DATA, "is_swizzled_scales": True}, r"\[32, 16\]"),
    ("MXTensor", MX, {**MX_DATA, "is_swizzled_scales": 1}, "true or false"),
    ("MXTensor", {**MX, "scale": codes(6, 2)}, MX_DATA, "needs F8_E8M0"),
    ("NVFP4Tensor", {**NV, "scale": MX["scale"]}, NV_DATA, "needs F8_E4M3"),
    ("NVFP4Tensor", {**NV, "per_tensor_scale": torch.ones(2)}, NV_DATA, "the factor of"),
    ("NVFP4Tensor", {**NV, "per_tensor_scale": torch.ones(6, 1)}, NV_DATA, "the factor of"),
    ("NVFP4Tensor", {**NV, "per_tensor_scale": torch.ones(()).half()}, NV_DATA, "needs F32"),
]


@pytest.mark.parametrize(("kind", "tensors", "data", "message"), REFUSED)
def test_what_is_refused(kind, tensors, data, message, tmp_path):
    path = write(tmp_path, "a.weight", kind, tensors, **data)
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.open(path)
    assert raised.value.layout == "torchao"
    assert raised.value.file == str(path)
    assert raised.value.tensor in ("a.weight", "a._weight_qdata", "a._weight_scale") or (
        raised.value.tensor == "a._weight_per_tensor_scale"
    )


TEXTS = [
    ({"tensor_names": "["}, "is JSON"),
    ({"tensor_names": "{}"}, "a list of names"),
    ({"tensor_names": "[1]"}, "a list of names"),
    ({"tensor_names": '["a.weight", "a.weight"]'}, "each name once"),
    ({"tensor_names": '["a.weight", "b.weight"]'}, "has a text"),
    ({"a.weight": "{"}, "UTF-8 and JSON"),
    ({"a.weight": "[]"}, "JSON object"),
    ({"a.weight": "{}"}, "got None"),
    ({"a.weight": '{"_type": ["x"]}'}, "the types that are read"),
    ({"a.weight": '{"_type": "Tensor"}'}, "the file has the tensor 'a.weight'"),
    ({"a.weight": '{"_type": "MXTensor"}'}, "has _data and"),
    ({"a.weight": '{"_type": "MXTensor", "_data": [], "_tensor_data_names": []}'}, "has _data"),
    (
        {"a.weight": '{"_type": "MXTensor", "_data": {}, "_tensor_data_names": [[], 1]}'},
        "has the tensors",
    ),
    ({"tensor_names": '["b.weight"]', "b.weight": '{"_type": "Tensor"}'}, "Download the missing"),
]


@pytest.mark.parametrize(("texts", "message"), TEXTS)
def test_damaged_texts(texts, message, tmp_path):
    path = write(tmp_path, "a.weight", "Float8Tensor", FP8, texts, **GOOD)
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.open(path)
    assert raised.value.layout == "torchao"


def test_a_config_without_header_texts(tmp_path):
    checkpoints.save({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors", layout="plain")
    config = {"quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(checkpoints.CheckpointError, match="header text tensor_names"):
        checkpoints.open(tmp_path)


def test_a_shard_alone_names_the_missing_tensor(tmp_path):
    """A header may describe tensors of other shards; the index finds them, one shard does not."""
    first = write(tmp_path, "a.weight", "Float8Tensor", FP8, **GOOD)
    first.rename(tmp_path / "whole.safetensors")
    whole = SafetensorsFile(tmp_path / "whole.safetensors")
    weight_map = {}
    for i, name in enumerate(whole.infos):
        tensor = whole.read(name)
        file = tmp_path / f"shard-{i}.safetensors"
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape))]
        with SafetensorsWriter(file, specs, dict(whole.headers[0])) as writer:
            writer.write(name, tensor)
        weight_map[name] = file.name
    (tmp_path / "whole.safetensors").unlink()
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with checkpoints.open(tmp_path) as checkpoint:
        assert checkpoint["a.weight"].quantizer.format == "fp8"
    with pytest.raises(checkpoints.CheckpointError, match="all shards"):
        checkpoints.open(tmp_path / "shard-0.safetensors")


CANNOT = [
    ("mxfp6", {"packed": True}, (48, 160), "a byte each"),
    ("mxfp8", {"columnwise": True, "rowwise": False}, (64, 160), "rowwise data"),
    ("mxfp8", {}, (48, 150), "whole blocks of 32"),
    ("nvfp4", {}, (48, 150), "whole blocks of 16"),
    ("nvfp4", {"row_scaled": True}, (48, 160), "for an expert"),
    ("fp8_blockwise", {"block_scaling_dim": 2}, (48, 160), "whole blocks of 128"),
]


@pytest.mark.parametrize(("fmt", "options", "shape", "message"), CANNOT)
def test_what_cannot_be_written(fmt, options, shape, message, tmp_path):
    state = {"x.weight": weight(fmt, *shape, **options)}
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.save(state, tmp_path / "x", layout="torchao")
    assert raised.value.tensor == "x.weight"


def test_names_without_a_module_cannot_be_written(tmp_path):
    """torchao's loader splits every name at its last dot."""
    for tensor in (torch.ones(2), weight("mxfp8")):
        with pytest.raises(checkpoints.CheckpointError, match="at the last dot"):
            checkpoints.save({"weight": tensor}, tmp_path / "x", layout="torchao")


@pytest.mark.parametrize("names", [("a.up", "a.up_b"), ("a.up_b", "a.up")])
def test_names_that_the_loader_confuses_cannot_be_written(names, tmp_path):
    """torchao takes every stored name that begins with a._up_ for a part of a.up."""
    state = {name: weight("mxfp8") for name in names}
    with pytest.raises(checkpoints.CheckpointError, match="beginning of names"):
        checkpoints.save(state, tmp_path / "x", layout="torchao")
    fine = {"a.up": weight("mxfp8"), "b.up_b": weight("mxfp8"), "a.upper": weight("mxfp8")}
    checkpoints.save(fine, tmp_path / "y", layout="torchao")
