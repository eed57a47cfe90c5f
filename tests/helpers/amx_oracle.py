"""The sums of AMX tiles in the order of docs/numerics.md, step by step in numpy."""

from __future__ import annotations

import numpy as np
import torch
from few_rows_oracle import Array, fused
from torch import Tensor

DEPTH = 32
"""Elements of the contraction that a tile holds."""


def sums(x: Array, w: Array) -> Array:
    """Return x @ w.T as float32 (M, N); x (M, K) and w (N, K) hold bfloat16 values as float32."""
    pad = ((0, 0), (0, -x.shape[1] % DEPTH))
    x, w = np.pad(x, pad)[:, None], np.pad(w, pad)[None]
    total = np.zeros((x.shape[0], w.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for first in range(0, x.shape[2], DEPTH):
            halves = [np.zeros_like(total), np.zeros_like(total)]
            for k in range(DEPTH):
                at = first + k
                halves[k % 2] = fused(x[..., at], w[..., at], halves[k % 2])
            total = total + (halves[0] + halves[1])
    return total


def product(x: Tensor, w: Tensor, factors: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product in float32, to be rounded to the dtype of a result.

    Args:
        x: (M, K) bfloat16.
        w: float32 (N, K), the values without the factors that follow the sums.
        factors: float32 (N,) or (1,).
        bias: (N,), or None.
    """
    total = sums(x.float().numpy(), w.numpy()) * factors.numpy()
    if bias is not None:
        total = total + bias.float().numpy()
    return torch.from_numpy(total)
