"""Round a weight column by column, so that later columns make up for the errors of earlier ones.

The method is GPTQ: E. Frantar, S. Ashkboos, T. Hoefler and D. Alistarh, "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers" (2022), a fast form of Optimal
Brain Quantization: E. Frantar and D. Alistarh, "Optimal Brain Compression" (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.quantizers.methods import Grid

LAZY = 128
"""Columns whose updates of all later columns are applied at once; a multiple of all block sizes."""


class Rounded(NamedTuple):
    """Codes (M, K), factors (m, k), and the damping that the Hessian needed."""

    codes: Tensor
    factors: Tensor
    damping: float


def compensate(
    grid: Grid,
    hessian: Tensor,
    damping: float,
    activation_order: bool,
    choose: Callable[[Tensor, Tensor], Tensor],
) -> Rounded:
    """Return codes and factors that make the error of the layer's output small.

    The output error of a row w with values q is ``(w - q) H (w - q)^T``. When column j is rounded,
    the best change of the columns after it is ``-(w_j - q_j) / U_jj * U_j``, where U is the upper
    Cholesky factor of the inverse of H. The factors of a block are chosen when its first column is
    reached, from its changed values. Columns whose inputs are always zero are rounded to nearest
    and do not change others.

    Args:
        grid: of the weight.
        hessian: float64 (K, K), the mean of ``x x^T`` over the inputs x; overwritten.
        damping: share of the mean of H's diagonal that is added to the diagonal.
        activation_order: round the blocks of columns with the largest inputs first. Columns of a
            block stay together.
        choose: returns the factors (m, n) of columns, from their values (M, n * columns) and from
            the diagonal of H there.
    """
    weight = grid.matrix.t().contiguous()  # (K, M): the column that is rounded is contiguous
    count, rows = weight.shape
    width = grid.block[1]
    diagonal = hessian.diagonal().clone()
    # A factor of the whole tensor or row is chosen once, so any order of columns is possible.
    unit = 1 if width >= count else width
    order = _block_order(diagonal, unit) if activation_order else None
    if order is not None:
        hessian, weight = hessian[order][:, order], weight[order]
        diagonal = diagonal[order]
    factor, damping = inverse_factor(hessian, damping)
    codes = torch.empty((count, rows), dtype=torch.uint8, device=weight.device)
    chosen: list[Tensor] = []
    spread = grid.block[0]
    wide = grid.wide[:, 0]
    current = torch.empty(0)
    for first in range(0, count, LAZY):
        last = min(first + LAZY, count)
        errors = weight.new_empty((last - first, rows))
        for column in range(first, last):
            if column % width == 0:
                part = slice(column, min(column + width, count))
                factors = choose(weight[part].t(), diagonal[part])
                chosen.append(factors)
                current = factors[:, 0].repeat_interleave(spread)[:rows]
            x = weight[column]
            codes[column], values = grid.round(x, current, wide)
            error = (x - values).div_(factor[column, column])
            errors[column - first] = error
            weight[column + 1 : last].addr_(factor[column, column + 1 : last], error, alpha=-1)
        if last < count:
            weight[last:].addmm_(factor[first:last, last:].t(), errors, alpha=-1)
    factors = torch.cat(chosen, 1)
    if order is None:
        return Rounded(codes.t(), factors, damping)
    codes[order] = codes.clone()
    if width < count:
        factors[:, order[::width].div(width, rounding_mode="floor")] = factors.clone()
    return Rounded(codes.t(), factors, damping)


def _block_order(diagonal: Tensor, width: int) -> Tensor:
    """Return the columns (K,), blocks of larger mean first; a partial last block stays last."""
    count = len(diagonal)
    whole = count // width * width
    means = diagonal[:whole].view(-1, width).mean(1)
    blocks = torch.argsort(means, descending=True, stable=True)
    columns = torch.arange(count, device=diagonal.device)
    return torch.cat((columns[:whole].view(-1, width)[blocks].flatten(), columns[whole:]))


def inverse_factor(hessian: Tensor, damping: float) -> tuple[Tensor, float]:
    """Return the upper Cholesky factor of the inverse of a damped Hessian, float32 (K, K).

    Args:
        hessian: float64 (K, K), symmetric and positive semidefinite; overwritten. Rows and columns
            of zeros get a 1 on the diagonal.
        damping: share of the diagonal's mean that is added. If the sum is not positive definite,
            ten times as much is tried, and so on.

    Returns:
        The factor, and the damping that sufficed.
    """
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    if not dead.all():
        # The factor's scale has no effect on the result, and this one fits into float32.
        hessian /= diagonal[~dead].mean()
    diagonal[dead] = 1.0
    added = 0.0
    while True:
        diagonal += damping - added
        added = damping
        lower, info = torch.linalg.cholesky_ex(hessian)
        if not info:
            inverse = torch.cholesky_inverse(lower)
            del lower
            upper, info = torch.linalg.cholesky_ex(inverse, upper=True)
            if not info and upper.isfinite().all():
                return upper.float(), damping
        damping = max(10 * damping, 1e-8)
