"""Where the pages of each sequence of a cache are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RING_PAGE = 64
"""Tokens of a page of a sliding window, unless the caller says so."""


class Pages(NamedTuple):
    """Each sequence has pages of its own. A ring uses them again for later tokens.

    Attributes:
        size: tokens of a page.
        each: pages of a sequence.
        kept: tokens that a ring holds; 0 if there is a page for every token.
        table: (B, pages of the capacity) int64: page i of sequence b is ``table[b, i]``.
    """

    size: int
    each: int
    kept: int
    table: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """The number of all pages, and of the tokens of each."""
        return self.table.shape[0] * self.each, self.size

    @staticmethod
    def of(
        batch: int, capacity: int, size: int, window: int, grow: bool, device: torch.device
    ) -> Pages | None:
        """Return the pages of a cache; None if each sequence has one block of memory.

        A ring holds, besides the window of the first token of a page, a whole page of new tokens.
        """
        if window:
            length = size or min(RING_PAGE, capacity)
            ring = -(-(window + length - 2) // length) + 1
            if grow or ring * length < capacity:
                wide = -(-capacity // length)
                return Pages(length, ring, ring * length, _table(batch, ring, wide, device))
        if not size:
            return None
        each = -(-capacity // size)
        return Pages(size, each, 0, _table(batch, each, each, device))

    def wider(self, capacity: int) -> Pages:
        """Return the pages of a larger capacity."""
        wide = -(-capacity // self.size)
        each = self.each if self.kept else wide
        table = _table(self.table.shape[0], each, wide, self.table.device)
        return self._replace(each=each, table=table)

    def of_batch(self, batch: int) -> Pages:
        """Return the pages of another number of sequences."""
        table = _table(batch, self.each, self.table.shape[1], self.table.device)
        return self._replace(table=table)

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
