"""Hold keys and values in buffers, in one block for each sequence or in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.api import Format
from qtensor.caches.options import Options
from qtensor.caches.pages import Pages
from qtensor.caches.rows import Rows
from qtensor.core.errors import UnsupportedError, check, fail
from qtensor.library.cache import CACHE_APPEND

_MANY = 1 << 62


class Layout(NamedTuple):
    """Sizes of a cache: sequences B, heads H, tokens of a sequence, head sizes D and E."""

    batch: int
    heads: int
    tokens: int
    k_size: int
    v_size: int
    device: torch.device


class Store:
    """Keys and values of the tokens of B sequences.

    Attributes:
        k: rows of the keys.
        v: rows of the values; None if the values are the first elements of the keys.
        v_size: head size E of the values.
        pages: where the pages of each sequence are; None if each has one block of memory.
        window: tokens that a ring of pages has to hold for a query, its own the last.
    """

    def __init__(
        self,
        formats: tuple[Format, Format | None],
        layout: Layout,
        pages: Pages | None,
        window: int,
    ) -> None:
        """Make buffers of zeros.

        Args:
            formats: of the keys and of the values; None for values that are a part of the keys.
            layout: sizes of the cache.
            pages: of the sequences, or None.
            window: tokens that a ring has to hold for a query.

        Raises:
            QTensorError: a format does not fit a head size.
        """
        batch, heads, tokens, k_size, v_size, device = layout
        places = (batch, tokens) if pages is None else (pages.total, pages.size)
        self.pages, self.window, self.v_size = pages, window, v_size
        self.k = Rows(formats[0], (places[0], heads, places[1], k_size), device)
        self.v = None
        if formats[1] is not None:
            self.v = Rows(formats[1], (places[0], heads, places[1], v_size), device)
            return
        block = self.k.form.block or self.k.form.group[0]
        rule = f"the values must be blocks of {block} of the {k_size} elements of the keys"
        fits = v_size <= k_size and v_size % block == 0
        check(fits, "KVCache", rule, f"v_head_size={v_size}", "Take another format")

    @property
    def rows(self) -> list[Rows]:
        """The rows that have buffers."""
        return [self.k] if self.v is None else [self.k, self.v]

    @property
    def step(self) -> int:
        """The most tokens that may be written at once, if all of them are queries too."""
        return _MANY if self.pages is None or not self.pages.kept else self.pages.size

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the rows of all values as a tensor that shares the buffers."""
        if self.v is None:
            return self.k.tensor(dtype)[..., : self.v_size]
        return self.v.tensor(dtype)

    # ---- tokens

    def write(
        self, k: Tensor, v: Tensor | None, positions: Tensor, lengths: Tensor, mean: Tensor | None
    ) -> None:
        """Write new tokens; a ring leaves out those that later ones would overwrite.

        Args:
            k: (B, H, N, D).
            v: (B, H, N, E), or None.
            positions: (B, N); negative for a token that is not written.
            lengths: (B,), with the new tokens.
            mean: of the keys, or None.
        """
        count, table = k.shape[2], None
        if self.pages is not None:
            table = self.pages.table
            if 0 < self.pages.kept < count:
                kept = positions >= lengths[:, None] - self.pages.kept
                positions = torch.where(kept, positions, -1)
        values: tuple[Any, ...] = (None, None, "", None)
        if self.v is not None:
            values = (self.v.codes, self.v.factors, self.v.form.text, self.v.wide)
        CACHE_APPEND(
            *(k, v, positions, self.k.codes, self.k.factors, *values[:2]),
            *(self.k.form.text, values[2], mean, table, self.k.wide, values[3]),
        )

    def attend(self, op: Callable[..., Any], q: Tensor, lengths: Tensor, options: Options) -> Any:
        """Call an op of attention.

        Args:
            op: ``ATTENTION`` or ``ATTENTION_PART``.
            q: (B, Hq, M, D).
            lengths: (B,).
            options: of the queries.

        """
        k, v = self.k, self.v or self.k
        codes, factors = v.codes, v.factors
        if self.v is None:
            codes = codes[..., : v.form.entries(self.v_size)]
            factors = None if factors is None else factors[..., : v.form.factors(self.v_size)]
        return op(
            *(q, k.codes, k.factors, codes, factors, k.form.text, v.form.text, lengths),
            *options,
            *(None if self.pages is None else self.pages.table, k.wide, v.wide),
        )

    def check_ring(self, queries: int, lengths: Tensor, options: Options) -> None:
        """Refuse queries that would see tokens that a ring has overwritten.

        Raises:
            UnsupportedError: a ring of pages has forgotten tokens that a query would see.
        """
        pages = self.pages
        if pages is None or not pages.kept:
            return
        name, window = "KVCache.attention", options.window
        fix = "Make the cache without window, and pass it to attention"
        if (options.causal or options.mask is None) and not 0 < window <= self.window:
            rule = f"a ring of pages holds the {self.window} tokens of its window"
            fail(name, rule, f"window={window}", fix, UnsupportedError)
        if options.positions is None and queries <= pages.size:
            return  # Writing leaves the windows of the last page of tokens.
        oldest = lengths - queries if options.positions is None else options.positions.amin(1)
        if not torch.compiler.is_compiling() and bool(self.forgotten(lengths, oldest + 1).any()):
            rule = "a ring of pages has forgotten tokens that a query would see"
            fail(name, rule, f"{queries} queries", fix, UnsupportedError)

    def forgotten(self, lengths: Tensor, new: Tensor) -> Tensor:
        """Return where a ring lacks tokens that the last of ``new`` tokens would see, bool (B,)."""
        if self.pages is None or not self.pages.kept:
            return torch.zeros_like(lengths, dtype=torch.bool)
        return self.pages.oldest(lengths) > (new - self.window).clamp(min=0)

    # ---- buffers

    def resize(self, batch: int, capacity: int) -> None:
        """Make room for more tokens of each sequence."""
        each, size = 1, capacity
        if self.pages is not None:
            self.pages = self.pages.wider(capacity)
            each, size = self.pages.each, self.pages.size
        if self.pages is None or not self.pages.kept:
            for rows in self.rows:
                rows.resize(batch, each, size)

    def select(self, index: Tensor) -> None:
        """Put sequence ``index[i]`` in place i."""
        if self.pages is not None:
            places = self.pages.places(index)
            self.pages = self.pages.of_batch(index.shape[0])
            index = places
        for rows in self.rows:
            rows.select(index)

    def to(self, device: torch.device) -> None:
        """Move the buffers."""
        for rows in self.rows:
            rows.to(device)
        self.pages = None if self.pages is None else self.pages.to(device)

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that exist by name."""
        named = {} if self.pages is None else {"block_table": self.pages.table}
        for name, rows in zip("kv", self.rows, strict=False):
            named |= {f"{name}_{key}": t for key, t in rows.named_buffers().items()}
        return named
