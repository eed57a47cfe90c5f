"""Activations and their gradients, one tile a program (docs/numerics.md, activations)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qtensor.kernels.fusion import Clamp
from qtensor.kernels.triton.common import (
    as_matrix,
    launch,
    load_tile,
    store_tile,
    tile_for,
    tile_indices,
    tiles,
)
from qtensor.kernels.triton.float_math import (
    activate,
    clamped,
    clamped_silu,
    derivative,
    rounded,
)

GATED = {
    "clamped_swiglu": "clamped_silu",
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
}
"""Gated kind -> the activation of the first half."""


NO_CLAMP = (0.0, 0.0, 0.0, 0.0)


@triton.jit
def load_activated(
    x_ptr, m, k, rows, cols, stride_m, stride_k, ACT: tl.constexpr, GATE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Return activations (len(m), len(k)), float32 and not yet rounded, 0 outside.

    ``cols`` is the number of columns of the result.
    """
    first = load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k)
    if ACT == "clamped_silu":
        values, _ = clamped_silu(first, ALPHA, LIMIT, BOUND)
        second = load_tile(x_ptr, m, k + cols, rows, 2 * cols, stride_m, stride_k)
        values = values * (clamped(second, -LIMIT, LIMIT) + OFFSET)
    else:
        values = activate(first, ACT)
        if GATE:
            values = values * load_tile(x_ptr, m, k + cols, rows, 2 * cols, stride_m, stride_k)
    return values


@triton.jit
def activation_kernel(
    x_ptr, y_ptr, rows, cols, stride_m, stride_k,
    ACT: tl.constexpr, GATE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, BOUND: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the result."""
    m0, k0 = tile_indices(rows, cols, BM, BK)
    m, k = m0 + tl.arange(0, BM), k0 + tl.arange(0, BK)
    y = load_activated(
        x_ptr, m, k, rows, cols, stride_m, stride_k, ACT, GATE, ALPHA, LIMIT, OFFSET, BOUND
    )
    store_tile(y_ptr, rounded(y, y_ptr.dtype.element_ty), m, k, rows, cols, cols, 1)


@triton.jit
def activation_backward_kernel(
    x_ptr, dy_ptr, dx_ptr, rows, cols, stride_m, stride_k, dy_stride_m, dy_stride_k,
    ACT: tl.constexpr, GATE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, BOUND: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the gradient; for a gated kind, one tile of each half."""
    m0, k0 = tile_indices(rows, cols, BM, BK)
    m, k = m0 + tl.arange(0, BM), k0 + tl.arange(0, BK)
    first = load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k)
    dy = load_tile(dy_ptr, m, k, rows, cols, dy_stride_m, dy_stride_k)
    element_type: tl.constexpr = dx_ptr.dtype.element_ty
    if GATE:
        second = load_tile(x_ptr, m, k + cols, rows, 2 * cols, stride_m, stride_k)
        if ACT == "clamped_silu":
            value, slope = clamped_silu(first, ALPHA, LIMIT, BOUND)
            db = tl.where(tl.abs(second) > LIMIT, 0.0, dy * value)
            second = clamped(second, -LIMIT, LIMIT) + OFFSET
        else:
            db, slope = dy * activate(first, ACT), derivative(first, ACT)
        to_second = rounded(db, element_type)
        inside = tl.where(k < cols, k + cols, 2 * cols)
        store_tile(dx_ptr, to_second, m, inside, rows, 2 * cols, 2 * cols, 1)
        to_first = rounded((dy * second) * slope, element_type)
        store_tile(dx_ptr, to_first, m, k, rows, cols, 2 * cols, 1)
    else:
        dx = rounded(dy * derivative(first, ACT), element_type)
        store_tile(dx_ptr, dx, m, k, rows, cols, cols, 1)


def activation_(
    out: Tensor, x: Tensor, kind: str, dy: Tensor | None = None, clamp: Clamp | None = None
) -> None:
    """Write the activation of ``x`` into ``out``, or the gradient of ``x`` if ``dy`` is given.

    Args:
        out: like the activation, or like ``x`` for the gradient.
        x: (..., K), or (..., 2 K) for a gated kind; float32, bfloat16 or float16.
        kind: kind of the activation.
        dy: gradient of the activation, (..., K), or None.
        clamp: constants of "clamped_swiglu", or None.
    """
    matrix, target = as_matrix(x), as_matrix(out)
    gate = kind in GATED
    shape = (matrix.shape[0], matrix.shape[1] // 2 if gate else matrix.shape[1])
    tile = tile_for(shape)
    constants = {"ACT": GATED.get(kind, kind), "GATE": gate, "BM": tile[0], "BK": tile[1]}
    names = ("ALPHA", "LIMIT", "OFFSET", "BOUND")
    constants |= zip(names, clamp or NO_CLAMP, strict=True)
    programs = tiles(shape, tile)
    if dy is None:
        launch(activation_kernel, programs, matrix, target, *shape, *matrix.stride(), **constants)
        return
    grad = as_matrix(dy)
    strides = (*matrix.stride(), *grad.stride())
    # Both halves of a gated kind take twice the registers.
    constants["num_warps"] = 8 if gate else 4
    launch(
        activation_backward_kernel, programs, matrix, grad, target, *shape, *strides, **constants
    )
