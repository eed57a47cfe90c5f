"""Narrow element codes: every code's value, the casts at and beside every midpoint, packing of
sub-byte codes.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from formats import assert_same_bytes
from torch import Tensor

import qtensor
from qtensor.core.formats import ELEMENTS, Element
from qtensor.reference.elements import (
    code_values,
    decode_pairs,
    encode_narrow,
    pack_pairs,
    pack_quads,
    unpack_pairs,
    unpack_quads,
)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M3 = [i / 8 for i in range(8)] + [(1 + i / 8) * 2**e for e in (0, 1, 2) for i in range(8)]
E3M2 = [i / 16 for i in range(4)] + [(1 + i / 4) * 2.0**e for e in range(-2, 5) for i in range(4)]
E4M3 = [i / 512 for i in range(8)] + [(1 + i / 8) * 2.0**e for e in range(-6, 9) for i in range(8)]
E5M2 = [i / 65536 for i in range(4)] + [
    (1 + i / 4) * 2.0**e for e in range(-14, 16) for i in range(4)
]
MAGNITUDES = {"e2m1": E2M1, "e2m3": E2M3, "e3m2": E3M2, "e4m3": E4M3[:127], "e5m2": E5M2}
"""The finite values from 0 up; the index is the code (written from the format definitions, not from
the library).
"""
SPECIALS = {
    "e4m3": {0x7F: math.nan},
    "e5m2": {0x7C: math.inf, 0x7D: math.nan, 0x7E: math.nan, 0x7F: math.nan},
}

elements = pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
narrow = pytest.mark.parametrize(
    "element", [e for e in ELEMENTS.values() if e.dtype is None], ids=lambda e: e.name
)


MX = {"e2m3": "mxfp6", "e3m2": "mxfp6", "e2m1": "mxfp4"}


def encode(values: Tensor, element: Element, keep_negative_zero: bool = True) -> Tensor:
    """FP8 under the factor 1; FP6 and FP4 by the cast itself, for their formats choose the
    factor.
    """
    if element.dtype is None:
        return encode_narrow(values, element, keep_negative_zero)
    return qtensor.quantize(values, "fp8_delayed", dtype=element.name, scale=torch.ones(1))._data


def decode(codes: Tensor, element: Element) -> Tensor:
    """The values of codes (n,), one a byte, of a tensor made by hand with the factor 1."""
    if element.dtype is not None:
        quantizer = qtensor.quantizer("fp8_delayed", dtype=element.name)
        return quantizer.assemble([codes, torch.ones(1)], codes.shape, torch.float32).dequantize()
    quantizer = qtensor.quantizer(MX[element.name], dtype=element.name)
    data, scales = quantizer.alloc_tensors(codes.shape).values()
    data.copy_(pack_pairs(codes) if element.bits == 4 else codes)
    scales.fill_(127)
    return quantizer.assemble([data, scales], codes.shape, torch.float32).dequantize()


def both_signs(codes: list[int], element: Element) -> Tensor:
    sign = 1 << (element.bits - 1)
    return torch.tensor(codes + [c | sign for c in codes], dtype=torch.uint8)


@elements
def test_every_code_decodes_to_its_value(element: Element) -> None:
    magnitudes = [*MAGNITUDES[element.name], *SPECIALS.get(element.name, {}).values()]
    assert len(magnitudes) == 1 << (element.bits - 1)
    want = torch.tensor(magnitudes + [-m for m in magnitudes])
    got = decode(torch.arange(1 << element.bits, dtype=torch.uint8), element)
    assert torch.equal(got.isnan(), want.isnan())
    assert_same_bytes(got[~want.isnan()], want[~want.isnan()])


@elements
def test_description_agrees_with_the_values(element: Element) -> None:
    values = MAGNITUDES[element.name]
    assert element.max == values[-1]
    assert element.max_exponent == math.floor(math.log2(values[-1]))
    assert 2.0**element.min_exponent == values[1 << element.mantissa_bits]
    if element.dtype is None:
        assert list(code_values(element)) == values + [-v for v in values]


@elements
def test_exact_values_encode_to_their_code(element: Element) -> None:
    """Signs of zero included: -0.0 keeps its sign in every format but NVFP4."""
    values = torch.tensor(MAGNITUDES[element.name])
    got = encode(torch.cat((values, -values)), element)
    assert_same_bytes(got, both_signs(list(range(len(values))), element))


@elements
@pytest.mark.parametrize("side", ["below", "at", "above"])
def test_midpoints(element: Element, side: str) -> None:
    """At a midpoint the even code wins; one float32 ulp beside it the nearer one."""
    values = MAGNITUDES[element.name]
    middle = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(values)])
    assert torch.equal(
        middle.double(), torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(values)]).double()
    )
    codes = range(len(values) - 1)
    if side == "below":
        x, want = torch.nextafter(middle, torch.tensor(0.0)), list(codes)
    elif side == "above":
        x, want = torch.nextafter(middle, torch.tensor(math.inf)), [c + 1 for c in codes]
    else:
        x, want = middle, [c + c % 2 for c in codes]
    assert_same_bytes(encode(torch.cat((x, -x)), element), both_signs(want, element))


@elements
def test_overflow_saturates(element: Element) -> None:
    """Beyond the largest value by an ulp, by the step where a cast would round to infinity, by any
    amount.
    """
    largest = torch.tensor(element.max)
    beyond = [
        torch.nextafter(largest, torch.tensor(math.inf)).item(),
        element.max * 1.0625,
        element.max * 1.25,
    ]
    x = torch.tensor([*beyond, element.max * 2, 1e6, torch.finfo(torch.float32).max, math.inf])
    code = len(MAGNITUDES[element.name]) - 1
    assert_same_bytes(encode(torch.cat((x, -x)), element), both_signs([code] * len(x), element))


@elements
def test_underflow_rounds_to_a_signed_zero(element: Element) -> None:
    smallest = MAGNITUDES[element.name][1]
    x = torch.tensor([smallest / 2, smallest / 4, 1e-38, 2.0**-149, 0.0])
    assert_same_bytes(encode(torch.cat((x, -x)), element), both_signs([0] * len(x), element))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_nan_becomes_the_positive_nan(name: str) -> None:
    x = torch.tensor([0x7FC00000, 0x7F800001, -0x400000, -1], dtype=torch.int32).view(torch.float32)
    assert x.isnan().all()
    got = encode(x, ELEMENTS[name])
    assert len(got.unique()) == 1
    assert decode(got, ELEMENTS[name]).isnan().all()
    assert not (got & 0x80).any()


@pytest.mark.parametrize("options", [{}, {"with_2d_quantization": True}], ids=["1d", "2d"])
def test_nan_is_code_0_in_nvfp4(options: dict[str, bool]) -> None:
    """And it is no part of the amax."""
    x = torch.full((16, 16), math.nan)
    x[:, 8:] = 3.0
    q = qtensor.quantize(x, "nvfp4", **options)
    assert q._amax_rowwise.item() == 3.0
    assert not q._rowwise_data[:, :4].any()
    assert (q._rowwise_data[:, 4:] == 0x77).all()


def test_nvfp4_drops_the_sign_of_zero_only() -> None:
    x = torch.tensor([-0.0, 0.0, -0.1, -0.25, -0.26])
    assert encode(x, ELEMENTS["e2m1"], keep_negative_zero=False).tolist() == [0, 0, 8, 8, 9]


def test_nvfp4_ties_of_the_contract() -> None:
    """docs/numerics.md, NVFP4 lists them."""
    ties = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4}
    got = decode(encode(torch.tensor(list(ties)), ELEMENTS["e2m1"]), ELEMENTS["e2m1"])
    assert got.tolist() == list(ties.values())


@narrow
def test_sixteen_bit_inputs_encode_like_float32(element: Element) -> None:
    """Through a block with factor 1: the largest power of two in it is the element's."""
    fmt = MX[element.name]
    values = torch.tensor(MAGNITUDES[element.name])
    x = torch.cat((values, (values[1:] + values[:-1]) / 2))
    x = torch.nn.functional.pad(x, (0, -len(x) % 31)).view(-1, 31)
    x = torch.cat((x, torch.full((len(x), 1), 2.0**element.max_exponent)), 1)
    want = qtensor.quantize(x, fmt, dtype=element.name)
    assert (want._rowwise_scale_inv[: len(x), 0] == 127).all()
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(x.to(dtype).float(), x)
        got = qtensor.quantize(x.to(dtype), fmt, dtype=element.name)
        assert_same_bytes(got._rowwise_data, want._rowwise_data)


