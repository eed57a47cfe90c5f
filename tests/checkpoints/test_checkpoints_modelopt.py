"""ModelOpt checkpoints: every algorithm, stacked experts, both configs, and what is refused."""

import json
import warnings

import numpy as np
import pytest
import torch
from checkpoint_cases import EXAMPLES, assert_same_bytes, assert_same_values, stored_bytes, weight

import qtensor
from qtensor import checkpoints
from tests.checkpoints.test_checkpoints_hostile import drop, put, write_example
from tests.checkpoints.test_checkpoints_variants import E2M1, E4M3, codes, every, low_first, powers

FP8 = torch.float8_e4m3fn
HF = "hf_quant_config.json"


def write(folder, tensors, algo=None, hf=None, **entry):
    """Open a folder with these tensors, a config of ``algo``, and hf_quant_config.json."""
    checkpoints.save(tensors, folder / "model.safetensors", layout="plain", overwrite=True)
    if algo is not None:
        entry = {"quant_method": "modelopt", "quant_algo": algo, **entry}
        (folder / "config.json").write_text(json.dumps({"quantization_config": entry}))
    if hf is not None:
        (folder / HF).write_text(json.dumps({"producer": {}, "quantization": hf}))
    return checkpoints.open(folder)


def in_dtype(data, factors, dtype):
    """Class D by its definition: element, factor and product are each rounded to ``dtype``."""
    elements = torch.from_numpy(E4M3[data.numpy()]).float().to(dtype)
    factors = torch.as_tensor(factors).float().to(dtype)
    exact = elements.double() * factors.double()  # at most 48 bits: exact
    return exact.float().to(dtype) if dtype == torch.bfloat16 else exact.to(dtype)


def nvfp4(data, scale, factor, size=16):
    """Class S in float32: f = fl(s * G), then fl(element * f); (E,) factors belong to experts."""
    elements = E2M1[low_first(data)].astype(np.float32)
    scale = E4M3[scale.view(torch.uint8).numpy()].astype(np.float32)
    factor = np.asarray(factor, dtype=np.float32)
    factor = factor.reshape(-1, 1, 1) if factor.size > 1 else factor.reshape(())
    return torch.from_numpy(elements * every(scale * factor, 1, size, elements.shape))


