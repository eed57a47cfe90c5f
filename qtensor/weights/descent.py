"""Change codes one column after another where the layer's output gets closer to its target.

This is coordinate descent on the error that GPTQ makes small; see K. Behdin et al., "QuantEase:
Optimization-based Quantization for Language Models" (2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.quantizers.methods import Grid
from qtensor.reference.blocks import spread
from qtensor.weights.compensation import Rounded

SWEEPS = 2
"""Passes over all columns; in our measurements, a third one gains less than 0.005 of the cosine."""


def descend(grid: Grid, start: Rounded, hessian: Tensor) -> Rounded:
    """Return codes whose output error is at most that of ``start``; factors stay.

    The output error of a row w with values q is ``(q - w) H (q - w)^T``. Each column takes the
    value on the grid that is nearest to the minimum with all other columns fixed, if that lowers
    the error.

    Args:
        grid: of the weight (M, K), which is the target.
        start: codes (M, K) and factors.
        hessian: (K, K), the mean of ``x x^T`` over the inputs x; not changed.
    """
    products = hessian.to(torch.float32)
    target = grid.matrix.t().contiguous()  # (K, M): the column that changes is contiguous
    shape = (target.shape[1], target.shape[0])
    factors = spread(start.factors, *grid.block, shape)
    codes = start.codes.t().contiguous()
    values = grid.values(start.codes, factors, grid.wide).t().contiguous()
    factors = factors.t().contiguous()
    wide = grid.wide[:, 0]
    diagonal = products.diagonal().tolist()
    for _ in range(SWEEPS):
        # Half the derivative of the error by each value. Each sweep computes it from the start, so
        # that rounding errors of the updates do not add up over sweeps.
        slopes = products @ (values - target)
        for column, curvature in enumerate(diagonal):
            if curvature <= 0:
                continue
            slope = slopes[column]
            wanted = values[column] - slope / curvature
            new_codes, new_values = grid.round(wanted, factors[column], wide)
            step = new_values - values[column]
            better = step * (2 * slope + curvature * step) < 0
            step = torch.where(better, step, 0.0)
            values[column] += step
            codes[column] = torch.where(better, new_codes, codes[column])
            slopes.addr_(products[:, column], step)
    return Rounded(codes.t(), start.factors, start.damping)
