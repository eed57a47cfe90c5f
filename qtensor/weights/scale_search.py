"""Choose the factor of each block by the squared error of its values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.quantizers.methods import Grid
from qtensor.reference.blocks import to_blocks

CHUNK = 1 << 20
"""Values that are searched at a time; a block with more values is searched alone."""


def best_factors(
    grid: Grid, x: Tensor, importance: Tensor | None = None, start: Tensor | None = None
) -> Tensor:
    """Return the factors with the least sum of ``importance * (x - value)^2`` in each block.

    Each block is searched over the candidates of ``grid.falling``, in float64. Values beyond the
    largest one of a candidate are clipped to it. The error of this clipping alone grows with each
    further candidate, so a block is finished when it reaches the least error found. The search
    is exact where ``falling`` yields every factor that can be best: for E8M0 and E4M3 factors and
    for powers of two. A factor other than ``start`` is chosen only if its error is smaller.

    Args:
        grid: of the weight.
        x: float32 (M, k), columns of some whole blocks of the weight.
        importance: float32 or float64 (k,), not negative: weights of the columns; None: all equal.
        start: factors to begin with; the nearest ones if None.

    Returns:
        Factors (m, k / columns), as ``grid.nearest`` returns them.
    """
    rows, cols = grid.block
    nearest = grid.nearest(x)
    blocks = to_blocks(x, rows, cols)
    down, _, right, _ = blocks.shape
    weights = None
    if importance is not None:
        line = to_blocks(importance.double()[None], 1, cols)
        weights = line.expand(down, rows, right, cols)
    above, wide = nearest.reshape(-1), grid.wide.expand_as(nearest).reshape(-1)
    factors = (nearest if start is None else start).reshape(-1).clone()
    size = rows * cols
    flat = _lines(blocks, size)
    flat_weights = None if weights is None else _lines(weights, size)
    step = max(1, CHUNK // size)
    for first in range(0, len(flat), step):
        part = slice(first, first + step)
        weight = None if flat_weights is None else flat_weights[part]
        found = _Blocks(flat[part], above[part], wide[part], weight)
        factors[part] = _search(grid, found, factors[part])
    return factors.view(nearest.shape)


def _lines(blocks: Tensor, size: int) -> Tensor:
    """Return blocks (m, r, k, c) as rows (m * k, r * c)."""
    return blocks.transpose(1, 2).reshape(-1, size)


class _Blocks(NamedTuple):
    """Blocks to search.

    Attributes:
        x: (n, values).
        nearest: (n,), the factors that quantizing chooses; candidates fall from them.
        wide: (n,), the tensor-wide factors.
        weight: (n, values) of the squares; None for equal weights.
    """

    x: Tensor
    nearest: Tensor
    wide: Tensor
    weight: Tensor | None


def _search(grid: Grid, blocks: _Blocks, start: Tensor) -> Tensor:
    """Return the best factors (n,) of blocks, ``start`` where no candidate is better."""
    x, nearest, wide, weight = blocks
    best = start.clone()
    least = _error(grid, x, start, wide, weight)
    active = torch.arange(len(x), device=x.device)
    magnitude = x.abs()
    for candidates in grid.falling(nearest):
        _, inner, outer = grid.multipliers(candidates[active], wide[active])
        largest = (grid.element.max * inner * outer)[:, None]
        own = None if weight is None else weight[active]
        clipped = _total((magnitude[active] - largest).clamp_(min=0).double(), own)
        active = active[clipped < least[active]]
        if not active.numel():
            break
        own = None if weight is None else weight[active]
        error = _error(grid, x[active], candidates[active], wide[active], own)
        better = error < least[active]
        chosen = active[better]
        least[chosen] = error[better]
        best[chosen] = candidates[chosen]
    return best


def _error(grid: Grid, x: Tensor, factors: Tensor, wide: Tensor, weight: Tensor | None) -> Tensor:
    _, values = grid.round(x, factors[:, None], wide[:, None])
    return _total(x.double() - values, weight)


def _total(difference: Tensor, weight: Tensor | None) -> Tensor:
    squares = difference.square()
    return (squares if weight is None else squares.mul_(weight)).sum(1)
