"""Helpers of the norm and activation tests: inputs, oracle calls, comparison by bytes."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from formats import assert_same_bytes
from native_cases import threads
from oracle import float_ops
from torch import Tensor

from qtensor.kernels import table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))

SHAPES = ((1,), (7,), (300,), (3, 128), (5, 130), (67, 40), (130, 257), (2, 3, 64), (2, 1, 3, 258))
"""Odd ones, below and above the lanes (128) and the rows of a block (64), 1-d to 4-d."""
CLAMPED = {
    "clamped_swiglu": (1.702, 7.0, 1.0),
    "clamped_swiglu(limit=0.3,alpha=2.5e-2)": (0.025, 0.3, 1.0),
    "clamped_swiglu(alpha=1.0,limit=1e+30,offset=-0.5)": (1.0, 1e30, -0.5),
}
"""Kinds with numbers, spelled as users may, and the numbers."""
EMPTY = ((0,), (0, 8), (4, 0), (2, 0, 6))


def hurting(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return values of many sizes, with signed zeros, subnormals, largest finite values, inf and
    NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-8, 6, shape, generator=generator).float())
    x = x.to(dtype)
    info = torch.finfo(dtype)
    rows = x.view(-1, shape[-1])
    values = [0.0, -0.0, info.tiny / 4, info.max, -info.max, torch.inf, -torch.inf, torch.nan]
    for i, value in enumerate(values[: len(rows) - 1]):
        rows[1 + i % (len(rows) - 1), i % shape[-1] :: 7] = value
    return x


def strided(x: Tensor) -> list[Tensor]:
    """Return the same values with other strides."""
    wide = torch.stack((x, x), -1)[..., 0]
    padded = torch.cat((x, x), -1)[..., : x.shape[-1]]
    return [wide, padded, x.movedim(-1, 0).contiguous().movedim(0, -1)]


def floats(t: Tensor | None) -> Any:
    """Return a tensor as a float32 array of shape (M, K), or (K,) for a vector."""
    return None if t is None else t.float().reshape(-1, t.shape[-1]).numpy()


def rounded(values: Any, like: Tensor) -> Tensor:
    """Return an array in the shape and dtype of ``like``; all NaN get one bit pattern."""
    t = torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(like.shape)
    nan = t.isnan()
    return t.masked_fill(nan, 0).to(like.dtype).masked_fill_(nan, torch.nan)


def expect_norm(x, weight, bias, kind, eps, zero_centered, like):
    """Return the oracle's y, mean and rstd, in the shapes and dtypes of ``like``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gamma = gain(weight, zero_centered)
        wanted = float_ops.norm(floats(x), gamma, floats(bias), kind, eps)
    return [got if w is None else rounded(w, got) for w, got in zip(wanted, like, strict=True)]


def expect_norm_backward(dy, x, weight, stats, zero_centered, like):
    """Return the oracle's dx, dweight and dbias."""
    mean, rstd = (t.reshape(-1, 1).numpy() if t.numel() else None for t in stats)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gamma = gain(weight, zero_centered)
        wanted = float_ops.norm_backward(floats(dy), floats(x), gamma, mean, rstd)
    return [rounded(w, got) if got.numel() else got for w, got in zip(wanted, like, strict=True)]


def gain(weight, zero_centered):
    if weight is None:
        return None
    return floats(weight) + np.float32(1) if zero_centered else floats(weight)


def expect_activation(x, gate, kind, dy, like):
    """Return the oracle's activation and the gradient of its input."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        values, grad = floats(x), floats(dy)
        if not gate:
            value, slope = float_ops.activate(values, kind)
            return rounded(value, like[0]), rounded(grad * slope, like[1])
        first, second = np.split(values, 2, -1)
        if kind in CLAMPED:
            value, da, db = float_ops.clamped_swiglu(first, second, grad, *CLAMPED[kind])
            return rounded(value, like[0]), rounded(np.concatenate((da, db), -1), like[1])
        value, slope = float_ops.activate(first, gate)
        dx = np.concatenate(((grad * second) * slope, grad * value), -1)
        return rounded(value * second, like[0]), rounded(dx, like[1])


# ---- kernels beside the reference --------------------------------------------------------------

ACTIVATIONS = ("gelu", "qgelu", "relu", "silu", "srelu")
GATED = ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", *CLAMPED)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Let the reference compute every op."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "FLOATS", {})
        yield


@contextlib.contextmanager
def kernels_only() -> Iterator[None]:
    """Fail on a call that the kernels leave to the reference."""

    def checked(name: str, device: str, *args: Any) -> bool:
        assert table.FLOATS[device][name](*args), f"{name} was not served"
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "floats_", checked)
        yield


def outputs_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def check_kernels(op: Any, *args: Any) -> list[Tensor]:
    """Assert that kernels and reference give equal bytes and leave the inputs unchanged."""
    given = [a.clone() for a in args if isinstance(a, Tensor)]
    with kernels_only():
        got = outputs_of(op(*args))
    with without_kernels():
        want = outputs_of(op(*args))
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same_bytes(g, w, f"output {i} of {op}")
    for before, after in zip(given, (a for a in args if isinstance(a, Tensor)), strict=True):
        assert_same_bytes(after, before, "an input")
    return got


def draw_floats(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return random values of a random kind with random strides."""
    seed = rng.randint(0, 1 << 30)
    generator = torch.Generator().manual_seed(seed)
    if rng.random() < 0.5:
        x = hurting(shape, dtype, seed)
    else:
        x = (torch.randn(shape, generator=generator) * 2.0 ** rng.randint(-30, 30)).to(dtype)
    return rng.choice(strided(x)) if rng.random() < 0.3 else x


def check_random(seed: int) -> None:
    """Run every op once on a random shape, with the kernels and with the reference."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows, cols = rng.choice([
        (rng.randint(1, 9), rng.randint(1, 700)),
        (rng.randint(1, 300), rng.randint(1, 40)),
        (rng.choice([63, 64, 65, 128, 129]), rng.choice([127, 128, 129, 256, 257])),
    ])
    shape = rng.choice([(rows, cols), (rows, 1, cols), (cols,)])
    dtype, other, third = (rng.choice(DTYPES) for _ in range(3))
    x, dy = draw_floats(rng, shape, dtype), draw_floats(rng, shape, other)
    weight = rng.choice([None, draw_floats(rng, (cols,), third)])
    bias = rng.choice([None, draw_floats(rng, (cols,), rng.choice(DTYPES))])
    kind, centered = rng.choice(["layernorm", "rmsnorm"]), rng.random() < 0.5
    eps = rng.choice([0.0, 1e-5, 1e-12])
    with threads(1 + seed % 2):
        ops = torch.ops.qtensor
        got = check_kernels(ops.norm, x, weight, bias, kind, eps, centered, other)
        with_bias = bias is not None
        check_kernels(ops.norm_backward, dy, x, weight, *got[1:], kind, centered, with_bias)
        check_kernels(ops.bias_grad, x)
        gate = rng.random() < 0.5
        act = rng.choice(GATED if gate else ACTIVATIONS)
        x = draw_floats(rng, (*shape[:-1], shape[-1] * (1 + gate)), dtype)
        check_kernels(ops.activation, x, act)
        check_kernels(ops.activation_backward, dy.to(dtype), x, act)
