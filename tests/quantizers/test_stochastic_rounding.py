"""NVFP4's stochastic rounding: the generator of its bytes, the two neighbours, the mean,
reproducibility.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from adversarial import assert_like_oracle, mixed, philox_bytes, philox_words
from formats import BY_NAME, USAGES, assert_same_bytes, assert_same_tensor, dtypes
from torch import Tensor

import qtensor
from qtensor.reference.elements import code_values
from qtensor.reference.nvfp4 import stochastic_codes
from qtensor.reference.philox import philox4x32, random_bytes

GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NVFP4 = BY_NAME["nvfp4"]
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Counter, key, output: the known-answer tests that Random123 publishes for philox4x32-10."""


def quantize(x: Tensor, seed: int, **options: Any) -> Any:
    call = {"generator": torch.tensor([seed])}
    return qtensor.quantize(x, "nvfp4", stochastic_rounding=True, **options, **call)


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]
) -> None:
    """The library's generator, and the numpy one that the oracle comparisons use."""
    words = philox4x32([torch.tensor([c]) for c in counter], [torch.tensor([k]) for k in key])
    assert tuple(int(w) for w in words) == want
    assert tuple(philox_words(np.array([counter], np.uint32), key)[0].tolist()) == want


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345, -(2**63), 0x1234_5678_9ABC_DEF])
@pytest.mark.parametrize("stream", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 1000])
def test_random_bytes(seed: int, stream: int, count: int) -> None:
    got = random_bytes(torch.tensor([seed]), count, stream)
    assert_same_bytes(got, torch.from_numpy(philox_bytes(seed, count, stream).copy()))


def test_random_bytes_are_uniform() -> None:
    """Chi-squared over 256 cells has mean 255 and deviation sqrt(510): five deviations."""
    counts = torch.bincount(
        random_bytes(torch.tensor([7]), 1 << 18, 0).int(), minlength=256
    ).double()
    expected = (1 << 18) / 256
    assert abs(((counts - expected) ** 2 / expected).sum().item() - 255) < 5 * math.sqrt(510)


@pytest.mark.parametrize("noise", [0, 1, 127, 128, 255])
def test_rule_of_one_value(noise: int) -> None:
    """t = |x| + (r / 256) * step, floored to the grid of t, capped at 6, with the sign of x
    (docs/numerics.md).
    """
    x = torch.cat((
        torch.arange(0, 7, 1 / 64),
        GRID,
        torch.tensor([0.49999997, 1.9999999, 5.9999995, 100.0, 1e-30]),
    ))
    x = torch.cat((x, -x))
    codes = stochastic_codes(x, torch.full(x.shape, noise, dtype=torch.uint8))
    want = []
    for value in x.tolist():
        size = np.float32(min(abs(value), 6.0))
        step = np.float32(0.5 if size < 2 else 1 if size < 4 else 2)
        raised = size + np.float32(noise) / np.float32(256) * step
        below = max(i for i, g in enumerate(GRID.tolist()) if g <= raised)
        want.append(below + (8 if value < 0 else 0))
    assert codes.tolist() == want


def test_values_of_the_grid_never_move() -> None:
    """The largest byte raises by 255/256 of a step, which is not enough."""
    for noise in (0, 128, 255):
        codes = stochastic_codes(GRID, torch.full(GRID.shape, noise, dtype=torch.uint8))
        assert codes.tolist() == list(range(8))


@dtypes
@pytest.mark.parametrize(
    "options", [{}, {"with_2d_quantization": True}, {"with_rht": True}], ids=str
)
def test_exact_for_a_seed(options: dict[str, Any], dtype: torch.dtype) -> None:
    for seed in (0, 5, -3, 2**62 + 1):
        for rowwise, columnwise in USAGES:
            chosen = {"rowwise": rowwise, "columnwise": columnwise, **options}
            x = mixed((33, 50), dtype)
            assert_like_oracle(x, NVFP4, seed, stochastic_rounding=True, **chosen)


def test_each_draw_is_one_of_the_two_neighbours() -> None:
    """In units of the block's factor, where the grid is E2M1's; a value of the grid stays."""
    x = torch.randn(64, 64)
    nearest = qtensor.quantize(x, "nvfp4")
    rows, blocks = 64, 4
    scale = (
        nearest._rowwise_scale_inv[:rows, :blocks].contiguous().view(torch.float8_e4m3fn).float()
    )
    # The encode factor of docs/numerics.md, NVFP4, in float32 at each step.
    global_dec = 1 / (torch.tensor(448.0 * 6) / nearest._amax_rowwise)
    scaled = (
        (x.view(rows, blocks, 16) * (1 / (scale * global_dec))[..., None])
        .view(rows, -1)
        .abs()
        .clamp(max=6)
    )
    above = torch.bucketize(scaled, GRID).clamp(max=7)
    below = torch.where(GRID[above] == scaled, above, above - 1)
    seen = set()
    for seed in range(32):
        q = quantize(x, seed)
        assert_same_bytes(q._rowwise_scale_inv, nearest._rowwise_scale_inv)
        codes = torch.stack((q._rowwise_data & 0xF, q._rowwise_data >> 4), -1).view(rows, -1)
        assert ((codes & 7 == below) | (codes & 7 == above)).all()
        assert torch.equal(codes >= 8, x < 0)
        seen.add(codes.numpy().tobytes())
    assert len(seen) == 32


