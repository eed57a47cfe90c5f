"""Options of attention over a cache, and checks of new queries and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import check
from qtensor.library.attention import check_options
from qtensor.library.cache import check_rows
from qtensor.storage.ops.attention import refuse_gradient


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


class Asked(NamedTuple):
    """The arguments of ``KVCache.attention`` beside the queries."""

    positions: Tensor | None = None
    first: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = True
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    scale: float | None = None
    window: int | None = None


def query_options(q: Tensor, asked: Asked, cache_window: int, has_mean: bool) -> Options:
    """Return the options of ``KVCache.attention`` for the queries ``q``.

    Raises:
        QTensorError: a soft cap for keys without their mean, with which it does not commute.
        UnsupportedError: ``q``, the mask or the sinks require grad while grad mode is on.
    """
    refuse_gradient("KVCache.attention", q=q, mask=asked.mask, sinks=asked.sinks)
    rule, fix = "keys without their mean change capped scores", "Leave out k_mean"
    fits = not (has_mean and asked.soft_cap)
    check(fits, "KVCache.attention", rule, f"soft_cap={asked.soft_cap}", fix)
    scale = q.shape[-1] ** -0.5 if asked.scale is None else asked.scale
    window = asked.window
    if window is None:
        window = cache_window if asked.causal else 0
    numbers = (scale, asked.causal, window, asked.soft_cap)
    return Options(*numbers, asked.positions, asked.first, asked.mask, asked.sinks)


def without_mean(options: Options, q: Tensor, mean: Tensor | None) -> Options:
    """Return options for keys without their mean: sinks become smaller by what it adds to scores.

    Without a mean, they are as they were.

    Raises:
        QTensorError: the sinks have a wrong shape.
    """
    sinks = options.sinks
    if sinks is None or mean is None:
        return options
    check_options("KVCache.attention", q, options)
    mean = mean.repeat_interleave(q.shape[1] // mean.shape[-2], -2).unsqueeze(-2)
    sinks = sinks.float() if sinks.ndim == 3 else sinks.float()[:, None]
    return options._replace(sinks=sinks - (q.float() * mean).sum(-1) * options.scale)


def check_new(k: Tensor, v: Tensor | None, *, latent: bool) -> None:
    """Refuse tokens with a gradient, values for a latent cache, and a cache that gets no values.

    Raises:
        QTensorError: ``v`` does not fit the cache.
        UnsupportedError: ``k`` or ``v`` requires grad while grad mode is on.
    """
    refuse_gradient("KVCache.append", k=k, v=v)
    rule = "v must be (B, heads, tokens, head size), as the cache is not latent"
    got, fix = "None", "Pass the values, or make the cache with latent=True"
    if latent:
        rule, fix = "v must be None, as the values of a latent cache are a part of k", "Pass None"
        got = "" if v is None else str(tuple(v.shape))
    check((v is None) == latent, "KVCache.append", rule, got, fix)


def check_update(q: Tensor, k: Tensor, options: Options, lengths: Tensor) -> None:
    """Refuse queries and options that do not fit new keys, before these are appended.

    Args:
        q: (B, Hq, N, D).
        k: (B, H, N, D).
        options: of the queries.
        lengths: (B,) tokens of the cache, without the new ones.

    Raises:
        QTensorError: a shape, dtype or option does not fit.
    """
    name, mask = "KVCache.update", options.mask
    check_rows(name, "q", q)
    check_rows(name, "k", k)
    rule = "q must have the sequences, tokens and head size of k, and a multiple of its heads"
    same = q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:] and q.shape[1] % k.shape[1] == 0
    check(same, name, rule, f"q {tuple(q.shape)}, k {tuple(k.shape)}", "Fix one of them")
    if torch.compiler.is_compiling():
        return  # The op checks when the graph runs, after the append.
    check_options(name, q, options)
    # A host that does not wait for a device cannot ask for the lengths.
    if mask is not None and lengths.is_cpu:
        most = int(lengths.max()) + k.shape[2]
        rule = f"the mask must cover the longest sequence, {most} tokens"
        check(mask.shape[3] >= most, name, rule, tuple(mask.shape), "Pass a longer mask")


def check_counts(op: str, least: int, **counts: int | None) -> None:
    """Refuse numbers of tokens, heads and the like that are not integers, or too small.

    Raises:
        QTensorError: the message names the argument.
    """
    for name, count in counts.items():
        is_count = isinstance(count, int | torch.SymInt) and not isinstance(count, bool)
        fits = count is None or (is_count and count >= least)
        check(fits, op, f"{name} must be an integer of at least {least}", repr(count), "Fix it")
