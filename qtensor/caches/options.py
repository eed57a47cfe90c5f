"""Options of attention over a cache, and checks of new queries and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import check
from qtensor.library.cache import check_rows


class Options(NamedTuple):
    """Options of the ops of attention, in their order (``qtensor/library/attention.py``)."""

    scale: float
    causal: bool
    window: int
    soft_cap: float
    positions: Tensor | None
    first: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None

    def split(self, positions: Tensor, recent: int, tokens: int) -> tuple[Options | None, Options]:
        """Return options for the early tokens of each query, and for its last ``recent`` ones.

        Args:
            positions: (B, M) of the queries.
            recent: R; the query at position p has the tokens up to p - R among the early ones.
            tokens: S that a mask covers.

        Returns:
            Two options without sinks. The first is None if a window hides all early tokens.
        """
        own = self._replace(positions=positions, sinks=None)
        early = own._replace(positions=positions - recent, causal=True)
        if self.window:
            early = early._replace(window=self.window - recent)
        late = own._replace(window=min(recent, self.window or recent))
        if not self.causal:
            late = late._replace(window=0, mask=self._late_mask(positions, recent, tokens))
        return (None if self.window and self.window <= recent else early), late

    def _late_mask(self, positions: Tensor, recent: int, tokens: int) -> Tensor:
        """Return the mask, which also hides the early tokens."""
        tokens = tokens if self.mask is None else self.mask.shape[3]
        steps = torch.arange(tokens, device=positions.device)
        late = (steps > (positions - recent).unsqueeze(-1)).unsqueeze(1)
        if self.mask is None:
            return late
        if self.mask.dtype is torch.bool:
            return self.mask & late
        return torch.where(late, self.mask, -torch.inf)


def shifted_sinks(sinks: Tensor, q: Tensor, mean: Tensor, scale: float) -> Tensor:
    """Return the sinks minus what a mean adds to the scores of the tokens, (B, Hq, M)."""
    mean = mean.repeat_interleave(q.shape[1] // mean.shape[-2], -2).unsqueeze(-2)
    sinks = sinks.float() if sinks.ndim == 3 else sinks.float()[:, None]
    return sinks - (q.float() * mean).sum(-1) * scale


def check_values(v: Tensor | None, *, latent: bool) -> None:
    """Refuse values for a latent cache, and a cache of values that gets none.

    Raises:
        QTensorError: ``v`` does not fit the cache.
    """
    rule = "v must be (B, heads, tokens, head size), as the cache is not latent"
    got, fix = "None", "Pass the values, or make the cache with latent=True"
    if latent:
        rule, fix = "v must be None, as the values of a latent cache are a part of k", "Pass None"
        got = "" if v is None else str(tuple(v.shape))
    check((v is None) == latent, "KVCache.append", rule, got, fix)


def check_queries(q: Tensor, k: Tensor) -> None:
    """Refuse queries that do not fit new keys, before these are appended.

    Raises:
        QTensorError: a shape or the dtype of ``q`` does not fit.
    """
    name = "KVCache.update"
    check_rows(name, "q", q)
    check_rows(name, "k", k)
    rule = "q must have the sequences, tokens and head size of k, and a multiple of its heads"
    same = q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:] and q.shape[1] % k.shape[1] == 0
    check(same, name, rule, f"q {tuple(q.shape)}, k {tuple(k.shape)}", "Fix one of them")
