"""What attention needs of a cache of keys and values."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AttentionCache(Protocol):
    """A cache of keys and values, as ``DotProductAttention`` uses one for inference.

    One cache belongs to one layer; ``qtensor.KVCache`` is one.
    """

    def update(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Append the N tokens of each sequence, and return the causal attention of their queries.

        Args:
            q: (B, H, N, D).
            k: (B, G, N, D).
            v: (B, G, N, E).
            scale: multiplies the scores.
            window: let a query see that many tokens, its own the last; None for those of the cache.
            sinks: (H,), a score beside those of the keys that has no value; or None.

        Returns:
            (B, H, N, E).
        """
