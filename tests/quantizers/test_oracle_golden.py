"""The oracle against every array of `data/golden`: made by independent public implementations,
compared byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import oracle
import pytest
from oracle import fp8, mx, rht, rounding

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
Arrays = dict[str, np.ndarray]

E2E_FILES = (
    "fp8_current_e4m3",
    "fp8_current_e5m2_pow2",
    "fp8_block_1x128_e4m3_pow2",
    "fp8_block_128x128_e4m3_pow2",
    "mxfp8_e4m3_rceil",
    "mxfp8_2d_e4m3_rceil",
    "nvfp4_1d",
    "nvfp4_2d",
    "nvfp4_1d_rht",
    "nvfp4_rowscaled",
    "nvfp4_4over6_mae256",
)
OTHER_FILES = (
    "mx_ocp_floor",
    "delayed_scaling_updates",
    "scale_swizzle",
    "nvfp4_rht_matrix",
    "mxfp8_e8m0_table",
    "gemm_ref",
    "cutlass_sf_layouts",
)
NVFP4_OPTIONS: dict[str, dict[str, bool]] = {
    "nvfp4_1d": {},
    "nvfp4_2d": {"with_2d_quantization": True},
    "nvfp4_1d_rht": {"with_rht": True},
    "nvfp4_rowscaled": {"row_scaled": True},
    "nvfp4_4over6_mae256": {"use_4over6": True},
}


@cache
def golden(name: str) -> Arrays:
    with np.load(GOLDEN / f"{name}.npz") as archive:
        return {key: archive[key] for key in archive.files}


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def load_input(name: str) -> tuple[np.ndarray, str]:
    """The float32 values of a golden input and its dtype."""
    raw = golden("inputs")[name]
    return (bf16_values(raw), "bfloat16") if raw.dtype == np.uint16 else (raw, "float32")


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal dtype, shape and bytes (so -0.0 differs from 0.0)."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got, want)
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes()


def crop_checked(padded: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The unpadded scales, after a check that the padding is zero."""
    rows, cols = shape
    assert not padded[rows:].any()
    assert not padded[:, cols:].any()
    return np.ascontiguousarray(padded[:rows, :cols])


def fp8_current(file: str, x: np.ndarray, in_dtype: str) -> Arrays:
    options = {"dtype": "e5m2", "force_pow_2_scales": True} if "e5m2" in file else {}
    buffers = oracle.quantize(x, "fp8", in_dtype, **options)
    scale = fp8.scale_of_amax(
        np.abs(x).max().reshape(1), oracle.Options(**options).for_format("fp8"), rounding.FLT_MAX
    )
    return {
        "data": buffers["_data"],
        "scale_inv": buffers["_scale_inv"],
        "scale": scale,
        "amax": np.abs(x).max().reshape(1),
        "dequant_f32": oracle.dequantize(buffers, "fp8", x.shape, **options),
    }


