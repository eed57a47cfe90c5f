"""Configurations as other versions write them, and codes that a layout does not know."""

import json

import pytest
import torch
from checkpoint_cases import assert_same_values

from qtensor import checkpoints
from tests.checkpoints.test_checkpoints_variants import (
    E2M1,
    E2M3,
    codes,
    every,
    fp8_values,
    grid,
    low_first,
    powers,
    six_bits,
)

FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
FLOAT = {"type": "float", "num_bits": 8}


def write(folder, tensors, config):
    checkpoints.save(tensors, folder / "model.safetensors", layout="plain", overwrite=True)
    (folder / "config.json").write_text(json.dumps(config))
    return checkpoints.open(folder)


def compressed(folder, fmt, tensors, *groups, **top):
    """Open a compressed-tensors checkpoint; a group is (targets, weights)."""
    table = {
        f"group_{i}": {"targets": targets, "weights": weights}
        for i, (targets, weights) in enumerate(groups)
    }
    entry = {"quant_method": "compressed-tensors", "format": fmt, "config_groups": table, **top}
    return write(folder, tensors, {"quantization_config": entry})


def fp8(scale, *shape, name="a.weight", factor="_scale"):
    """Stored tensors of an FP8 weight."""
    return {name: codes(*shape).view(FP8), f"{name}{factor}": scale}


# ---- compressed-tensors

STRATEGIES = [
    ({"strategy": None}, (1,), "fp8"),
    ({}, (1,), "fp8"),
    ({"group_size": -1}, (130, 1), "fp8_rowwise"),
    ({"strategy": None, "group_size": 128}, (130, 3), "fp8_blockwise"),
    ({"strategy": "CHANNEL", "type": "FLOAT"}, (130, 1), "fp8_rowwise"),
    ({"strategy": "block", "block_structure": "128x128"}, (2, 3), "fp8_blockwise"),
    ({"strategy": "tensor", "num_bits": None}, (), "fp8"),
]


@pytest.mark.parametrize(("weights", "shape", "fmt"), STRATEGIES)
def test_strategies_as_the_origin_reads_them(weights, shape, fmt, tmp_path):
    """In any case, or inferred from the group size; the block size may be a text."""
    scale = grid(*shape)
    groups = ["Linear"], {**FLOAT, **weights}
    with compressed(tmp_path, "float-quantized", fp8(scale, 130, 300), groups) as checkpoint:
        assert checkpoint["a.weight"].quantizer.format == fmt
        factors = scale.double().numpy()
        if fmt == "fp8_blockwise":
            factors = every(factors, 128 if shape[0] == 2 else 1, 128, (130, 300))
        want = torch.from_numpy(fp8_values(codes(130, 300), factors)).float()
        assert_same_values(checkpoint.dense("a.weight"), want)


@pytest.mark.parametrize(
    ("fmt", "weights", "message"),
    [
        ("float-quantized", {"strategy": "channel", "num_bits": 4}, "8 bits; got 4"),
        ("mxfp8-quantized", {"strategy": "group", "group_size": 16}, "is 32; got 16"),
        ("nvfp4-pack-quantized", {"num_bits": 4, "group_size": 64}, "16 or 32; got 64"),
        ("float-quantized", {"strategy": "block", "block_structure": "128"}, "two positive"),
        ("float-quantized", {"strategy": "block", "block_structure": "axb"}, "two positive"),
        ("float-quantized", {"strategy": "token"}, "'token'"),
    ],
)
def test_schemes_that_contradict_themselves(fmt, weights, message, tmp_path):
    tensors = fp8(torch.ones(4, 1), 4, 32)
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        compressed(tmp_path, fmt, tensors, (["Linear"], {**FLOAT, **weights}))
    assert raised.value.layout == "compressed-tensors"


def test_a_group_of_activations_alone(tmp_path):
    """Its ``weights`` are null: attention, for example."""
    groups = (["LlamaAttention"], None), (["Linear"], {**FLOAT, "strategy": "tensor"})
    with compressed(tmp_path, "float-quantized", fp8(torch.ones(1), 4, 8), *groups) as checkpoint:
        assert checkpoint["a.weight"].quantizer.format == "fp8"


def test_a_class_is_the_default_of_names(tmp_path):
    """Both blocks fit; a name or a pattern comes before ``Linear``."""
    block = {**FLOAT, "strategy": "block"}
    groups = (
        (["Linear"], {**block, "block_structure": [64, 64]}),
        (["re:.*b$"], {**block, "block_structure": [128, 128]}),
    )
    tensors = fp8(grid(1, 1), 64, 64) | fp8(grid(1, 1), 64, 64, name="b.weight")
    with compressed(tmp_path, "float-quantized", tensors, *groups) as checkpoint:
        assert "64x64" in checkpoint.why_dense("a.weight")
        assert checkpoint["b.weight"].quantizer.format == "fp8_blockwise"


