"""Quark checkpoints: every scheme, where the config gives it, and what is refused."""

import json

import numpy as np
import pytest
import torch
from checkpoint_cases import EXAMPLES, assert_same_values, stored_bytes, weight

from qtensor import checkpoints
from tests.checkpoints.test_checkpoints_hostile import drop, put, write_example
from tests.checkpoints.test_checkpoints_variants import (
    E2M1,
    E2M3,
    check,
    codes,
    every,
    fp8_values,
    grid,
    low_first,
    powers,
    six_bits,
)

FP8 = torch.float8_e4m3fn
E3M2 = [m / 16 for m in range(4)]
E3M2 += [2.0 ** (e - 3) * (1 + m / 4) for e in range(1, 8) for m in range(4)]
E3M2 = np.array(E3M2 + [-x for x in E3M2])
MX = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1}
FP4, E2M3_6, E3M2_6 = ({"dtype": name, **MX} for name in ("fp4", "fp6_e2m3", "fp6_e3m2"))
TENSOR = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
ROWS = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}
BLOCKS = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}


def write(folder, tensors, scheme, **entry):
    checkpoints.save(tensors, folder / "model.safetensors", layout="plain", overwrite=True)
    entry = {"quant_method": "quark", "global_quant_config": {"weight": scheme}, **entry}
    (folder / "config.json").write_text(json.dumps({"quantization_config": entry}))
    return checkpoints.open(folder)


def mx(table, width, read):
    """Stored tensors and values of a weight (48, 160)."""
    data, scale = codes(48, width), codes(48, 5, below=255)
    scale[0, :2] = torch.tensor([0, 127])
    values = table[read(data)] * every(powers(scale), 1, 32, (48, 160))
    return {"a.weight": data, "a.weight_scale": scale}, values


MX_CASES = [
    (FP4, E2M1, 80, low_first, "mxfp4"),
    (E2M3_6, E2M3, 120, six_bits, "mxfp6(packed=True)"),
    (E3M2_6, E3M2, 120, six_bits, "mxfp6(dtype=e3m2,packed=True)"),
]


@pytest.mark.parametrize(("scheme", "table", "width", "read", "canonical"), MX_CASES)
@pytest.mark.parametrize("method", ["reorder", "order"])
def test_mx(scheme, table, width, read, canonical, method, tmp_path):
    """The order of packing changes nothing, and the code 0 is 2^-127."""
    tensors, values = mx(table, width, read)
    with write(tmp_path, tensors, scheme, export={"pack_method": method}) as checkpoint:
        assert checkpoint["a.weight"].quantizer.canonical == canonical
        check(checkpoint, "a.weight", values, canonical.partition("(")[0], (torch.float32,))
        bf16 = torch.from_numpy(values).float().bfloat16()
        assert_same_values(checkpoint.dense("a.weight"), bf16)
        checkpoints.save(checkpoint, tmp_path / "x", layout="quark")
    assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "model.safetensors")


FP8_CASES = [
    (TENSOR, (48, 160), (), "fp8"),
    (TENSOR, (48, 160), (1,), "fp8"),
    (ROWS, (48, 160), (48,), "fp8_rowwise"),
    (BLOCKS, (256, 384), (2, 3), "fp8_blockwise"),
    (BLOCKS, (192, 160), (2, 2), "fp8_blockwise"),
    ({**BLOCKS, "block_size": [64, 32]}, (100, 160), (2, 5), None),
]


