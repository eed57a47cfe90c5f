"""Operands of GEMMs: quantize, take the part that a GEMM reads, multiply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.operand import Operand, plain_operand
from qtensor.functional.linear.layer_plan import parts
from qtensor.library.gemm import GEMM
from qtensor.library.quantize import DRAW_SEEDS, QUANTIZE


def draw(like: Tensor, draws: Tensor, count: int) -> Tensor:
    """Return ``count`` seeds (count,) int64 for stochastic rounding on the device of ``like``.

    ``draws`` (1,) int64 on the CPU counts the draws of the layer. On the meta device, which has no
    values, nothing is drawn and nothing counted.
    """
    if like.is_meta:
        return torch.empty(count, dtype=torch.int64, device="meta")
    return DRAW_SEEDS(like, draws, count)


def draw_seeds(
    like: Tensor, draws: Tensor, stochastic: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return a seed (1,) int64, or None, for each of input, weight and gradient."""
    return split_seeds(draw(like, draws, sum(stochastic)), stochastic)


def split_seeds(
    seeds: Tensor, stochastic: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Split the seeds (n,) of ``DRAW_SEEDS`` among input, weight and gradient."""
    place, found = 0, []
    for wanted in stochastic:
        found.append(seeds[place : place + 1] if wanted else None)
        place += wanted
    return found[0], found[1], found[2]


class Quantized(NamedTuple):
    """A value (..., K) that another operation has quantized. It stands for the tensor.

    Attributes:
        operand: the matrix (M, K) of its rows, as products read it.
        shape: the logical shape, (..., K).
        dtype: dtype of the tensor that was quantized.
        amax: (1,) float32 under delayed scaling.
    """

    operand: Operand
    shape: Shape
    dtype: torch.dtype
    amax: Tensor | None

    @property
    def ndim(self) -> int:
        """Number of dims of the logical shape."""
        return len(self.shape)


def as_matrix(t: Tensor) -> Tensor:
    """Return ``t`` (..., K) as a matrix (M, K)."""
    return t if t.ndim == 2 else t.reshape(-1, t.shape[-1])


def quantize_operand(
    x: Tensor, canonical: str, scale: Tensor | None = None, seed: Tensor | None = None
) -> tuple[Operand, Tensor | None]:
    """Quantize ``x`` (M, K). A tensor of that quantizer answers the op with its own buffers.

    The function does not ask for the type or the quantizer of ``x``, because in a compiled region
    neither can be relied on.

    Returns:
        The operand, and its amax (1,) under delayed scaling, for which ``scale`` is passed.
    """
    if not canonical:
        return plain_operand(x), None
    buffers = QUANTIZE(x, canonical, scale, None, seed)
    if scale is None:
        return Operand(buffers, canonical, x.shape), None
    return Operand(buffers[:-1], canonical, x.shape), buffers[-1]


def row_part(operand: Operand) -> Operand:
    """Return the rowwise part: fprop reads it of input and weight, dgrad of the gradient.

    The operand may hold the buffers of several matrices, one after another.
    """
    found = parts(operand.canonical)
    return _part(operand, found.row, found.row_canonical, found.total)


def column_part(operand: Operand) -> Operand:
    """Return the part that wgrad (input, gradient) or dgrad (weight) reads.

    An operand without columnwise data is returned whole. It may hold the buffers of several
    matrices, one after another.
    """
    found = parts(operand.canonical)
    return _part(operand, found.column, found.column_canonical, found.total)


def _part(operand: Operand, slots: tuple[int, ...], canonical: str, total: int) -> Operand:
    if len(slots) == total or not slots:
        return operand
    starts = range(0, len(operand.buffers), total)
    buffers = [operand.buffers[start + slot] for start in starts for slot in slots]
    return Operand(buffers, canonical, operand.shape)


def multiply(
    a: Operand, b: Operand, layout: str, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Return the product (M, N) in a layout of the ``gemm`` op; ``bias`` is (N,)."""
    return GEMM(*a, *b, layout, dtype, bias)
