"""A copy in the same layout has the names, dtypes, shapes and bytes of the file that was read."""

import pytest
import torch
from checkpoint_cases import stored_bytes, weight

from qtensor import checkpoints
from tests.checkpoints.test_checkpoints_configs import E8M0, FP8, LAYOUTS, fp8, write
from tests.checkpoints.test_checkpoints_variants import codes, grid

FINE = {"quant_method": "fp8", "weight_block_size": [128, 128]}
TENSOR = {"quant_method": "fp8", "weight_block_size": None}
CT = {"quant_method": "compressed-tensors", **LAYOUTS["compressed-tensors"]}
MODELOPT = {"quant_method": "modelopt"}
QUARK = {"quant_method": "quark"}
MX = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}


def powers(*shape):
    return codes(*shape, below=200).view(E8M0)


def mxfp4(dtype):
    return {"a.weight": codes(5, 32), "a.weight_scale": codes(5, 2, below=200).view(dtype)}


CASES = {
    "V4": (
        {**FINE, "expert_dtype": "fp4", "scale_fmt": "ue8m0"},
        {
            "a.weight": codes(200, 150).view(FP8),
            "a.scale": powers(2, 2),
            "e.weight": codes(5, 32).view(torch.int8),
            "e.scale": powers(5, 2),
        },
    ),
    "V4 names": (FINE, {"a.weight": codes(200, 150).view(FP8), "a.scale": grid(2, 2)}),
    "V3.1": (
        {**FINE, "scale_fmt": "ue8m0"},
        fp8(powers(2, 2).float(), 200, 150, factor="_scale_inv"),
    ),
    "ue8m0": ({**FINE, "scale_fmt": "ue8m0"}, fp8(powers(2, 2), 200, 150, factor="_scale_inv")),
    "uint8 grid": (FINE, fp8(codes(2, 2, below=200), 200, 150, factor="_scale_inv")),
    "bfloat16 grid": (FINE, fp8(grid(2, 2).bfloat16(), 200, 150, factor="_scale_inv")),
    "older experts": (
        FINE,
        {"e.down_proj": codes(2, 128, 40).view(FP8), "e.down_proj_scales_inv": grid(2, 1, 1)},
    ),
    "Mistral": (
        {**TENSOR, "activation_scheme": "static"},
        {
            "a.weight": codes(4, 8).view(FP8),
            "a.qscale_weight": torch.tensor(0.3).bfloat16(),
            "a.qscale_act": torch.tensor(0.7).bfloat16(),
        },
    ),
    "one factor (1,)": (TENSOR, fp8(torch.rand(1), 4, 8, factor="_scale_inv")),
    "MXFP8 in E8M0": (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        fp8(powers(4, 2), 4, 64, factor="_scale_inv"),
    ),
    "compressed-tensors ()": (CT, fp8(torch.rand(()).bfloat16(), 4, 8)),
    "ModelOpt blocks": (
        {**MODELOPT, "quant_algo": "FP8_PB_WO"},
        fp8(torch.rand(2, 1, 2, 1), 200, 150),
    ),
    "ModelOpt column": ({**MODELOPT, "quant_algo": "FP8_PB_REAL"}, fp8(torch.rand(2), 200, 100)),
    "ModelOpt (1,)": ({**MODELOPT, "quant_algo": "FP8"}, fp8(torch.rand(1), 4, 8)),
    "ModelOpt E8M0": ({**MODELOPT, "quant_algo": "MXFP4"}, mxfp4(E8M0)),
    "Quark (1,)": ({**QUARK, **LAYOUTS["quark"]}, fp8(torch.rand(1), 4, 8)),
    "Quark E8M0": (
        {**QUARK, "global_quant_config": {"weight": {"dtype": "fp4", **MX}}},
        mxfp4(E8M0),
    ),
    "Quark uint8": (
        {**QUARK, "global_quant_config": {"weight": {"dtype": "fp4", **MX}}},
        mxfp4(torch.uint8),
    ),
    "gpt-oss E8M0": (
        {"quant_method": "mxfp4"},
        {"e.up_blocks": codes(2, 3, 2, 16), "e.up_scales": powers(2, 3, 2)},
    ),
    "FBGEMM experts": (
        {"quant_method": "fbgemm_fp8"},
        {"e.down_proj": codes(2, 6, 4).view(FP8), "e.down_proj_scale": torch.rand(2, 1, 4)},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["save", "convert"])
def test_a_copy_equals_the_file(case, how, tmp_path):
    entry, tensors = CASES[case]
    (tmp_path / "in").mkdir()
    with write(tmp_path / "in", tensors, {"quantization_config": entry}) as checkpoint:
        assert checkpoint.groups
        if how == "save":
            checkpoints.save(checkpoint, tmp_path / "x", layout=checkpoint.layout)
        else:
            checkpoints.convert(tmp_path / "in", tmp_path / "x", layout=checkpoint.layout)
        assert stored_bytes(tmp_path / "x") == stored_bytes(tmp_path / "in")
        with checkpoints.open(tmp_path / "x") as copy:
            kinds = [(row.name, row.kind) for row in checkpoint.table().rows]
            assert sorted(kinds) == sorted((row.name, row.kind) for row in copy.table().rows)
            said = copy.config["quantization_config"]
    for key in {"scale_fmt", "activation_scheme", "expert_dtype"} & entry.keys():
        assert said[key] == entry[key]


def test_weights_that_are_quantized_anew_have_new_factors(tmp_path):
    """Factors of powers of two are F8_E8M0 in the source; the new ones are not such powers."""
    entry, tensors = CASES["ue8m0"]
    (tmp_path / "in").mkdir()
    write(tmp_path / "in", tensors, {"quantization_config": entry}).close()
    checkpoints.convert(tmp_path / "in", tmp_path / "x", layout="fine-grained-fp8", format="fp8")
    with checkpoints.open(tmp_path / "x") as copy:
        assert copy["a.weight"].quantizer.format == "fp8"
        assert copy.stored("a.weight")["scale"].dtype == torch.float32


@pytest.mark.parametrize(
    "between", ["qtensor", "torchao", "comfyui", "quark", "compressed-tensors"]
)
@pytest.mark.parametrize("layout", ["modelopt", "quark", "compressed-tensors"])
def test_factors_of_the_kv_cache_keep_their_names_over_another_layout(layout, between, tmp_path):
    names = {
        "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
        "quark": ("k_proj.output_scale", "v_proj.output_scale"),
        "compressed-tensors": ("k_scale", "v_scale"),
    }[layout]
    state = {f"m.{name}": torch.tensor(0.5 + i) for i, name in enumerate(names)}
    state |= {f"m.{p}_proj.weight": weight("fp8") for p in "kv"}
    checkpoints.save(state, tmp_path / "a", layout=layout)
    checkpoints.convert(tmp_path / "a", tmp_path / "b", layout=between)
    checkpoints.convert(tmp_path / "b", tmp_path / "c", layout=layout)
    back = checkpoints.load_state_dict(tmp_path / "c")
    assert set(back) == set(state)
    assert [back[f"m.{name}"].item() for name in names] == [0.5, 1.5]