def fp8_block(file: str, x: np.ndarray, in_dtype: str) -> Arrays:
    dim = 2 if "128x128" in file else 1
    buffers = oracle.quantize(x, "fp8_blockwise", in_dtype, columnwise=True, block_scaling_dim=dim)
    row, col = buffers["_rowwise_scale_inv"], buffers["_columnwise_scale_inv"]
    blocks = [-(-side // 128) for side in x.shape]
    if dim == 2:
        logical, logical_t = (
            crop_checked(row, (blocks[0], blocks[1])),
            crop_checked(col, (blocks[1], blocks[0])),
        )
        assert_same(buffers["_columnwise_data"], np.ascontiguousarray(buffers["_rowwise_data"].T))
    else:
        logical, logical_t = (
            crop_checked(row, (blocks[1], x.shape[0])).T,
            crop_checked(col, (blocks[0], x.shape[1])).T,
        )
    return {
        "data": buffers["_rowwise_data"],
        "data_t": buffers["_columnwise_data"],
        "scale_inv_gemm_layout": row,
        "scale_inv_t_gemm_layout": col,
        "scale_inv_logical": logical,
        "scale_inv_t_logical": logical_t,
        "dequant_f32": oracle.dequantize(buffers, "fp8_blockwise", x.shape, block_scaling_dim=dim),
    }


def mxfp8(file: str, x: np.ndarray, in_dtype: str) -> Arrays:
    buffers = oracle.quantize(
        x, "mxfp8", in_dtype, columnwise=True, with_2d_quantization="2d" in file
    )
    if "2d" in file:
        assert_same(buffers["_columnwise_data"], buffers["_rowwise_data"])
    rows, cols = x.shape
    return {
        "rowwise_data": buffers["_rowwise_data"],
        "columnwise_data": buffers["_columnwise_data"],
        "rowwise_scale_e8m0": crop_checked(buffers["_rowwise_scale_inv"], (rows, cols // 32)),
        "columnwise_scale_e8m0": crop_checked(buffers["_columnwise_scale_inv"], (rows // 32, cols)),
    }


def nvfp4(file: str, x: np.ndarray, in_dtype: str) -> Arrays:
    options = NVFP4_OPTIONS[file]
    buffers = oracle.quantize(x, "nvfp4", in_dtype, columnwise=True, **options)
    rows, cols = x.shape
    return {
        "rowwise_data": buffers["_rowwise_data"],
        "columnwise_data": buffers["_columnwise_data"],
        "rowwise_scale_e4m3": crop_checked(buffers["_rowwise_scale_inv"], (rows, cols // 16)),
        "columnwise_scale_e4m3": crop_checked(buffers["_columnwise_scale_inv"], (cols, rows // 16)),
        "amax_rowwise": buffers["_amax_rowwise"],
        "amax_columnwise": buffers["_amax_columnwise"],
        "dequant_f32": oracle.dequantize(buffers, "nvfp4", x.shape, **options),
    }


COMPUTE: dict[str, Callable[[str, np.ndarray, str], Arrays]] = {
    "fp8_current": fp8_current,
    "fp8_block": fp8_block,
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
}


@cache
def computed(file: str, name: str) -> Arrays:
    """What the oracle says for one golden file and one input."""
    compute = next(function for prefix, function in COMPUTE.items() if file.startswith(prefix))
    return compute(file, *load_input(name))


@pytest.mark.parametrize(
    ("file", "key"), [(file, key) for file in E2E_FILES for key in golden(file)]
)
def test_quantized_inputs(file: str, key: str) -> None:
    name, field = key.split("/")
    assert_same(computed(file, name)[field], golden(file)[key])


MX_FLOOR_KEYS = [key for key in golden("mx_ocp_floor") if not key.startswith("inputs/")]


@pytest.mark.parametrize("key", MX_FLOOR_KEYS)
def test_mx_ocp_floor(key: str) -> None:
    name, format_and_element, mode, field = key.split("/")
    fmt, element = format_and_element.split("_")
    x, want = golden("mx_ocp_floor")[f"inputs/{name}"], golden("mx_ocp_floor")[key]
    buffers = oracle.quantize(x, fmt, dtype=element, scale_mode=mode)
    if field == "qdata":
        assert_same(buffers["_rowwise_data"], want)
    else:
        assert_same(crop_checked(buffers["_rowwise_scale_inv"], want.shape), want)


@pytest.mark.parametrize("case", ["max_m0", "max_m2", "most_recent_m0", "most_recent_m2"])
def test_delayed_scaling_updates(case: str) -> None:
    arrays = golden("delayed_scaling_updates")
    stream, histories, scales = (
        arrays[f"{case}/{field}"] for field in ("amax_stream", "history", "scale")
    )
    algo, margin = case.rsplit("_m", 1)
    history, scale = histories[0], scales[0]
    for step, amax in enumerate(stream):
        history = history.copy()
        history[0] = np.maximum(history[0], amax)
        history, scale = oracle.delayed_update(history, scale, algo, int(margin))
        assert_same(history, histories[step + 1])
        assert_same(scale, scales[step + 1])


@pytest.mark.parametrize("case", ["mx_row", "mx_col", "nv_row"])
def test_scale_swizzle(case: str) -> None:
    """The golden `mx_col_out` keeps the shape of its input; the oracle's array has the transposed
    shape and the same bytes in the same order.
    """
    compact, want = golden("scale_swizzle")[f"{case}_in"], golden("scale_swizzle")[f"{case}_out"]
    source = np.ascontiguousarray(compact.T) if case == "mx_col" else compact
    swizzled = oracle.swizzle(source)
    assert_same(swizzled.reshape(want.shape), want)
    assert_same(oracle.unswizzle(swizzled), source)


def test_nvfp4_rht_matrix() -> None:
    arrays = golden("nvfp4_rht_matrix")
    assert_same(rht.matrix(), arrays["ref_f32"])
    assert_same(rht.matrix(), bf16_values(arrays["lib_bf16"]))
    assert_same(rht.matrix(with_signs=False), bf16_values(arrays["lib_bf16_nosign"]))
    assert int(arrays["sign_mask"]) == rht.SIGN_MASK


def test_mxfp8_e8m0_table() -> None:
    """All entries but NaN, where the golden source returns 0 and docs/numerics.md asks for 255."""
    amax, want = golden("mxfp8_e8m0_table")["amax"], golden("mxfp8_e8m0_table")["e8m0"]
    got = mx.scale_codes(amax, oracle.ELEMENTS["e4m3"], "rceil").astype(np.uint8)
    isnan = np.isnan(amax)
    assert_same(got[~isnan], want[~isnan])
    assert isnan.sum() == 1
    assert (got[isnan] == 255).all()


GEMMS = [
    ("nvfp4_y_f32", "nvfp4", 1e-6),
    ("fp8cs_y_f32", "fp8", 1e-6),
    ("fp8cs_y_f32_exact_dequant_matmul", "fp8", 1e-6),
    ("fp8cs_y_bf16", "fp8", 2**-8),
]


@pytest.mark.parametrize(("key", "fmt", "rtol"), GEMMS)
def test_gemm_ref(key: str, fmt: str, rtol: float) -> None:
    """Products of dequantized operands (NVFP4: x in 1x16 blocks, w in 16x16, as the golden was
    made).

    The tolerance is that of float32 accumulation (bf16: of the final cast), relative to sum |a||b|.
    """
    raw = golden("gemm_ref")[key]
    want = bf16_values(raw) if raw.dtype == np.uint16 else raw
    x, w = load_input("randn_bf16_64x128")[0], bf16_values(golden("gemm_ref")["w"])
    a = oracle.dequantize(oracle.quantize(x, fmt, "bfloat16"), fmt, x.shape)
    b = oracle.dequantize(
        oracle.quantize(w, fmt, "bfloat16", with_2d_quantization=True), fmt, w.shape
    )
    bound = rtol * oracle.gemm(np.abs(a), np.abs(b))
    assert (np.abs(oracle.gemm(a, b) - want) <= bound).all()


CUTLASS_KEYS = [key for key in golden("cutlass_sf_layouts") if not key.endswith("cosize")]


@pytest.mark.parametrize("key", CUTLASS_KEYS)
def test_cutlass_scale_layouts(key: str) -> None:
    """Offsets of the scale of (row, k block) in a CUTLASS operand: the swizzle of docs/numerics.md,
    or (blockwise) a plain matrix in M- or K-major order.
    """
    kind, _, block, operand = key.split("/")
    offsets = golden("cutlass_sf_layouts")[key]
    size = golden("cutlass_sf_layouts")[key.rsplit("/", 1)[0] + "/cosize"]["AB".index(operand)]
    if kind.startswith("bs"):
        padded = np.pad(
            np.arange(1, offsets.size + 1, dtype=np.int64).reshape(offsets.shape),
            [(0, -side % unit) for side, unit in zip(offsets.shape, (128, 4), strict=True)],
        )
        swizzled = oracle.swizzle(padded)
        assert swizzled.size == size
        assert_same(swizzled.ravel()[offsets], padded[: offsets.shape[0], : offsets.shape[1]])
        return
    major = kind[-2:]["AB".index(operand)]
    plain = np.arange(offsets.size, dtype=np.int32)
    want = plain.reshape(offsets.shape) if major == "k" else plain.reshape(offsets.shape[::-1]).T
    assert_same(offsets, want)
    assert block in ("1x128", "128x128", "1x1")


def test_every_golden_file_is_compared() -> None:
    present = {path.stem for path in GOLDEN.glob("*.npz")}
    assert present == {*E2E_FILES, *OTHER_FILES, "inputs"}
    index = json.loads((GOLDEN / "index.json").read_text())
    assert set(index) <= present
