"""What is written is read back with the same bytes, in every layout and format."""

import json
import os

import pytest
import torch
from checkpoint_cases import EXAMPLES, assert_same_bytes, weight

import qtensor
from qtensor import checkpoints
from qtensor.checkpoints.containers.safetensors import SafetensorsWriter, TensorSpec

# (layout, format, options): one row for each format and option that a layout writes.
CASES = [
    ("qtensor", "fp8", {"columnwise": True}),
    ("qtensor", "fp8", {"dtype": "e5m2"}),
    ("qtensor", "fp8_rowwise", {"axis": 0}),
    ("qtensor", "fp8_blockwise", {"columnwise": True}),
    ("qtensor", "fp8_blockwise", {"block_scaling_dim": 2}),
    ("qtensor", "mxfp8", {"columnwise": True, "rowwise": False}),
    ("qtensor", "mxfp8", {"swizzled": True}),
    ("qtensor", "mxfp6", {"dtype": "e3m2", "packed": True}),
    ("qtensor", "mxfp6", {}),
    ("qtensor", "mxfp4", {"columnwise": True, "swizzled": True}),
    ("qtensor", "nvfp4", {"columnwise": True, "with_rht": True}),
    ("qtensor", "nvfp4", {"row_scaled": True}),
    ("qtensor", "nvfp4", {"use_4over6": True}),
    ("qtensor", "nvfp4", {"with_global_scale_inv": True}),
    ("compressed-tensors", "fp8", {}),
    ("compressed-tensors", "fp8_rowwise", {}),
    (
        "compressed-tensors",
        "fp8_blockwise",
        {"block_scaling_dim": 2, "force_pow_2_scales": False},
    ),
    ("compressed-tensors", "nvfp4", {}),
    ("compressed-tensors", "mxfp4", {}),
    ("compressed-tensors", "mxfp6", {"packed": True}),
    ("compressed-tensors", "mxfp8", {}),
    ("fine-grained-fp8", "fp8", {}),
    ("fine-grained-fp8", "fp8_blockwise", {"block_scaling_dim": 2, "force_pow_2_scales": False}),
    ("fine-grained-fp8", "mxfp8", {}),
    ("fine-grained-fp8", "mxfp4", {}),
    ("modelopt", "fp8", {}),
    ("modelopt", "fp8_rowwise", {}),
    ("modelopt", "fp8_blockwise", {"block_scaling_dim": 2, "force_pow_2_scales": False}),
    ("modelopt", "nvfp4", {}),
    ("modelopt", "mxfp8", {}),
    ("modelopt", "mxfp4", {}),
    ("fbgemm-fp8", "fp8_rowwise", {}),
    ("quark", "fp8", {}),
    ("quark", "fp8_rowwise", {}),
    ("quark", "fp8_blockwise", {"block_scaling_dim": 2, "force_pow_2_scales": False}),
    ("quark", "mxfp4", {}),
    ("quark", "mxfp6", {"packed": True}),
    ("quark", "mxfp6", {"packed": True, "dtype": "e3m2"}),
    ("comfyui", "fp8", {}),
    ("comfyui", "fp8", {"dtype": "e5m2"}),
    ("comfyui-scaled-fp8", "fp8", {}),
    ("comfyui-scaled-fp8", "fp8", {"dtype": "e5m2"}),
    ("mlx", "mxfp4", {}),
    ("mlx", "mxfp8", {}),
]
cases = pytest.mark.parametrize(
    ("layout", "fmt", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(v)
)


def state_of(fmt, options, dtype=torch.bfloat16):
    plain = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    return {
        "model.embed.weight": plain,
        "model.layers.0.up.weight": weight(fmt, nominal=dtype, **options),
        "model.layers.0.up.bias": plain[0],
        "model.layers.1.up.weight": weight(fmt, 130, 288, seed=2, nominal=dtype, **options),
    }


@cases
def test_round_trip(layout, fmt, options, tmp_path):
    """A state dict comes back with equal bytes, and so does every stored byte after that."""
    # An FP8 factor from a bfloat16 amax is a float32, and with it compressed-tensors' dtype.
    dtype = torch.float32 if layout == "compressed-tensors" and "fp8" in fmt else torch.bfloat16
    dtype = torch.bfloat16 if fmt.startswith("mx") else dtype
    state = state_of(fmt, options, dtype)
    checkpoints.save(state, tmp_path / "x", layout=layout, config={"torch_dtype": str(dtype)[6:]})
    back = checkpoints.load_state_dict(tmp_path / "x")
    assert back.keys() == state.keys()
    for name, want in state.items():
        assert_same_bytes(back[name], want)
    with checkpoints.open(tmp_path / "x") as checkpoint:
        assert checkpoint.layout == layout


SWIZZLED = [c for c in CASES if c[0] != "qtensor" and c[1].startswith(("mx", "nv"))]


@pytest.mark.parametrize(("layout", "fmt", "options"), SWIZZLED)
def test_swizzled_factors_are_written_plain(layout, fmt, options, tmp_path):
    """These layouts hold row-major factors, whatever order our tensor has."""
    for swizzled in (False, True):
        state = state_of(fmt, {**options, "swizzled": swizzled})
        checkpoints.save(state, tmp_path / f"{swizzled}", layout=layout)
    one, other = (tmp_path / f"{s}" / "model.safetensors" for s in (False, True))
    assert one.read_bytes() == other.read_bytes()


def test_bfloat16_factors_are_written_as_read(tmp_path):
    """A factor that the nominal dtype holds exactly is stored in it, as the origin does."""
    q = weight("fp8")
    buffers = [q.buffers()[0], torch.tensor([0.75])]
    q = q.quantizer.assemble(buffers, q.shape, torch.bfloat16)
    checkpoints.save({"x.weight": q}, tmp_path / "x", layout="compressed-tensors")
    with checkpoints.open(tmp_path / "x") as checkpoint:
        assert checkpoint.stored("x.weight")["scale"].dtype == torch.bfloat16
        assert_same_bytes(checkpoint["x.weight"], q)


@pytest.mark.parametrize("shape", [(48, 256), (1, 128)])
def test_groups_of_compressed_tensors(shape, tmp_path):
    """One factor for 128 columns; the transposed factors of a single row keep their strides."""
    q = weight("fp8_blockwise", *shape, nominal=torch.float32, force_pow_2_scales=False)
    checkpoints.save({"x.weight": q}, tmp_path / "x", layout="compressed-tensors")
    assert_same_bytes(checkpoints.load_state_dict(tmp_path / "x")["x.weight"], q)


def test_shards(tmp_path):
    """Shards hold whole weights and at most the size asked for; the index has every tensor."""
    state = {f"l{i}.weight": weight("mxfp8", 64, 64, seed=i) for i in range(6)}
    checkpoints.save(state, tmp_path / "x", shard_size="10KB")
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "x").glob("*.safetensors"))
    assert len(shards) == 3
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    per_weight = {}
    for stored, file in index["weight_map"].items():
        per_weight.setdefault(stored.rpartition(".")[0], set()).add(file)
    assert all(len(files) == 1 for files in per_weight.values())
    back = checkpoints.load_state_dict(tmp_path / "x")
    for name, want in state.items():
        assert_same_bytes(back[name], want)


