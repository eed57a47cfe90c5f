"""The random Hadamard transform of the column-wise side of NVFP4 (docs/numerics.md, NVFP4)."""

from __future__ import annotations

import numpy as np

from .layout import pad_to_multiple
from .options import Options
from .rounding import round_to_dtype

SIGN_MASK = 0xD7E8
BF16_SUBNORMALS_ARE_ZERO = True
"""Golden `nvfp4_1d_rht`, input `subnormal_bf16`, has a zero transform of a non-zero input: the
machine that made it flushed bfloat16 subnormals.
"""


def matrix(with_signs: bool = True) -> np.ndarray:
    """diag(signs) @ H16 / 4 with H16 in Sylvester order: H[i, j] = (-1)^popcount(i & j). Every
    entry is +-0.25, exact in bfloat16.
    """
    signs = [-1.0 if with_signs and SIGN_MASK >> i & 1 else 1.0 for i in range(16)]
    return np.array(
        [[signs[i] * (-1.0) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)],
        np.float32,
    )


def _multiply(x: np.ndarray, right: np.ndarray) -> np.ndarray:
    """x @ right for every 16 columns of x (zero-padded), summed over index 0, 1, ... 15 in order
    in float32.
    """
    padded = pad_to_multiple(x, 1, 16)
    groups = padded.reshape(-1, 16)
    with np.errstate(all="ignore"):
        total = groups[:, :1] * right[0]
        for index in range(1, 16):
            total = total + groups[:, index : index + 1] * right[index]
    return total.reshape(padded.shape)


def rotate(x: np.ndarray, options: Options) -> np.ndarray:
    """x' of the zero-padded x, accumulated in float32 and rounded once to the input dtype. The
    padding columns are kept.
    """
    flush = BF16_SUBNORMALS_ARE_ZERO and options.in_dtype == "bfloat16"
    x = _flush(x) if flush else x
    rotated = round_to_dtype(_multiply(x, matrix(options.with_random_sign_mask)), options.in_dtype)
    return _flush(rotated) if flush else rotated


def rotate_back(x: np.ndarray, options: Options) -> np.ndarray:
    """The inverse rotation in float32 (the matrix is orthogonal), cropped to the columns of x."""
    return _multiply(x, matrix(options.with_random_sign_mask).T)[:, : x.shape[1]]


def _flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)
