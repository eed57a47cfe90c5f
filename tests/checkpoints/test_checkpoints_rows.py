"""Conversion decodes weights in parts of rows: the bytes are those of the whole."""

import pytest
import torch

from qtensor import checkpoints
from qtensor.checkpoints.conversion import rows
from tests.checkpoints.test_checkpoints_configs import FP8, fp8, write
from tests.checkpoints.test_checkpoints_variants import codes, grid

SHAPE = (300, 320)
"""Three parts: 128, 128 and 44 rows."""


def fine(block):
    return {"quant_method": "fp8", "weight_block_size": block}


def compressed(fmt, bits, **weights):
    weights = {"type": "float", "num_bits": bits, **weights}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": groups}


def modelopt(algo):
    return {"quant_method": "modelopt", "quant_algo": algo}


def quark(**weight):
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}}


def packed(*factor, bits=4, last="weight", second=None):
    """Stored tensors of packed codes, a factor of this shape and dtype, and a second one."""
    shape, dtype = factor
    tensors = {
        f"a.{last}": codes(SHAPE[0], SHAPE[1] * bits // 8),
        "a.weight_scale": codes(*shape, below=127).view(dtype),
    }
    return tensors | ({f"a.{second}": torch.rand(()) + 0.5} if second else {})


MX = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
E8 = (300, 10), torch.uint8
CASES = {
    "fine 128x128": (fine([128, 128]), fp8(grid(3, 3), *SHAPE, factor="_scale_inv")),
    "fine 1x128": (fine([1, 128]), fp8(grid(300, 3), *SHAPE, factor="_scale_inv")),
    # As many rows of factors as blocks of 128 rows have, but other ones.
    "fine 110x64": (fine([110, 64]), fp8(grid(3, 5), *SHAPE, factor="_scale_inv")),
    "fine 1x64": (fine([1, 64]), fp8(grid(300, 5), *SHAPE, factor="_scale_inv")),
    "fine tensor": (fine(None), fp8(grid(), *SHAPE, factor="_scale_inv")),
    "fine mxfp8": (fine([1, 32]), fp8(codes(300, 10, below=140), *SHAPE, factor="_scale_inv")),
    "ct channel": (
        compressed("float-quantized", 8, strategy="channel"),
        fp8(grid(300, 1).bfloat16(), *SHAPE),
    ),
    "ct 110x64": (
        compressed("float-quantized", 8, strategy="block", block_structure=[110, 64]),
        fp8(grid(3, 5), *SHAPE),
    ),
    "ct mxfp4": (compressed("mxfp4-pack-quantized", 4), packed(*E8, last="weight_packed")),
    "ct mxfp6": (compressed("mxfp6-pack-quantized", 6), packed(*E8, bits=6, last="weight_packed")),
    "modelopt fp8": (modelopt("FP8"), fp8(grid(1), *SHAPE)),
    "modelopt rows": (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), fp8(torch.rand(300), *SHAPE)),
    "modelopt blocks": (modelopt("FP8_PB_WO"), fp8(torch.rand(3, 1, 3, 1), *SHAPE)),
    "modelopt column": (modelopt("FP8_PB_WO"), fp8(torch.rand(3), 300, 100)),
    "modelopt row": (modelopt("FP8_PB_WO"), fp8(torch.rand(3), 3, 300)),
    "modelopt nvfp4": (
        modelopt("NVFP4"),
        packed((300, 20), FP8, second="weight_scale_2"),
    ),
    "modelopt groups of 32": (
        modelopt("W4A8_NVFP4_FP8"),
        packed((300, 10), FP8, second="weight_scale_2"),
    ),
    "modelopt mxfp8": (modelopt("MXFP8"), fp8(codes(300, 10, below=140), *SHAPE)),
    "modelopt mxfp4": (modelopt("MXFP4"), packed(*E8)),
    "quark tensor": (quark(dtype="fp8_e4m3", qscheme="per_tensor"), fp8(grid(), *SHAPE)),
    "quark rows": (
        quark(dtype="fp8_e4m3", qscheme="per_channel", ch_axis=0),
        fp8(torch.rand(300).bfloat16(), *SHAPE),
    ),
    "quark blocks": (
        quark(dtype="fp8_e4m3", qscheme="per_block", block_size=[128, 128]),
        fp8(torch.rand(3, 3), *SHAPE),
    ),
    "quark 110x64": (
        quark(dtype="fp8_e4m3", qscheme="per_block", block_size=[110, 64]),
        fp8(torch.rand(3, 5), *SHAPE),
    ),
    "quark mxfp4": (quark(dtype="fp4", **MX), packed(*E8)),
    "quark mxfp6": (quark(dtype="fp6_e3m2", **MX), packed(*E8, bits=6)),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8(torch.rand(300, 1), *SHAPE)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parts_have_the_values_of_the_whole(case, dtype, tmp_path, monkeypatch):
    """Every class of rounding, also where conversion takes our arithmetic instead."""
    entry, tensors = CASES[case]
    monkeypatch.setattr(rows, "PART", 1)
    with write(tmp_path, tensors, {"quantization_config": entry}) as checkpoint:
        (name,) = checkpoint.groups
        want = checkpoint.dense(name, dtype)
        if "110x64" not in case:
            # The whole weight is never decoded at once.
            monkeypatch.setattr(checkpoint, "dense", None)
        values = rows.origin_values(checkpoint, name, dtype)
        got = torch.cat([values.read(*pair) for pair in values.bounds])
    assert torch.equal(got.nan_to_num(nan=7e4), want.nan_to_num(nan=7e4))


def test_a_block_of_another_height_is_converted(tmp_path):
    """Blocks of 110 rows are as many as blocks of 128 rows; a wide weight has several parts."""
    (tmp_path / "in").mkdir()
    state = fp8(grid(2, 8192 // 64), 200, 8192, factor="_scale_inv")
    checkpoint = write(tmp_path / "in", state, {"quantization_config": fine([110, 64])})
    want = checkpoint.dense("a.weight", torch.bfloat16)
    checkpoints.dequantize(tmp_path / "in", tmp_path / "x", dtype="bf16")
    got = checkpoints.load_state_dict(tmp_path / "x")["a.weight"]
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