def test_nvfp4_in_groups_of_32(tmp_path):
    """Dense only: fl(element * fl(s / g))."""
    data, scale = codes(5, 32), codes(5, 2, below=127).view(FP8)
    tensors = {"a.weight_packed": data, "a.weight_scale": scale}
    tensors["a.weight_global_scale"] = torch.tensor([777.7])
    weights = {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 32}
    with compressed(tmp_path, "nvfp4-pack-quantized", tensors, (["Linear"], weights)) as checkpoint:
        factors = every((scale.float() / tensors["a.weight_global_scale"]).numpy(), 1, 32, (5, 64))
        want = torch.from_numpy(E2M1[low_first(data)].astype("float32") * factors).bfloat16()
        assert_same_values(checkpoint["a.weight"], want)
        assert "groups of 32" in checkpoint.why_dense("a.weight")


@pytest.mark.parametrize("cols", [32, 48, 96])
def test_fp6_whose_last_block_is_short(cols, tmp_path):
    data, scale = codes(5, cols * 3 // 4), codes(5, -(-cols // 32), below=140)
    tensors = {"a.weight_packed": data, "a.weight_scale": scale}
    weights = {**FLOAT, "num_bits": 6, "strategy": "group", "group_size": 32}
    with compressed(tmp_path, "mxfp6-pack-quantized", tensors, (["Linear"], weights)) as checkpoint:
        values = E2M3[six_bits(data)] * every(powers(scale), 1, 32, (5, cols))
        want = torch.from_numpy(values).float().bfloat16()
        assert_same_values(checkpoint.dense("a.weight"), want)
        assert_same_values(checkpoint["a.weight"].dequantize(), want)


def test_a_missing_global_scale_is_named(tmp_path):
    tensors = {"a.weight_packed": codes(3, 24), "a.weight_scale": codes(3, 3).view(FP8)}
    weights = {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    with pytest.raises(checkpoints.CheckpointError, match="has a weight_global_scale; got none"):
        compressed(tmp_path, "nvfp4-pack-quantized", tensors, (["Linear"], weights))


LAYOUTS = {
    "compressed-tensors": {
        "format": "float-quantized",
        "config_groups": {
            "g": {"targets": ["Linear"], "weights": {**FLOAT, "strategy": "tensor"}},
        },
    },
    "fp8": {"weight_block_size": None},
    "modelopt": {"quant_algo": "FP8"},
    "quark": {"global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
    "fbgemm_fp8": {},
    "mxfp4": {},
}


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8", "quark", "fbgemm_fp8"])
def test_a_model_that_is_one_module(method, tmp_path):
    """Its tensors have no prefix: ``weight``."""
    factor = "_scale_inv" if method == "fp8" else "_scale"
    scale = grid(4, 1) if method == "fbgemm_fp8" else torch.tensor(0.75)
    entry = {"quant_method": method, **LAYOUTS[method]}
    state = fp8(scale, 4, 8, name="weight", factor=factor)
    with write(tmp_path, state, {"quantization_config": entry}) as checkpoint:
        want = torch.from_numpy(fp8_values(codes(4, 8), scale.double().numpy())).float()
        assert_same_values(checkpoint.dense("weight", torch.float32), want)
        assert list(checkpoint) == ["weight"]


# ---- codes that no group takes would pass as plain values

LEFT = {
    "float8 experts": {"experts.gate_up_proj": codes(2, 4, 8).view(FP8)},
    "e5m2": {"b.weight": codes(4, 8).view(torch.float8_e5m2)},
    "packed experts of ModelOpt": {
        "experts.gate_up_proj": codes(2, 32, 8),
        "experts.gate_up_proj_weight_scale_x": codes(2, 2, 8),
    },
    "packed FP4": {"b.weight": codes(4, 8), "b.scale": codes(4, 1).view(E8M0)},
    "an E8M0 factor alone": {"b.weight_scales": codes(4, 8).view(E8M0)},
}


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("method", LAYOUTS)
def test_codes_are_never_plain(method, left, tmp_path):
    entry = {"quant_method": method, **LAYOUTS[method]}
    with pytest.raises(checkpoints.CheckpointError) as raised:
        write(tmp_path, LEFT[left], {"quantization_config": entry})
    assert raised.value.tensor in LEFT[left]
    assert raised.value.layout
    assert "; got " in str(raised.value)


@pytest.mark.parametrize("method", LAYOUTS)
def test_other_bytes_pass(method, tmp_path):
    """Extra states, tables of integers, float factors of modules that are not weights."""
    state = {
        "a._extra_state": codes(20),
        "position_ids": torch.arange(6).reshape(2, 3),
        "mask": codes(3, 3),
        "norm.scale": torch.ones(3),
        "a.weight": torch.ones(2, 3, dtype=torch.bfloat16),
    }
    entry = {"quant_method": method, **LAYOUTS[method]}
    with write(tmp_path, state, {"quantization_config": entry}) as checkpoint:
        assert set(checkpoint) == set(state)
        assert not checkpoint.groups


# ---- fine-grained FP8


@pytest.mark.parametrize(
    ("scale", "fmt"), [(grid(2, 2), "fp8_blockwise"), (grid(), "fp8"), (grid(1), "fp8")]
)
def test_no_block_size_in_the_config(scale, fmt, tmp_path):
    """Its default in transformers is 128x128; one factor is one of the tensor."""
    state = fp8(scale, 200, 150, factor="_scale_inv")
    with write(tmp_path, state, {"quantization_config": {"quant_method": "fp8"}}) as checkpoint:
        assert checkpoint["a.weight"].quantizer.format == fmt
    state = fp8(grid(3, 3), 200, 150, factor="_scale_inv")
    with pytest.raises(checkpoints.CheckpointError, match="128x128 needs"):
        write(tmp_path, state, {"quantization_config": {"quant_method": "fp8"}})


@pytest.mark.parametrize("block", [{}, {"weight_block_size": None}, {"weight_block_size": [1, 32]}])
def test_the_method_mxfp8(block, tmp_path):
    state = fp8(codes(4, 3, below=140), 4, 96, factor="_scale_inv")
    entry = {"quant_method": "mxfp8", **block}
    with write(tmp_path, state, {"quantization_config": entry}) as checkpoint:
        assert checkpoint["a.weight"].quantizer.format == "mxfp8"


EXPERTS = [("fp4", None, True), (None, "fp4", True), ("fp8", "fp4", True), (None, None, True)]
EXPERTS += [("fp8", None, False), (None, "fp8", False), ("int4", None, False)]


@pytest.mark.parametrize(("here", "top", "legal"), EXPERTS)
def test_the_dtype_of_experts(here, top, legal, tmp_path):
    """Transformers writes its default "fp8" into the entry, and DeepSeek "fp4" at the top."""
    entry = {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": here}
    state = {"e.weight": codes(4, 48).view(torch.int8), "e.scale": codes(4, 3).view(E8M0)}
    config = {"quantization_config": entry, "expert_dtype": top}
    if legal:
        with write(tmp_path, state, config) as checkpoint:
            assert checkpoint["e.weight"].quantizer.format == "mxfp4"
        return
    with pytest.raises(checkpoints.CheckpointError, match="packed FP4") as raised:
        write(tmp_path, state, config)
    assert raised.value.tensor == "e.weight"


def test_elements_other_than_e4m3_are_refused(tmp_path):
    entry = {"quant_method": "fp8", "weight_block_size": None, "fmt": "e5m2"}
    with pytest.raises(checkpoints.CheckpointError, match="'e5m2'"):
        write(tmp_path, fp8(grid(), 4, 8, factor="_scale_inv"), {"quantization_config": entry})


# ---- Quark

QUARK = {"quant_method": "quark", **LAYOUTS["quark"]}


def test_fake_quantized_weights_keep_their_factors(tmp_path):
    """The tensors are dense, whatever lies beside them."""
    state = {"a.weight": torch.randn(4, 8).bfloat16(), "a.weight_scale": torch.tensor(0.5)}
    entry = {**QUARK, "export": {"weight_format": "fake_quantized"}}
    with write(tmp_path, state, {"quantization_config": entry}) as checkpoint:
        assert not checkpoint.groups
        for name, tensor in state.items():
            assert torch.equal(checkpoint[name], tensor)


@pytest.mark.parametrize("last", ["weight_zero_point_2", "input_scale_2", "output_zero_point_2"])
def test_two_levels_are_refused(last, tmp_path):
    state = fp8(torch.tensor(0.5), 4, 8) | {f"a.{last}": torch.tensor(1.0)}
    with pytest.raises(checkpoints.CheckpointError, match=f"one level .*{last}") as raised:
        write(tmp_path, state, {"quantization_config": QUARK})
    assert raised.value.tensor == "a.weight"


# ---- where the entry is


def test_an_entry_without_a_method_gives_way(tmp_path):
    """Of an empty entry and one of the language model, the one that says a method counts."""
    entry = {"quant_method": "modelopt", "quant_algo": "FP8"}
    inner = {"dtype": "float16", "quantization_config": entry}
    for outer in ({}, {"bits": 8}, None):
        config = {"quantization_config": outer, "text_config": inner}
        with write(tmp_path, fp8(torch.tensor(0.5), 4, 8), config) as checkpoint:
            assert checkpoint.layout == "modelopt"
            assert checkpoint["a.weight"].dtype == torch.float16


def test_hf_quant_config_beside_an_entry_without_a_method(tmp_path):
    text = {"quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(text))
    config = {"quantization_config": {"quant_method": None, "quant_algo": "FP8"}}
    with write(tmp_path, fp8(torch.tensor(0.5), 4, 8), config) as checkpoint:
        assert checkpoint.layout == "modelopt"


def test_a_float8_model_has_a_wider_nominal_dtype(tmp_path):
    state = {"a.weight": codes(4, 8).view(FP8)}
    with write(tmp_path, state, {"torch_dtype": "float8_e4m3fn"}) as checkpoint:
        assert checkpoint["a.weight"].dtype == torch.bfloat16
