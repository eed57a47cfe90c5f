"""Examples of other libraries decode to what those libraries give, bit for bit."""

import contextlib
import json
import shutil

import pytest
import torch
from checkpoint_cases import EXAMPLES, READ, assert_same_values, expected, stored_bytes

import qtensor
from qtensor import checkpoints
from qtensor.checkpoints.layout_base import layouts

examples = pytest.mark.parametrize("example", READ, ids=lambda e: e.folder)


@examples
def test_origin_rounding(example):
    """The dense values equal those that the origin's own dequantizer gave."""
    with checkpoints.open(example.path) as checkpoint:
        count = 0
        for name, dtype, want in expected(example):
            assert_same_values(checkpoint.dense(name, dtype), want)
            count += 1
        assert count


@examples
def test_origin_rounding_of_a_state_dict(example):
    for dtype in (torch.bfloat16, torch.float32):
        state = checkpoints.load_state_dict(example.path, dtype=dtype, rounding="origin")
        for name, stored, want in expected(example):
            # A second name of a tensor, which state dicts do not have.
            if stored == dtype and not name.endswith(" times scale"):
                assert_same_values(state[name], want)


@examples
def test_as_quantized_tensors(example):
    """Weights have our formats, and decode to the origin's values where the arithmetic is equal."""
    with checkpoints.open(example.path) as checkpoint:
        formats = set()
        for name, dtype, want in expected(example):
            tensor = checkpoint[name]
            if isinstance(tensor, qtensor.QuantizedTensor):
                formats.add(tensor.quantizer.format)
                tensor = tensor.dequantize(dtype)
                if checkpoint.groups[name].transposed:
                    tensor = tensor.transpose(-1, -2)
                if not example.exact:
                    # NVFP4: fl(fl(e * s) * G) against fl(e * fl(s / g)), four float32 roundings
                    # apart. FP8: a factor rounded to bfloat16 first. At most one bfloat16 unit.
                    torch.testing.assert_close(tensor, want, rtol=2**-7, atol=0)
                    continue
            assert_same_values(tensor.to(dtype), want)
        assert formats == set(example.formats)


@examples
def test_the_layout_is_recognised(example):
    with checkpoints.open(example.path) as checkpoint:
        assert checkpoint.layout == example.layout
        config = example.path / "config.json"
        assert checkpoint.config == (json.loads(config.read_text()) if config.exists() else {})


def test_no_layout_claims_an_example_of_another():
    rows = {example.folder: example.layout for example in READ}
    assert set(rows.values()) <= set(layouts())
    for folder in sorted(p.name for p in EXAMPLES.iterdir() if p.is_dir()):
        if folder in rows:
            with checkpoints.open(EXAMPLES / folder) as checkpoint:
                assert checkpoint.layout == rows[folder]
            continue
        with contextlib.suppress(checkpoints.CheckpointError):
            checkpoint = checkpoints.open(EXAMPLES / folder)
            assert checkpoint.layout == "plain", folder


@pytest.mark.parametrize("example", [e for e in READ if not e.copied], ids=lambda e: e.folder)
def test_quantized_tensors_do_not_copy_codes(example):
    """The codes of a tensor lie in the mapped file: two reads share them."""
    with checkpoints.open(example.path) as checkpoint:
        for name, group in checkpoint.groups.items():
            one, other = checkpoint[name], checkpoint[name]
            if isinstance(one, qtensor.QuantizedTensor):
                shared = one.buffers()[0].data_ptr() == other.buffers()[0].data_ptr()
                assert shared is not bool(example.copied), group.scheme


# A torch file of torchao is written as safetensors, and Transformer Engine refuses foreign pickles.
WRITTEN = [e for e in READ if e.formats and not (e.path / "model.pt").exists()]


@pytest.mark.parametrize("example", WRITTEN, ids=lambda e: e.folder)
def test_written_files_equal_the_original(example, tmp_path):
    """Reading as quantized tensors and writing the same layout gives the stored bytes."""
    with checkpoints.open(example.path) as checkpoint:
        checkpoints.save(checkpoint, tmp_path / "copy", layout=example.layout)
        written, original = stored_bytes(tmp_path / "copy"), stored_bytes(example.path)
        assert written.keys() == original.keys()
        for name in original:
            assert written[name] == original[name], name
        with checkpoints.open(tmp_path / "copy") as copy:
            assert copy.layout == example.layout
            for name, dtype, want in expected(example):
                assert_same_values(copy.dense(name, dtype), want)


