"""The library against the independent numpy oracle: every option, usage, dtype, kind of input and
shape, byte for byte.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from adversarial import (
    KINDS,
    assert_buffers,
    assert_like_oracle,
    assert_same_values,
    expected,
    make,
    mixed,
    to_numpy,
)
from formats import (
    BY_NAME,
    DTYPES,
    FORMATS,
    USAGES,
    FormatCase,
    assert_same_bytes,
    dtypes,
    formats,
    usages,
)

import qtensor

GRID = [(case, options) for case in FORMATS for options in case.every_option()]
SHAPES = [
    (),
    (1,),
    (33,),
    (128, 128),
    (7, 50),
    (130, 260),
    (3, 5, 40),
    (2, 16, 33),
    (1, 1),
    (2, 1, 64),
    (5, 1, 31),
    (2, 3, 4, 20),
    (257, 31),
    (1, 256),
    (129, 1),
    (0,),
    (0, 32),
    (4, 0),
    (2, 0, 16),
    (0, 0),
]


def option_id(value: Any) -> str:
    if isinstance(value, FormatCase):
        return value.name
    return ",".join(f"{k}={v}" for k, v in value.items()) or "default"


@pytest.mark.parametrize(("case", "options"), GRID, ids=option_id)
def test_every_option(case: FormatCase, options: dict[str, Any]) -> None:
    """Usages and dtypes take turns over the grid; NaN and inf where they do not decide the whole
    tensor's factor.
    """
    turn = GRID.index((case, options))
    dtype = DTYPES[turn % 3]
    rowwise, columnwise = USAGES[2 - turn // 3 % 3]
    usage = {"rowwise": rowwise, "columnwise": columnwise}
    assert_like_oracle(mixed((66, 69), dtype), case, **usage, **options)
    if case.name not in ("fp8", "nvfp4") or options.get("row_scaled"):
        assert_like_oracle(mixed((84, 48), dtype, finite=False), case, **usage, **options)
    else:
        assert_like_oracle(make("nan", (40, 48), dtype), case, **usage, **options)


@formats
@usages
@dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(
    case: FormatCase, kind: str, dtype: torch.dtype, rowwise: bool, columnwise: bool
) -> None:
    assert_like_oracle(make(kind, (37, 70), dtype), case, rowwise=rowwise, columnwise=columnwise)


@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(case: FormatCase, shape: tuple[int, ...]) -> None:
    """With the defaults in every usage, then each other value of each option on its own."""
    x = make("randn", shape, torch.bfloat16)
    for rowwise, columnwise in USAGES:
        assert_like_oracle(x, case, rowwise=rowwise, columnwise=columnwise)
    for options in case.each_option():
        assert_like_oracle(x, case, columnwise=True, **options)


@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (129, 130), (256, 272)], ids=str)
@pytest.mark.parametrize("pow2", [False, True], ids=["f32", "pow2"])
@pytest.mark.parametrize("dim", [1, 2])
def test_blockwise_extrema(
    dim: int, pow2: bool, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Blocks of zeros and of the dtype's largest value, beside ordinary ones."""
    options = {"block_scaling_dim": dim, "force_pow_2_scales": pow2, "columnwise": True}
    case = BY_NAME["fp8_blockwise"]
    assert_like_oracle(torch.zeros(shape, dtype=dtype), case, **options)
    assert_like_oracle(torch.full(shape, torch.finfo(dtype).max, dtype=dtype), case, **options)
    x = torch.randn(shape).to(dtype)
    x[:, : shape[1] // 2] = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    x[shape[0] // 2 :] = 0
    assert_like_oracle(x, case, **options)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "amax", [0.0, 2.0**-149, 1e-38, 448 / 65504, 1.0, 3e38, math.inf, math.nan]
)
def test_scale_from_amax(amax: float, element: str) -> None:
    """Zero and non-finite: 1. Overflow: the largest float32. Everything else: the IEEE quotient."""
    largest = {"e4m3": 448.0, "e5m2": 57344.0}[element]
    q = qtensor.quantize(torch.tensor([amax, 0.0]), "fp8", dtype=element)
    scale = np.float32(1)
    if 0 < amax < math.inf:
        with np.errstate(over="ignore"):
            quotient = np.float32(largest) / np.float32(amax)
        scale = min(quotient, np.finfo(np.float32).max)
    assert q._scale_inv.item() == np.float32(1) / np.float32(scale)
    assert math.isfinite(q._scale_inv.item())


