"""Reorder, join and select the rows of weights, with the codes and factors that they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints.buffers import Parts, assemble, rowwise_parts
from qtensor.core.errors import UnsupportedError, fail
from qtensor.integrations.stacking import Grid, common_factors, stack
from qtensor.storage.tensor import QuantizedTensor


def pair_rows(rows: int, heads: int) -> Tensor:
    """Return the order of the rows of q or k in which llama.cpp rotates neighbours as a pair.

    In transformers, row i of a head is rotated with row i + half of its rows.
    """
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).flatten()


def take_rows(weight: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a matrix, or of each matrix of a stack; of a vector, its elements.

    A quantized weight has rowwise data in a format whose factors each belong to one row, or to the
    tensor.
    """
    if not isinstance(weight, QuantizedTensor):
        return weight[rows] if weight.ndim == 1 else weight[..., rows, :]
    quantizer, lead = quantizer_of(weight), weight.shape[:-1]
    if quantizer.two_dimensional and quantizer.format == "fp8_blockwise":
        fix = "Decode it first"
        fail("take_rows", "factors belong to rows", quantizer.canonical, fix, UnsupportedError)

    def of(part: Tensor | None) -> Tensor | None:
        whole = part is None or part.numel() < lead.numel() or part.numel() == 1
        return part if whole else part.reshape(*lead, -1)[..., rows, :]  # type: ignore[union-attr]

    parts = Parts(*map(of, rowwise_parts(weight)))  # type: ignore[arg-type]
    shape = (*lead[:-1], len(rows), weight.shape[-1])
    return assemble(quantizer, shape, weight.dtype, parts)


def join_experts(weights: Sequence[Tensor]) -> Tensor:
    """Return the stack (E, N, K) of the weights of the experts of a layer, each (N, K).

    Raises:
        UnsupportedError: their formats differ.
    """
    if not any(isinstance(weight, QuantizedTensor) for weight in weights):
        return torch.stack(list(weights))
    return stack(cast(Grid, [[weight] for weight in weights]), "gguf")


def expert(weights: Tensor, number: int) -> Tensor:
    """Return the weight of one expert of a stack, with a factor of its own."""
    weight = weights[number]
    return common_factors(weight) if isinstance(weight, QuantizedTensor) else weight


def in_turns(first: Tensor, second: Tensor) -> Tensor:
    """Return the rows of two stacks in turns, (E, 2 * N, K); of biases (E, N), the elements."""
    if not isinstance(first, QuantizedTensor) or not isinstance(second, QuantizedTensor):
        joined = torch.stack((first, second), 2)
        return joined.flatten(1, 2)
    grid = cast(Grid, list(zip(first.unbind(), second.unbind(), strict=True)))
    rows = first.shape[1]
    return take_rows(stack(grid, "gguf"), torch.arange(2 * rows).view(2, rows).t().flatten())
