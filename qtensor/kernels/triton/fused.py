"""Quantizing a norm or an activation that no one stores: the kernels that quantize compute it as they load it.

A norm takes one pass for mean and rstd, which are results anyway; what follows is elementwise, like an activation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.kernels.cpu.floats import Clamp
from qtensor.kernels.triton.activation import GATED, NO_CLAMP, load_activated
from qtensor.kernels.triton.common import Made, as_matrix, load_tile, raw
from qtensor.kernels.triton.float_math import through
from qtensor.kernels.triton.norm import norm_, normalize

_LOCAL = ("fp8", "fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp6", "mxfp4")


def serves(codec: Any) -> bool:
    """Whether the kernels of a quantizer load every tile by its rows and columns.

    Columns of ``nvfp4`` are lines of a transpose, and its rotation rounds to the dtype behind a pointer.
    """
    if codec.format == "nvfp4":
        return not codec.with_rht and (codec.two_dimensional or not codec.columnwise)
    return codec.format in _LOCAL


@triton.jit
def _load_activation(made, m, k, rows, cols, stride_m, stride_k):
    """A tile of an activation: (function, x, kind, whether it has a gate, dtype, numbers of a clamp)."""
    values = load_activated(
        made[1], m, k, rows, cols, stride_m, stride_k, made[2], made[3],
        made[5], made[6], made[7], made[8],
    )  # fmt: skip
    return through(values, made[4])


@triton.jit
def _load_norm(made, m, k, rows, cols, stride_m, stride_k):
    """A tile of a norm: (function, x, mean, rstd, weight, bias, whether the weight is centered at zero, dtype)."""
    rstd = tl.load(made[3] + m, mask=m < rows, other=0.0)
    mean = tl.zeros_like(rstd)
    if made[2] is not None:
        mean = tl.load(made[2] + m, mask=m < rows, other=0.0)
    x = load_tile(made[1], m, k, rows, cols, stride_m, stride_k)
    y = through(normalize(x, mean, rstd, made[4], made[5], k, cols, made[6]), made[7])
    return tl.where((m < rows)[:, None] & (k < cols)[None, :], y, 0.0)


def _name(dtype: torch.dtype) -> tl.constexpr:
    return tl.constexpr(str(dtype).removeprefix("torch."))


def made_activation(x: Tensor, kind: str, clamp: Clamp | None = None) -> Made:
    """The activation of ``x``, in its dtype."""
    matrix, gate = as_matrix(x), kind in GATED
    act = tl.constexpr(GATED.get(kind, kind))
    numbers = map(tl.constexpr, clamp or NO_CLAMP)
    arguments = (_load_activation, matrix, act, tl.constexpr(gate), _name(x.dtype), *numbers)
    shape = (matrix.shape[0], matrix.shape[1] // (2 if gate else 1))
    return Made(arguments, shape, matrix.stride(), x.dtype, x.device)


def made_norm(
    stats: tuple[Tensor, Tensor],
    x: Tensor,
    vectors: tuple[Tensor | None, Tensor | None],
    settings: tuple[str, float, bool],
    dtype: torch.dtype,
) -> Made:
    """The norm of ``x`` in ``dtype``, after its mean and rstd are written into ``stats``."""
    norm_((None, *stats), x, *vectors, settings)
    matrix = as_matrix(x)
    weight, bias = (None if v is None else raw(v.contiguous()) for v in vectors)
    mean = stats[0] if settings[0] == "layernorm" else None
    centered = tl.constexpr(settings[2])
    arguments = (_load_norm, matrix, mean, stats[1], weight, bias, centered, _name(dtype))
    return Made(arguments, tuple(matrix.shape), matrix.stride(), dtype, x.device)
