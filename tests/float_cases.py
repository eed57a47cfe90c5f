"""What the tests of norms and activations share: shapes, inputs that hurt, calls of the oracle, comparison by bytes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from oracle import float_ops
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))

SHAPES = ((1,), (7,), (300,), (3, 128), (5, 130), (67, 40), (130, 257), (2, 3, 64), (2, 1, 3, 258))
"""Odd ones, below and above the lanes (128) and the rows of a block (64), 1-d to 4-d."""
EMPTY = ((0,), (0, 8), (4, 0), (2, 0, 6))


def hurting(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values of many sizes, with signed zeros, subnormals, largest finite values; rows with inf and NaN."""
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
    """The same values with other strides."""
    wide = torch.stack((x, x), -1)[..., 0]
    padded = torch.cat((x, x), -1)[..., : x.shape[-1]]
    return [wide, padded, x.movedim(-1, 0).contiguous().movedim(0, -1)]


def floats(t: Tensor | None) -> Any:
    """As a float32 (M, K) array, or the vector itself."""
    return None if t is None else t.float().reshape(-1, t.shape[-1]).numpy()


def rounded(values: Any, like: Tensor) -> Tensor:
    """An array in the shape and dtype of ``like``; NaN has one pattern."""
    t = torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(like.shape)
    nan = t.isnan()
    return t.masked_fill(nan, 0).to(like.dtype).masked_fill_(nan, torch.nan)


def expect_norm(x, weight, bias, kind, eps, zero_centered, like):
    """y, mean and rstd by the oracle, in the shapes and dtypes of ``like``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gamma = gain(weight, zero_centered)
        wanted = float_ops.norm(floats(x), gamma, floats(bias), kind, eps)
    return [got if w is None else rounded(w, got) for w, got in zip(wanted, like, strict=True)]


def expect_norm_backward(dy, x, weight, stats, zero_centered, like):
    """dx, dweight and dbias by the oracle."""
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
    """The activation and the gradient of its input, by the oracle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        values, grad = floats(x), floats(dy)
        if not gate:
            value, slope = float_ops.activate(values, kind)
            return rounded(value, like[0]), rounded(grad * slope, like[1])
        first, second = np.split(values, 2, -1)
        value, slope = float_ops.activate(first, gate)
        dx = np.concatenate(((grad * second) * slope, grad * value), -1)
        return rounded(value * second, like[0]), rounded(dx, like[1])