def factors(*shape):
    """Float32 factors of 24 random bits."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) + 0.01


FP8_CASES = [
    ("FP8", (48, 160), (), "fp8"),
    ("fp8", (48, 160), (1,), "fp8"),
    ("FP8_PER_CHANNEL_PER_TOKEN", (48, 160), (48,), "fp8_rowwise"),
    ("fp8_pb_wo", (256, 384), (2, 1, 3, 1), "fp8_blockwise"),
    ("FP8_PB_REAL", (256, 384), (2, 3), "fp8_blockwise"),
    ("FP8_PB_WO", (200, 300), (2, 3), "fp8_blockwise"),
    ("FP8_PB_WO", (128, 384), (3,), "fp8_blockwise"),
    ("FP8_PB_WO", (384, 128), (3,), "fp8_blockwise"),
    ("FP8_PB_WO", (128, 128), (), "fp8_blockwise"),
    ("FP8_PB_WO", (128, 384), (1, 1, 3, 1), "fp8_blockwise"),
]


@pytest.mark.parametrize(("algo", "shape", "scale_shape", "fmt"), FP8_CASES)
def test_fp8(algo, shape, scale_shape, fmt, tmp_path):
    """Factors are rounded to the dtype before the product."""
    data, scale = codes(*shape), factors(*scale_shape)
    tensors = {"a.weight": data.view(FP8), "a.weight_scale": scale, "a.input_scale": factors()}
    with write(tmp_path, tensors, algo) as checkpoint:
        spread = scale.reshape(()) if fmt == "fp8" else scale.reshape(-1, 1)
        if fmt == "fp8_blockwise":
            table = scale.reshape(-(-shape[0] // 128), -(-shape[1] // 128)).numpy()
            spread = every(table, 128, 128, shape)
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            want = in_dtype(data, spread, dtype)
            assert_same_values(checkpoint.dense("a.weight", dtype), want)
        assert checkpoint["a.weight"].quantizer.format == fmt
        ours = checkpoint["a.weight"].dequantize(torch.float32)
        assert_same_values(ours, in_dtype(data, spread, torch.float32))
        assert torch.equal(checkpoint["a.input_scale"], factors())


@pytest.mark.parametrize("algo", ["NVFP4", "w4a16_nvfp4", "NVFP4_SVD", "NVFP4_AWQ"])
def test_nvfp4(algo, tmp_path):
    """A K of 152 has a last block of 8; most factors of 24 bits need their own decode factor."""
    data, scale = codes(48, 76), codes(48, 10, below=127).view(FP8)
    tensors = {}
    for i, factor in enumerate(factors(20)):
        tensors |= {f"{i}.weight": data, f"{i}.weight_scale": scale, f"{i}.weight_scale_2": factor}
    with write(tmp_path, tensors, algo) as checkpoint:
        stored = 0
        for i, factor in enumerate(factors(20)):
            want = nvfp4(data, scale, factor)
            assert_same_values(checkpoint.dense(f"{i}.weight", torch.float32), want)
            assert_same_values(checkpoint.dense(f"{i}.weight"), want.bfloat16())
            tensor = checkpoint[f"{i}.weight"]
            stored += tensor.quantizer.with_global_scale_inv
            torch.testing.assert_close(tensor.dequantize(torch.float32), want, rtol=2**-22, atol=0)
        assert 0 < stored < 20
        checkpoints.save(checkpoint, tmp_path / "x", layout="modelopt")
    assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "model.safetensors")


def test_nvfp4_in_groups_of_32(tmp_path):
    data, scale, factor = codes(48, 80), codes(48, 5, below=127).view(FP8), factors()
    tensors = {"a.weight": data, "a.weight_scale": scale, "a.weight_scale_2": factor}
    want = nvfp4(data, scale, factor, 32)
    with write(tmp_path, tensors, "W4A8_NVFP4_FP8") as checkpoint:
        assert_same_values(checkpoint.dense("a.weight", torch.float32), want)
        assert_same_values(checkpoint["a.weight"], want.bfloat16())
        assert "groups of 32" in checkpoint.why_dense("a.weight")
    with write(tmp_path, tensors, "NVFP4", group_size=32) as checkpoint:
        assert_same_values(checkpoint.dense("a.weight", torch.float32), want)
        assert "groups of 32" in checkpoint.why_dense("a.weight")


@pytest.mark.parametrize("algo", ["MXFP8", "mxfp4", "W4A8_MXFP4_FP8"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mx(algo, dtype, tmp_path):
    data, scale = codes(48, 160), codes(48, 5, below=140)
    if algo != "MXFP8":
        data = codes(48, 80)
    stored = data.view(FP8) if algo == "MXFP8" else data
    tensors = {"a.weight": stored, "a.weight_scale": scale.view(dtype)}
    with write(tmp_path, tensors, algo) as checkpoint:
        elements = E4M3[data.numpy()] if algo == "MXFP8" else E2M1[low_first(data)]
        want = torch.from_numpy(elements * every(powers(scale), 1, 32, (48, 160)))
        for kind in (torch.bfloat16, torch.float32):
            assert_same_values(checkpoint.dense("a.weight", kind), want.float().to(kind))
            ours = checkpoint["a.weight"].dequantize(kind)
            assert_same_values(ours, want.float().to(kind))
        assert checkpoint["a.weight"].quantizer.format == ("mxfp8" if algo == "MXFP8" else "mxfp4")


def turned(tensor):
    return tensor.transpose(1, 2).contiguous()


EXPERTS = [(), (1,), (3,)]


@pytest.mark.parametrize("factor_shape", EXPERTS)
def test_nvfp4_experts(factor_shape, tmp_path):
    """Packing and blocks run along the middle dim: byte row i holds the K indexes 2i and 2i + 1."""
    data, scale = codes(3, 24, 40), codes(3, 24, 5, below=127).view(FP8)
    factor, name = factors(*factor_shape), "mlp.experts.gate_up_proj"
    tensors = {
        name: turned(data),
        f"{name}_weight_scale": turned(scale),
        f"{name}_weight_scale_2": factor,
        f"{name}_input_scale": factors(),
        f"{name}_bias": torch.ones(3, 24, dtype=torch.bfloat16),
    }
    with write(tmp_path, tensors, "NVFP4") as checkpoint:
        want = turned(nvfp4(data, scale, factor))
        assert_same_values(checkpoint.dense(name, torch.float32), want)
        assert_same_values(checkpoint.dense(name), want.bfloat16())
        tensor, group = checkpoint[name], checkpoint.groups[name]
        assert (tensor.shape, group.shape, group.transposed) == ((3, 24, 80), (3, 80, 24), True)
        ours = turned(tensor.dequantize(torch.float32))
        torch.testing.assert_close(ours, want, rtol=2**-22, atol=0)
        assert tensor.quantizer.row_scaled == (factor_shape == (3,))
        checkpoints.save(checkpoint, tmp_path / "x", layout="modelopt")
        assert (
            checkpoints.load_state_dict(tmp_path, dtype=torch.bfloat16)[f"{name}_input_scale"].dtype
            == torch.float32
        )
    written, original = stored_bytes(tmp_path / "x"), stored_bytes(tmp_path / "model.safetensors")
    assert written.keys() == original.keys()
    assert {k: v[2] for k, v in written.items()} == {k: v[2] for k, v in original.items()}


def test_experts_with_equal_factors_keep_them(tmp_path):
    """Three equal factors stay three."""
    state = {"experts.down_proj": codes(3, 40, 24)}
    state["experts.down_proj_weight_scale"] = codes(3, 5, 24, below=127).view(FP8)
    state["experts.down_proj_weight_scale_2"] = torch.full((3,), 0.5)
    with write(tmp_path, state, "NVFP4") as checkpoint:
        checkpoints.save(checkpoint, tmp_path / "x", layout="modelopt")
    assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "model.safetensors")


def test_fp8_experts(tmp_path):
    """One factor has no blocks, so the tensor keeps the orientation of the file."""
    data, scale = codes(3, 40, 24), factors()
    tensors = {"experts.down_proj": data.view(FP8), "experts.down_proj_weight_scale": scale}
    with write(tmp_path, tensors, "FP8") as checkpoint:
        for dtype in (torch.bfloat16, torch.float32):
            want = in_dtype(data, scale, dtype)
            assert_same_values(checkpoint.dense("experts.down_proj", dtype), want)
        ours = checkpoint["experts.down_proj"].dequantize(torch.float32)
        assert_same_values(ours, want)
        checkpoints.save(checkpoint, tmp_path / "x", layout="modelopt")
    assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "model.safetensors")


@pytest.mark.parametrize("algo", ["MXFP4", "MXFP8"])
def test_mx_experts(algo, tmp_path):
    data, scale = codes(3, 24, 32 if algo == "MXFP4" else 64), codes(3, 24, 2, below=140)
    elements = E2M1[low_first(data)] if algo == "MXFP4" else E4M3[data.numpy()]
    stored = turned(data) if algo == "MXFP4" else turned(data).view(FP8)
    tensors = {"experts.up_proj": stored, "experts.up_proj_weight_scale": turned(scale)}
    with write(tmp_path, tensors, algo) as checkpoint:
        want = torch.from_numpy(elements * every(powers(scale), 1, 32, (3, 24, 64))).float()
        assert_same_values(checkpoint.dense("experts.up_proj", torch.float32), turned(want))
        assert_same_values(checkpoint["experts.up_proj"].dequantize(torch.float32), want)
        checkpoints.save(checkpoint, tmp_path / "x", layout="modelopt")
    assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "model.safetensors")


LISTED = {
    "a": {"quant_algo": "fp8"},
    "b": {"quant_algo": "NVFP4", "group_size": 16},
    "experts": {"quant_algo": "NVFP4", "group_size": 16},
    "tower.*": {"quant_algo": "MXFP8"},
    "absent": {"quant_algo": "MXFP4"},
}


def mixed():
    return {
        "a.weight": codes(48, 160).view(FP8),
        "a.weight_scale": factors(),
        "b.weight": codes(48, 80),
        "b.weight_scale": codes(48, 10, below=127).view(FP8),
        "b.weight_scale_2": factors(),
        "experts.0.weight": codes(48, 80),
        "experts.0.weight_scale": codes(48, 10, below=127).view(FP8),
        "experts.0.weight_scale_2": factors(),
        "tower.0.weight": codes(48, 160).view(FP8),
        "tower.0.weight_scale": codes(48, 5, below=140),
        "c.weight": torch.ones(4, 4, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("where", ["config", "hf", "both"])
def test_mixed_precision(where, tmp_path):
    """Each module has its own algorithm, in either file; one that is not listed is dense."""
    hf = {"quant_algo": "MIXED_PRECISION", "quantized_layers": LISTED, "exclude_modules": []}
    algo = None if where == "hf" else "mixed_precision"
    layers = {} if where == "hf" else {"quantized_layers": LISTED}
    with write(
        tmp_path, mixed(), algo, hf if where != "config" else None, ignore=[], **layers
    ) as checkpoint:
        kinds = {row.name: row.kind for row in checkpoint.table().rows}
        assert kinds == {
            "a.weight": "fp8",
            "b.weight": "nvfp4",
            "experts.0.weight": "nvfp4",
            "tower.0.weight": "mxfp8",
            "c.weight": "plain",
        }
        checkpoints.save(checkpoint, tmp_path / "x", layout="modelopt")
    with checkpoints.open(tmp_path / "x") as copy:
        assert {row.name: row.kind for row in copy.table().rows} == kinds
        entry = copy.config["quantization_config"]
        assert entry["quant_algo"] == "MIXED_PRECISION"
        assert entry["quantized_layers"]["b"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "model.safetensors")


def test_hf_quant_config_alone(tmp_path):
    """Older exports wrote nothing into config.json."""
    source = EXAMPLES / "modelopt_nvfp4"
    for name in ("model.safetensors", HF):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    with checkpoints.open(source) as first, checkpoints.open(tmp_path) as second:
        assert second.layout == "modelopt"
        assert list(first) == list(second)
        for name in first.groups:
            assert_same_bytes(first[name], second[name])


CONFIGS = [
    # quant_algo of config.json, more of it, the other file, the error
    ("NVFP4", {}, {"quant_algo": "FP8"}, r"give one quant_algo; got 'NVFP4' and 'FP8'"),
    ("NVFP4", {"group_size": 16}, {"quant_algo": "NVFP4", "group_size": 32}, "one group_size"),
    ("MIXED_PRECISION", {"quantized_layers": {"a": {"quant_algo": "FP8"}}},
     {"quantized_layers": {"a": {"quant_algo": "MXFP8"}}}, "one quantized_layers"),
    ("MIXED_PRECISION", {}, None, "has quantized_layers"),
    ("MIXED_PRECISION", {"quantized_layers": {"a": {"quant_algo": "W4A16_AWQ"}}}, None,
     r"'W4A16_AWQ' of module a"),
    ("MIXED_PRECISION", {"quantized_layers": {"b": {"quant_algo": "NVFP4"}}}, None,
     "does not list is dense"),
    ("MIXED_PRECISION", {"quantized_layers": [1]}, None, "maps modules to objects"),
    ("INT4_AWQ", {}, None, r"read are FP8.*got quant_algo 'INT4_AWQ'"),
    ("W8A8_SQ_PER_CHANNEL", {}, None, "W8A8_SQ_PER_CHANNEL"),
    ("NVFP4", {"group_size": 64}, None, "16 or 32; got 64"),
    ("NVFP4", {"group_size": "16"}, None, "16 or 32"),
    ("MXFP8", {"group_size": 16}, None, "is 32; got 16"),
    ("NVFP4", {"group_size": 32}, None, r"needs F8_E4M3 of shape \[48, 5\]"),
    ("FP8", {}, None, "FP8 weight needs F8_E4M3.*got U8"),
    ("MXFP4", {}, None, r"needs U8 or F8_E8M0 of shape \[48, 5\]"),
    (None, {}, {"quant_algo": None}, "names the quant_algo"),
    ("NVFP4", {}, [], "has an object 'quantization'"),
]  # fmt: skip


@pytest.mark.parametrize(("algo", "more", "hf", "message"), CONFIGS)
def test_configs_that_are_refused(algo, more, hf, message, tmp_path):
    tensors = {
        "a.weight": codes(48, 80),
        "a.weight_scale": codes(48, 10, below=127).view(FP8),
        "a.weight_scale_2": factors(),
    }
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        write(tmp_path, tensors, algo, hf, **more)
    assert raised.value.layout == "modelopt"
    assert str(tmp_path) in raised.value.file


def change_algo(name):
    def change(tensors, config):
        config["quantization_config"].update(quant_algo=name, config_groups={})

    return change


BROKEN = [
    ("modelopt_fp8", drop("q_proj.weight_scale"), "has a weight_scale"),
    ("modelopt_fp8", drop("q_proj.weight"), "a factor has a weight"),
    ("modelopt_fp8", put("weight_scale", lambda t: t.bfloat16()), "needs F32"),
    ("modelopt_fp8", put("weight_scale", lambda t: t.repeat(64)), r"shape \[\] or \[1\]"),
    ("modelopt_fp8", put("q_proj.weight", lambda t: t.view(torch.float8_e5m2)), "needs F8_E4M3"),
    ("modelopt_mxfp8", put("weight", lambda t: t.view(torch.uint8)), "needs F8_E4M3"),
    ("modelopt_mxfp8", put("weight_scale", lambda t: t[:, :1]), r"\[64, 2\]"),
    ("modelopt_mxfp8", put("weight_scale", lambda t: t.float()), "needs U8"),
    ("modelopt_nvfp4", drop("weight_scale"), "has a weight_scale"),
    ("modelopt_nvfp4", drop("weight_scale_2"), "has a weight_scale_2"),
    ("modelopt_nvfp4", drop("down_proj.weight"), "a factor has a weight"),
    # The padded and swizzled size: 128 rows, four columns.
    (
        "modelopt_nvfp4",
        put("down_proj.weight_scale", lambda t: torch.zeros(128, 4).to(FP8)),
        r"shape \[64, 3\]; got F8_E4M3 of shape \[128, 4\]",
    ),
    ("modelopt_nvfp4", put("weight_scale_2", lambda t: t.repeat(2)), r"shape \[\] or \[1\]"),
    ("modelopt_nvfp4", put("proj.weight", lambda t: t[None]), "2-D"),
    ("modelopt_llama4_experts_nvfp4", drop("down_proj_weight_scale"), "has a weight_scale"),
    ("modelopt_llama4_experts_nvfp4", drop("down_proj_weight_scale_2"), "has a weight_scale_2"),
    ("modelopt_llama4_experts_nvfp4", drop("down_proj"), "a factor has a weight"),
    (
        "modelopt_llama4_experts_nvfp4",
        put("down_proj_weight_scale", turned),
        r"needs F8_E4M3 of shape \[2, 3, 64\]",
    ),
    ("modelopt_llama4_experts_nvfp4", change_algo("FP8_PB_WO"), "stacked experts are"),
]


@pytest.mark.parametrize(("name", "change", "message"), BROKEN)
def test_examples_that_do_not_fit_their_config(name, change, message, tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.open(write_example(tmp_path, name, change))
    assert raised.value.layout == "modelopt"
    assert raised.value.tensor


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_a_tensor_factor_that_was_never_calibrated(value, tmp_path):
    change = put("weight_scale_2", lambda t: torch.full_like(t, value))
    with checkpoints.open(write_example(tmp_path, "modelopt_nvfp4", change)) as checkpoint:
        name = "model.layers.0.mlp.down_proj.weight"
        for read in (checkpoint.dense, checkpoint.__getitem__):
            with pytest.raises(checkpoints.CheckpointError, match="finite and not") as raised:
                read(name)
            assert raised.value.tensor == f"{name}_scale_2"


def test_a_tensor_factor_of_zero_is_a_weight_of_zeros(tmp_path):
    change = put("weight_scale_2", torch.zeros_like)
    with checkpoints.open(write_example(tmp_path, "modelopt_nvfp4", change)) as checkpoint:
        name = "model.layers.0.mlp.down_proj.weight"
        assert not checkpoint.dense(name).any()
        assert not checkpoint[name].dequantize().any()


def test_pre_quant_scale_is_kept_and_told(tmp_path):
    """AWQ's factor of the activations is not folded into the weight."""
    tensors = {
        "a.weight": codes(48, 80),
        "a.weight_scale": codes(48, 10, below=127).view(FP8),
        "a.weight_scale_2": factors(),
        "a.pre_quant_scale": torch.rand(160, dtype=torch.float32) + 0.5,
    }
    with pytest.warns(UserWarning, match=r"1 weights have a pre_quant_scale.*activations"):
        checkpoint = write(tmp_path, tensors, "NVFP4_AWQ")
    with checkpoint:
        want = nvfp4(tensors["a.weight"], tensors["a.weight_scale"], tensors["a.weight_scale_2"])
        assert_same_values(checkpoint.dense("a.weight", torch.float32), want)
        assert torch.equal(checkpoint["a.pre_quant_scale"], tensors["a.pre_quant_scale"])
        assert "pre_quant_scale" in repr(checkpoint.table())
        checkpoints.save(checkpoint, tmp_path / "x", layout="modelopt")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4_AWQ"
    tensors["a.pre_quant_scale"] = torch.ones(80)
    with pytest.raises(checkpoints.CheckpointError, match=r"of 160 inputs needs .*\[160\]"):
        write(tmp_path, tensors, "NVFP4_AWQ")