def test_small_amax_float16() -> None:
    """The amax whose factor would overflow float16 (torchao's test_small_amax_float16) has a finite
    factor and is exact.
    """
    x = torch.full((1, 32), 448 / 65504, dtype=torch.float16)
    for case in FORMATS:
        assert assert_like_oracle(x, case).dequantize().isfinite().all(), case.name


@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("k", [-127, -60, -1, 0, 1, 77, 119])
def test_e8m0_of_known_amax(k: int, mode: str) -> None:
    """An amax of 448 * 2^k gives code k + 127 (rceil); the OCP text takes the exponent of 448, 8,
    off its own.
    """
    x = torch.zeros(1, 32, dtype=torch.float64)
    x[0, 31] = -448.0 * 2.0**k
    q = qtensor.quantize(x.float(), "mxfp8", scale_mode=mode)
    # 448 = 1.75 * 2^8, so "ceil" and "even" (which rounds to three bits) differ from the floor only
    # in "ceil".
    want = k + 127 + (mode == "ceil")
    assert q._rowwise_scale_inv[0, 0].item() == want
    assert q._rowwise_data[0, 31].item() == (0xFE if mode != "ceil" else 0xF6)


@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("mxfp8", "e4m3"),
        ("mxfp8", "e5m2"),
        ("mxfp6", "e2m3"),
        ("mxfp6", "e3m2"),
        ("mxfp4", "e2m1"),
    ],
)
def test_e8m0_beside_every_threshold(name: str, element: str, mode: str) -> None:
    """Block maxima at 32 significands a binade, among them all where a mode turns, and one ulp
    beside.
    """
    powers = [-149, -140, -133, -128, -127, -126, -125, -119, -60, -1, 0, 1, 63, 119, 126, 127]
    amax = [(1 + i / 32) * 2.0**k for k in powers for i in range(32)]
    exact = torch.tensor(amax)
    beside = [torch.nextafter(exact, torch.tensor(to)) for to in (0.0, math.inf)]
    x = torch.zeros(3 * len(exact), 32)
    x[:, 5] = torch.cat((exact, *beside))
    # A second value, a third of the largest, is rounded under the factor too.
    x[:, 9] = x[:, 5] / -3
    assert_like_oracle(x, BY_NAME[name], dtype=element, scale_mode=mode)


@formats
def test_rowwise_alone_equals_rowwise_of_both(case: FormatCase) -> None:
    x = mixed((64, 96), torch.float32)
    both = case.quantize(x, rowwise=True, columnwise=True)
    for usage in ("rowwise", "columnwise"):
        alone = case.quantize(x, rowwise=usage == "rowwise", columnwise=usage == "columnwise")
        for slot in alone.quantizer.slots:
            assert_same_bytes(getattr(alone, slot.name), getattr(both, slot.name), slot.name)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4"])