def test_quant_method_without_a_layout_is_named(tmp_path):
    shutil.copytree(EXAMPLES / "ct_mxfp8", tmp_path / "x")
    config = {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    with pytest.raises(checkpoints.CheckpointError, match=r"compressed-tensors.*got .*'awq'"):
        checkpoints.open(tmp_path / "x")


def test_codes_without_a_config_need_a_layout(tmp_path):
    """``weight_scale`` means five different things, so names alone do not settle a layout."""
    shutil.copy(EXAMPLES / "hf_fp8_block" / "model.safetensors", tmp_path)
    with pytest.raises(checkpoints.CheckpointError, match=r"Pass layout="):
        checkpoints.open(tmp_path)
    with checkpoints.open(tmp_path, layout="plain") as checkpoint:
        assert not checkpoint.groups
        assert len(checkpoint) == 3


def test_the_config_may_lie_in_the_text_model(tmp_path):
    shutil.copytree(EXAMPLES / "ct_mxfp8", tmp_path / "x")
    path = tmp_path / "x" / "config.json"
    path.write_text(json.dumps({"text_config": json.loads(path.read_text())}))
    with checkpoints.open(tmp_path / "x") as checkpoint:
        assert checkpoint.layout == "compressed-tensors"


def test_a_file_an_index_and_an_open_file(tmp_path):
    example = READ[0]
    with checkpoints.open(example.path / "model.safetensors") as checkpoint:
        assert checkpoint.layout == example.layout
    state = {"a": torch.arange(4.0), "b": torch.ones(2, dtype=torch.int64)}
    checkpoints.save(state, tmp_path / "x", shard_size=1)
    with checkpoints.open(tmp_path / "x" / "model.safetensors.index.json") as checkpoint:
        assert torch.equal(checkpoint["a"], state["a"])
    with (
        (tmp_path / "x" / "model-00001-of-00002.safetensors").open("rb") as file,
        checkpoints.open(file) as checkpoint,
    ):
        assert list(checkpoint) == ["a"]


def test_the_table_shows_each_tensor():
    with checkpoints.open(EXAMPLES / "ct_fp8_tensor") as checkpoint:
        text = repr(checkpoint.table())
        assert "lm_head.weight" in text
        assert "float-quantized tensor" in text
        rows = {row.name: row for row in checkpoint.table().rows}
        assert list(rows) == list(checkpoint)
        assert rows["lm_head.weight"].nbytes == 20 * 64 * 2
        assert rows["model.layers.0.self_attn.q_proj.weight"].nbytes == 48 * 64 + 2


def test_tensors_outlive_the_checkpoint():
    """Closing drops the map, and a tensor that was read keeps it."""
    with checkpoints.open(EXAMPLES / "ct_mxfp8") as checkpoint:
        name = next(iter(checkpoint))
        tensor, want = checkpoint[name], checkpoint.dense(name)
    assert torch.equal(tensor.dequantize(), want)
    with pytest.raises(checkpoints.CheckpointError, match="closed"):
        checkpoint[name]


def test_a_write_to_a_tensor_leaves_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    checkpoints.save({"a": torch.zeros(64)}, path)
    before = path.read_bytes()
    with checkpoints.open(path) as checkpoint:
        checkpoint["a"].fill_(1)
    assert path.read_bytes() == before


def test_dtype_leaves_factors_and_codes():
    path = EXAMPLES / "ct_fp8_tensor"
    state = checkpoints.load_state_dict(path, dtype=torch.float32)
    assert state["lm_head.weight"].dtype == torch.float32
    assert state["model.layers.0.self_attn.q_proj.input_scale"].dtype == torch.bfloat16
    weight = state["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(weight, qtensor.Float8Tensor)
    assert weight.dtype == torch.float32