@pytest.mark.parametrize("prefix", ["a.", "a.weight_quantizer._"])
def test_svdquant_is_no_plain_weight(prefix, tmp_path):
    """The weight is the decoded part plus b @ a; the other weights are read."""
    tensors = {}
    for name in "ab":
        tensors[f"{name}.weight"] = codes(48, 80)
        tensors[f"{name}.weight_scale"] = codes(48, 10, below=127).view(FP8)
        tensors[f"{name}.weight_scale_2"] = factors()
    tensors[f"{prefix}svdquant_lora_a"] = torch.ones(4, 160)
    tensors[f"{prefix}svdquant_lora_b"] = torch.ones(48, 4)
    with write(tmp_path, tensors, "NVFP4_SVD") as checkpoint:
        for read in (checkpoint.dense, checkpoint.__getitem__):
            with pytest.raises(checkpoints.CheckpointError, match=r"svdquant_lora.*b @ a"):
                read("a.weight")
        assert checkpoint["b.weight"].quantizer.format == "nvfp4"
        assert {row.name: row.kind for row in checkpoint.table().rows}["a.weight"] == "unreadable"


@pytest.mark.parametrize("where", ["top", "text_config"])
def test_the_dtype_of_the_model(where, tmp_path):
    change = put("weight_scale_2", lambda t: t)
    folder = write_example(tmp_path, "modelopt_nvfp4", change)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float16"
    (folder / "config.json").write_text(
        json.dumps(config if where == "top" else {"text_config": config})
    )
    with checkpoints.open(folder) as checkpoint:
        name = "model.layers.0.mlp.down_proj.weight"
        assert checkpoint.dense(name).dtype == torch.float16
        assert checkpoint[name].dtype == torch.float16


