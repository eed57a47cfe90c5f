"""Swizzled scales: the bytes of the 128x4 tiles (docs/numerics.md), and values that do not depend
on them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from adversarial import mixed
from formats import BY_NAME, USAGES, FormatCase, assert_same_bytes, dtypes
from torch import Tensor

import qtensor
from qtensor.reference.blocks import swizzle, unswizzle

SWIZZLED = [case for case in BY_NAME.values() if "swizzled" in case.options]
swizzled_formats = pytest.mark.parametrize("case", SWIZZLED, ids=lambda c: c.name)
SHAPES = [
    (128, 128),
    (256, 256),
    (130, 70),
    (1, 1),
    (33, 300),
    (2, 70, 40),
    (257,),
    (),
    (0, 64),
    (5, 0),
]


def tile_by_tile(scales: Tensor) -> Tensor:
    """The rule of docs/numerics.md, element by element."""
    rows, cols = scales.shape
    out = torch.empty(rows * cols, dtype=scales.dtype)
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * (cols // 4) + c // 4
            inside = (r % 128 % 32) * 16 + (r % 128 // 32) * 4 + c % 4
            out[tile * 512 + inside] = scales[r, c]
    return out.view(rows, cols)


def plain_and_swizzled(case: FormatCase, x: Tensor, **options: Any) -> tuple[Any, Any]:
    return case.quantize(x, swizzled=False, **options), case.quantize(x, swizzled=True, **options)


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (384, 12), (128, 16)], ids=str)
def test_rule(shape: tuple[int, int]) -> None:
    scales = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert_same_bytes(swizzle(scales), tile_by_tile(scales))
    assert_same_bytes(swizzle(scales), torch.from_numpy(oracle.swizzle(scales.numpy())))


@pytest.mark.parametrize(
    "shape", [(128, 4), (256, 8), (100, 3), (4, 4), (50, 10), (384, 12)], ids=str
)
def test_round_trip(shape: tuple[int, int]) -> None:
    """The shapes of torchao's to_blocked / from_blocked test, padded as storages pad them."""
    padded = torch.zeros(-(-shape[0] // 128) * 128, -(-shape[1] // 4) * 4, dtype=torch.uint8)
    padded[: shape[0], : shape[1]] = torch.randint(1, 256, shape, dtype=torch.uint8)
    moved = swizzle(padded)
    assert moved.shape == padded.shape
    assert not torch.equal(moved, padded)
    assert_same_bytes(unswizzle(moved), padded)


@swizzled_formats
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_the_plain_scales(
    case: FormatCase, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """MX column-wise scales are transposed first; everything else stands as it is."""
    x = (torch.randn(shape) * 8).to(dtype)
    plain, tiled = plain_and_swizzled(case, x, columnwise=True)
    assert (plain.scale_layout, tiled.scale_layout) == ("plain", "swizzled_32_4_4")
    for slot in plain.quantizer.slots:
        before, after = getattr(plain, slot.name), getattr(tiled, slot.name)
        if slot.name == "_columnwise_scale_inv" and case.name != "nvfp4":
            before = swizzle(before.t()).reshape(before.shape)
        elif slot.name.endswith("scale_inv"):
            before = swizzle(before)
        assert_same_bytes(after, before, slot.name)


@swizzled_formats
def test_values_do_not_depend_on_the_layout(case: FormatCase) -> None:
    for options in case.each_option():
        if "swizzled" in options or "stochastic_rounding" in options:
            continue
        for rowwise, columnwise in USAGES:
            x = mixed((140, 70), torch.bfloat16, finite=False)
            plain, tiled = plain_and_swizzled(
                case, x, rowwise=rowwise, columnwise=columnwise, **options
            )
            a, b = plain.dequantize(), tiled.dequantize()
            assert torch.equal(a.isnan(), b.isnan())
            assert_same_bytes(a.nan_to_num(0.0), b.nan_to_num(0.0))


@swizzled_formats
def test_padding_is_zero_in_both_layouts(case: FormatCase) -> None:
    x = torch.randn(33, 70) + 5
    for q in plain_and_swizzled(case, x, columnwise=True):
        block = 16 if case.name == "nvfp4" else 32
        down, across = -(-33 // block), -(-70 // block)
        assert (q._rowwise_scale_inv != 0).sum() == 33 * across
        assert (q._columnwise_scale_inv != 0).sum() == 70 * down


@swizzled_formats
def test_wrong_flag_gives_wrong_values(case: FormatCase) -> None:
    """The flag matters: swizzled bytes read as plain ones decode to other values."""
    x = torch.randn(128, 128) * torch.exp2(torch.arange(128.0) % 16)[:, None]
    plain, tiled = plain_and_swizzled(case, x)
    misread = plain.quantizer.assemble(tiled.buffers(), tiled.shape, tiled.dtype)
    assert not torch.equal(misread.dequantize(), plain.dequantize())


@pytest.mark.parametrize(
    "case", [c for c in BY_NAME.values() if c not in SWIZZLED], ids=lambda c: c.name
)
def test_formats_without_tiles_say_plain(case: FormatCase) -> None:
    assert case.quantize(torch.randn(3, 40)).scale_layout == "plain"
    with pytest.raises(
        qtensor.QTensorError,
        match=r"the option must be one of the format's; got swizzled\. Choose among: rowwise",
    ):
        case.quantizer(swizzled=True)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4", "nvfp4"])
def test_requantizing_into_swizzled_buffers(name: str) -> None:
    """A second write leaves nothing of the first, in the padding neither."""
    x, y = torch.randn(40, 70), torch.randn(40, 70) * 100
    q = qtensor.quantize(x, name, swizzled=True, columnwise=True)
    q.quantize_(y)
    want = qtensor.quantize(y, name, swizzled=True, columnwise=True)
    for a, b in zip(q.buffers(), want.buffers(), strict=True):
        assert_same_bytes(a, b)


def test_rule_notices_a_moved_byte() -> None:
    scales = torch.arange(512).to(torch.uint8).view(128, 4)
    wrong = tile_by_tile(scales)
    wrong[0, 0], wrong[0, 1] = wrong[0, 1].item(), wrong[0, 0].item()
    assert not np.array_equal(wrong.numpy(), oracle.swizzle(scales.numpy()))
    with pytest.raises(AssertionError, match="2 of 512 bytes differ"):
        assert_same_bytes(swizzle(scales), wrong)