@pytest.mark.parametrize(("scheme", "shape", "scale_shape", "fmt"), FP8_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8(scheme, shape, scale_shape, fmt, dtype, tmp_path):
    """The grid of a ragged weight is rounded up: 192 rows are 128 and 64, not 96 and 96."""
    data, scale = codes(*shape), grid(*scale_shape).bfloat16().to(dtype)
    factors = scale.double().numpy()
    if fmt == "fp8_rowwise":
        factors = factors[:, None]
    elif scheme["qscheme"] == "per_block":
        factors = every(factors, *scheme["block_size"], shape)
    tensors = {"a.weight": data.view(FP8), "a.weight_scale": scale}
    tensors |= {"a.input_scale": torch.tensor(0.5), "a.output_scale": torch.tensor(2.0)}
    with write(tmp_path, tensors, scheme) as checkpoint:
        check(checkpoint, "a.weight", fp8_values(data, factors), fmt)
        assert checkpoint.is_factor("a.input_scale")
        assert checkpoint.is_factor("a.output_scale")
        if fmt is None:
            assert "64x32" in checkpoint.why_dense("a.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_factors_are_written_in_the_dtype_of_the_model(dtype, tmp_path):
    data, scale = codes(48, 160), (torch.rand(48) + 0.1).to(dtype)
    tensors = {"a.weight": data.view(FP8), "a.weight_scale": scale}
    with write(tmp_path, tensors, ROWS) as checkpoint:
        assert checkpoint["a.weight"].dtype == (torch.bfloat16 if dtype.itemsize == 4 else dtype)
        checkpoints.save(checkpoint, tmp_path / "x", layout="quark")
    assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "model.safetensors")


def several():
    return {
        "a.weight": codes(48, 80),
        "a.weight_scale": codes(48, 5, below=140),
        "layers.0.b.weight": codes(48, 160).view(FP8),
        "layers.0.b.weight_scale": torch.tensor(0.75),
        "layers.1.b.weight": codes(48, 160).view(FP8),
        "layers.1.b.weight_scale": grid(48),
        "lm_head.weight": torch.ones(4, 4),
    }


def test_layers_have_schemes_of_their_own(tmp_path):
    """A name, or a shell wildcard, overrides the global scheme; a list of names decides nothing."""
    layers = {"layers.*.b": {"weight": TENSOR}, "layers.1.b": {"weight": ROWS}}
    with write(
        tmp_path, several(), FP4, layer_quant_config=layers, exclude=["a", "re:.*b"]
    ) as checkpoint:
        kinds = {row.name: row.kind for row in checkpoint.table().rows}
        assert kinds == {
            "a.weight": "mxfp4",
            "layers.0.b.weight": "fp8",
            "layers.1.b.weight": "fp8_rowwise",
            "lm_head.weight": "plain",
        }
        checkpoints.save(checkpoint, tmp_path / "x", layout="quark")
    with checkpoints.open(tmp_path / "x") as copy:
        assert {row.name: row.kind for row in copy.table().rows} == kinds
        entry = copy.config["quantization_config"]
        assert entry["exclude"] == ["lm_head"]
        assert entry["export"]["weight_format"] == "real_quantized"
        assert len(entry["layer_quant_config"]) == 2


def test_the_scheme_of_a_layer_type(tmp_path):
    tensors, values = mx(E2M1, 80, low_first)
    types = {"Linear": {"weight": FP4}, "Embedding": {"weight": TENSOR}}
    with write(tmp_path, tensors, TENSOR, layer_type_quant_config=types) as checkpoint:
        check(checkpoint, "a.weight", values, "mxfp4", (torch.float32,))


def test_fake_quantized_tensors_are_dense(tmp_path):
    state = {"a.weight": torch.randn(4, 4)}
    fake = {"weight_format": "fake_quantized"}
    with write(tmp_path, state, FP4, export=fake) as checkpoint:
        assert not checkpoint.groups
        assert torch.equal(checkpoint["a.weight"], state["a.weight"])
    tensors, _ = mx(E2M1, 80, low_first)
    with pytest.raises(checkpoints.CheckpointError, match="fake_quantized"):
        write(tmp_path, tensors, FP4, export=fake)


SCHEMES = [
    {"dtype": "mx", "qscheme": "per_group", "group_size": 32, "mx_element_dtype": "fp4"},
    [FP4, TENSOR],
    {"dtype": "int8", "qscheme": "per_tensor"},
    {"dtype": "uint4", "qscheme": "per_group", "group_size": 128},
    {"dtype": "fp8_e5m2", "qscheme": "per_tensor"},
    {**FP4, "group_size": 16},
    {**FP4, "scale_format": "float32"},
    {**ROWS, "ch_axis": 1},
    {**BLOCKS, "block_size": None},
    {**BLOCKS, "block_size": [128]},
    {**BLOCKS, "block_size": [128, 0]},
    "fp4",
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("where", ["global", "layer"])
def test_schemes_that_are_refused(scheme, where, tmp_path):
    tensors, _ = mx(E2M1, 80, low_first)
    layers = {"a": {"weight": scheme}} if where == "layer" else {}
    with pytest.raises(checkpoints.CheckpointError) as raised:
        write(tmp_path, tensors, FP4 if layers else scheme, layer_quant_config=layers)
    assert raised.value.layout == "quark"
    assert raised.value.tensor == ("a.weight" if layers else "")
    found = {dict: lambda s: s["dtype"], list: lambda s: "2 levels"}.get(type(scheme), str)
    assert found(scheme) in str(raised.value)


def test_an_entry_without_weight_leaves_it_to_the_next(tmp_path):
    tensors, values = mx(E2M1, 80, low_first)
    layers = {"a": {"weight": None}, "*": {"output_tensors": TENSOR}}
    with write(tmp_path, tensors, FP4, layer_quant_config=layers) as checkpoint:
        check(checkpoint, "a.weight", values, "mxfp4", (torch.float32,))
    with pytest.raises(checkpoints.CheckpointError, match="has a scheme") as raised:
        write(tmp_path, tensors, None, layer_quant_config=layers)
    assert raised.value.tensor == "a.weight"


def test_a_second_level_is_refused(tmp_path):
    tensors, _ = mx(E2M1, 80, low_first)
    for name in ("a.weight_scale_2", "a.weight_2"):
        with pytest.raises(checkpoints.CheckpointError, match="one level") as raised:
            write(tmp_path, {**tensors, name: torch.ones(())}, FP4)
        assert raised.value.tensor == "a.weight"


BROKEN = [
    ("quark_fp8", drop("q_proj.weight_scale"), "has a weight_scale; got none"),
    ("quark_fp8", drop("q_proj.weight"), "each factor has a weight"),
    ("quark_fp8", put("weight_scale", lambda t: t.repeat(2)), r"shape \[\] or \[1\]"),
    ("quark_fp8", put("weight_scale", lambda t: t.to(torch.int8)), "I8"),
    ("quark_fp8", put("q_proj.weight", lambda t: t.view(torch.uint8)), "needs F8_E4M3"),
    ("quark_mxfp4", drop("weight_scale"), "has a weight_scale; got none"),
    ("quark_mxfp4", put("weight_scale", lambda t: t[:, :1]), r"\[64, 3\]; got U8"),
    ("quark_mxfp4", put("weight_scale", lambda t: t.float()), "needs U8"),
    ("quark_mxfp4", put("proj.weight", lambda t: t[None]), "two dims"),
    ("quark_mxfp6_e3m2", put("proj.weight", lambda t: t[:, :47].clone()), "three bytes"),
    ("quark_mxfp6_e3m2", put("proj.weight", lambda t: t[:, :24].clone()), r"\[64, 1\]; got"),
]


@pytest.mark.parametrize(("name", "change", "message"), BROKEN)
def test_examples_that_do_not_fit_their_config(name, change, message, tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.open(write_example(tmp_path, name, change))
    assert raised.value.layout == "quark"
    assert raised.value.tensor


def test_a_factor_of_255(tmp_path):
    folder = write_example(tmp_path, "quark_mxfp4", put("weight_scale", lambda t: t.fill_(255)))
    with checkpoints.open(folder) as checkpoint:
        name = "model.layers.0.mlp.down_proj.weight"
        assert checkpoint[name].dequantize().isnan().all()
        with pytest.raises(checkpoints.CheckpointError, match="not 255"):
            checkpoint.dense(name)


def test_the_config_is_written_as_the_origin_writes_it(tmp_path):
    """Every key that Quark gave an entry of a weight, with its value, but for the observers."""
    for folder in ("quark_fp8", "quark_mxfp4", "quark_mxfp6_e3m2"):
        with checkpoints.open(EXAMPLES / folder) as checkpoint:
            checkpoints.save(checkpoint, tmp_path / folder, layout="quark")
            theirs = checkpoint.config["quantization_config"]
        config = json.loads((tmp_path / folder / "config.json").read_text())
        ours = config["quantization_config"]
        assert ours["export"] == theirs["export"]
        for part in ("weight", "input_tensors"):
            one, other = ours["global_quant_config"][part], theirs["global_quant_config"][part]
            if other is None:
                assert one is None
                continue
            for key in ("dtype", "qscheme", "group_size", "ch_axis", "block_size", "scale_format"):
                assert one[key] == other[key], (folder, part, key)


def test_quark_holds_2d_weights(tmp_path):
    for name, tensor, message in [
        ("a.weight", weight("mxfp6"), "packed"),
        ("a.weight", weight("mxfp8"), "layout holds"),
        ("a.weight", weight("nvfp4"), "layout holds"),
        ("a.weight", weight("fp8_rowwise", axis=0), "belong to rows"),
        ("a.weight", weight("fp8_blockwise"), "128x128"),
        ("a.weight", weight("fp8", dtype="e5m2"), "layout holds"),
        ("a.codes", weight("mxfp4"), "2-D 'weight'"),
    ]:
        with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
            checkpoints.save({name: tensor}, tmp_path / "x", layout="quark")
        assert raised.value.tensor == name


def test_factors_of_the_kv_cache_are_in_the_config(tmp_path):
    """Loaders look for them in the entries of the modules that ``kv_cache_group`` names."""
    state = {"a.k_proj.weight": weight("fp8"), "a.k_proj.output_scale": torch.tensor(0.5)}
    state |= {"a.v_proj.weight": weight("fp8"), "a.v_proj.output_scale": torch.tensor(0.25)}
    state |= {"a.up.weight": weight("fp8")}
    checkpoints.save(state, tmp_path / "x", layout="quark")
    config = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    assert config["export"]["kv_cache_group"] == ["a.k_proj", "a.v_proj"]
    assert config["global_quant_config"]["output_tensors"] is None
    layers = config["layer_quant_config"]
    assert list(layers) == ["a.k_proj", "a.v_proj"]
    assert layers["a.k_proj"] == layers["a.v_proj"]
    assert layers["a.k_proj"]["output_tensors"]["qscheme"] == "per_tensor"
    with checkpoints.open(tmp_path / "x") as checkpoint:
        assert {row.kind for row in checkpoint.table().rows} == {"fp8", "plain"}
