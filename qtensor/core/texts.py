"""Lay out texts for messages and reprs: tables, and lists that are cut short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(rows: Sequence[Sequence[str]], numbers_from: int | None = None) -> list[str]:
    """Return the lines of a table whose columns are as wide as their longest cell.

    Args:
        rows: the cells of each row; the first row usually holds the titles.
        numbers_from: index of the first column that is aligned to the right; None for none.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    limit = len(widths) if numbers_from is None else numbers_from
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < limit else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def some(names: Iterable[str], most: int = 8) -> str:
    """Return the first ``most`` names, separated by commas, and "..." if there are more."""
    listed = list(names)
    return ", ".join(listed[:most]) + ", ..." * (len(listed) > most)
