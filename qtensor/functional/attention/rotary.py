"""Rotary position embedding (https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.core.errors import fail

Embedding = Tensor | tuple[Tensor, Tensor]
"""Angles (S, 1, 1, R) of queries and keys, or two such tensors."""


def angles(inverse: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Return the angles (S, 1, 1, R) by which each position rotates a head.

    Args:
        inverse: (R / 2,) float32: the angle of each pair of channels at position 1.
        positions: (S,).
        interleaved: pairs are neighbouring channels, not channels i and i + R / 2.
    """
    pairs = positions.to(inverse.dtype)[:, None] * inverse
    both = torch.stack((pairs, pairs), -1) if interleaved else torch.stack((pairs, pairs), -2)
    return both.flatten(1)[:, None, None]


def rotate(t: Tensor, embedding: Tensor, sequence_dim: int, interleaved: bool = False) -> Tensor:
    """Return ``t`` with the first R channels of each head rotated.

    The rotation is computed in float32 and rounded once.

    Args:
        t: (S, B, H, D) or (B, S, H, D), or (T, H, D) with an angle for each token.
        embedding: (S or more, 1 or B, 1, R) angles.
        sequence_dim: the dim of ``t`` that holds the sequence: 0 or 1.
        interleaved: pairs are neighbouring channels, not channels i and i + R / 2.

    Raises:
        QTensorError: the angles do not fit ``t``.
    """
    count, size = t.shape[sequence_dim], embedding.shape[-1]
    fits = embedding.ndim == 4 and embedding.shape[2] == 1 and embedding.shape[0] >= count
    if not (fits and size <= t.shape[-1] and size % 2 == 0):
        # Not before: compiled code would specialize on sizes that it formats.
        rule = f"rotary_pos_emb must be ({count} or more, 1, 1, an even number up to {t.shape[-1]})"
        fix = "Pass that of qtensor.RotaryPositionEmbedding"
        fail("rotary_pos_emb", rule, tuple(embedding.shape), fix)
    turn = embedding[:count].float()
    if t.ndim == 3:
        turn = turn[:, 0]
    elif sequence_dim == 1:
        turn = turn.transpose(0, 1)
    head, rest = t[..., :size].float(), t[..., size:]
    if interleaved:
        even, odd = head[..., ::2], head[..., 1::2]
        turned = torch.stack((-odd, even), -1).flatten(-2)
    else:
        first, second = head.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    head = head * turn.cos() + turned * turn.sin()
    return torch.cat((head.to(t.dtype), rest), -1)