def test_modules(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Linear(8, 4))
    model[0].weight = torch.nn.Parameter(qtensor.quantize(model[0].weight.detach(), "mxfp8"))
    checkpoints.save(model, tmp_path / "x.safetensors")
    state = checkpoints.load_state_dict(tmp_path / "x.safetensors")
    assert_same_bytes(state["0.weight"], model[0].weight.data)
    assert torch.equal(state["1.bias"], model[1].bias)


def test_an_existing_checkpoint_is_kept(tmp_path):
    checkpoints.save({"a": torch.ones(2)}, tmp_path / "x")
    before = (tmp_path / "x" / "model.safetensors").read_bytes()
    with pytest.raises(checkpoints.CheckpointError, match="overwrite=True"):
        checkpoints.save({"a": torch.zeros(2)}, tmp_path / "x")
    assert (tmp_path / "x" / "model.safetensors").read_bytes() == before
    checkpoints.save({"a": torch.zeros(2)}, tmp_path / "x", overwrite=True)
    assert not checkpoints.load_state_dict(tmp_path / "x")["a"].any()


def test_overwriting_shards_by_one_file_removes_the_index(tmp_path):
    checkpoints.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "x", shard_size=1)
    checkpoints.save({"c": torch.ones(2)}, tmp_path / "x", overwrite=True)
    assert list(checkpoints.load_state_dict(tmp_path / "x")) == ["c"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    """A full disk in the middle of the data: the old file stays, and no temporary one remains."""
    path = tmp_path / "x.safetensors"
    checkpoints.save({"a": torch.ones(1000)}, path)
    before, original = path.read_bytes(), os.pwrite

    def full(descriptor, data, offset):
        if offset:
            raise OSError(28, "No space left on device")
        return original(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(checkpoints.CheckpointError, match=r"No space left.*Free space"):
        checkpoints.save({"a": torch.zeros(1000)}, path, overwrite=True)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_writer_needs_every_tensor(tmp_path):
    specs = [TensorSpec("a", torch.float32, (2,)), TensorSpec("b", torch.uint8, (3,))]
    writer = SafetensorsWriter(tmp_path / "x.safetensors", specs)
    writer.write("a", torch.zeros(2))
    with pytest.raises(checkpoints.CheckpointError, match="every tensor of the header"):
        writer.close()
    assert not list(tmp_path.iterdir())


def test_the_package_safetensors_reads_what_we_write(tmp_path):
    load_file = pytest.importorskip("safetensors.torch", reason="an extra of the demo").load_file
    state = {
        "f4": torch.arange(6, dtype=torch.uint8).view(2, 3).view(torch.float4_e2m1fn_x2),
        "e8m0": torch.arange(4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "bool": torch.tensor([True, False]),
        "u16": torch.tensor([1, 65535], dtype=torch.uint16),
        "scalar": torch.tensor(3.0, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
    }
    checkpoints.save(state, tmp_path / "x.safetensors", layout="plain")
    theirs = load_file(tmp_path / "x.safetensors")
    ours = checkpoints.load_state_dict(tmp_path / "x.safetensors")
    for name, want in state.items():
        assert_same_bytes(ours[name], want)
        assert_same_bytes(theirs[name], want)


def test_dense_weights_are_not_written_silently(tmp_path):
    """A weight that only decodes is written if the caller decoded it."""
    path = EXAMPLES / "hf_fp8_experts"
    with (
        checkpoints.open(path) as checkpoint,
        pytest.raises(checkpoints.CheckpointError, match=r"32x32.*load_state_dict"),
    ):
        checkpoints.save(checkpoint, tmp_path / "x")
    checkpoints.save(checkpoints.load_state_dict(path), tmp_path / "x")


REFUSED = [
    ("compressed-tensors", "fp8_rowwise", {"axis": 0}, "factors belong to rows"),
    ("compressed-tensors", "fp8", {"dtype": "e5m2"}, "e4m3"),
    ("compressed-tensors", "mxfp8", {"columnwise": True, "rowwise": False}, "rowwise data"),
    ("compressed-tensors", "nvfp4", {"row_scaled": True}, "one factor"),
    ("compressed-tensors", "fp8_blockwise", {}, "whole groups of 128"),
    ("fine-grained-fp8", "nvfp4", {}, "fp8_blockwise"),
    ("fine-grained-fp8", "fp8_rowwise", {}, "holds fp8"),
    ("fine-grained-fp8", "fp8_blockwise", {}, "128x128"),
    ("modelopt", "mxfp6", {"packed": True}, "the layout holds fp8"),
    ("modelopt", "fp8_blockwise", {}, "128x128"),
    ("modelopt", "fp8_rowwise", {"axis": 0}, "belong to rows"),
    ("modelopt", "fp8", {"dtype": "e5m2"}, "e4m3"),
    ("modelopt", "nvfp4", {"row_scaled": True}, "one factor for a weight"),
    ("modelopt", "mxfp8", {"columnwise": True, "rowwise": False}, "rowwise data"),
    ("gpt-oss", "mxfp8", {}, "holds MXFP4"),
    ("gpt-oss", "mxfp4", {}, "stacked experts"),
    ("fbgemm-fp8", "fp8", {}, "factors of rows"),
    ("fbgemm-fp8", "fp8_rowwise", {"dtype": "e5m2"}, "e4m3"),
    ("fbgemm-fp8", "fp8_rowwise", {"axis": 0}, "factors of rows"),
    ("quark", "nvfp4", {}, "the layout holds fp4"),
    ("plain", "fp8", {}, "a factor of"),
    ("plain", "mxfp8", {}, "plain tensors, and fp8 with a factor of 1"),
    ("comfyui", "mxfp4", {}, "holds fp8"),
    ("comfyui", "fp8_rowwise", {}, "holds fp8"),
    ("comfyui", "nvfp4", {"row_scaled": True}, "one factor for the tensor"),
    ("comfyui", "nvfp4", {"with_rht": True, "rowwise": False, "columnwise": True}, "rowwise"),
    ("comfyui-scaled-fp8", "mxfp8", {}, "one for the file"),
    ("mlx", "fp8", {}, "mxfp4, mxfp8, nvfp4"),
    ("mlx", "mxfp8", {"dtype": "e5m2"}, "mxfp4, mxfp8, nvfp4"),
    ("mlx", "nvfp4", {}, "no factor of the tensor"),
    ("mlx", "mxfp4", {"columnwise": True, "rowwise": False}, "rowwise data"),
]


@pytest.mark.parametrize(("layout", "fmt", "options", "message"), REFUSED)
def test_what_a_layout_cannot_hold(layout, fmt, options, message, tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.save({"x.weight": weight(fmt, **options)}, tmp_path / "x", layout=layout)
    assert raised.value.tensor in ("x.weight", "")
    assert raised.value.layout == layout
    assert not (tmp_path / "x").exists()
