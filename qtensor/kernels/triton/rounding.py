"""Stochastic rounding of E2M1 with random bytes of Philox4x32-10 (docs/numerics.md)."""

from __future__ import annotations

import triton
import triton.language as tl

from qtensor.kernels.triton.elements import as_float, magnitude_bits


@triton.jit
def _words(seed_ptr, group, STREAM: tl.constexpr):
    """Return the four output words, uint32, of counters (group, group >> 32, 0, stream)."""
    low, high = (group & 0xFFFFFFFF).to(tl.uint32), (group >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    return tl.philox(tl.load(seed_ptr), low, high, zero, zero + STREAM)


@triton.jit
def noise_bytes(
    seed_ptr, line, unit0, length, STREAM: tl.constexpr, N: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Return the random bytes, int32, of elements (line, unit0 .. unit0 + N) of a matrix.

    The matrix is row-major with lines of ``length``. If ``ALIGNED``, lines and tiles hold whole
    groups of 16, so one draw serves 16 elements.
    """
    L: tl.constexpr = line.shape[0]
    if ALIGNED:
        group = (line * (length // 16))[:, None] + (unit0 // 16 + tl.arange(0, N // 16))[None, :]
        a, b, c, d = _words(seed_ptr, group, STREAM)
        a, b, c, d = a[:, :, None], b[:, :, None], c[:, :, None], d[:, :, None]
        byte = tl.arange(0, 16)[None, None, :]
    else:
        index = (line * length)[:, None] + (unit0 + tl.arange(0, N))[None, :]
        a, b, c, d = _words(seed_ptr, index // 16, STREAM)
        byte = (index % 16).to(tl.int32)
    word = tl.where(byte < 8, tl.where(byte < 4, a, b), tl.where(byte < 12, c, d))
    random = (word >> (byte % 4 * 8).to(tl.uint32)) & 0xFF
    return tl.reshape(random.to(tl.int32), (L, N))


@triton.jit
def stochastic_codes(values, noise):
    """Return int32 E2M1 codes of values with stochastic rounding.

    A value is rounded up with the probability that equals its distance from the lower neighbour.

    Args:
        values: float32; NaN counts as inf.
        noise: random bytes, int32, of the same shape.
    """
    magnitude = as_float(magnitude_bits(values))
    magnitude = tl.where(magnitude < 6.0, magnitude, 6.0)
    step = tl.where(magnitude < 2.0, 0.5, tl.where(magnitude < 4.0, 1.0, 2.0))
    raised = magnitude + noise.to(tl.float32) * (1.0 / 256.0) * step
    low = (raised >= 0.5).to(tl.int32) + (raised >= 1.0) + (raised >= 1.5) + (raised >= 2.0)
    code = low + (raised >= 3.0) + (raised >= 4.0) + (raised >= 6.0)
    return code | ((values < 0.0).to(tl.int32) << 3)
