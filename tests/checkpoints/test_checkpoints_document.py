"""The document of our layout is enough: a reader of numpy and json decodes every format."""

import json

import numpy as np
import pytest
import torch

import qtensor
from qtensor import checkpoints

# ---- the reader, from docs/checkpoints.md and the formulas of docs/numerics.md alone

ELEMENTS = {"e4m3": (4, 3), "e5m2": (5, 2), "e2m3": (2, 3), "e3m2": (3, 2), "e2m1": (2, 1)}
DTYPES = {"U8": np.uint8, "F32": np.float32}


def read(path):
    """{name: float32 values} of the quantized tensors of a file."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    about = json.loads(header["__metadata__"]["qtensor"])
    assert about["version"] == 1

    def stored(name):
        first, last = (start + n for n in header[name]["data_offsets"])
        data = np.frombuffer(raw[first:last], DTYPES[header[name]["dtype"]])
        return data.reshape(header[name]["shape"])

    return {
        name: decoded(entry, {k: stored(s) for k, s in entry["buffers"].items()})
        for name, entry in about["tensors"].items()
    }


def floats(codes, element):
    exponent, mantissa = ELEMENTS[element]
    sign, size = codes >> (exponent + mantissa) & 1, codes & (1 << (exponent + mantissa)) - 1
    field, part = size >> mantissa, (size & (1 << mantissa) - 1) / 2.0**mantissa
    values = (part + (field > 0)) * 2.0 ** (np.maximum(field, 1) - 2.0 ** (exponent - 1) + 1)
    if element == "e4m3":
        values = np.where(size == 127, np.nan, values)
    if element == "e5m2":
        values = np.where(size > 124, np.nan, np.where(size == 124, np.inf, values))
    return np.where(sign, -values, values).astype(np.float32)


def unpacked(codes, element, packed, count):
    """One code a byte, of codes that are packed along the last dim."""
    if element == "e2m1":
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), 2 * codes.shape[1])
    elif packed:
        a, b, c = (codes[:, i::3].astype(int) for i in range(3))
        word = (a | b << 8 | c << 16)[..., None] >> np.array([0, 6, 12, 18]) & 63
        codes = word.reshape(len(codes), codes.shape[1] // 3 * 4)
    return codes[..., :count].astype(int)


def row_major(scale):
    """Factors (R, C), multiples of 128 and 4, that lie in tiles."""
    r, c = np.indices(scale.shape)
    tile = r // 128 * (scale.shape[1] // 4) + c // 4
    return scale.ravel()[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]


def decoded(entry, buffers):
    fmt, _, words = entry["quantizer"].rstrip(")").partition("(")
    options = dict(word.split("=") for word in words.split(",") if word)
    shape = entry["shape"]
    cols = shape[-1] if shape else 1
    rows = int(np.prod(shape[:-1], dtype=int))
    on = {name for name, word in options.items() if word == "True"}
    default = {"mxfp6": "e2m3", "mxfp4": "e2m1", "nvfp4": "e2m1"}.get(fmt, "e4m3")
    element = options.get("dtype", default)
    if fmt in ("fp8", "fp8_rowwise", "fp8_delayed"):
        turned = "data" not in buffers or "columnwise_value" in on
        codes = buffers["transpose"].reshape(cols, rows).T if turned else buffers["data"]
        values = floats(codes.reshape(rows, cols).astype(int), element) * buffers["scale_inv"]
        return values.reshape(shape)
    turned = "rowwise_data" not in buffers or "columnwise_value" in on
    side = "columnwise" if turned else "rowwise"
    codes, scale = buffers[f"{side}_data"], buffers[f"{side}_scale_inv"]
    first, last = (cols, rows) if turned else (rows, cols)  # factors belong to blocks of last
    rotated = "with_rht" in on and options.get("rht_side", "columnwise") == side
    if fmt.startswith("mx") and turned:  # keeps the logical layout
        codes = codes.reshape(int(np.prod(codes.shape[:-1], dtype=int)), cols).T
        scale = scale.reshape(scale.shape[::-1]) if "swizzled" in on else scale.T
    if fmt == "fp8_blockwise" and options.get("block_scaling_dim", "1") == "1":
        scale = scale.T  # stored as (blocks, up4(first))
    elif fmt == "fp8_blockwise":
        scale = scale.repeat(128, 0)
    scale = row_major(scale) if "swizzled" in on else scale
    wide = -(-last // 16) * 16 if rotated else last
    flat = codes.reshape(first, np.prod(codes.shape[1:] if turned else codes.shape[-1:], dtype=int))
    codes = unpacked(flat, element, "packed" in on, wide)
    size = {"fp8_blockwise": 128, "nvfp4": 16}.get(fmt, 32)
    scale = scale[:first].repeat(size, 1)[:, :wide]
    if fmt == "fp8_blockwise":
        values = floats(codes, element) * scale
    elif fmt == "nvfp4":
        values = floats(codes, element) * floats(scale.astype(int), "e4m3")
        values = values * tensor_factor(side, buffers, options).reshape(-1, 1)
    else:
        factor = np.where(scale == 255, np.nan, 2.0 ** (scale.astype(float) - 127))
        values = floats(codes, element) * factor.astype(np.float32)
    values = back(values, "with_random_sign_mask" in options)[:, :last] if rotated else values
    return (values.T if turned else values).reshape(shape)


def tensor_factor(side, buffers, options):
    if "with_global_scale_inv" in options:
        return buffers[f"{side}_global_scale_inv"]
    top = float(options.get("e4m3_max", 256 if "use_4over6" in options else 448))
    return buffers[f"amax_{side}"] / np.float32(6 * top)


def back(values, plus):
    """Rotate groups of 16 back: the sum over k in order, in float32."""
    k, j = np.indices((16, 16))
    matrix = np.array([(-1.0) ** int(n).bit_count() for n in (k & j).ravel()]).reshape(16, 16) / 4
    signs = [1 if plus or not 0xD7E8 >> i & 1 else -1 for i in range(16)]
    matrix = (matrix * np.array(signs)[:, None]).T.astype(np.float32)  # of diag(signs) @ H16
    groups = values.reshape(len(values), values.shape[1] // 16, 16)
    total = np.zeros_like(groups)
    for n in range(16):
        total = total + groups[..., n : n + 1] * matrix[n]
    return total.reshape(values.shape)


# ---- the formats

BOTH = {"columnwise": True}
ONLY = {"columnwise": True, "rowwise": False}
FORMATS = [
    *[("fp8", o) for o in ({}, BOTH, ONLY, {"dtype": "e5m2"})],
    *[("fp8_rowwise", o) for o in ({}, BOTH, ONLY, {"axis": 0}, {"axis": 0, **ONLY})],
    *[("fp8_blockwise", o) for o in ({}, BOTH, ONLY, {"force_pow_2_scales": False})],
    *[("fp8_blockwise", {"block_scaling_dim": 2, **o}) for o in ({}, BOTH, ONLY)],
    *[("mxfp8", o) for o in ({}, BOTH, ONLY, {"dtype": "e5m2"}, {"scale_mode": "floor"})],
    *[("mxfp8", {"swizzled": True, **o}) for o in ({}, ONLY)],
    ("mxfp8", {"with_2d_quantization": True}),
    *[("mxfp6", o) for o in ({}, ONLY, {"dtype": "e3m2"}, {"packed": True})],
    ("mxfp6", {"packed": True, **ONLY}),
    *[("mxfp4", o) for o in ({}, BOTH, ONLY, {"swizzled": True}, {"swizzled": True, **ONLY})],
    *[("nvfp4", o) for o in ({}, BOTH, ONLY, {"swizzled": True}, {"swizzled": True, **ONLY})],
    *[("nvfp4", {"row_scaled": True, **o}) for o in ({}, ONLY)],
    *[("nvfp4", o) for o in ({"e4m3_max": 256.0}, {"use_4over6": True})],
    ("nvfp4", {"use_4over6": True, "e4m3_max": 448.0}),
    *[("nvfp4", {"with_global_scale_inv": True, **o}) for o in ({}, ONLY)],
    *[("nvfp4", {"with_rht": True, **o}) for o in ({}, ONLY)],
    ("nvfp4", {"with_rht": True, "with_random_sign_mask": False, **ONLY}),
    ("nvfp4", {"with_2d_quantization": True}),
]


@pytest.mark.parametrize(("fmt", "options"), FORMATS, ids=str)
def test_the_document_is_enough(fmt, options, tmp_path):
    state = {}
    for shape in ((48, 160), (5, 37), (130, 257), (3, 20, 96), (1, 1), (2, 0)):
        generator = torch.Generator().manual_seed(shape[0])
        values = torch.randn(shape, generator=generator) * torch.rand(shape[-1:]).add(0.1)
        state[f"a.{'x'.join(map(str, shape))}"] = qtensor.quantize(values, fmt, **options)
    checkpoints.save(state, tmp_path / "x.safetensors")
    found = read(tmp_path / "x.safetensors")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        want = tensor.dequantize(torch.float32).numpy()
        assert found[name].shape == want.shape
        np.testing.assert_array_equal(found[name], want, err_msg=name)


def test_transposed_tensors(tmp_path):
    """The values of a transpose may be those of its columnwise data, or rotated rowwise."""
    values = torch.randn(48, 160, generator=torch.Generator().manual_seed(0))
    formats = ("fp8", "mxfp8", "nvfp4", "fp8_blockwise")
    state = {fmt: qtensor.quantize(values, fmt, columnwise=True).t() for fmt in formats}
    state["rotated"] = qtensor.quantize(values, "nvfp4", with_rht=True, **ONLY).t()
    checkpoints.save(state, tmp_path / "x.safetensors")
    found = read(tmp_path / "x.safetensors")
    for name, tensor in state.items():
        want = tensor.dequantize(torch.float32).numpy()
        np.testing.assert_array_equal(found[name], want, err_msg=name)


@pytest.mark.parametrize(("fmt", "element"), [("fp8", "e4m3"), ("fp8", "e5m2"), ("mxfp8", "e5m2")])
def test_every_code(fmt, element, tmp_path):
    """NaN and infinite codes, which a file of another origin may have brought."""
    tensor = qtensor.quantize(torch.zeros(8, 32), fmt, dtype=element)
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scale = tensor.buffers()[1].clone()
    if fmt == "mxfp8":
        scale[:4, 0] = torch.tensor([0, 1, 254, 255], dtype=torch.uint8)
    tensor = tensor.quantizer.assemble([codes, scale], tensor.shape, tensor.dtype)
    checkpoints.save({"a": tensor}, tmp_path / "x.safetensors")
    want = tensor.dequantize(torch.float32).numpy()
    with np.errstate(all="ignore"):
        found = read(tmp_path / "x.safetensors")["a"]
    np.testing.assert_array_equal(found, want)
