"""Round the sum of a quantized weight and a change.

The weight lies on its grid already. Methods other than rounding to nearest begin with the factors
that it has, so that what is not changed stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.library.quantize import maxima_of
from qtensor.quantizers import Quantizer
from qtensor.quantizers.call import quantize_by_maxima
from qtensor.quantizers.methods import Grid
from qtensor.reference.blocks import block_amax, spread, to_blocks
from qtensor.reference.elements import code_values
from qtensor.storage.tensor import QuantizedTensor
from qtensor.weights.compensation import Rounded, compensate
from qtensor.weights.descent import descend
from qtensor.weights.rounding import grid_of
from qtensor.weights.scale_search import best_factors

DAMPING = 0.01
"""Share of the mean of the diagonal of the matrix of inputs that is added to it."""
GROWTH = 1.25
"""A tensor-wide factor stays while the largest value of the sum is below this times its limit.

Clipping the few values beyond costs less than moving all others off their grid."""


def rounded_sum(
    weight: QuantizedTensor,
    target: Tensor,
    method: str,
    matrices: Sequence[Tensor | None],
    generator: torch.Generator | None,
) -> Tensor:
    """Return the sum of weight and change in the format of the weight."""
    quantizer = quantizer_of(weight)
    if method == "nearest":
        return nearest_sum(target, quantizer, shared_rows(weight))
    grid = grid_of(quantizer, target)
    grid.dtype = weight.dtype
    stored = _take(grid, weight)
    if method == "stochastic":
        done = _at_random(grid, stored, generator)
    else:
        parts = [
            _compensated(_rows_of(grid, expert, len(matrices)), own, matrix)
            for expert, (own, matrix) in enumerate(
                zip(stored.chunk(len(matrices)), matrices, strict=True)
            )
        ]
        codes, factors = (torch.cat([part[i] for part in parts]) for i in range(2))
        done = Rounded(codes, factors, DAMPING)
    return grid.tensor(done.codes, done.factors)


def _take(grid: Grid, weight: QuantizedTensor) -> Tensor:
    """Return the factors of a weight (m, k), and let the grid of the sum use its tensor-wide one.

    If the sum has grown far beyond the largest value that the tensor-wide factor allows, both are
    those that quantizing the sum gives.
    """
    maxima, rows = grid.wide, shared_rows(weight)
    if rows:
        maxima = maxima.view(-1, rows).amax(1).repeat_interleave(rows)[:, None]
    names = [slot.name for slot in grid.quantizer.slots]
    stored = grid.take(dict(zip(names, weight.buffers(), strict=True)))
    grown = maxima > GROWTH * grid.wide
    if not grown.any():
        return stored
    grid.wide = torch.where(grown, maxima, grid.wide)
    return torch.where(grown, grid.nearest(grid.matrix), stored)


def nearest_sum(target: Tensor, quantizer: Quantizer, rows: int) -> QuantizedTensor:
    """Return the sum of weight and change, rounded to nearest; the gradient passes unchanged.

    Args:
        target: float32 (N, K) or (E, N, K).
        quantizer: of the weight.
        rows: ``shared_rows`` of the weight.
    """
    if not rows:
        return quantizer(target)
    maxima = maxima_of(target.detach(), quantizer.canonical)
    shared = [m.view(-1, rows).amax(1).repeat_interleave(rows).view(m.shape) for m in maxima]
    return quantize_by_maxima(quantizer, target, shared)


def shared_rows(weight: QuantizedTensor) -> int:
    """Return N if experts (E, N, K) were quantized apart, with one factor for all rows of each.

    The stack holds this factor once for each row. 0 stands for all other weights.
    """
    quantizer = quantizer_of(weight)
    names = [slot.name for slot in quantizer.slots]
    stored = quantizer.stored_factors(dict(zip(names, weight.buffers(), strict=True)))
    if weight.ndim != 3 or quantizer.columnwise or not stored:
        return 0
    value: Any = next(iter(stored.values()))
    factors = value[0] if isinstance(value, list) else value
    experts, rows = weight.shape[:2]
    if factors.numel() != experts * rows:
        return 0
    each = factors.reshape(experts, rows)
    return rows if bool((each == each[:, :1]).all()) else 0


def _rows_of(grid: Grid, expert: int, experts: int) -> Grid:
    """Return the grid of one of ``experts`` matrices that lie below each other."""
    if experts == 1:
        return grid
    part = copy.copy(grid)
    part.matrix = grid.matrix.chunk(experts)[expert]
    part.wide = grid.wide if len(grid.wide) == 1 else grid.wide.chunk(experts)[expert]
    return part


def _compensated(grid: Grid, stored: Tensor, hessian: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return codes and factors of a matrix that make the change of the outputs the wanted one.

    The factors of the weight stay where no others have a smaller error, so that the values that it
    has now stay on the grid. Without inputs, values are rounded to nearest.
    """
    columns = iter(stored.split(1, 1))

    def choose(x: Tensor, _: Tensor) -> Tensor:
        own = next(columns) if grid.block[1] < grid.matrix.shape[1] else stored
        return best_factors(grid, x, None, own)

    if hessian is None:
        factors = best_factors(grid, grid.matrix, None, stored)
        shape = (grid.matrix.shape[0], grid.matrix.shape[1])
        codes, _ = grid.round(grid.matrix, spread(factors, *grid.block, shape), grid.wide)
        return codes, factors
    start = compensate(grid, hessian.clone(), DAMPING, False, choose)
    done = descend(grid, start, hessian)
    return done.codes, done.factors


def _at_random(grid: Grid, stored: Tensor, generator: torch.Generator | None) -> Rounded:
    """Return codes drawn between the two neighbors of each value, with the mean of the value.

    A block keeps its factor unless a value would be beyond the largest one of the grid.
    """
    x = grid.matrix
    shape = (x.shape[0], x.shape[1])
    encode, _, _ = grid.multipliers(spread(stored, *grid.block, shape), grid.wide)
    largest = block_amax(to_blocks(x * encode, *grid.block))
    factors = torch.where(largest > grid.element.max, grid.nearest(x), stored)
    encode, _, _ = grid.multipliers(spread(factors, *grid.block, shape), grid.wide)
    scaled = (x * encode).clamp_(-grid.element.max, grid.element.max)
    table = sorted({v for v in code_values(grid.element) if abs(v) <= grid.element.max})
    steps = torch.tensor(table, device=x.device)
    upper = torch.searchsorted(steps, scaled).clamp_(1, len(table) - 1)
    low, high = steps[upper - 1], steps[upper]
    drawn = torch.rand(shape, generator=generator, device=x.device)
    chosen = torch.where(drawn * (high - low) < scaled - low, high, low)
    return Rounded(grid.codes(chosen), factors, 0.0)
