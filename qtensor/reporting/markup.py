"""Write HTML: escaped texts, numbers and tables that the page's script sorts and filters."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple


def text(value: object) -> str:
    """Return a text for HTML: a name with ``<script>`` is shown, not run."""
    return html.escape(str(value), quote=True)


def number(value: float | None, form: str = ".2f") -> str:
    """Return a number as the page shows it; "-" for NaN and None."""
    if value is None or math.isnan(value):
        return "-"
    return "∞" if value == math.inf else "-∞" if value == -math.inf else format(value, form)


def nbytes(count: float) -> str:
    """Return a number of bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


class Column(NamedTuple):
    """A column of a table."""

    title: str
    numeric: bool = True
    explanation: str = ""


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        shown: HTML.
        value: the number by which the column is sorted; None for a text or no value.
        css: names of classes.
    """

    shown: str
    value: float | None = None
    css: str = ""


class Row(NamedTuple):
    """A row of a table."""

    anchor: str
    kind: str
    cells: Sequence[Cell]


def numeric(value: float, form: str = ".2f", css: str = "") -> Cell:
    """Return a cell with a number; the cell of NaN has no value."""
    return Cell(number(value, form), None if math.isnan(value) else value, css)


def words(value: object, css: str = "t") -> Cell:
    """Return a cell with a text."""
    return Cell(text(value), None, css)


def table(
    label: str, columns: Sequence[Column], rows: Sequence[Row], kinds: dict[str, str], chosen: str
) -> str:
    """Return a table with a field that filters names and a choice of kinds.

    The first column holds the name. ``kinds`` are the texts of the choice by value: "" shows all
    rows, and "*" those that are not "plain".
    """
    head = "".join(_header(column) for column in columns)
    body = "".join(_row(row) for row in rows)
    options = "".join(
        f'<option value="{text(value)}"{" selected" * (value == chosen)}>{text(title)}</option>'
        for value, title in kinds.items()
    )
    return (
        '<div data-table><div class="controls">'
        '<label>Filter names <input type="search" placeholder="words"></label>'
        f"<label>Show <select>{options}</select></label>"
        '<span role="status" class="soft"></span></div>'
        f'<div class="scroll tall" tabindex="0" role="region" aria-label="{text(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></div>"
    )


def plain_table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a small table without controls."""
    titles = "".join(
        f'<th scope="col"{_css("t" if i == 0 else "")}>{text(t)}</th>' for i, t in enumerate(head)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{titles}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _header(column: Column) -> str:
    kind = "number" if column.numeric else "text"
    css = "" if column.numeric else ' class="t"'
    tip = f' title="{text(column.explanation)}"' if column.explanation else ""
    return (
        f'<th scope="col" data-sort="{kind}"{css}>'
        f'<button type="button"{tip}>{text(column.title)}</button></th>'
    )


def _row(row: Row) -> str:
    anchor = f' id="{text(row.anchor)}"' if row.anchor else ""
    return f'<tr{anchor} data-kind="{text(row.kind)}">{"".join(map(_cell, row.cells))}</tr>'


def _cell(cell: Cell) -> str:
    value = "" if cell.value is None else f' data-v="{_js(cell.value)}"'
    return f"<td{_css(cell.css)}{value}>{cell.shown}</td>"


def _css(names: str) -> str:
    return f' class="{names}"' if names else ""


def _js(value: float) -> str:
    """Return a number as JavaScript's ``Number`` reads it."""
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return f"{value:.9g}"
