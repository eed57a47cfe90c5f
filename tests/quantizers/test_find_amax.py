"""The maximum that belongs to a factor of NVFP4: ``find_amax``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from formats import rand

from qtensor.reference.nvfp4 import decode_factor, find_amax


def brute_force(factors: np.ndarray, e4m3_max: int) -> np.ndarray:
    """Whether some float32 within 8 units of G * 6L, by float64, has the quotient G."""
    bound = np.float32(6 * e4m3_max)
    start = (factors.astype(np.float64) * (6 * e4m3_max)).astype(np.float32).view(np.int32)
    near = (start[:, None] + np.arange(-8, 9, dtype=np.int32)).view(np.float32)
    return ((near / bound) == factors[:, None]).any(1)


def test_find_amax_finds_every_amax():
    """100,000 factors against brute force; and the documented shares."""
    random = np.random.default_rng(0)
    significand = random.integers(1 << 23, 1 << 24, 100_000)
    factors = np.ldexp(significand, random.integers(-60, 30, 100_000) - 23).astype(np.float32)
    first, second = brute_force(factors, 448), brute_force(factors, 256)
    assert abs(first.mean() - 0.84) < 0.01
    assert abs((first | second).mean() - 0.96) < 0.01
    assert find_amax(torch.from_numpy(factors)) is None  # not all have one
    for found, e4m3_max in ((first, 448.0), (second & ~first, 256.0)):
        amax = find_amax(torch.from_numpy(factors[found]))
        # A row-scaled tensor needs one L for all rows, so these are those of the first or second.
        assert amax is not None
        assert amax[1] == e4m3_max
        assert np.array_equal(amax[0].numpy() / np.float32(6 * e4m3_max), factors[found])
    for factor in factors[~(first | second)][:1000]:
        assert find_amax(torch.tensor([factor])) is None


def test_find_amax_of_a_quotient():
    amax = torch.cat([rand(10_000).abs(), torch.tensor([0.0, 3e38, 1e-38, 1e-45])])
    for e4m3_max in (448.0, 256.0):
        found = find_amax(decode_factor(amax, e4m3_max))
        assert found is not None or e4m3_max == 256.0
    bfloat16 = rand(10_000).bfloat16().float().abs()
    found = find_amax(decode_factor(bfloat16, 448.0))
    assert found is not None
    assert torch.equal(decode_factor(*found), decode_factor(bfloat16, 448.0))


@pytest.mark.parametrize("factor", [-1.0, -0.0, float("inf"), float("nan"), 3e38, -float("inf")])
def test_find_amax_of_impossible_factors(factor: float):
    assert find_amax(torch.tensor([factor])) is None
