"""Norms, activations and sums over rows by the native kernels: the bytes of the reference, for each
instruction set.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from float_cases import (
    ACTIVATIONS,
    DTYPES,
    GATED,
    check_kernels,
    check_random,
    dtypes,
    hurting,
    without_kernels,
)
from formats import assert_same_bytes
from native_cases import ISAS, library_of, loaded, threads

from qtensor.kernels.cpu import floats, native

ops = torch.ops.qtensor


@pytest.fixture(scope="session", params=ISAS)
def library(request: pytest.FixtureRequest) -> native.Library:
    """The kernels of one instruction set."""
    return library_of(request.param)


@pytest.fixture(autouse=True)
def _serves(library: native.Library) -> Iterator[None]:
    with loaded(library):
        yield


@dtypes
@pytest.mark.parametrize("kind", [*ACTIVATIONS, *GATED])
def test_every_value_of_16_bits_and_many_of_32(dtype: torch.dtype, kind: str) -> None:
    if dtype == torch.float32:
        generator = torch.Generator().manual_seed(3)
        bits = torch.randint(-(2**31), 2**31, (120_000,), generator=generator, dtype=torch.int64)
        x = torch.cat((bits.to(torch.int32).view(dtype), torch.linspace(-110, 110, 40_000)))
    else:
        x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    other = x.roll(12345)
    x = torch.stack((x, other)).t().contiguous() if kind in GATED else x
    check_kernels(ops.activation, x, kind)
    dy = other[:, None] if kind in GATED else other
    check_kernels(ops.activation_backward, dy, x, kind)


@dtypes
@pytest.mark.parametrize("count", [1, 2])
def test_norms_at_the_edges_of_chunks_and_blocks(dtype: torch.dtype, count: int) -> None:
    for rows in (1, 63, 64, 65, 130):
        for cols in (1, 31, 32, 33, 127, 128, 129, 255, 384):
            x, dy = hurting((rows, cols), dtype, 1), hurting((rows, cols), dtype, 2)
            weight = hurting((1, cols), DTYPES[(rows + cols) % 3], 3)[0]
            with threads(count):
                for kind in ("layernorm", "rmsnorm"):
                    args = (x, weight, weight, kind, 1e-5, cols % 2 == 0, DTYPES[cols % 3])
                    stats = check_kernels(ops.norm, *args)[1:]
                    check_kernels(ops.norm_backward, dy, x, weight, *stats, kind, True, True)
                check_kernels(ops.bias_grad, x)


def test_random_cases() -> None:
    for seed in range(250):
        check_random(seed)


def test_large_outputs_go_around_the_cache() -> None:
    """More elements than ``STREAMED`` of norm.cpp and activation.cpp, with whole and ragged
    rows.
    """
    for cols in (4096, 4100):
        x = torch.randn((8 << 20) // 4096 + 1, cols).bfloat16()
        weight = torch.randn(cols)
        got = ops.norm(x, weight, None, "rmsnorm", 1e-5, False, x.dtype)
        dx = ops.norm_backward(x, x, weight, *got[1:], "rmsnorm", False, False)[0]
        y = ops.activation(x, "silu")
        last = slice(-3, None)
        with without_kernels():
            part = x[last]
            want = ops.norm(part, weight, None, "rmsnorm", 1e-5, False, x.dtype)
            back = ops.norm_backward(part, part, weight, *want[1:], "rmsnorm", False, False)[0]
            assert_same_bytes(got[0][last], want[0])
            assert_same_bytes(dx[last], back)
            assert_same_bytes(y[last], ops.activation(part, "silu"))


def test_what_is_left_to_the_reference() -> None:
    """Gradients of another dtype than the input's, tensors without elements, a CPU without
    kernels.
    """
    x = torch.randn(3, 8)
    out = torch.full_like(x, 7.0)
    assert floats.activation_(out, x, "gelu", x.bfloat16()) is False
    assert floats.activation_(out[:0], x[:0], "gelu") is False
    assert floats.bias_grad_(out[0], x[:0]) is False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: "switched off")
        assert floats.activation_(out, x, "gelu") is False
        assert floats.norm_((out, x[0], x[0]), x, None, None, ("rmsnorm", 1e-5, False)) is False
    assert (out == 7.0).all()
    got = ops.activation_backward(x.bfloat16(), x, "gelu")
    with without_kernels():
        assert_same_bytes(got, ops.activation_backward(x.bfloat16(), x, "gelu"))