def test_probability_is_the_distance() -> None:
    """A value at 3/8 of a step goes up in 96 of the 256 equally likely bytes."""
    noise = torch.arange(256).to(torch.uint8)
    for low, high in itertools.pairwise(GRID):
        value = low + (high - low) * 3 / 8
        codes = stochastic_codes(value.repeat(256), noise)
        values = torch.tensor(code_values(NVFP4.quantizer().element))[codes.int()]
        assert ((values == low) | (values == high)).all()
        assert (values == high).sum() == 96


@pytest.mark.parametrize("columnwise", [False, True])
def test_mean_of_draws_converges(columnwise: bool) -> None:
    """Fifty draws come closer than rounding to nearest.

    Let u be the position between the neighbours a step apart, uniform: one draw has variance u(1 -
    u), 1/6 on average, so the mean of 50 has RMSE sqrt(1 / 300) = 0.058 of a step; rounding to
    nearest has sqrt(1 / 12) = 0.289.
    """
    x = torch.randn(128, 128)
    usage = {"rowwise": not columnwise, "columnwise": columnwise}
    nearest = qtensor.quantize(x, "nvfp4", **usage).dequantize()
    draws = torch.stack([quantize(x, seed, **usage).dequantize() for seed in range(50)])

    def rmse(y: Tensor) -> float:
        return (y - x).square().mean().sqrt().item()

    assert rmse(draws.mean(0)) < 0.35 * rmse(nearest)
    assert rmse(draws[0]) > rmse(nearest)


def test_reproducible_by_generator() -> None:
    x = torch.randn(32, 64)
    quantizer = NVFP4.quantizer(stochastic_rounding=True, columnwise=True)
    first, second = (quantizer(x, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert_same_tensor(first, second)
    generator = torch.Generator().manual_seed(3)
    assert_same_tensor(quantizer(x, generator=generator), first)
    other = quantizer(x, generator=generator)
    assert not torch.equal(other._rowwise_data, first._rowwise_data)
    assert not torch.equal(other._columnwise_data, first._columnwise_data)


def test_reproducible_by_global_seed() -> None:
    x = torch.randn(32, 64)
    torch.manual_seed(11)
    first, next_one = (qtensor.quantize(x, "nvfp4", stochastic_rounding=True) for _ in range(2))
    torch.manual_seed(11)
    assert_same_tensor(qtensor.quantize(x, "nvfp4", stochastic_rounding=True), first)
    assert not torch.equal(next_one._rowwise_data, first._rowwise_data)


def test_own_generator_leaves_the_global_one_alone() -> None:
    state = torch.get_rng_state()
    qtensor.quantize(
        torch.ones(3, 16), "nvfp4", stochastic_rounding=True, generator=torch.Generator()
    )
    quantize(torch.ones(3, 16), 5)
    qtensor.quantize(torch.ones(3, 16), "nvfp4")
    assert torch.equal(torch.get_rng_state(), state)


def test_same_bytes_for_the_same_seed_tensor() -> None:
    x, seed = torch.randn(32, 64), torch.tensor([99])
    quantizer = NVFP4.quantizer(stochastic_rounding=True)
    first = quantizer(x, generator=seed)
    assert_same_tensor(quantizer(x, generator=seed), first)
    assert_same_tensor(quantizer(x, generator=torch.tensor(99)), first)
    assert_same_tensor(quantizer(x, generator=seed, out=quantizer(torch.zeros(32, 64))), first)
    assert seed.item() == 99
    assert not torch.equal(
        quantizer(x, generator=torch.tensor([100]))._rowwise_data, first._rowwise_data
    )


def test_directions_draw_apart() -> None:
    """Row- and column-wise data round on their own, by different bytes; 2D data are one draw,
    transposed.
    """
    x = torch.full((32, 32), 2.5)
    x[0, 0] = 6.0
    q = quantize(x, 1, columnwise=True)
    assert not torch.equal(q._rowwise_data, q._columnwise_data)
    both = quantize(x, 1, columnwise=True, with_2d_quantization=True)
    row = torch.stack((both._rowwise_data & 0xF, both._rowwise_data >> 4), -1).view(32, 32)
    column = torch.stack((both._columnwise_data & 0xF, both._columnwise_data >> 4), -1).view(32, 32)
    assert_same_bytes(column, row.t())


def test_without_the_option_no_seed_matters() -> None:
    x = torch.randn(16, 32)
    torch.manual_seed(1)
    first = qtensor.quantize(x, "nvfp4")
    torch.manual_seed(2)
    assert_same_tensor(qtensor.quantize(x, "nvfp4"), first)
    assert not NVFP4.quantizer(stochastic_rounding=True).is_requantization_safe()
    assert NVFP4.quantizer().is_requantization_safe()


def test_encoding_without_a_seed_is_refused() -> None:
    """The reference, too, never rounds to nearest in its place."""
    quantizer = qtensor.NVFP4Quantizer(stochastic_rounding=True)
    out = quantizer.alloc_tensors((4, 64))
    with pytest.raises(qtensor.QTensorError, match="stochastic rounding needs a seed; got none"):
        quantizer.encode_(out, torch.randn(4, 64), None, None, None)
