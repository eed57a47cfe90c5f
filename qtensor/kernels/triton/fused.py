"""Quantize a norm or an activation without storing it: kernels compute it while they load it.

A norm needs one pass for mean and rstd, which are results anyway. The rest is elementwise, like an
activation.
"""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.kernels.fusion import Clamp
from qtensor.kernels.quantizers import NVFP4Like
from qtensor.kernels.triton.activation import GATED, NO_CLAMP, load_activated
from qtensor.kernels.triton.common import LazyMatrix, as_matrix, load_tile, raw
from qtensor.kernels.triton.float_math import through
from qtensor.kernels.triton.norm import norm_, normalize

_LOCAL = ("fp8", "fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp6", "mxfp4")


def serves(quantizer: QuantizerLike) -> bool:
    """Return True if a quantizer's kernels load every tile by its rows and columns.

    The kernels of ``nvfp4`` read columns as lines of a transpose, and their rotation rounds to the
    dtype of a pointer; they cannot load a ``LazyMatrix`` then.
    """
    if quantizer.format == "nvfp4":
        rotated = cast(NVFP4Like, quantizer).with_rht
        return not rotated and (quantizer.two_dimensional or not quantizer.columnwise)
    return quantizer.format in _LOCAL


@triton.jit
def _load_activation(matrix, m, k, rows, cols, stride_m, stride_k):
    """Load a tile of an activation.

    ``matrix`` is (function, x, kind, has gate, dtype, constants of a clamp...).
    """
    values = load_activated(
        matrix[1], m, k, rows, cols, stride_m, stride_k, matrix[2], matrix[3],
        matrix[5], matrix[6], matrix[7], matrix[8],
    )  # fmt: skip
    return through(values, matrix[4])


@triton.jit
def _load_norm(matrix, m, k, rows, cols, stride_m, stride_k):
    """Load a tile of a norm.

    ``matrix`` is (function, x, mean, rstd, weight, bias, weight is zero-centered, dtype).
    """
    rstd = tl.load(matrix[3] + m, mask=m < rows, other=0.0)
    mean = tl.zeros_like(rstd)
    if matrix[2] is not None:
        mean = tl.load(matrix[2] + m, mask=m < rows, other=0.0)
    x = load_tile(matrix[1], m, k, rows, cols, stride_m, stride_k)
    y = through(normalize(x, mean, rstd, matrix[4], matrix[5], k, cols, matrix[6]), matrix[7])
    return tl.where((m < rows)[:, None] & (k < cols)[None, :], y, 0.0)


def _name(dtype: torch.dtype) -> tl.constexpr:
    return tl.constexpr(str(dtype).removeprefix("torch."))


def lazy_activation(x: Tensor, kind: str, clamp: Clamp | None = None) -> LazyMatrix:
    """Return the activation of ``x`` in its dtype, as a ``LazyMatrix``."""
    matrix, gate = as_matrix(x), kind in GATED
    act = tl.constexpr(GATED.get(kind, kind))
    numbers = map(tl.constexpr, clamp or NO_CLAMP)
    arguments = (_load_activation, matrix, act, tl.constexpr(gate), _name(x.dtype), *numbers)
    shape = (matrix.shape[0], matrix.shape[1] // (2 if gate else 1))
    return LazyMatrix(arguments, shape, matrix.stride(), x.dtype, x.device)


def lazy_norm(
    stats: tuple[Tensor, Tensor],
    x: Tensor,
    vectors: tuple[Tensor | None, Tensor | None],
    settings: tuple[str, float, bool],
    dtype: torch.dtype,
) -> LazyMatrix:
    """Write mean and rstd into ``stats``, and return the norm of ``x`` as a ``LazyMatrix``."""
    norm_((None, *stats), x, *vectors, settings)
    matrix = as_matrix(x)
    weight, bias = (None if v is None else raw(v.contiguous()) for v in vectors)
    mean = stats[0] if settings[0] == "layernorm" else None
    centered = tl.constexpr(settings[2])
    arguments = (_load_norm, matrix, mean, stats[1], weight, bias, centered, _name(dtype))
    return LazyMatrix(arguments, tuple(matrix.shape), matrix.stride(), dtype, x.device)