def test_mx_2d_scales_are_constant_in_a_block(name: str) -> None:
    x = torch.randn(128, 128) * torch.exp2(torch.arange(128.0) // 16)
    q = qtensor.quantize(x, name, with_2d_quantization=True, columnwise=True)
    row, column = q._rowwise_scale_inv[:, :4].view(4, 32, 4), q._columnwise_scale_inv.view(4, 4, 32)
    assert (row == row[:, :1]).all()
    assert (column == column[..., :1]).all()
    assert_same_bytes(row[:, 0], column[..., 0])
    assert len(row.unique()) > 1
    if name == "mxfp8":
        assert_same_bytes(q._rowwise_data, q._columnwise_data)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_poisons_one_block(name: str, bad: float) -> None:
    x = torch.randn(4, 96)
    x[2, 40] = bad
    q = qtensor.quantize(x, name)
    spoiled = torch.zeros(4, 96, dtype=torch.bool)
    spoiled[2, 32:64] = True
    assert (q._rowwise_scale_inv[:4, :3] == 255).sum() == 1
    assert q._rowwise_scale_inv[2, 1] == 255
    assert torch.equal(q.dequantize().isnan(), spoiled)
    codes = q._rowwise_data.view(4, 3, -1)[2, 1]
    assert (codes == (0x7F if name == "mxfp8" else 0)).all()


COMBINED = pytest.mark.nightly(reason="test_every_option has all combinations of options")


def alone(case: FormatCase, options: dict[str, Any]) -> bool:
    """Return whether at most one option differs from its default."""
    return sum(value != case.options[name][0] for name, value in options.items()) <= 1


@pytest.mark.parametrize(
    ("case", "options"),
    [pytest.param(c, o, marks=() if alone(c, o) else COMBINED) for c, o in GRID],
    ids=option_id,
)
def test_transposed_quantizer_on_the_transposed_input(
    case: FormatCase, options: dict[str, Any]
) -> None:
    """Gives the transposed values, from the same blocks; the random bytes belong to a direction, so
    they do not move.
    """
    if options.get("stochastic_rounding"):
        options = {**options, "stochastic_rounding": False}
    x = mixed((66, 69), torch.float32, finite=case.name in ("fp8", "nvfp4"))
    for rowwise, columnwise in USAGES:
        quantizer = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
        got = quantizer.transposed()(x.t(), **case.call()).dequantize()
        assert_same_values(got, quantizer(x, **case.call()).dequantize().t().numpy())
    assert quantizer.transposed().transposed() == quantizer


@dtypes
@pytest.mark.parametrize("signs", [True, False])
def test_rotation_of_the_rowwise_side(signs: bool, dtype: torch.dtype) -> None:
    """``rht_side`` names the side; rowwise data of x are then the rotated columnwise data of its
    transpose.
    """
    x = mixed((66, 69), dtype)
    options = {"with_rht": True, "with_random_sign_mask": signs}
    want = expected(x, BY_NAME["nvfp4"], rowwise=False, columnwise=True, **options)
    got = qtensor.quantize(x.t(), "nvfp4", rht_side="rowwise", **options)
    for name in ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"):
        other = want[name.replace("rowwise", "columnwise")]
        assert_same_bytes(getattr(got, name), torch.from_numpy(other.copy()), name)


@pytest.mark.parametrize(
    "options", [{}, {"with_2d_quantization": True}, {"use_4over6": True}], ids=option_id
)
def test_nvfp4_negative_zero_has_code_0(options: dict[str, Any]) -> None:
    x = torch.full((16, 32), -0.0)
    x[0, 0] = -1.0
    codes = qtensor.quantize(x, "nvfp4", **options)._rowwise_data
    assert codes[0, 0] & 0xF == 0xF
    codes[0, 0] = 0
    assert not codes.any()


@formats
def test_a_changed_value_is_noticed(case: FormatCase) -> None:
    """The comparison fails on a wrong code, a wrong factor and a missing buffer."""
    x = mixed((32, 64), torch.float32)
    q, want = case.quantize(x), expected(x, case)
    assert_buffers(q, want)
    for slot in q.quantizer.slots:
        wrong = {name: buffer.copy() for name, buffer in want.items()}
        wrong[slot.name].reshape(-1).view(np.uint8)[0] ^= 1
        with pytest.raises(AssertionError, match=f"{slot.name}: 1 of "):
            assert_buffers(q, wrong)
    del wrong[slot.name]
    with pytest.raises(AssertionError):
        assert_buffers(q, wrong)


def test_inputs_are_what_they_say() -> None:
    """The kinds hold what their names promise, in every dtype."""
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        subnormal = make("subnormal", (40, 40), dtype)
        assert ((subnormal != 0) & (subnormal.float().abs() < info.tiny)).any()
        powers = to_numpy(make("powers_of_two", (40, 40), dtype))
        assert (np.frexp(np.abs(powers))[0] == 0.5).all()
        assert (make("max_finite", (40, 40), dtype).float().abs() == info.max).any()
        assert make("negative_zeros", (40, 40), dtype).signbit().all()
        assert make("nan", (40, 40), dtype).isnan().any()
        assert make("inf", (40, 40), dtype).isposinf().any()
        assert make("minus_inf", (40, 40), dtype).isneginf().any()
        assert mixed((66, 69), dtype).isfinite().all()
        assert not mixed((84, 48), dtype, finite=False).isfinite().all()