def test_pairs_put_the_even_index_in_the_low_nibble() -> None:
    assert pack_pairs(torch.tensor([[0x1, 0x2, 0xF, 0x0, 0x7]], dtype=torch.uint8)).tolist() == [
        [0x21, 0x0F, 0x07]
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 16])
def test_pairs_round_trip(count: int) -> None:
    codes = torch.randint(0, 16, (3, count), dtype=torch.uint8)
    packed = pack_pairs(codes)
    assert packed.shape == (3, (count + 1) // 2)
    assert_same_bytes(unpack_pairs(packed, count), codes)
    assert_same_bytes(
        decode_pairs(packed, ELEMENTS["e2m1"], count),
        torch.tensor(E2M1 + [-v for v in E2M1])[codes.int()],
    )


def test_every_byte_decodes_as_a_pair() -> None:
    packed = torch.arange(256, dtype=torch.uint8)[:, None]
    signed = torch.tensor(E2M1 + [-v for v in E2M1])
    want = torch.stack((signed.repeat(16), signed.repeat_interleave(16)), 1)
    assert_same_bytes(decode_pairs(packed, ELEMENTS["e2m1"], 2), want)


def test_quads_are_little_endian() -> None:
    """Code i of a group takes bits 6i to 6i + 5."""
    one_hot = torch.zeros(4, 4, dtype=torch.uint8)
    one_hot.fill_diagonal_(0b111111)
    packed = pack_quads(one_hot)
    assert packed.tolist() == [[0x3F, 0, 0], [0xC0, 0x0F, 0], [0, 0xF0, 0x03], [0, 0, 0xFC]]
    assert pack_quads(torch.tensor([[0b100001]], dtype=torch.uint8)).tolist() == [[0b100001, 0, 0]]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 9, 32])
def test_quads_round_trip(count: int) -> None:
    codes = torch.randint(0, 64, (3, count), dtype=torch.uint8)
    packed = pack_quads(codes)
    assert packed.shape == (3, -(-count // 4) * 3)
    assert_same_bytes(unpack_quads(packed, count), codes)


@pytest.mark.parametrize("element", ["e2m3", "e3m2"])
def test_packed_and_unpacked_hold_the_same_codes(element: str) -> None:
    x = torch.randn(5, 70)
    loose = qtensor.quantize(x, "mxfp6", dtype=element, columnwise=True)
    tight = qtensor.quantize(x, "mxfp6", dtype=element, columnwise=True, packed=True)
    assert tight._rowwise_data.shape == (5, 18 * 3)
    assert_same_bytes(unpack_quads(tight._rowwise_data, 70), loose._rowwise_data)
    assert tight._columnwise_data.shape == (2 * 3, 70)
    assert_same_bytes(unpack_quads(tight._columnwise_data.t(), 5).t(), loose._columnwise_data)
    assert_same_bytes(tight._rowwise_scale_inv, loose._rowwise_scale_inv)
    assert_same_bytes(tight.dequantize(), loose.dequantize())
