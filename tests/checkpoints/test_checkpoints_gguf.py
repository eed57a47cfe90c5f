"""GGUF files: values of every byte, tensor factors, writing, and the package gguf as oracle."""

import os
import struct

import numpy as np
import pytest
import torch
from checkpoint_cases import EXAMPLES, assert_same_bytes, assert_same_values, weight

from qtensor import checkpoints
from qtensor.checkpoints.containers.gguf import TYPES
from tests.checkpoints.test_checkpoints_variants import E2M1, E4M3, codes, powers

F32, BF16, Q2_K, MXFP4, NVFP4 = 0, 30, 10, 39, 40
NO_GGUF = "the package gguf is not installed: pip install gguf"


def text(value):
    value = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(value)) + value


def pair(key, kind, data):
    return text(key) + struct.pack("<I", kind) + data


def info(name, dims, kind, offset):
    """An entry of a tensor; ``dims`` with the fastest first, as in the file."""
    head = text(name) + struct.pack("<I", len(dims))
    return head + b"".join(struct.pack("<Q", n) for n in dims) + struct.pack("<IQ", kind, offset)


def gguf_bytes(pairs=(), infos=(), data=b"", version=3, counts=None, alignment=32):
    tensors, values = counts or (len(infos), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, values) + b"".join([*pairs, *infos])
    return head + bytes(-len(head) % alignment) + data


def write(folder, tensors, pairs=(), alignment=32, **options):
    """Write (name, shape, type, bytes) and open the file."""
    infos, data = [], b""
    for name, shape, kind, raw in tensors:
        data += bytes(-len(data) % alignment)
        infos.append(info(name, shape[::-1], kind, len(data)))
        data += raw
    path = folder / "x.gguf"
    path.write_bytes(gguf_bytes(pairs, infos, data, options.pop("version", 3), None, alignment))
    return checkpoints.open(path, **options)


