"""The library against every array of ``data/golden``, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from formats import assert_same_bytes
from torch import Tensor

import qtensor
from qtensor.reference import hadamard
from qtensor.reference.blocks import swizzle, unswizzle
from qtensor.reference.scaling import fp8_scale

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
Arrays = dict[str, Tensor]

NVFP4 = {
    "nvfp4_1d": {},
    "nvfp4_2d": {"with_2d_quantization": True},
    "nvfp4_1d_rht": {"with_rht": True},
    "nvfp4_rowscaled": {"row_scaled": True},
    "nvfp4_4over6_mae256": {"use_4over6": True, "err_mode": "mae", "e4m3_max": 256.0},
}


@cache
def golden(name: str) -> Arrays:
    """A file's arrays as tensors; bfloat16 bits (uint16) become bfloat16."""
    with np.load(GOLDEN / f"{name}.npz") as archive:
        return {key: as_tensor(archive[key]) for key in archive.files}


def as_tensor(array: np.ndarray) -> Tensor:
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))


def cropped(padded: Tensor, rows: int, cols: int) -> Tensor:
    """The scales without their padding, which must be zero."""
    outside = padded.clone()
    outside[:rows, :cols] = 0
    assert not outside.any()
    return padded[:rows, :cols]


def fp8_current(file: str, x: Tensor) -> Arrays:
    options = {"dtype": "e5m2", "force_pow_2_scales": True} if "e5m2" in file else {}
    quantizer = qtensor.quantizer("fp8", **options)
    q, amax = quantizer(x), quantizer.amax(x)[0]
    scale = fp8_scale(amax, quantizer.element.max, quantizer.force_pow_2_scales, 0.0)
    return {
        "data": q._data,
        "scale_inv": q._scale_inv,
        "scale": scale,
        "amax": amax,
        "dequant_f32": q.dequantize(torch.float32),
    }


