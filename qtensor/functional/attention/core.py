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
        is_causal: query i sees the keys 0 to i; ``seen``, ``bias`` and ``sinks`` are then None.
        bias: floating, broadcastable to (B, H, Sq, Skv), added to the scaled scores; or None.
        dropout: the share of the probabilities that is set to 0.
        sinks: (H,) floating, a score beside those of the keys that has no value; or None.
    """

    scale: float
    seen: Tensor | None = None
    is_causal: bool = False
    bias: Tensor | None = None
    dropout: float = 0.0
    sinks: Tensor | None = None

    def mask(self, q: Tensor, keys: int) -> Tensor | None:
        """Return the mask that ``scaled_dot_product_attention`` takes.

        Args:
            q: the queries (B, H, Sq, D).
            keys: Skv. With ``sinks`` the mask has another column for them.
        """
        if self.bias is None and self.sinks is None:
            return self.seen
        bias = q.new_zeros(1, 1) if self.bias is None else self.bias.to(q.dtype)
        if self.seen is not None:
            bias = bias.masked_fill(~self.seen, float("-inf"))
        if self.sinks is None:
            return bias
        shape = (bias.shape[0] if bias.ndim == 4 else 1, *q.shape[1:3])
        sinks = self.sinks.to(q.dtype).view(-1, 1, 1).expand(*shape, 1)
        return torch.cat([bias.expand(*shape, keys), sinks], -1)


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
    mask = scoring.mask(q, k.shape[2])
    if scoring.sinks is not None:
        # The score of a key of zeros is what the mask adds, and its value adds nothing.
        k, v = (functional.pad(t, (0, 0, 0, 1)) for t in (k, v))
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        mask,
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
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    found = scores.softmax(-1)
    if scoring.sinks is not None:
        found = found[..., :-1]
    if seen is not None:
        found = found.masked_fill(~seen, 0.0)
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