def raw(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def mxfp4(*shape):
    """Random blocks, and their values by index: element j low, j + 16 high."""
    blocks = codes(*shape[:-1], shape[-1] // 32, 17)
    blocks[..., 0] = codes(*blocks.shape[:-1], seed=1, below=250)
    q = blocks[..., 1:].numpy()
    elements = E2M1[np.concatenate([q & 15, q >> 4], -1)]
    return blocks, (elements * powers(blocks[..., :1])).reshape(shape)


def nvfp4(*shape, below=255):
    """Random blocks, and their values: 16 elements a factor, element j low, j + 8 high."""
    blocks = codes(*shape[:-1], shape[-1] // 64, 36)
    blocks[..., :4] = codes(*blocks.shape[:-1], 4, seed=1, below=below)
    blocks[..., 0, 0], blocks[..., 0, 1] = 127, 200
    q = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8).numpy()
    elements = E2M1[np.concatenate([q & 15, q >> 4], -1)]
    factors = E4M3[blocks[..., :4].numpy() & 127]
    factors = np.where(blocks[..., :4].numpy() == 255, 480.0, np.nan_to_num(factors))
    return blocks, (elements * factors[..., None]).reshape(shape)


def exact(values, dtype=torch.float32):
    return torch.from_numpy(values).float().to(dtype)


SHAPES = [(5, 128), (3, 4, 192), (64,)]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mxfp4(shape, version, tmp_path):
    blocks, want = mxfp4(*shape)
    with write(tmp_path, [("a.weight", shape, MXFP4, raw(blocks))], version=version) as checkpoint:
        assert checkpoint.layout == "gguf"
        for dtype in (torch.float32, torch.bfloat16):
            assert_same_values(checkpoint.dense("a.weight", dtype), exact(want, dtype))
            assert_same_values(checkpoint["a.weight"].dequantize(dtype), exact(want, dtype))
        assert checkpoint["a.weight"].quantizer.format == "mxfp4"


def test_mxfp4_factors_of_255(tmp_path):
    blocks, _ = mxfp4(2, 32)
    blocks[0, 0, 0] = 255
    with (
        write(tmp_path, [("a.weight", (2, 32), MXFP4, raw(blocks))]) as checkpoint,
        pytest.raises(checkpoints.CheckpointError, match="not 255"),
    ):
        checkpoint.dense("a.weight")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nvfp4(shape, tmp_path):
    """The sign of a factor is ignored, and 0x7F is 0."""
    blocks, want = nvfp4(*shape)
    with write(tmp_path, [("a.weight", shape, NVFP4, raw(blocks))]) as checkpoint:
        for dtype in (torch.float32, torch.bfloat16):
            assert_same_values(checkpoint.dense("a.weight", dtype), exact(want, dtype))
            assert_same_values(checkpoint["a.weight"].dequantize(dtype), exact(want, dtype))


def test_a_factor_byte_of_255_is_480(tmp_path):
    """ggml gives 480, which e4m3 does not have, so that the weight is dense only."""
    blocks, want = nvfp4(4, 128, below=256)
    blocks[0, 0, 1] = 255
    want.reshape(4, 2, 4, 16)[0, 0, 1] = E2M1[
        np.concatenate([blocks[0, 0, 12:20] & 15, blocks[0, 0, 12:20] >> 4])
    ]
    want.reshape(4, 2, 4, 16)[0, 0, 1] *= 480
    with write(tmp_path, [("a.weight", (4, 128), NVFP4, raw(blocks))]) as checkpoint:
        assert_same_values(checkpoint["a.weight"], exact(want))
        assert "0xFF" in checkpoint.why_dense("a.weight")


@pytest.mark.parametrize("sidecar", ["a.scale", "a.weight.scale"])
@pytest.mark.parametrize("factor", [0.25, 0.0071234, 1.1e-3])
def test_the_tensor_factor(sidecar, factor, tmp_path):
    """The weight as it lies, its product under a second name, and folded weights on request."""
    blocks, want = nvfp4(6, 128)
    factor = torch.tensor([factor])
    tensors = [
        ("a.weight", (6, 128), NVFP4, raw(blocks)),
        (sidecar, (1,), F32, raw(factor)),
        ("a.input_scale", (1,), F32, raw(torch.ones(1))),
    ]
    product = exact(want) * factor
    with write(tmp_path, tensors) as checkpoint:
        assert list(checkpoint) == ["a.weight", sidecar, "a.input_scale"]
        assert "without its factor .scale" in repr(checkpoint.table())
        assert_same_values(checkpoint.dense("a.weight"), exact(want))
        assert_same_values(checkpoint["a.weight"].dequantize(), exact(want))
        assert_same_values(checkpoint.dense("a.weight times scale"), product)
        assert_same_values(checkpoint["a.weight times scale"].dequantize(), product)
        assert_same_values(checkpoint[sidecar], factor)
        assert checkpoint.is_factor(sidecar)
    with write(tmp_path, tensors, fold_scale=True) as checkpoint:
        assert list(checkpoint) == ["a.weight", "a.input_scale"]
        for dtype in (torch.float32, torch.bfloat16):
            assert_same_values(checkpoint.dense("a.weight", dtype), product.to(dtype))
            assert_same_values(checkpoint["a.weight"].dequantize(dtype), product.to(dtype))
        checkpoints.save(checkpoint, tmp_path / "copy.gguf", layout="gguf")
        with checkpoints.open(tmp_path / "copy.gguf") as copy:
            assert list(copy) == ["a.weight", sidecar, "a.input_scale"]
            assert_same_bytes(copy[sidecar], factor)


def test_factors_of_experts(tmp_path):
    """One factor for each expert: a row-scaled tensor that writes the same factors."""
    blocks, want = nvfp4(3, 4, 128)
    factors = torch.tensor([0.5, 0.0071234, 3.0])
    tensors = [
        ("ffn_exps.weight", (3, 4, 128), NVFP4, raw(blocks)),
        ("ffn_exps.scale", (3,), F32, raw(factors)),
    ]
    product = exact(want) * factors[:, None, None]
    with write(tmp_path, tensors, fold_scale=True) as checkpoint:
        assert checkpoint["ffn_exps.weight"].quantizer.row_scaled
        assert_same_values(checkpoint["ffn_exps.weight"].dequantize(), product)
        assert_same_values(checkpoint.dense("ffn_exps.weight"), product)
        checkpoints.save(checkpoint, tmp_path / "copy.gguf", layout="gguf")
    with checkpoints.open(tmp_path / "copy.gguf", fold_scale=True) as copy:
        assert_same_values(copy["ffn_exps.weight"].dequantize(), product)
        assert_same_bytes(copy.stored("ffn_exps.weight")["factor"], factors)


def test_diff_and_inspect_read_a_weight_with_its_factor(tmp_path):
    """As a conversion does; the tensor of the factor is still shown by its name."""
    blocks, want = nvfp4(2, 128)
    tensors = [
        ("a.weight", (2, 128), NVFP4, raw(blocks)),
        ("a.scale", (1,), F32, raw(torch.tensor([0.0071234]))),
        ("b.weight", (2, 128), NVFP4, raw(blocks)),
        ("b.scale", (1,), F32, raw(torch.tensor([3.0]))),
    ]
    write(tmp_path, tensors).close()
    path = tmp_path / "x.gguf"
    checkpoints.dequantize(path, tmp_path / "dense", dtype="f32")
    for pair in ((path, tmp_path / "dense"), (tmp_path / "dense", path)):
        assert checkpoints.compare(*pair).counts() == {"equal values": 2}
    found = checkpoints.inspect_tensor(path, "a.weight")
    assert found.maximum == (exact(want) * torch.tensor(0.0071234)).max().item()
    assert list(found.stored) == ["codes", "factor"]
    assert checkpoints.inspect_tensor(path, "a.scale").maximum == torch.tensor(0.0071234).item()
    assert checkpoints.inspect_tensor(path, "b.weight times scale").maximum == 3 * want.max()
    kinds = {kind.kind: kind.tensors for kind in checkpoints.inspect(path).kinds}
    assert kinds == {"nvfp4": 2, "plain": 2}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_verify_finds_a_factor_that_is_none(value, tmp_path):
    tensors = [
        ("a.weight", (1, 64), NVFP4, raw(nvfp4(1, 64)[0])),
        ("a.scale", (1,), F32, raw(torch.tensor([value]))),
    ]
    write(tmp_path, tensors).close()
    problems = checkpoints.verify(tmp_path / "x.gguf").problems
    assert any("tensor factors are finite" in problem.text for problem in problems)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_tensor_factors_that_are_no_factors(value, tmp_path):
    tensors = [
        ("a.weight", (1, 64), NVFP4, raw(nvfp4(1, 64)[0])),
        ("a.scale", (1,), F32, raw(torch.tensor([value]))),
    ]
    with write(tmp_path, tensors, fold_scale=True) as checkpoint:
        for read in (checkpoint.dense, checkpoint.__getitem__):
            with pytest.raises(checkpoints.CheckpointError, match="finite") as raised:
                read("a.weight")
            assert raised.value.tensor == "a.scale"


PLAIN = {
    "f32": (0, torch.float32),
    "f16": (1, torch.float16),
    "bf16": (30, torch.bfloat16),
    "f64": (28, torch.float64),
    "i8": (24, torch.int8),
    "i16": (25, torch.int16),
    "i32": (26, torch.int32),
    "i64": (27, torch.int64),
}


def plain_tensors():
    return {name: torch.arange(6).view(2, 3).to(dtype) for name, (_, dtype) in PLAIN.items()}


@pytest.mark.parametrize("alignment", [1, 8, 32, 256])
def test_plain_tensors_and_alignments(alignment, tmp_path):
    state = plain_tensors()
    tensors = [(n, (2, 3), PLAIN[n][0], raw(t)) for n, t in state.items()]
    pairs = [pair("general.alignment", 4, struct.pack("<I", alignment))]
    with write(tmp_path, tensors, pairs, alignment) as checkpoint:
        assert list(checkpoint) == list(state)
        for name, want in state.items():
            assert_same_bytes(checkpoint[name], want)


def test_other_types_are_listed_and_refused(tmp_path):
    """A quantized tensor of another type is in the table, and asking for it names the type."""
    tensors = [
        ("q", (2, 256), Q2_K, bytes(168)),
        ("new", (2, 256), 99, b""),
        ("a", (2,), F32, raw(torch.ones(2))),
    ]
    with write(tmp_path, tensors) as checkpoint:
        rows = {row.name: row for row in checkpoint.table().rows}
        assert rows["q"].kind == rows["new"].kind == "unreadable"
        assert rows["q"].note == (
            "warning: type Q2_K is not read; "
            "MXFP4, NVFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K are"
        )
        assert rows["q"].shape == (2, 256)
        assert torch.equal(checkpoint["a"], torch.ones(2))
        for name, kind in (("q", "Q2_K"), ("new", "number 99")):
            for read in (checkpoint.dense, checkpoint.__getitem__):
                with pytest.raises(checkpoints.CheckpointError, match=kind) as raised:
                    read(name)
                assert raised.value.tensor == name


# ---- writing


def state():
    return {
        "blk.0.norm.weight": torch.ones(64),
        "blk.0.up.weight": weight("nvfp4", 8, 128, nominal=torch.float32),
        "blk.0.down.weight": weight("mxfp4", 8, 96, nominal=torch.float32),
        "blk.0.half.weight": torch.ones(3, 4, dtype=torch.bfloat16),
    }


CONFIG = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a", "ü"],
    "tokenizer.ggml.token_type": [1, -2, 3],
    "tokenizer.ggml.add_bos_token": True,
    "hidden_size": 64,
}


def test_round_trip(tmp_path):
    """Codes come back, the amax as a tensor factor, and key-values as they were passed."""
    checkpoints.save(state(), tmp_path / "x.gguf", layout="gguf", config=CONFIG)
    with checkpoints.open(tmp_path / "x.gguf", fold_scale=True) as checkpoint:
        assert set(checkpoint) == set(state())
        for name, want in state().items():
            assert_same_bytes(checkpoint[name], want)
        values = {k: v.decode() for k, v in checkpoint.source.extra["key_values"].items()}
    wanted = {k: v for k, v in CONFIG.items() if "." in k}
    assert values == {**wanted, "general.file_type": 38, "general.quantization_version": 2}


@pytest.mark.parametrize("folder", ["gguf_mxfp4", "gguf_nvfp4"])
@pytest.mark.parametrize("reserve", [True, False])
def test_examples_are_written_byte_for_byte(folder, reserve, tmp_path, monkeypatch):
    """Header, key-values and padding included, also where a system cannot reserve the space."""
    if not reserve:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    path = EXAMPLES / folder / "model.gguf"
    with checkpoints.open(path) as checkpoint:
        checkpoints.save(checkpoint, tmp_path / "x.gguf", layout="gguf")
    assert (tmp_path / "x.gguf").read_bytes() == path.read_bytes()


def test_other_layouts_need_the_factors_in_the_weights(tmp_path):
    """Without them the new file would have weights of another size."""
    path = EXAMPLES / "gguf_nvfp4"
    with (
        checkpoints.open(path) as checkpoint,
        pytest.raises(checkpoints.CheckpointError, match="fold_scale=True"),
    ):
        checkpoints.save(checkpoint, tmp_path / "x", layout="compressed-tensors")
    with checkpoints.open(path, fold_scale=True) as checkpoint:
        checkpoints.save(checkpoint, tmp_path / "x", layout="qtensor")
        want = checkpoint["blk.0.ffn_up.weight"].dequantize()
    with checkpoints.open(tmp_path / "x") as checkpoint:
        assert torch.equal(checkpoint["blk.0.ffn_up.weight"].dequantize(), want)


@pytest.mark.parametrize(
    ("tensors", "number"),
    [
        ({"a": torch.ones(4)}, 0),
        ({"a": torch.ones(4), "b": torch.ones(4).half()}, 1),
        ({"a": torch.ones(4).bfloat16()}, 32),
        ({"a": torch.ones(4), "b": weight("mxfp4", 2, 32)}, 38),
        ({"a": torch.ones(4), "b": weight("nvfp4", 2, 64)}, 39),
    ],
)
def test_file_types(tensors, number, tmp_path):
    checkpoints.save(tensors, tmp_path / "x", layout="gguf")
    assert not (tmp_path / "x" / "config.json").exists()
    with checkpoints.open(tmp_path / "x") as checkpoint:
        assert checkpoint.source.extra["key_values"]["general.file_type"].decode() == number


def nan_factors():
    q = weight("nvfp4", 4, 64)
    q.buffers()[1].fill_(127)
    return q


REFUSED = [
    ({"a": weight("mxfp8", 4, 64)}, "mxfp4"),
    ({"a": weight("mxfp4", 4, 48)}, "multiple of 32"),
    ({"a": weight("nvfp4", 4, 96)}, "multiple of 64"),
    ({"a": weight("nvfp4", 4, 64, row_scaled=True)}, "one factor for the tensor"),
    ({"a": weight("mxfp4", 64, 64, columnwise=True, rowwise=False)}, "rowwise data"),
    ({"a": nan_factors()}, "negative or NaN"),
    ({"a": torch.ones(4, dtype=torch.uint8)}, "plain tensors are F32"),
    ({"a" * 64: torch.ones(4)}, "63 bytes"),
    ({"a": torch.ones(1, 1, 1, 1, 1)}, "5 dims"),
]


@pytest.mark.parametrize(("tensors", "message"), REFUSED)
def test_what_gguf_cannot_hold(tensors, message, tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match=message):
        checkpoints.save(tensors, tmp_path / "x.gguf", layout="gguf")
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("value", [[], [1, "a"], None, 2**70, {"a": 1}])
def test_key_values_that_gguf_cannot_hold(value, tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match="list"):
        checkpoints.save({"a": torch.ones(1)}, tmp_path / "x", "gguf", config={"a.b": value})


@pytest.mark.parametrize(("name", "layout"), [("x.safetensors", "gguf"), ("x.gguf", "qtensor")])
def test_the_name_of_a_file_fits_its_layout(name, layout, tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match="end in"):
        checkpoints.save({"a": torch.ones(1)}, tmp_path / name, layout=layout)


def test_a_gguf_file_replaces_a_safetensors_file_of_the_folder(tmp_path):
    """The older file would be read in place of the new one."""
    checkpoints.save({"a": torch.ones(1)}, tmp_path / "x")
    checkpoints.save({"b": torch.ones(1)}, tmp_path / "x", layout="gguf", overwrite=True)
    with checkpoints.open(tmp_path / "x") as checkpoint:
        assert list(checkpoint) == ["b"]


def test_a_conversion_says_whose_names_a_file_has(tmp_path):
    """llama.cpp does not know the names of transformers."""
    tensors = {"model.norm.weight": torch.ones(4)}
    config = {"model_type": "llama", "hidden_size": 4}
    checkpoints.save(tensors, tmp_path / "x", layout="plain", config=config)
    report = checkpoints.convert(tmp_path / "x", tmp_path / "y.gguf", layout="gguf")
    assert any("save_gguf" in note for note in report.notes)
    with checkpoints.open(tmp_path / "y.gguf") as found:
        assert list(found) == ["model.norm.weight"]


# ---- the package gguf


def test_the_package_gguf_writes_what_we_read(tmp_path):
    """Arrays of texts and several tensors, and MXFP4 codes of its own quantizer."""
    gguf = pytest.importorskip("gguf", reason=NO_GGUF)
    values = np.random.default_rng(0).normal(size=(4, 96)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.MXFP4
    data = gguf.quantize(values, kind)
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_token_list(["a", "b"])
    writer.add_tensor("q.weight", data, raw_dtype=kind)
    writer.add_tensor("v", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with checkpoints.open(tmp_path / "x.gguf") as checkpoint:
        want = torch.from_numpy(gguf.dequantize(data, kind))
        assert_same_values(checkpoint["q.weight"].dequantize(), want)
        assert_same_values(checkpoint.dense("q.weight"), want)
        assert torch.equal(checkpoint["v"], torch.from_numpy(values))
        pairs = checkpoint.source.extra["key_values"]
        assert pairs["tokenizer.ggml.tokens"].decode() == ["a", "b"]


def test_every_byte_as_the_package_gguf_decodes_it(tmp_path):
    """All factor bytes (E8M0 255 left out) with all element bytes."""
    gguf = pytest.importorskip("gguf", reason=NO_GGUF)
    q = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for kind, number, size, block in (("MXFP4", MXFP4, 1, 32), ("NVFP4", NVFP4, 4, 64)):
        count = 255 if kind == "MXFP4" else 256
        blocks = torch.empty(count, 256 * 2 // block, size + block // 2, dtype=torch.uint8)
        blocks[..., :size] = q[:count, None, None]
        blocks[..., size:] = q.view(-1, block // 2)
        shape = (count, 512)
        with write(tmp_path, [("a.weight", shape, number, raw(blocks))]) as checkpoint:
            with np.errstate(over="ignore"):
                theirs = gguf.dequantize(
                    blocks.flatten(-2).numpy(), gguf.GGMLQuantizationType[kind]
                )
            assert_same_values(checkpoint.dense("a.weight"), torch.from_numpy(theirs))


def test_types_of_the_package_gguf():
    gguf = pytest.importorskip("gguf", reason=NO_GGUF)
    theirs = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {number: kind[:3] for number, kind in TYPES.items()} == theirs