def fp8_block(file: str, x: Tensor) -> Arrays:
    dim = 2 if "128x128" in file else 1
    q = qtensor.quantize(x, "fp8_blockwise", columnwise=True, block_scaling_dim=dim)
    row, col = q._rowwise_scale_inv, q._columnwise_scale_inv
    rows, cols = x.shape
    down, across = -(-rows // 128), -(-cols // 128)
    if dim == 2:
        logical, logical_t = cropped(row, down, across), cropped(col, across, down)
    else:
        logical, logical_t = cropped(row, across, rows).t(), cropped(col, down, cols).t()
    return {
        "data": q._rowwise_data,
        "data_t": q._columnwise_data,
        "scale_inv_gemm_layout": row,
        "scale_inv_t_gemm_layout": col,
        "scale_inv_logical": logical,
        "scale_inv_t_logical": logical_t,
        "dequant_f32": q.dequantize(torch.float32),
    }


def mxfp8(file: str, x: Tensor) -> Arrays:
    q = qtensor.quantize(x, "mxfp8", columnwise=True, with_2d_quantization="2d" in file)
    rows, cols = x.shape
    return {
        "rowwise_data": q._rowwise_data,
        "columnwise_data": q._columnwise_data,
        "rowwise_scale_e8m0": cropped(q._rowwise_scale_inv, rows, cols // 32),
        "columnwise_scale_e8m0": cropped(q._columnwise_scale_inv, rows // 32, cols),
    }


def nvfp4(file: str, x: Tensor) -> Arrays:
    q = qtensor.quantize(x, "nvfp4", columnwise=True, **NVFP4[file])
    rows, cols = x.shape
    return {
        "rowwise_data": q._rowwise_data,
        "columnwise_data": q._columnwise_data,
        "rowwise_scale_e4m3": cropped(q._rowwise_scale_inv, rows, cols // 16),
        "columnwise_scale_e4m3": cropped(q._columnwise_scale_inv, cols, rows // 16),
        "amax_rowwise": q._amax_rowwise,
        "amax_columnwise": q._amax_columnwise,
        "dequant_f32": q.dequantize(torch.float32),
    }


COMPUTE: dict[str, Callable[[str, Tensor], Arrays]] = {
    "fp8_current_e4m3": fp8_current,
    "fp8_current_e5m2_pow2": fp8_current,
    "fp8_block_1x128_e4m3_pow2": fp8_block,
    "fp8_block_128x128_e4m3_pow2": fp8_block,
    "mxfp8_e4m3_rceil": mxfp8,
    "mxfp8_2d_e4m3_rceil": mxfp8,
    **dict.fromkeys(NVFP4, nvfp4),
}
QUANTIZED = [(file, key) for file in COMPUTE for key in golden(file)]
MX_FLOOR = [key for key in golden("mx_ocp_floor") if not key.startswith("inputs/")]
DELAYED = ("max_m0", "max_m2", "most_recent_m0", "most_recent_m2")
SWIZZLES = ("mx_row", "mx_col", "nv_row")
RHT = {"ref_f32": True, "lib_bf16": True, "lib_bf16_nosign": False}
GEMMS = {
    "nvfp4_y_f32": ("nvfp4", 2.0**-17),
    "fp8cs_y_f32": ("fp8", 2.0**-17),
    "fp8cs_y_f32_exact_dequant_matmul": ("fp8", 2.0**-17),
    "fp8cs_y_bf16": ("fp8", 2.0**-8),
}
TILES = [k for k in golden("cutlass_sf_layouts") if k.startswith("bs") and not k.endswith("cosize")]
NOT_COMPARED = {
    "inputs": len(golden("inputs")),
    "mx_ocp_floor": len(golden("mx_ocp_floor")) - len(MX_FLOOR),
    "delayed_scaling_updates": len(DELAYED),
    "scale_swizzle": len(SWIZZLES),
    "mxfp8_e8m0_table": 1,
    "gemm_ref": 1,
}
"""Arrays that are inputs of others."""
PLAIN_LAYOUTS = [k for k in golden("cutlass_sf_layouts") if not k.startswith("bs")]
"""Offsets of an unswizzled row- or column-major matrix: an option of the GEMM, no bytes of ours."""


@cache
def computed(file: str, name: str) -> Arrays:
    """What the library says for one file and one input."""
    return COMPUTE[file](file, golden("inputs")[name])


@pytest.mark.parametrize(("file", "key"), QUANTIZED)
def test_quantized_inputs(file: str, key: str) -> None:
    name, field = key.split("/")
    assert_same_bytes(computed(file, name)[field], golden(file)[key], key)


@pytest.mark.parametrize("key", MX_FLOOR)
def test_mx_ocp_floor(key: str) -> None:
    name, format_and_element, mode, field = key.split("/")
    fmt, element = format_and_element.split("_")
    want = golden("mx_ocp_floor")[key]
    x = golden("mx_ocp_floor")[f"inputs/{name}"]
    q = qtensor.quantize(x, fmt, dtype=element, scale_mode=mode)
    got = q._rowwise_data if field == "qdata" else cropped(q._rowwise_scale_inv, *want.shape)
    assert_same_bytes(got, want, key)


@pytest.mark.parametrize("case", DELAYED)
def test_delayed_scaling_updates(case: str) -> None:
    arrays = golden("delayed_scaling_updates")
    stream, histories, scales = (arrays[f"{case}/{f}"] for f in ("amax_stream", "history", "scale"))
    algorithm, margin = case.rsplit("_m", 1)
    history, scale = histories[0].clone(), scales[0].clone()
    for step, amax in enumerate(stream):
        qtensor.record_amax_(history, amax)
        history, scale = qtensor.delayed_scaling_update(
            history, scale, algorithm=algorithm, margin=int(margin)
        )
        assert_same_bytes(history, histories[step + 1], f"history after step {step}")
        assert_same_bytes(scale, scales[step + 1], f"scale after step {step}")


@pytest.mark.parametrize("case", SWIZZLES)
def test_scale_swizzle(case: str) -> None:
    """The source transposes MXFP8's column-wise scales first and keeps their shape."""
    compact, want = golden("scale_swizzle")[f"{case}_in"], golden("scale_swizzle")[f"{case}_out"]
    source = compact.t() if case == "mx_col" else compact
    assert_same_bytes(swizzle(source).reshape(want.shape), want)
    assert_same_bytes(unswizzle(want.reshape(source.shape)), source)


@pytest.mark.parametrize("key", RHT)
def test_rht_matrix(key: str) -> None:
    want = golden("nvfp4_rht_matrix")[key]
    assert_same_bytes(hadamard.matrix(RHT[key], torch.device("cpu")).to(want.dtype), want)


def test_rht_sign_mask() -> None:
    assert int(golden("nvfp4_rht_matrix")["sign_mask"]) == hadamard.SIGN_MASK


def test_e8m0_table() -> None:
    """Blocks whose largest value is the table's. For NaN the source says 0 where docs/numerics.md,
    MX asks for 255.
    """
    amax, want = golden("mxfp8_e8m0_table")["amax"], golden("mxfp8_e8m0_table")["e8m0"]
    x = torch.zeros(len(amax), 32)
    x[:, 7] = -amax
    got = qtensor.quantize(x, "mxfp8")._rowwise_scale_inv[: len(amax), 0]
    assert amax.isnan().sum() == 1
    assert_same_bytes(got, torch.where(amax.isnan(), 255, want))


@pytest.mark.parametrize("key", GEMMS)
def test_gemm(key: str) -> None:
    """Tolerance relative to sum |a||b|: float32 accumulation of K = 128 terms in another order is
    within 128 * 2**-24; two roundings to bfloat16 differ by an ulp, 2**-8, at most.

    ``nvfp4_y_f32`` was made from 16x16 weight blocks.
    """
    fmt, bound = GEMMS[key]
    want = golden("gemm_ref")[key]
    options = {"with_2d_quantization": True} if fmt == "nvfp4" else {}
    a = qtensor.quantize(golden("inputs")["randn_bf16_64x128"], fmt)
    b = qtensor.quantize(golden("gemm_ref")["w"], fmt, **options)
    got = qtensor.gemm(a, b, "TN", dtype=want.dtype)
    size = a.dequantize(torch.float64).abs() @ b.dequantize(torch.float64).abs().t()
    assert got.dtype == want.dtype
    assert ((got.double() - want.double()).abs() <= bound * size).all()


@pytest.mark.parametrize("key", TILES)
def test_cutlass_scale_tiles(key: str) -> None:
    """CUTLASS reads the scale of (row, block) at the offset where ``swizzle`` puts it."""
    offsets = golden("cutlass_sf_layouts")[key].long()
    rows, cols = offsets.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-cols // 4) * 4, dtype=torch.int64)
    padded[:rows, :cols] = torch.arange(1, rows * cols + 1).view(rows, cols)
    size = golden("cutlass_sf_layouts")[key.rsplit("/", 1)[0] + "/cosize"]["AB".index(key[-1])]
    assert padded.numel() == size
    assert_same_bytes(swizzle(padded).flatten()[offsets], padded[:rows, :cols])


def test_every_array_is_accounted_for(record_property: Callable[[str, object], None]) -> None:
    """Compared, an input of a comparison, or a plain matrix order."""
    compared = len(QUANTIZED) + len(MX_FLOOR) + 2 * len(DELAYED) + len(SWIZZLES) + len(RHT) + 1
    compared += 1 + len(GEMMS) + len(TILES)
    sizes = sum(
        1 for k in golden("cutlass_sf_layouts") if k.startswith("bs") and k.endswith("cosize")
    )
    total = sum(len(golden(path.stem)) for path in GOLDEN.glob("*.npz"))
    assert compared + sizes + len(PLAIN_LAYOUTS) + sum(NOT_COMPARED.values()) == total
    record_property("golden_arrays_compared", compared + sizes)
    print(f"golden arrays compared: {compared + sizes} of {total}")


def test_a_wrong_byte_is_noticed() -> None:
    key = "randn_bf16_64x128/data"
    wrong = golden("fp8_current_e4m3")[key].clone()
    wrong[3, 5] ^= 1
    with pytest.raises(AssertionError, match=r"1 of 8192 bytes differ; first at byte 389"):
        assert_same_bytes(computed("fp8_current_e4m3", "randn_bf16_64x128")["data"], wrong)
