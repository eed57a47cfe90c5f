"""Attention over heads (B, H, S, D): in the dtype of its inputs, or through quantized operands."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from qtensor.functional.attention.plan import AttentionPlan
from qtensor.functional.attention.product import product


class Scoring(NamedTuple):
    """How scores become probabilities.

    Attributes:
        scale: multiplies the scores.
        seen: bool, broadcastable to (B, H, Sq, Skv), the keys that a query sees; None for all.
        is_causal: query i sees the keys 0 to i; ``seen`` and ``bias`` are then None.
        bias: floating, broadcastable to (B, H, Sq, Skv), added to the scaled scores; or None.
        dropout: the share of the probabilities that is set to 0.
    """

    scale: float
    seen: Tensor | None = None
    is_causal: bool = False
    bias: Tensor | None = None
    dropout: float = 0.0

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return the mask that ``scaled_dot_product_attention`` takes."""
        if self.bias is None:
            return self.seen
        bias = self.bias.to(dtype)
        return bias if self.seen is None else bias.masked_fill(~self.seen, float("-inf"))


def attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Return ``softmax(q @ k.mT * scale) @ v`` as torch computes it.

    Args:
        q: (B, H, Sq, D).
        k: (B, G, Skv, D); G divides H.
        v: (B, G, Skv, E).
        scoring: how scores become probabilities.

    Returns:
        (B, H, Sq, E); 0 for a query that sees no key.
    """
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        scoring.mask(q.dtype),
        scoring.dropout,
        scoring.is_causal,
        scale=scoring.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def probabilities(scores: Tensor, scoring: Scoring) -> Tensor:
    """Return the probabilities of scores (B, H, Sq, Skv) float32; rows that see no key are 0."""
    scores = scores * scoring.scale
    if scoring.bias is not None:
        scores = scores + scoring.bias
    seen = scoring.seen
    if scoring.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if seen is None:
        found = scores.softmax(-1)
    else:
        least = torch.finfo(scores.dtype).min
        found = scores.masked_fill(~seen, least).softmax(-1).masked_fill(~seen, 0.0)
    return functional.dropout(found, scoring.dropout) if scoring.dropout else found


def quantized_attention(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, plan: AttentionPlan
) -> Tensor:
    """Return attention whose products, forward and backward, read quantized operands.

    The shapes are those of ``attention``. Scores, the softmax and its gradient are float32; the
    scores of all queries and keys are in memory at once.
    """
    (batch, heads, queries, _), (groups, keys) = q.shape, k.shape[1:3]
    size = v.shape[-1]
    q, k, v = (_padded(t, plan.multiple) for t in (q, k, v))
    # All queries that share a key are rows of one matrix.
    rows = q.reshape(batch * groups, -1, q.shape[-1])
    scores = product(rows, k.flatten(0, 1), plan.scores, torch.float32)
    scores = scores.view(batch, heads, -1, k.shape[2])[:, :, :queries, :keys]
    weights = _padded(probabilities(scores, scoring), plan.multiple)
    weights = weights.reshape(batch * groups, -1, k.shape[2])
    out = product(weights, v.flatten(0, 1), plan.output, q.dtype)
    return out.view(batch, heads, -1, v.shape[-1])[:, :, :queries, :size]


def _padded(t: Tensor, multiple: int) -> Tensor:
    """Return ``t`` (..., R, C) with zeros behind it, up to a multiple of rows and columns."""
    more_rows, more_columns = -t.shape[-2] % multiple, -t.shape[-1] % multiple
    if more_rows == 0 and more_columns == 0:
        return t
    return functional.pad(t, (0, more_columns, 0, more_rows))