def test_what_the_config_says_of_what_is_written(tmp_path):
    """vLLM asks for group_size, kv_cache_quant_algo and exclude_modules; null is legal."""
    state = {"a.weight": weight("nvfp4"), "a.input_scale": torch.tensor(0.5)}
    state |= {"lm_head.weight": torch.ones(4, 4), "k_proj.k_scale": torch.tensor(1.0)}
    checkpoints.save(state, tmp_path / "x", layout="modelopt")
    config = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4"
    assert (config["group_size"], config["ignore"]) == (16, ["lm_head"])
    assert config["kv_cache_scheme"]["num_bits"] == 8
    hf = json.loads((tmp_path / "x" / HF).read_text())
    assert hf["producer"]["name"] == "modelopt"
    assert hf["quantization"] == {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    checkpoints.save({"a.weight": weight("fp8")}, tmp_path / "y", layout="modelopt")
    hf = json.loads((tmp_path / "y" / HF).read_text())["quantization"]
    assert hf == {
        "quant_algo": "FP8",
        "group_size": None,
        "kv_cache_quant_algo": None,
        "exclude_modules": [],
    }


def test_four_over_six_is_written_with_its_factor(tmp_path):
    """G = fl(A / 1536)."""
    tensor = weight("nvfp4", use_4over6=True)
    checkpoints.save({"a.weight": tensor}, tmp_path / "x", layout="modelopt")
    with checkpoints.open(tmp_path / "x") as checkpoint:
        factor = checkpoint.stored("a.weight")["factor"]
        assert torch.equal(factor, (tensor.buffers()[2] / 1536).reshape(()))
        ours = checkpoint["a.weight"].dequantize(torch.float32)
        assert_same_values(ours, tensor.dequantize(torch.float32))


def test_experts_whose_rows_differ_are_refused(tmp_path):
    values = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    tensor = qtensor.quantize(values, "nvfp4", row_scaled=True)
    with pytest.raises(checkpoints.CheckpointError, match="each expert, has one finite amax"):
        checkpoints.save({"experts.up_proj": tensor}, tmp_path / "x", layout="modelopt")


def test_reading_without_awq_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.open(EXAMPLES / "modelopt_nvfp4").close()
