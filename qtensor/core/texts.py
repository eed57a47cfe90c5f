"""Lay out texts for messages and reprs: tables, and lists that are cut short."""

from __future__ import annotations

import html
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


def html_table(rows: Sequence[Sequence[str]], text: str = "") -> str:
    """Return the HTML of a text and a table below it, for notebooks; the first row has titles."""
    lines = [f"<pre>{html.escape(text, quote=False)}</pre>"] if text else []
    for i, row in enumerate(rows):
        tag = "td" if i else "th"
        cells = (f"<{tag}>{html.escape(cell, quote=False)}</{tag}>" for cell in row)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"{lines.pop(0) if text else ''}<table>{''.join(lines)}</table>"


def some(names: Iterable[str], most: int = 8) -> str:
    """Return the first ``most`` names, separated by commas, and "..." if there are more."""
    listed = list(names)
    return ", ".join(listed[:most]) + ", ..." * (len(listed) > most)
