"""Where the pages of each sequence of a cache are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RING_PAGE = 64
"""Tokens of a page of a sliding window, unless the caller says so."""


class Pages(NamedTuple):
    """Each sequence has pages of its own, unless a caller assigns them.

    Attributes:
        size: tokens of a page.
        total: all pages.
        each: pages that each sequence owns, which a ring uses again for later tokens; 0 if the
            caller assigns pages.
        kept: tokens that a ring holds; 0 if there is a page for every token.
        table: (B, pages of the capacity) int64: page i of sequence b is ``table[b, i]``.
    """

    size: int
    total: int
    each: int
    kept: int
    table: Tensor

    @property
    def is_assigned(self) -> bool:
        """Whether the caller assigns the pages."""
        return not self.each

    @staticmethod
    def of(
        batch: int, capacity: int, size: int, window: int, grow: bool, device: torch.device
    ) -> Pages | None:
        """Return the pages of a cache; None if each sequence has one block of memory.

        A ring holds, besides the window of the first token of a page, a whole page of new tokens.
        """
        if window:
            length = size or (RING_PAGE if grow else min(RING_PAGE, capacity))
            ring = -(-(window + length - 2) // length) + 1
            if grow or ring * length < capacity:
                wide = -(-capacity // length)
                table = _table(batch, ring, wide, device)
                return Pages(length, batch * ring, ring, ring * length, table)
        if not size:
            return None
        each = -(-capacity // size)
        return Pages(size, batch * each, each, 0, _table(batch, each, each, device))

    @staticmethod
    def assigned(batch: int, capacity: int, size: int, total: int, device: torch.device) -> Pages:
        """Return pages of which no sequence has one until the caller assigns them."""
        wide = -(-capacity // size)
        table = torch.full((batch, wide), -1, dtype=torch.int64, device=device)
        return Pages(size, total, 0, 0, table)

    def wider(self, capacity: int) -> Pages:
        """Return the pages of a larger capacity."""
        wide = -(-capacity // self.size)
        each = self.each if self.kept else wide
        batch = self.table.shape[0]
        table = _table(batch, each, wide, self.table.device)
        return self._replace(each=each, total=batch * each, table=table)

    def of_batch(self, batch: int) -> Pages:
        """Return the pages of another number of sequences."""
        table = _table(batch, self.each, self.table.shape[1], self.table.device)
        return self._replace(table=table, total=batch * self.each)

    def places(self, index: Tensor) -> Tensor:
        """Return all pages of the sequences that ``index`` names, in order."""
        steps = torch.arange(self.each, device=index.device)
        return (index.unsqueeze(1) * self.each + steps).flatten()

    def oldest(self, lengths: Tensor) -> Tensor:
        """Return the first token that a ring still holds of sequences with ``lengths`` tokens."""
        return ((lengths - 1) // self.size - self.each + 1).clamp(min=0) * self.size

    def to(self, device: torch.device) -> Pages:
        """Return the pages with a table on ``device``."""
        return self._replace(table=self.table.to(device))


def _table(batch: int, each: int, wide: int, device: torch.device) -> Tensor:
    steps = torch.arange(wide, device=device) % each
    return torch.arange(batch, device=device).unsqueeze(1) * each + steps
