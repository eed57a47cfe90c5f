"""The reference of every quantized matmul (docs/numerics.md, products)."""

from __future__ import annotations

import numpy as np


def gemm(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a (M, K) @ b (N, K)^T of dequantized operands, accumulated in float64 and left in float64.

    The contract accumulates in float32 in any order; compare with a tolerance of that accumulation.
    """
    return a.astype(np.float64) @ b.astype(np.float64).T
