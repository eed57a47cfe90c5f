"""What attention needs of a cache of keys and values."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AttentionCache(Protocol):
    """A cache of keys and values, as ``DotProductAttention`` uses one for inference.

    One cache belongs to one layer. Both methods can be compiled.
    """

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add the keys (B, G, N, D) and values (B, G, N, E) of N new tokens of each sequence."""

    def attend(self, q: Tensor, *, scale: float, causal: bool = True, window: int = 0) -> Tensor:
        """Return the attention (B, H, N, E) of queries (B, H, N, D) over all tokens of the cache.

        Args:
            q: queries of the last N tokens.
            scale: multiplies the scores.
            causal: let a query see the tokens up to its own alone.
            window: let a query see that many tokens, its own the last; 0 for all.
        """
